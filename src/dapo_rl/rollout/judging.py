"""Judging: verdicts on whole groups are computed while the engine works, and decide what becomes of each group.

A verdict is looked at a fixed number of polls of the engine after its group is whole, not when it happens to be there:
every decision then follows the order of draws, polls and weight versions, and the same seed gives the same run. With
`sampling.wait_for_verdicts: false` verdicts are taken as they come, and the engine never waits for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dapo_rl.algo import dynamic_sampling_filter
from dapo_rl.base.quote import describe
from dapo_rl.config import SamplingSettings
from dapo_rl.errors import UserError
from dapo_rl.fates import Fate
from dapo_rl.rollout.flights import Flight
from dapo_rl.rollout.verdicts import submit
from dapo_rl.types import Group, Pending, Verifier

GroupFilter = Callable[[Group], bool]

LEAST_POLLS = 4
POLLS_PER_TOKEN = 1 / 256
"""The engine's polls until a verdict is waited for: long responses leave more time to compute it, at no more cost."""


@dataclass(frozen=True, slots=True)
class _Judged:
    poll: int
    flight: Flight
    verdicts: Pending


class Judging:
    """Whole groups whose verdicts are being computed, in the order in which they became whole."""

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
        """After a poll of the engine: the groups that it made whole."""
        self._polls += 1
        for flight in whole:
            samples = [sample for sample in flight.samples if sample is not None]
            verdicts = submit(self._verifier, flight.prompt, samples)
            self._waiting.append(_Judged(self._polls, flight, verdicts))

    def finish(self, *, everything: bool) -> Iterator[Group]:
        """The groups whose verdicts are due; waits for them."""
        waiting, self._waiting = self._waiting, []
        for judged in waiting:
            if everything or self._is_due(judged):
                flight = judged.flight
                samples = tuple(sample for sample in flight.samples if sample is not None)
                yield Group(flight.draw, flight.prompt, samples, tuple(judged.verdicts.result()))
            else:
                self._waiting.append(judged)

    def _is_due(self, judged: _Judged) -> bool:
        if not self._waits:
            return judged.verdicts.done()
        return self._polls - judged.poll >= self._polls_to_wait


def fate_of(group: Group, settings: SamplingSettings, keep: GroupFilter | None) -> Fate:
    """Decides by correctness or raw scores, before any length penalty is in them."""
    if any(verdict.failed for verdict in group.verdicts):
        return "verifier_error"
    if settings.dynamic:
        correct = [verdict.correct for verdict in group.verdicts]
        if settings.metric == "score":
            scores = torch.tensor([[verdict.score for verdict in group.verdicts]])
            if not dynamic_sampling_filter(scores).item():
                return "no_spread"
        elif not dynamic_sampling_filter(torch.tensor([correct])).item():
            return "all_correct" if correct[0] else "all_wrong"
    return "kept" if keep is None or _passes(keep, group) else "filtered"


def _passes(keep: GroupFilter, group: Group) -> bool:
    try:
        return bool(keep(group))
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit among them: sys.exit(0) in a filter is not a finished run
        raise UserError(
            f"sampling.filter: {describe(error)}, on the group of prompt {group.prompt.id}; "
            "it is called with a group (prompt, samples, verdicts) and returns whether to keep it"
        ) from error
