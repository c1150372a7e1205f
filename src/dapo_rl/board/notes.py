"""The notes of a run: lines of `notes.jsonl`, which the run writes as it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dapo_rl.board.files import open_regular
from dapo_rl.board.run_files import as_count, as_text, as_time

TAIL = 256 << 10
MOST_NOTES = 500
LONGEST_NOTE = 4000


def read_notes(path: Path | None) -> list[dict[str, Any]]:
    """The latest notes, oldest first. Lines that are not notes are skipped."""
    if path is None:
        return []
    try:
        with open_regular(str(path)) as file:
            start = max(0, file.seek(0, 2) - TAIL)
            file.seek(start)
            lines = file.read(TAIL).split(b"\n")
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
