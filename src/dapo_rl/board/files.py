"""Reads untrusted files: only regular ones, only inside the run directory, and never more than expected.

What a run, an ablation or an evaluation would not write is None, or the reason that the file cannot be read.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from dapo_rl.base.reading import open_regular
from dapo_rl.config import Config
from dapo_rl.config.recipe import check_values, flat, put
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.techniques import TECHNIQUES
from dapo_rl.runs.directory import Summary
from dapo_rl.runs.metrics_log import LAST_STEP

Identity = tuple[int, int, int, int]
"""Inode, size, mtime and ctime: as long as they are the same, the file has not changed."""
MOST_LEVELS, MOST_EVENTS = 40, 40_000
LARGEST_CONFIG, LARGEST_SUMMARY, LARGEST_LOCK = 1 << 20, 4 << 20, 1 << 10
LARGEST_ERROR = 1 << 20
LONGEST_TEXT = 300
LONGEST_TRACEBACK = 20_000
NOTES_TAIL, MOST_NOTES, LONGEST_NOTE = 256 << 10, 500, 4000
LARGEST_COUNT = 2**53
"""JavaScript represents integers exactly up to here."""
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class UnreadableError(Exception):
    """A file has unexpected content; the message says which file and why."""


def identity(path: str) -> Identity | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def shown_name(name: str) -> str:
    """A name that is safe in JSON and URLs even if the file system's is not UTF-8."""
    return os.fsencode(name).decode("utf-8", "replace")


def regular(path: str, inside: str) -> bool:
    """Whether it is a regular file that is under `inside` after links are resolved."""
    return os.path.isfile(path) and is_inside(path, inside)


def is_inside(path: str, directory: str) -> bool:
    return os.path.realpath(path).startswith(os.path.join(directory, ""))


