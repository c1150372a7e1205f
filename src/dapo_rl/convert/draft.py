"""A recipe in the making, and the table that explains every setting of the other library."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter, ValidationError

from dapo_rl.base.quote import shown
from dapo_rl.config import Config, known_keys
from dapo_rl.config.peers import Library, Setting, leaves
from dapo_rl.config.peers.values import Near, NoCounterpartError, is_number, written
from dapo_rl.convert.hydra import UnknownValue
from dapo_rl.errors import UserError

Status = Literal["same", "default here", "differs", "no counterpart", "unknown to dapo convert"]
STATUSES: tuple[Status, ...] = ("same", "default here", "no counterpart", "differs", "unknown to dapo convert")


@dataclass(frozen=True, slots=True)
class ConvertedSetting:
    """A row of the table: a setting of the other library, and its counterpart."""

    key: str
    value: Any
    status: Status
    here: str = ""
    """The setting here, with its value."""
    note: str = ""
    learns: bool = False
    """Whether learning changes."""
    is_set: bool = True
    """False: a default of the other library, which its user left out."""


@dataclass(slots=True)
class Draft:
    """The recipe's settings so far. A value of the file comes before a default of the library."""

    library: Library
    keys: dict[str, Any]
    """The settings of the file."""
    prompts: int | None = None
    """Number of training prompts, to turn epochs into steps."""
    processes: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, ConvertedSetting] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """The setting of the file that each setting here was carried over from."""

    def value(self, *names: str) -> Any:
        """The value of the first of these settings that is known: given, or a default."""
        known = (self.keys[key] for key in names if self._is_known(key))
        return next(known, self._default(names))

    def _is_known(self, key: str) -> bool:
        return key in self.keys and not isinstance(self.keys[key], UnknownValue)

    def _default(self, names: tuple[str, ...]) -> Any:
        return next((self.library.defaults[key] for key in names if key in self.library.defaults), None)

    def name(self, key: str) -> str | None:
        value = self.value(key)
        return None if value is None else str(value)

    def number(self, *names: str) -> float | None:
        value = self.value(*names)
        if value is None or (is_number(value) and math.isfinite(value)):
            return value  # type: ignore[no-any-return]
        raise UserError(f"{self._name(names)}: expected a number, got {shown(value)}")

    def number_or(self, default: float, *names: str) -> float:
        value = self.number(*names)
        return default if value is None else value

    def count(self, *names: str) -> int | None:
        value = self.number(*names)
        if value is None or value == int(value):
            return value if value is None else int(value)
        raise UserError(f"{self._name(names)}: expected a whole number, got {shown(value)}")

    def size(self, *names: str) -> int | None:
        """A whole number of at least 1, or None if it is not set."""
        value = self.count(*names)
        if value is None or value >= 1:
            return value
        raise UserError(f"{self._name(names)}: expected 1 or more, got {value}")

    def needed(self, *names: str) -> int:
        """A whole number of at least 1; null is the library's default."""
        if value := self.size(*names) or self._default(names):
            return int(value)
        raise UserError(f"{self._name(names)}: expected 1 or more, got null")

    def _name(self, names: tuple[str, ...]) -> str:
        return next((key for key in names if key in self.keys), names[0])

    def has(self, *names: str) -> bool:
        return any(key in self.keys for key in names)

    def setting(self, ours: str) -> Any:
        return self.settings.get(ours, default_of(ours))

    def put(
        self, ours: str, value: Any, *keys: str, note: str = "", differs: bool = False, learns: bool = False
    ) -> None:
        """Sets `ours`, which follows from `keys`."""
        self.settings[ours] = value
        here = f"{ours}: {written(value)}"
        status: Status = "differs" if differs or learns else "default here" if is_default(ours, value) else "same"
        for key in keys:
            entry = self.library.find(key)
            self.explain(key, status, here, note or (entry.note if entry else ""), learns)

    def explain(self, key: str, status: Status, here: str = "", note: str = "", learns: bool = False) -> None:
        """Writes the row of a setting: one that is given, or a default that matters."""
        known = key in self.keys or key in self.library.defaults
        if not known or isinstance(self.keys.get(key), UnknownValue) or (key in self.rows and key in self.keys):
            return
        value = self.keys.get(key, self.library.defaults.get(key))
        self.rows[key] = ConvertedSetting(key, value, status, here, note, learns, key in self.keys)

    def unused(self, note: str, *keys: str) -> None:
        """Explains settings that have no effect, or the effect that everything has here."""
        for key in keys:
            self.explain(key, "default here", note=note)

    def no_counterpart(self, note: str, *keys: str, learns: bool = True) -> None:
        for key in keys:
            self.explain(key, "no counterpart", note=note, learns=learns)

    def explain_again(self, key: str, status: Status, here: str = "", note: str = "", learns: bool = False) -> None:
        """Replaces the row of a setting whose meaning depends on others."""
        if not isinstance(self.keys.get(key), UnknownValue):
            self.rows.pop(key, None)
            self.explain(key, status, here, note, learns)

    def add_row(
        self, key: str, value: Any, status: Status, here: str = "", note: str = "", learns: bool = False
    ) -> None:
        """Adds a row that is not a setting of the file; its key is in parentheses."""
        self.rows[key] = ConvertedSetting(key, value, status, here, note, learns, is_set=False)

    def always(self, ours: str, value: Any, why: str) -> None:
        """Sets what the other library always does, if the file does not say otherwise."""
        if ours not in self.settings and not is_default(ours, value):
            self.settings[ours] = value
            self._add_own(ours, value, why)

    def _add_own(self, ours: str, value: Any, why: str, note: str = "") -> None:
        """Adds a row of a setting here that follows from none of the file alone."""
        row = ConvertedSetting(f"({self.library.name})", why, "same", f"{ours}: {written(value)}", note, is_set=False)
        self.rows[f"({ours})"] = row

    def carry_over(self) -> None:
        """Handles every setting that stands for itself; those that go together are left to the library's module."""
        for key, value in self.keys.items():
            entry = self.library.find(key)
            if isinstance(value, UnknownValue):
                self._explain_unknown(key, value, entry)
            elif entry is None and value is None:
                self.no_counterpart("null sets nothing", key, learns=False)
            elif entry is None:
                why = f"not in its table of {self.library.name}"
                self.explain(key, "unknown to dapo convert", note=why, learns=True)
            elif entry.ours is None and entry.is_off(value):
                self.unused(entry.note, key)
            elif entry.ours is None:
                self.no_counterpart(entry.note, key, learns=entry.learns)
            elif not entry.joint:
                self._carry(key, value, entry)
        for key, value in self.library.defaults.items():
            entry = self.library.find(key)
            if entry is None or entry.joint or self._is_known(key):
                continue
            if entry.ours is None and not entry.is_off(value):
                self.no_counterpart(entry.note, key, learns=entry.learns)
            elif entry.ours is not None and entry.ours not in self.settings:
                self._carry(key, value, entry)

    def _explain_unknown(self, key: str, value: UnknownValue, entry: Setting | None) -> None:
        if entry is not None and entry.ours is None and not entry.learns:
            row = ConvertedSetting(key, value.text, "no counterpart", "", entry.note)
        elif entry is None:
            row = ConvertedSetting(key, value.text, "unknown to dapo convert", "", value.why, True)
        else:
            here = f"set {entry.ours}" if entry.ours else ""
            row = ConvertedSetting(key, value.text, "differs", here, f"the value is not known: {value.why}", True)
        self.rows[key] = row

    def _carry(self, key: str, value: Any, entry: Setting) -> None:
        assert entry.ours is not None
        if entry.mapping:
            if value is not None and value != {}:
                self.put(entry.ours, self.settings.get(entry.ours, {}) | {key.rpartition(".")[2]: value}, key)
            return
        try:
            found = entry.convert(value) if entry.convert else value
            near = found if isinstance(found, Near) else Near(found, entry.note, learns=False)
            checked = _checked(key, entry.ours, near.value)
            converted = checked if isinstance(checked, int) else near.value  # 16.0
        except NoCounterpartError as error:
            self.no_counterpart(str(error), key, learns=error.learns)
            return
        except (TypeError, UserError) as error:
            if value is None:
                self._carry_null(key, entry)
                return
            if isinstance(error, UserError):
                raise
            raise UserError(f"{key}: unexpected value {shown(value)}") from None
        if entry.ours in self.sources and self.settings.get(entry.ours) != converted:
            if converted in (None, "auto"):  # bf16 and fp16: the one that is off says nothing
                self.unused(f"{self.sources[entry.ours]} counts", key)
                return
            if (there := self.settings[entry.ours]) not in (None, "auto"):
                other, both = self.sources[entry.ours], f"{written(there)} and {written(converted)}"
                raise UserError(f"{other} and {key} are both {entry.ours} here, but give {both}; keep one")
        self.sources[entry.ours] = key
        self.put(entry.ours, converted, key, note=near.effect, differs=near is found, learns=near.learns)

    def _carry_null(self, key: str, entry: Setting) -> None:
        """A setting that is null where a value is needed has the default: that of the library, or the one here."""
        default = self.library.defaults.get(key)
        if default is None:
            self.unused("null sets nothing", key)
        else:
            self._carry(key, default, entry)

    def finish(self) -> None:
        """Every setting has a row: what no rule has used is explained by its entry."""
        for key in self.keys:
            entry = self.library.find(key)
            if key not in self.rows and entry is not None and entry.ours is not None:
                value = self.setting(entry.ours)
                here = f"{entry.ours}: {written(value)}"
                self.explain(key, "default here" if is_default(entry.ours, value) else "same", here, entry.note)
        told = " ".join(f"{row.here} {row.note}" for row in self.rows.values())
        for ours, value in self.settings.items():
            if ours not in told and not is_default(ours, value):
                self._add_own(ours, value, "", "follows from the settings above")


def _checked(key: str, ours: str, value: Any) -> Any:
    """The value as the setting has it. Raises UserError for one that it cannot have, before it is computed with."""
    kind: Any = Annotated[known_keys()[ours].annotation, known_keys()[ours]]
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise UserError(f"{key}: {message[0].lower()}{message[1:]}, got {shown(value)}") from None


@cache
def _defaults() -> dict[str, Any]:
    return dict(leaves("", Config().model_dump(mode="json")))


def default_of(ours: str) -> Any:
    return _defaults().get(ours)


def is_default(ours: str, value: Any) -> bool:
    default = default_of(ours)
    return bool(default == value) and isinstance(default, bool) == isinstance(value, bool)
