"""Rows of a source as plain Python values, and why some cannot be used.

Images, video, audio and tools are not supported: a row with one is an error, since a model would be trained on the text
alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo_rl.base.unicode import is_unicode
from dapo_rl.errors import UserError

_MEDIA_COLUMNS = {name: kind for kind in ("image", "video", "audio") for name in (kind, f"{kind}s")}
"""The columns in which TRL, verl and ms-swift look for media, and the keys of vLLM's `multi_modal_data`."""
_MEDIA_MODULES = ("PIL.", "torchcodec.", "torchvision.", "datasets.features._torchcodec")


@dataclass(frozen=True, slots=True)
class Row:
    number: int
    """Position in the source: the line of a text file (from 1), otherwise the index (from 0)."""
    where: str
    """`train.jsonl:17`, `train.parquet:row 17`."""
    columns: dict[str, Any]
    origin: str = ""
    """The entry of a list of sources that it comes from; empty if there is no list."""

    @property
    def id(self) -> str:
        """The id of its prompt: unique in the data set."""
        return f"{self.origin}:{self.number}" if self.origin else str(self.number)

    def bad(self, why: BadRowError) -> BadRow:
        return BadRow(self.number, self.where, str(why), self.origin)


@dataclass(frozen=True, slots=True)
class BadRow:
    number: int
    where: str
    why: str
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True, slots=True)
class Rows:
    key: str
    """The setting that names the source, for messages: `data.train`."""
    source: str
    """The source as the user wrote it; empty for rows passed in memory."""
    good: list[Row]
    bad: list[BadRow]
    origins: tuple[str, ...] = ()
    """The entries of a list of sources, in its order."""


@dataclass(frozen=True, slots=True)
class RowStream:
    """Rows that are read as they are needed, because their number is not known; it may have no end."""

    key: str
    source: str
    open: Callable[[], Iterator[Row | BadRow]]
    """Starts at the first row."""
    repeats: bool
    """Whether it can be opened again. An iterator cannot."""


class BadRowError(ValueError):
    """Why a row cannot be used; the row is skipped and reported."""


class MediaError(UserError):
    """A row that has an image, video, audio or tools."""


def make_row(number: int, where: str, value: object) -> Row | BadRow:
    """Raises MediaError for a row with an image, video, audio or tools."""
    try:
        if not isinstance(value, Mapping):
            raise BadRowError(f"not a mapping of columns but a {type(value).__name__}")
        odd = [name for name in value if not isinstance(name, str)]
        if odd:
            raise BadRowError(f"the column name {odd[0]!r} is not a string")
        _refuse_media(where, value)
        return Row(number, where, {name: plain(column) for name, column in value.items()})
    except BadRowError as error:
        return BadRow(number, where, str(error))
    except RecursionError:
        return BadRow(number, where, "nested too deeply")


def plain(value: Any) -> Any:
    """Converts values of NumPy, torch and pandas to Python's own types; tuples stay tuples."""
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        return {plain(name): plain(inner) for name, inner in value.items()}
    if kind is list:
        return [plain(inner) for inner in value]
    if kind is tuple:
        return tuple([plain(inner) for inner in value])
    if kind.__name__ in ("NAType", "NaTType"):  # pandas' missing values
        return None
    if hasattr(value, "tolist"):
        return plain(_from_numpy(value))
    if hasattr(value, "to_pydatetime"):
        return value.to_pydatetime()
    return value


def _from_numpy(value: Any) -> Any:
    """`tolist`, except for times in nanoseconds, which it turns into integers, and for narrow floats, which it
    lengthens: 0.1 would become 0.10000000149011612."""
    dtype = getattr(value, "dtype", None)
    kind = getattr(dtype, "kind", "")
    if kind in ("M", "m") and str(dtype).endswith("[ns]"):
        return value.astype(f"{kind}8[us]").tolist()
    if kind == "f" and value.ndim == 0:
        return float(str(value))
    return value.tolist()


def _text(value: str) -> str:
    if not is_unicode(value):  # from JSON's \ud800, for example; tokenizers and Parquet reject it
        raise BadRowError("it has text that is not valid Unicode (half of a surrogate pair)")
    # Data sets repeat rows (avg@32 files, and DAPO-Math-17K a hundred times): equal texts are stored once.
    return sys.intern(str(value))


def _refuse_media(where: str, columns: Mapping[str, Any]) -> None:
    """Raises MediaError for a row with an image, video, audio or tools; empty columns of that name are fine."""
    for name, value in columns.items():
        if name.lower() == "tools" and _are_tools(value):
            raise MediaError(
                f"{where}: the column {name!r} has tools, and tools are not supported: a run trains on single "
                "responses without calls"
            )
        held = value.items() if name == "multi_modal_data" and isinstance(value, Mapping) else [(name, value)]
        for called, thing in held:
            kind = _MEDIA_COLUMNS.get(str(called).lower())
            if kind is not None and _holds_something(thing):
                raise _refused(where, f"the column {name!r} has", kind)
        if value is None or isinstance(value, str | bytes | int | float):
            continue
        if (kind := _of_object(value)) is not None:
            raise _refused(where, f"the column {name!r} has", kind)
        if isinstance(value, Sequence):
            _refuse_in_list(where, name, value)


def _refuse_in_list(where: str, name: str, values: Sequence[Any]) -> None:
    for at, value in enumerate(values):
        if (kind := _of_object(value)) is not None:
            raise _refused(where, f"the column {name!r} has", kind)
        if not isinstance(value, Mapping) or not isinstance(content := value.get("content"), Sequence):
            continue
        for part in () if isinstance(content, str) else content:
            if isinstance(part, Mapping) and (kind := _of_part(part)) is not None:
                raise _refused(where, f"message {at} of {name!r} has", kind)


def _refused(where: str, place: str, kind: str) -> MediaError:
    shown, plural = {
        "image": ("an image", "images are"),
        "video": ("a video", "videos are"),
        "audio": ("audio", "audio is"),
    }[kind]
    return MediaError(f"{where}: {place} {shown}, and {plural} not supported: prompts are text only")


def _holds_something(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float):
        return False
    if isinstance(value, str | bytes):
        return bool(value.strip())
    if isinstance(value, Mapping):
        return any(map(_holds_something, value.values()))
    return any(map(_holds_something, value)) if isinstance(value, list | tuple) else True


def _are_tools(value: Any) -> bool:
    """Whether a column describes tools as TRL reads them: mappings, or the JSON of a list of them."""
    if isinstance(value, str):
        return value.replace(" ", "").startswith("[{")
    return isinstance(value, list | tuple) and any(isinstance(tool, Mapping) for tool in value)


def _of_object(value: Any) -> str | None:
    """The kind of a decoded image, video or audio, or of one as `datasets` stores it."""
    if isinstance(value, Mapping):
        if value.keys() == {"bytes", "path"} and _holds_something(value):
            return "image"
        return "audio" if {"array", "sampling_rate"} <= value.keys() else None
    if not f"{type(value).__module__}.".startswith(_MEDIA_MODULES):
        return None
    name = type(value).__name__.lower()
    return "video" if "video" in name else "audio" if "audio" in name else "image"


def _of_part(part: Mapping[str, Any]) -> str | None:
    """The kind of a part of a message's content: `{type: image}`, `{type: image_url, …}`, `{type: input_audio, …}`."""
    words = str(part.get("type", "")).lower().split("_")
    return next((kind for kind in ("image", "video", "audio") if kind in words), None)
