"""config.yaml: every setting of a run, with a checksum in the last line.

The checksum shows whether the file was truncated or edited. Every checkpoint has a copy.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dapo_rl.base.reading import read_bytes
from dapo_rl.config import Config, known_keys
from dapo_rl.config.aliases import current_name
from dapo_rl.config.recipe import MOST_BYTES as MOST_OF_A_RECIPE
from dapo_rl.config.recipe import put, read_recipe
from dapo_rl.errors import UserError

NAME = "config.yaml"
MOST_BYTES = 4 * MOST_OF_A_RECIPE
"""Escaped text takes more space than in a recipe."""
SEAL = b"# All settings of the run, sha256 "


def settings_text(config: Config) -> bytes:
    text = yaml.safe_dump(config.resolved(), sort_keys=False, allow_unicode=True).encode()
    return text + SEAL + _checksum(text) + b"\n"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    path: Path
    settings: dict[str, Any]
    content: bytes

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        try:
            if not path.exists():
                raise UserError(f"{path}: is missing")
            file = cls(path, read_recipe(path, MOST_BYTES), read_bytes(path, MOST_BYTES))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        if not file.settings:
            raise UserError(f"{path}: is empty")
        return file

    @property
    def is_whole(self) -> bool:
        """Whether the file is exactly as a run wrote it."""
        text, found, checksum = self.content.rpartition(SEAL)
        return bool(found) and checksum == _checksum(text) + b"\n"

    @property
    def was_edited(self) -> bool:
        return SEAL in self.content and not self.is_whole

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """The settings with overrides; missing settings have their defaults."""
        return self._build(copy.deepcopy(self.settings), overrides)

    def over(self, other: Config) -> Config:
        """The settings, completed with those of another configuration."""
        settings, rest = copy.deepcopy(self.settings), other.resolved()
        for key in self.missing(rest):
            put(settings, key, _get(rest, key))
        return self._build(settings)

    def whole_config(self, overrides: Sequence[str] = ()) -> Config:
        """The settings if there is no other copy: a missing setting is an error and does not get its default."""
        config = self.config(overrides)
        lost = [key for key in self.missing(config.resolved()) if not is_given(key, overrides)]
        if lost and not self.is_whole:  # a complete file comes from a version without the setting
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise UserError(
                f"{self.path}: has no {lost[0]}{more}: it was cut off or edited; restore it from a copy, or give "
                f"{lost[0]}=VALUE on the command line"
            )
        return config

    def missing(self, whole: Mapping[str, Any]) -> list[str]:
        """The keys of `whole` that are missing here; of a missing section, every key."""
        return [
            key
            for key in known_keys()
            if _get(whole, key) is not _NOTHING
            and _get(self.settings, key) is _NOTHING
            # Without LoRA, there are no LoRA settings.
            and isinstance(_get(self.settings, key.rpartition(".")[0], {}), dict)
        ]

    def _build(self, settings: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
        try:
            return Config.override(settings, overrides)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None


def is_given(key: str, overrides: Sequence[str]) -> bool:
    names = (current_name(override.partition("=")[0].strip()) for override in overrides)
    return any(f"{key}.".startswith(f"{name}.") for name in names)


_NOTHING: Any = object()


def _get(settings: Any, key: str, default: Any = _NOTHING) -> Any:
    for name in key.split(".") if key else ():
        settings = settings.get(name, default) if isinstance(settings, dict) else default
    return settings


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:32].encode()
