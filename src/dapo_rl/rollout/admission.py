"""Admission: judged groups join the batch in the order in which their prompts were drawn.

Taking groups in the order they finish would favour short answers.
"""

from __future__ import annotations

from collections.abc import Iterable

from dapo_rl.base.format import counted
from dapo_rl.config import SamplingSettings
from dapo_rl.errors import CapReachedError
from dapo_rl.fates import FATES, Fate
from dapo_rl.rollout.fill import Filling
from dapo_rl.rollout.grading import has_spread
from dapo_rl.types import Group


class Admission:
    """Judged groups that wait for the verdicts of earlier draws, or for the next step."""

    def __init__(self, carried: Iterable[Group] = (), rejected: Iterable[tuple[Group, Fate]] = ()) -> None:
        """`rejected` groups wait for earlier draws, in a step that was interrupted."""
        self._judged: dict[int, tuple[Group, Fate]] = {group.draw: (group, "kept") for group in carried}
        self._judged |= {group.draw: (group, fate) for group, fate in rejected}

    def __len__(self) -> int:
        return len(self._judged)

    @property
    def good(self) -> int:
        """Groups that will be kept."""
        return sum(fate == "kept" for _, fate in self._judged.values())

    @property
    def carried(self) -> tuple[Group, ...]:
        """Good groups that wait for the next step, or for earlier draws, in the order drawn."""
        return tuple(group for _, (group, fate) in sorted(self._judged.items()) if fate == "kept")

    @property
    def rejected(self) -> tuple[tuple[Group, Fate], ...]:
        """Other groups that wait for earlier draws, in the order drawn. Between steps there are none."""
        return tuple((group, fate) for _, (group, fate) in sorted(self._judged.items()) if fate != "kept")

    def add(self, group: Group, fate: Fate) -> None:
        self._judged[group.draw] = (group, fate)

    def admit(self, filling: Filling, first_out: float) -> None:
        """Admits groups in the order drawn, up to `first_out`, the first draw without a verdict. A full batch admits
        only groups that are due."""
        for draw in sorted(self._judged):
            if draw > first_out or (not filling.missing and draw > filling.due):
                break
            group, fate = self._judged.pop(draw)
            if fate == "kept":
                filling.kept.append(group)
            else:
                filling.dropped.append((group, fate))

    def settle(self, filling: Filling, surplus: str) -> list[Group]:
        """Ends a step: only carried groups stay. Returns the others, which are dropped."""
        removed: list[Group] = []
        for draw in sorted(self._judged):
            group, fate = self._judged[draw]
            if fate == "kept" and surplus == "carry":
                continue
            removed.append(group)
            filling.dropped.append((group, "surplus" if fate == "kept" else fate))
            del self._judged[draw]
        return removed


def at_cap(filling: Filling, settings: SamplingSettings) -> tuple[frozenset[int], str | None]:
    """Applies `on_cap` to a batch that is not full when the cap is reached. Returns the draws that fill it up, and a
    note for the user."""
    nothing: frozenset[int] = frozenset()
    if settings.dynamic_batch and filling.kept:
        return nothing, None
    found = f"{counted(filling.drawn, 'group')} drawn, {len(filling.kept)} of {filling.n} kept ({filling.reasons()})"
    same = [group for group, fate in filling.dropped if fate in ("all_correct", "all_wrong")]
    if different := sum(has_spread(group.verdicts) for group in same):
        found += f"; sampling.metric=score keeps {different} of these, whose scores differ"
    if settings.on_cap == "fill":
        spare = [group for group, fate in filling.dropped if not FATES[fate].signal]
        chosen = spare[: filling.missing]
        draws = frozenset(group.draw for group in chosen)
        filling.dropped = [entry for entry in filling.dropped if entry[0].draw not in draws]
        filling.kept = sorted([*filling.kept, *chosen], key=lambda group: group.draw)
        if filling.kept:
            return draws, f"sampling.cap reached: {found}; filled up with {counted(len(draws), 'uninformative group')}"
    if settings.on_cap == "partial" and filling.kept:
        return nothing, f"sampling.cap reached: {found}; training on {counted(len(filling.kept), 'group')}"
    raise CapReachedError(
        f"sampling.cap: {found}; raise sampling.cap, use easier or harder prompts, "
        "or choose sampling.on_cap=partial or fill"
    )
