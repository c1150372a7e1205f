"""Reads untrusted files: only regular ones, only inside the run directory, and never more than expected."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import yaml

from dapo_rl.base.reading import open_regular
from dapo_rl.config.recipe import check_values
from dapo_rl.errors import UserError

Identity = tuple[int, int, int, int]
"""Inode, size, mtime and ctime: as long as they are the same, the file has not changed."""
MOST_LEVELS, MOST_EVENTS = 40, 40_000
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class UnreadableError(Exception):
    """A file has unexpected content; the message says which file and why."""


def identity(path: str) -> Identity | None:
    """The identity of a path; None if it does not exist."""
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
