"""Which samples give up their pages when none are free: the youngest, which are sampled on later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dapo_rl.engines.native.page_table import Pages
from dapo_rl.engines.native.slots import NO_SLOT, BatchRow


def extend_or_preempt(
    short: Sequence[tuple[BatchRow, int]],
    rows: Sequence[BatchRow],
    pages: Pages,
    preempt: Callable[[BatchRow], None],
) -> int:
    """Gives the rows in `short` pages for as many tokens, the oldest first. While pages are lacking, the youngest of
    all `rows` is preempted; returns how many were."""
    by_age = sorted(rows, key=lambda row: row.age) if short else []
    count = len(by_age)
    for row, tokens in sorted(short, key=lambda pair: pair[0].age):
        while row.slot != NO_SLOT and pages.lacking(row.slot, tokens) > pages.free:
            preempt(by_age.pop())
        if row.slot != NO_SLOT:
            pages.extend(row.slot, tokens)
    return count - len(by_age)
