"""The quantities that an ablation measures: their names in ablation.json, their headings and how they are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dapo_rl.base.format import duration, fixed

Write = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Quantity:
    head: str
    write: Write
    scale: float = 1.0
    """Factor for differences: 100 for shares, whose differences are in points."""
    digits: int = 2
    """Decimals of a difference."""
    unit: str = ""

    def signed(self, difference: float) -> str:
        return f"{self.scale * difference:+,.{self.digits}f}"

    def unsigned(self, width: float) -> str:
        return f"{self.scale * width:,.{self.digits}f}"


def percent_of(share: float) -> str:
    return f"{100 * share:.1f}"


def _share(head: str) -> Quantity:
    return Quantity(head, percent_of, 100, 1, "points")


TABLE = {
    "accuracy": _share("accuracy %"),
    "entropy": Quantity("entropy", fixed, digits=3, unit="nats per token"),
    "response_length": Quantity("length", lambda tokens: fixed(tokens, 1), digits=1, unit="tokens"),
    "truncated": _share("cut off %"),
    "generated_per_trained": Quantity("tokens per trained", fixed),
    "reward": Quantity("reward", fixed),
    "wall_seconds": Quantity("time", duration, digits=0, unit="seconds"),
}

TO_ACCURACY = {
    "steps_to": Quantity("steps to accuracy", lambda steps: fixed(steps, 1), digits=1, unit="steps"),
    "tokens_to": Quantity("tokens to accuracy", lambda tokens: f"{tokens:,.0f}", digits=0, unit="tokens"),
}
"""Cost of reaching an accuracy. A run that does not reach it counts with all its steps and tokens."""

OTHERS = {
    "mean_accuracy": _share("accuracy over the run %"),
    "mean_entropy": Quantity("entropy over the run", fixed, digits=3, unit="nats per token"),
    "mean_length": Quantity("length over the run", lambda tokens: fixed(tokens, 1), digits=1, unit="tokens"),
    "mean_truncated": _share("cut off over the run %"),
    "clipped_high": Quantity("clipped above %", lambda share: f"{100 * share:.2f}", 100, 2, "points"),
    "clipped_prob": Quantity("probability clipped above", fixed, digits=2),
    "repetition": _share("repeated 4-grams %"),
}

COMPARABLE = TABLE | TO_ACCURACY | OTHERS
"""Everything that `--compare` takes."""

DEFAULT_COMPARED = ("accuracy",)
