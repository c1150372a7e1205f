"""The engines and the ranks of a run on a cluster: what each did in the last step."""

from __future__ import annotations

import re
from typing import Any

from dapo_rl.board.run import BoardRun
from dapo_rl.board.run_files import as_number

FIGURES = {
    "engines": re.compile(r"engine/([0-9]{1,6})/(queue|version|tokens_per_s|busy|lost)"),
    "ranks": re.compile(r"rank/([0-9]{1,6})/(tokens|busy|memory_gib)"),
}
MOST_ROWS = 4096


def engines_and_ranks(run: BoardRun) -> dict[str, list[dict[str, Any]]]:
    """The latest figures of each, by its number."""
    return {kind: _rows(run, figure) for kind, figure in FIGURES.items()}


def _rows(run: BoardRun, figure: re.Pattern[str]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for name in run.log.names:
        if (match := figure.fullmatch(name)) and (len(found) < MOST_ROWS or int(match[1]) in found):
            found.setdefault(int(match[1]), {"number": int(match[1])})[match[2]] = as_number(run.log.latest(name, 1))
    return [found[number] for number in sorted(found)]
