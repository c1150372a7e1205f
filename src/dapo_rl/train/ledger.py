"""Counts generated tokens by outcome; each token is counted in exactly one column."""

from __future__ import annotations

from collections import Counter

from dapo_rl.rollout.batch_builder import FailedBatch, SampledBatch
from dapo_rl.train.off_policy import LEFT_OUT
from dapo_rl.types import Batch


class Ledger:
    def __init__(self, counts: dict[str, int] | None = None) -> None:
        self._counts: Counter[str] = Counter(counts or {})

    def add(self, fill: SampledBatch, batch: Batch) -> None:
        self._counts["total"] += fill.tokens_generated
        self._counts["cancelled"] += fill.tokens_cancelled
        if fill.tokens_restarted:
            self._counts["restarted"] += fill.tokens_restarted
        for sample in batch.samples:
            if left_out := int(sample.scalars.get(LEFT_OUT, 0)):
                self._counts["off_policy"] += left_out
            in_loss = sample.trained_tokens or left_out
            self._counts["trained" if in_loss else "masked_truncated"] += sample.written - left_out
        for dropped, outcome in fill.dropped:
            self._counts[outcome] += dropped.tokens

    def with_interrupted(self, so_far: SampledBatch) -> Ledger:
        """A copy that includes a step that was interrupted: nothing was trained on."""
        copy = Ledger(dict(self._counts))
        copy.add(so_far, Batch(()))
        return copy

    def with_failed(self, remains: FailedBatch) -> Ledger:
        """A copy that includes a step in which the run failed."""
        copy = self.with_interrupted(remains.fill)
        copy._counts["unfinished"] += sum(group.tokens for group in remains.unfinished)
        return copy

    def columns(self, waiting: int = 0, in_flight: int = 0) -> dict[str, int]:
        """Tokens by outcome. `carried` are those of finished samples that wait for the next step and of unfinished
        samples, which no step's total includes yet."""
        counts = dict(sorted(self._counts.items()))
        return counts | {"carried": waiting + in_flight, "total": counts.get("total", 0) + in_flight}

    def state(self) -> dict[str, int]:
        return dict(self._counts)
