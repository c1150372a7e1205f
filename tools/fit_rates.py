"""Fits the rates of `dapo plan` to measurements on one H200, and prints the error of each prediction.

python tools/fit_rates.py

The figures are those of docs/benchmarks.md: bfloat16, shapes with random weights, the native engine with graphs, fused
updates. Each has the context at which it was measured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from math import log

import numpy as np

from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.lab.bench.workload import draw_lengths
from dapo_rl.lab.plan.rates import MEASURED_ON, SPECS, Rates, Shares
from dapo_rl.lab.simulated_engine import Replica, SimulatedRow
from dapo_rl.memory.model_size import KNOWN


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One step of decoding."""

    model: str
    rows: int
    context: int
    seconds: float

    def predicted(self, shares: Shares) -> float:
        return _rates(self.model, shares).decode(self.rows, self.context)


@dataclass(frozen=True, slots=True)
class Rollout:
    """`dapo bench rollout`, all samples at once."""

    model: str
    prompts: int
    group: int
    prompt_tokens: int
    lengths: str
    cap: int
    seconds: float

    def predicted(self, shares: Shares) -> float:
        drawn = draw_lengths(self.lengths, self.cap, self.prompts, self.group, 0)
        replica = Replica(_rates(self.model, shares), sys.maxsize, self.prompts * self.group, self.prompt_tokens)
        request = Request("rollout", np.zeros(1, np.int32), 1, SamplingParams(self.cap), 0)
        prompt = self.prompt_tokens / self.group
        replica.queue.extend(SimulatedRow(request, 0, length, prompt) for group in drawn for length in group)
        replica.admit()
        while replica.running:
            replica.step_to_event()
        return replica.clock


@dataclass(frozen=True, slots=True)
class GradientStep:
    """`dapo bench update`, or the update of `dapo bench step`: one optimizer step."""

    model: str
    tokens: int
    position: int
    recompute: bool
    seconds: float

    def predicted(self, shares: Shares) -> float:
        rates = _rates(self.model, shares)
        return rates.update(self.tokens, self.position, self.recompute) + rates.optimizer(1)


Measurement = DecodeStep | Rollout | GradientStep

MEASURED: tuple[Measurement, ...] = (
    DecodeStep("qwen2.5-7b", 4, 164, 4.44e-3),
    DecodeStep("qwen2.5-7b", 32, 204, 4.70e-3),
    DecodeStep("qwen2.5-7b", 128, 212, 5.31e-3),
    DecodeStep("qwen2.5-7b", 384, 244, 11.0e-3),
    DecodeStep("qwen2.5-1.5b", 4, 164, 1.75e-3),
    DecodeStep("qwen2.5-1.5b", 32, 204, 1.82e-3),
    DecodeStep("qwen2.5-1.5b", 128, 212, 2.18e-3),
    DecodeStep("qwen2.5-1.5b", 512, 196, 4.23e-3),
    DecodeStep("smollm2-135m", 1024, 164, 2.50e-3),
    Rollout("qwen2.5-1.5b", 64, 8, 128, "lognormal:1000", 8192, 26.9),
    Rollout("qwen2.5-7b", 64, 8, 128, "lognormal:1000", 8192, 66.4),
    Rollout("qwen2.5-7b", 16, 8, 64, "fixed:1024", 1024, 6.16),
    GradientStep("qwen2.5-1.5b", 31_378, 120, False, 0.634),
    GradientStep("qwen2.5-7b", 132_096, 544, True, 12.9),
)


def errors(shares: Shares) -> dict[Measurement, float]:
    """The relative error of each prediction."""
    return {measured: measured.predicted(shares) / measured.seconds - 1 for measured in MEASURED}


def fit_shares(start: Shares, rounds: int = 12) -> Shares:
    """The shares with the least squares of the logarithms of predicted to measured times, by Gauss-Newton."""
    names = list(Shares.__dataclass_fields__)

    def residuals(at: Shares) -> list[float]:
        return [log(measured.predicted(at) / measured.seconds) for measured in MEASURED]

    shares = start
    for _ in range(rounds):
        here = np.array(residuals(shares))
        nearby = [replace(shares, **{name: getattr(shares, name) * 1.001}) for name in names]
        slopes = np.array([(np.array(residuals(each)) - here) / log(1.001) for each in nearby])
        change = np.linalg.lstsq(slopes.T, -here, rcond=None)[0]
        steps = {name: float(np.exp(step)) for name, step in zip(names, change, strict=True)}
        shares = replace(shares, **{name: getattr(shares, name) * steps[name] for name in names})
    return shares


def _rates(model: str, shares: Shares) -> Rates:
    return Rates(KNOWN[model], SPECS[MEASURED_ON], shares=shares)


if __name__ == "__main__":
    fitted = fit_shares(Shares())
    print(fitted)
    for measured, error in errors(fitted).items():
        print(f"{error:+.1%}  {measured}")
