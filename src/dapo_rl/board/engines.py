"""The engines of a run on a cluster: what each did in the last step."""

from __future__ import annotations

import re
from typing import Any

from dapo_rl.board.contents import as_number
from dapo_rl.board.run import BoardRun

FIGURE = re.compile(r"engine/([0-9]{1,6})/(queue|version|tokens_per_s|busy|lost)")
MOST_ENGINES = 4096


def engines_of(run: BoardRun) -> list[dict[str, Any]]:
    """The latest figures of each engine, by its number."""
    found: dict[int, dict[str, Any]] = {}
    for name in run.log.names:
        if (match := FIGURE.fullmatch(name)) and (len(found) < MOST_ENGINES or int(match[1]) in found):
            found.setdefault(int(match[1]), {"engine": int(match[1])})[match[2]] = as_number(run.log.latest(name, 1))
    return [found[number] for number in sorted(found)]
