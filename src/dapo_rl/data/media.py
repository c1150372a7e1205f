"""Refuses rows with images, video, audio or their own tools, which training would ignore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dapo_rl.errors import UserError

_COLUMNS = {name: kind for kind in ("image", "video", "audio") for name in (kind, f"{kind}s")}
"""The columns in which TRL, verl and ms-swift look for media, and the keys of vLLM's `multi_modal_data`."""
_MODULES = ("PIL.", "torchcodec.", "torchvision.", "datasets.features._torchcodec")


class MediaError(UserError):
    """A row that has an image, video, audio or tools."""


def refuse_media(where: str, columns: Mapping[str, Any]) -> None:
    """Raises MediaError for a row with an image, video, audio or tools; empty columns of that name are fine."""
    for name, given in columns.items():
        value = _listed(given)
        if name.lower() == "tools" and _are_tools(value):
            raise MediaError(
                f"{where}: the column {name!r} has tools, which are not taken from rows; name them in env.tools, and "
                "remove the column"
            )
        for place, kind in _media(name, value):
            shown = {"image": "an image, and images are", "video": "a video, and videos are"}
            refused = shown.get(kind, "audio, and audio is")
            raise MediaError(f"{where}: {place} {refused} not supported: prompts are text only")


def _media(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The places of a column that hold media, and their kind."""
    column = f"the column {name!r} has"
    held = value.items() if name == "multi_modal_data" and isinstance(value, Mapping) else [(name, value)]
    for called, thing in held:
        kind = _COLUMNS.get(str(called).lower())
        if kind is not None and _holds_something(thing):
            yield column, kind
    if value is None or isinstance(value, str | bytes | int | float):
        return
    if (kind := _of_object(value)) is not None:
        yield column, kind
    for at, item in enumerate(value) if isinstance(value, Sequence) else ():
        if (kind := _of_object(item)) is not None:
            yield column, kind
        content = _listed(item.get("content")) if isinstance(item, Mapping) else None
        for part in content if isinstance(content, Sequence) and not isinstance(content, str) else ():
            if isinstance(part, Mapping) and (kind := _of_part(part)) is not None:
                yield f"message {at} of {name!r} has", kind


def _listed(value: Any) -> Any:
    """Pandas reads lists as arrays. An array of numbers may be an image, and stays."""
    is_list = getattr(getattr(value, "dtype", None), "kind", "") == "O" or getattr(value, "size", None) == 0
    return value.tolist() if is_list and hasattr(value, "tolist") else value


def _holds_something(value: Any) -> bool:
    value = _listed(value)
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
    if not f"{type(value).__module__}.".startswith(_MODULES):
        return None
    name = type(value).__name__.lower()
    return "video" if "video" in name else "audio" if "audio" in name else "image"


def _of_part(part: Mapping[str, Any]) -> str | None:
    """The kind of a part of a message's content: `{type: image}`, `{type: image_url, …}`, `{type: input_audio, …}`."""
    words = str(part.get("type", "")).lower().split("_")
    return next((kind for kind in ("image", "video", "audio") if kind in words), None)
