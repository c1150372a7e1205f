"""Judging: verdicts on complete groups are computed while the engine generates, and decide which groups are kept.

A verdict is read a fixed number of engine polls after its group is complete, not when it happens to be ready. Every
decision then depends only on the order of draws, polls and weight versions, so the same seed gives the same run. With
`sampling.wait_for_verdicts: false` verdicts are read as soon as they are ready, and the engine never waits for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dapo_rl.base.quote import describe
from dapo_rl.choices import Masking
from dapo_rl.config import SamplingSettings
from dapo_rl.errors import UserError
from dapo_rl.fates import Fate
from dapo_rl.rollout.flights import Flight
from dapo_rl.rollout.grading import Grading, alike, same_score
from dapo_rl.rollout.verdicts import AtHand, await_verdicts, check_nothing, submit, take_verdicts
from dapo_rl.types import Group, Pending, Verdict, Verifier

GroupFilter = Callable[[Group], bool]

LEAST_POLLS = 4
POLLS_PER_TOKEN = 1 / 256
"""How many engine polls pass before a verdict is waited for: long responses leave more time to compute it."""
GRACE_S = 2.0
"""Seconds that an interrupted step waits for the verdicts that are being computed."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A complete group of an interrupted step whose verdicts have not been read."""

    flight: Flight
    polls: int
    """Engine polls since it was complete; enough of them if its verdicts are due."""
    verdicts: tuple[Verdict, ...] | None
    """None: they are computed again."""


@dataclass(frozen=True, slots=True)
class _Judged:
    poll: int
    flight: Flight
    verdicts: Pending


class Judging:
    """Complete groups whose verdicts are being computed, in the order in which they completed."""

    def __init__(self, verifier: Verifier, settings: SamplingSettings) -> None:
        self._verifier, self._waits = verifier, settings.wait_for_verdicts
        self._polls_to_wait = max(LEAST_POLLS, int(settings.max_new_tokens * POLLS_PER_TOKEN))
        self._waiting: list[_Judged] = []
        self._polls = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Flight]:
        return (judged.flight for judged in self._waiting)

    def start(self, whole: list[Flight]) -> None:
        """Submits the groups that the last engine poll completed."""
        self._polls += 1
        for flight in whole:
            samples = [sample for sample in flight.samples if sample is not None]
            verdicts = submit(self._verifier, flight.prompt, samples)
            self._waiting.append(_Judged(self._polls, flight, verdicts))

    def finish(self, *, everything: bool, check: Callable[[], None] = check_nothing) -> Iterator[Group]:
        """Waits for the verdicts that are due, and yields their groups.

        `check` is called meanwhile; it raises to end the waiting. What was due then stays due.
        """
        if everything:
            due = [replace(judged, poll=self._polls - self._polls_to_wait) for judged in self._waiting]
            self._waiting = list(due)
        else:
            due = [judged for judged in self._waiting if self._is_due(judged)]
        for judged in due:
            verdicts = tuple(await_verdicts(judged.verdicts, check))
            self._waiting = [other for other in self._waiting if other is not judged]
            flight = judged.flight
            samples = tuple(sample for sample in flight.samples if sample is not None)
            yield Group(flight.draw, flight.prompt, samples, verdicts)

    def interrupt(self) -> tuple[Unread, ...]:
        """Removes all groups, with the verdicts that are computed within a few seconds."""
        waiting, self._waiting = self._waiting, []
        found = take_verdicts([judged.verdicts for judged in waiting], GRACE_S)
        ages = [min(self._polls - judged.poll, self._polls_to_wait) for judged in waiting]
        return tuple(Unread(j.flight, age, verdicts) for j, age, verdicts in zip(waiting, ages, found, strict=True))

    def resume(self, interrupted: tuple[Unread, ...]) -> None:
        """Adds the groups of an interrupted step; verdicts that are missing are computed."""
        for unread in interrupted:
            flight = unread.flight
            samples = [sample for sample in flight.samples if sample is not None]
            known = None if unread.verdicts is None else AtHand(list(unread.verdicts))
            verdicts = known or submit(self._verifier, flight.prompt, samples)
            self._waiting.append(_Judged(self._polls - unread.polls, flight, verdicts))

    def _is_due(self, judged: _Judged) -> bool:
        if not self._waits:
            return judged.verdicts.done()
        return self._polls - judged.poll >= self._polls_to_wait


def fate_of(
    group: Group, settings: SamplingSettings, keep: GroupFilter | None, grading: Grading, masking: Masking = "none"
) -> Fate:
    """Decides by correctness or raw scores, before any length penalty. `grading` decides where the metric is `auto`."""
    if any(verdict.failed for verdict in group.verdicts):
        return "verifier_error"
    if settings.dynamic:
        by_metric = {"auto": grading.drops, "correct": alike, "score": same_score}
        why_dropped = by_metric[settings.metric]
        if (fate := why_dropped(group.verdicts)) is not None:
            return fate
        left = [v for s, v in zip(group.samples, group.verdicts, strict=True) if not s.truncated]
        # With truncated samples in the baseline, even equal samples have an advantage over them.
        if masking != "none" and (not left or (masking == "baseline" and why_dropped(left) is not None)):
            return "truncated"
    return "kept" if keep is None or _passes(keep, group) else "filtered"


def _passes(keep: GroupFilter, group: Group) -> bool:
    try:
        return bool(keep(group))
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # includes SystemExit: sys.exit(0) in a filter must not end the run as a success
        raise UserError(
            f"sampling.filter: {describe(error)}, on the group of prompt {group.prompt.id}; "
            "it is called with a group (prompt, samples, verdicts) and returns whether to keep it"
        ) from error