def read_all(path: str, largest: int) -> bytes:
    """The content of a file; raises UnreadableError if it has more than `largest` bytes."""
    with open_regular(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise UnreadableError(f"larger than {largest >> 10} KiB")
    return content


class Remembered:
    """Caches the parsed content of a file, or why it cannot be read, until the file changes."""

    def __init__(self, path: str, inside: str, make: Callable[[str], Any]) -> None:
        self._path, self._inside, self._make = path, inside, make
        self._known: Identity | None = None
        self.value: Any = None
        self.problem: str | None = None

    def look(self) -> Any:
        """The value; None if there is no file or it cannot be read, in which case `problem` says why."""
        now = identity(self._path)
        if now != self._known or (now is None and os.path.islink(self._path)):
            self.value, self.problem = self._read(now is not None)
            self._known = now
        return self.value

    def _read(self, there: bool) -> tuple[Any, str | None]:
        if not regular(self._path, self._inside):
            return None, not_a_file(self._path, self._inside) if there or os.path.islink(self._path) else None
        try:
            return self._make(self._path), None
        except FileNotFoundError:
            return None, None
        except (UnreadableError, UserError) as error:
            return None, str(error)
        except OSError as error:
            return None, error.strerror or str(error)
        except Exception as error:  # untrusted content may raise anything; it concerns only this file
            return None, f"cannot be read: {type(error).__name__}"


class BoardDirectory:
    """A directory that the board shows."""

    def __init__(self, name: str, path: Path, real: str | None = None) -> None:
        self.name, self.path = name, path
        self.real = real or os.path.realpath(path)
        """The path after links are resolved."""
        self._lock = self._remembered(".lock", read_owner)

    def at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _remembered(self, name: str, read: Callable[[str], Any]) -> Remembered:
        return Remembered(self.at(name), self.real, read)

    def file(self, *parts: str) -> Path | None:
        """A file in it; None if it is missing or a link that points out of the directory."""
        path = os.path.join(self.path, *parts)
        return Path(path) if regular(path, self.real) else None

    @property
    def is_written(self) -> bool:
        return is_alive(self._lock.look())


def not_a_file(path: str, inside: str) -> str:
    if os.path.islink(path) and not is_inside(path, inside):
        return "a link that points out of the run directory"
    return "is not a file"


def load_yaml(content: bytes) -> dict[str, Any]:
    """A mapping of plain values.

    The fast loader is recursive, and a stack overflow would end the process; its parser is not, so levels are counted
    first. Merged aliases (`<<`) can expand to more values than fit in memory.
    """
    level, aliases, merges = 0, False, False
    try:
        for count, event in enumerate(yaml.parse(content, _Loader)):
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            aliases = aliases or isinstance(event, yaml.AliasEvent)
            merges = merges or (isinstance(event, yaml.ScalarEvent) and event.value == "<<")
            if level > MOST_LEVELS or count > MOST_EVENTS or (aliases and merges):
                raise UnreadableError("too many values, or too deeply nested")
        settings = yaml.load(content, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise UnreadableError(f"not valid YAML{where}") from None
    except UnreadableError:
        raise
    except Exception as error:  # from Python's conversions: the 45th of a month, a number of 5000 digits
        raise UnreadableError(f"not valid YAML: {' '.join(str(error).split()) or type(error).__name__}") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UnreadableError(f"not a mapping but a {type(settings).__name__}")
    try:
        check_values(settings, "")
    except UserError as error:
        raise UnreadableError(str(error).removeprefix(": ")) from None
    return settings


def as_number(value: Any) -> float | None:
    """The value if it is a finite number, otherwise None."""
    if type(value) is int and abs(value) <= LARGEST_COUNT:
        return value
    return value if type(value) is float and math.isfinite(value) else None


def as_count(value: Any, largest: int = LAST_STEP) -> int | None:
    """The value if it is a non-negative integer, otherwise None."""
    return value if type(value) is int and 0 <= value <= largest else None


def as_text(value: Any, longest: int = LONGEST_TEXT) -> str | None:
    return value[:longest] if isinstance(value, str) else None


def as_list(value: Any, most: int) -> list[Any]:
    """The first values of a list; empty if it is not one."""
    return value[:most] if isinstance(value, list) else []


def as_items(value: Any, most: int, longest: int = LONGEST_TEXT) -> list[tuple[str, Any]]:
    """The first entries of a mapping; empty if it is not one."""
    return [(str(key)[:longest], inner) for key, inner in list(value.items())[:most]] if isinstance(value, dict) else []


def as_time(value: Any) -> float | str | None:
    return as_text(value) if isinstance(value, str) else as_number(value)


def read_settings(path: str) -> tuple[dict[str, Any], list[str] | None, str | None]:
    """The settings, the techniques that are on, and why those are unknown, for example settings of another version."""
    nested: dict[str, Any] = {}
    for key, value in load_yaml(read_all(path, LARGEST_CONFIG)).items():
        put(nested, str(key), value)
    settings = flat(nested)
    try:
        config = Config.build(nested)
    except UserError as error:
        return settings, None, str(error).partition("; ")[0]  # without the advice for authors of recipes
    return settings, [technique.name for technique in TECHNIQUES if technique.is_on(config)], None


def read_object(path: str, largest: int) -> dict[str, Any]:
    try:
        found = json.loads(read_all(path, largest))
    except (ValueError, RecursionError):
        raise UnreadableError("not valid JSON") from None
    if not isinstance(found, dict):
        raise UnreadableError(f"not an object but a {type(found).__name__}")
    return found


def read_error(path: str) -> dict[str, Any]:
    """Why a run failed: `error.json`, which the run writes as it ends."""
    found = read_object(path, LARGEST_ERROR)
    traceback = found.get("traceback")
    return {
        "time": as_time(found.get("time")),
        "step": as_count(found.get("step")),
        "kind": as_text(found.get("kind")),
        "message": as_text(found.get("message"), LONGEST_TRACEBACK),
        "traceback": traceback[-LONGEST_TRACEBACK:] if isinstance(traceback, str) else None,  # the end names the error
    }


def wrong_in_summary(summary: dict[str, Any]) -> str | None:
    """The first value that a run would not write; a missing one is not wrong."""
    try:
        Summary.model_validate(summary)
    except ValidationError as error:
        for each in error.errors(include_url=False, include_input=False):
            if each["type"] != "missing":
                return f"{each['loc'][0]} has an unexpected value"
    return None


def read_owner(path: str) -> tuple[int, str] | None:
    """The process that writes the run, and its machine; None if the file system has no locks."""
    words = read_all(path, LARGEST_LOCK).decode("utf-8", "replace").split()
    if not words:
        return None
    if len(words) != 2 or not (words[0].isascii() and words[0].isdecimal()) or int(words[0]) == 0:
        raise UnreadableError("does not name a process")
    return int(words[0]), words[1]


def is_alive(owner: tuple[int, str] | None) -> bool:
    if owner is None:
        return False
    process, host = owner
    if host != socket.gethostname():
        return True  # its processes are not visible from here
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def read_notes(path: Path | None) -> list[dict[str, Any]]:
    """The latest notes of notes.jsonl, oldest first. Lines that are not notes are skipped."""
    if path is None:
        return []
    try:
        with open_regular(str(path)) as file:
            start = max(0, file.seek(0, 2) - NOTES_TAIL)
            file.seek(start)
            lines = file.read(NOTES_TAIL).split(b"\n")
    except OSError:
        return []
    notes = [_note(line) for line in (lines[1:] if start else lines)]
    return [note for note in notes if note is not None][-MOST_NOTES:]


def _note(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    text = as_text(found.get("text"), LONGEST_NOTE) if isinstance(found, dict) else None
    if text is None:
        return None
    return {"time": as_time(found.get("time")), "step": as_count(found.get("step")), "text": text}
