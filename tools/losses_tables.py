"""Writes the tables of losses and advantages of docs/losses.md from `dapo_rl.objectives`: `make tables`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from dapo_rl.config import AlgoSettings
from dapo_rl.objectives import ADVANTAGES, LOSSES, AdvantageEntry, LossEntry

PAGE = Path(__file__).resolve().parent.parent / "docs" / "losses.md"


def family_tables() -> list[str]:
    """The rows of both tables."""
    return [*_rows(LOSSES, AlgoSettings().loss), *_rows(ADVANTAGES, AlgoSettings().advantage)]


def with_tables(page: str) -> str:
    """The page with new rows in its tables, each of which follows its head."""
    for key, entries, default in (
        ("algo.loss", LOSSES, AlgoSettings().loss),
        ("algo.advantage", ADVANTAGES, AlgoSettings().advantage),
    ):
        head = re.escape(f"| `{key}` |") + r"[^\n]*\n\|[-|]+\n"
        rows = "".join(f"{row}\n" for row in _rows(entries, default))
        page, found = re.subn(rf"({head})(?:\|[^\n]*\n)*", lambda match, rows=rows: match[1] + rows, page)
        assert found == 1, f"{PAGE.name} has {found} tables of {key}"
    return page


def _rows(entries: Mapping[str, LossEntry] | Mapping[str, AdvantageEntry], default: str) -> list[str]:
    return [
        f"| `{name}`{' (default)' if name == default else ''} | {entry.formula} | {entry.source} |"
        for name, entry in entries.items()
    ]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
