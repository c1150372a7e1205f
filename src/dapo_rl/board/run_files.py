"""Reads and checks the small files of a run, an ablation or an evaluation."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dapo_rl.base.reading import open_regular
from dapo_rl.board.files import UnreadableError, load_yaml, read_all
from dapo_rl.config import Config
from dapo_rl.config.recipe import flat, put
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.techniques import TECHNIQUES
from dapo_rl.runs.metrics_and_summary import Summary
from dapo_rl.runs.metrics_log import LAST_STEP

LARGEST_CONFIG, LARGEST_SUMMARY, LARGEST_LOCK = 1 << 20, 4 << 20, 1 << 10
LARGEST_ERROR = 1 << 20
LONGEST_TEXT = 300
LONGEST_TRACEBACK = 20_000
NOTES_TAIL, MOST_NOTES, LONGEST_NOTE = 256 << 10, 500, 4000
LARGEST_COUNT = 2**53
"""JavaScript represents integers exactly up to here."""


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
    """Seconds since 1970, or a date as text."""
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
    """A JSON file that contains an object."""
    try:
        found = json.loads(read_all(path, largest))
    except (ValueError, RecursionError):
        raise UnreadableError("not valid JSON") from None
    if not isinstance(found, dict):
        raise UnreadableError(f"not an object but a {type(found).__name__}")
    return found


def read_raw_summary(path: str) -> dict[str, Any]:
    return read_object(path, LARGEST_SUMMARY)


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
    """Whether the process that a lock names is running."""
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
