"""A step that ended early: interrupted, with what the next fill continues with apart from groups in flight, or failed,
with what is recorded of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dapo_rl.fates import Fate
from dapo_rl.rollout.fill import Fill, Filling
from dapo_rl.rollout.judging import Unread
from dapo_rl.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class Interrupted:
    filling: Filling
    rejected: tuple[tuple[Group, Fate], ...] = ()
    """Groups that are not kept, and wait for the verdicts of earlier draws."""
    unread: tuple[Unread, ...] = ()

    @property
    def prompts(self) -> list[Prompt]:
        groups = [*self.filling.kept, *(group for group, _ in (*self.filling.dropped, *self.rejected))]
        return [*(group.prompt for group in groups), *(unread.flight.prompt for unread in self.unread)]

    @property
    def waiting_tokens(self) -> int:
        """Tokens of its complete groups that no fate has been recorded for."""
        groups = [*self.filling.kept, *(group for group, _ in self.rejected)]
        return sum(group.tokens for group in groups) + sum(unread.flight.finished_tokens for unread in self.unread)

    def so_far(self) -> Fill:
        """Its result so far. Kept groups are not in it: nothing has been trained on them."""
        filling = self.filling
        return Fill(
            kept=(),
            dropped=tuple(filling.dropped),
            sampled=tuple(filling.sampled),
            tokens_generated=filling.tokens_generated,
            tokens_cancelled=filling.cancelled_tokens,
        )


@dataclass(frozen=True, slots=True)
class Remains:
    """What a step had sampled when the run failed in it."""

    fill: Fill
    """Its dropped groups, and the tokens that it generated. Kept groups are not in it: nothing was trained on them."""
    unfinished: tuple[Group, ...]
    """All other groups, with the samples that had finished. Those that were not judged have no verdicts."""

    @classmethod
    def of(cls, filling: Filling, dropped: tuple[tuple[Group, Fate], ...], unfinished: tuple[Group, ...]) -> Remains:
        fill = Fill(
            kept=(),
            dropped=dropped,
            sampled=tuple(filling.sampled),
            tokens_generated=filling.tokens_generated,
            tokens_cancelled=filling.cancelled_tokens,
        )
        return cls(fill, unfinished)

    @classmethod
    def of_update(cls, fill: Fill) -> Remains:
        """Of a step that failed after its batch was full."""
        return cls(replace(fill, kept=()), fill.kept)
