"""The denominators that the micro-batches of an optimizer step share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dapo_rl.choices import AGGREGATIONS, Aggregation
from dapo_rl.types import Trajectory


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts over a whole optimizer step, of what is in the loss."""

    tokens: int
    correct_tokens: int
    """Those of correct samples."""
    samples: int
    group_tokens: Mapping[int, int]

    @classmethod
    def of(cls, samples: Sequence[Trajectory]) -> Counts:
        group_tokens: Counter[int] = Counter({s.group: 0 for s in samples})
        trained = [s for s in samples if s.trained_tokens]
        for sample in trained:
            group_tokens[sample.group] += sample.trained_tokens
        correct = sum(s.trained_tokens for s in trained if s.correct)
        return cls(sum(group_tokens.values()), correct, len(trained), group_tokens)

    @classmethod
    def over(cls, ranks: Sequence[Counts]) -> Counts:
        group_tokens: Counter[int] = Counter()
        for counts in ranks:
            group_tokens.update(counts.group_tokens)
        tokens, correct, samples = (
            sum(getattr(counts, name) for counts in ranks) for name in ("tokens", "correct_tokens", "samples")
        )
        return cls(tokens, correct, samples, group_tokens)

    def denominator(self, aggregation: Aggregation, micro_batches: int) -> int:
        return {
            "tokens": self.tokens,
            "groups": sum(count > 0 for count in self.group_tokens.values()),
            "samples": self.samples,
            "micro-batches": micro_batches,
        }[AGGREGATIONS[aggregation].denominator]
