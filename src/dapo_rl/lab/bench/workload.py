"""The workload of a benchmark, the same for every contender. Lengths of samples are drawn from a distribution:
`fixed:256`, `lognormal:1000`, `uniform:10:500`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, isfinite, log, sqrt
from random import Random
from statistics import NormalDist
from typing import Any, Literal

from dapo_rl.config import Config
from dapo_rl.errors import UserError

Kind = Literal["rollout", "update", "step", "episodes"]

OPTIONS = {
    "seed": "--seed",
    "engine": "--engine",
    "model.device": "--device",
    "model.dtype": "--dtype",
    "sampling.prompts_per_step": "--prompts",
    "sampling.group_size": "--group",
    "sampling.max_new_tokens": "--tokens",
    "data.max_prompt_tokens": "--prompt-tokens",
    "env.max_turns": "--turns",
    "env.max_turn_tokens": "--turn-tokens",
}
"""The option of the command for each setting."""

SIGMA = sqrt(2 * log(1.637))
"""About 0.993. The mean of a lognormal distribution is median × exp(σ² / 2), so here 1.637 times its median."""

OBSERVATION_SLACK = 4
"""What separates an observation from turns takes a few tokens more."""

LATENCY_SIGMA = 1.2
"""With it, one call in a thousand takes 40 times the median."""

FORMS = "fixed:N, lognormal:MEDIAN[:SIGMA] or uniform:LOW:HIGH"

Quantile = Callable[[float], float]
"""The length below which a share of all samples lies."""


@dataclass(frozen=True, slots=True)
class ToolWork:
    """How the samples of `bench episodes` are interrupted: each has turns of equal length, with a tool call between two
    of them."""

    turns: int
    observation_tokens: int
    median_s: float
    """Median of the tools' latencies, which are lognormal."""
    longest_s: float
    at_a_time: int
    sync: bool = False
    """Whether the tool blocks its process."""
    trl_wait_s: float = 120.0
    """If TRL's tool calls, one after the other, take longer, their latencies are added instead of waited for."""

    @property
    def calls(self) -> int:
        return self.turns - 1

    def latencies(self, seed: int, episodes: int) -> list[list[float]]:
        return [[self.latency(seed, i, turn) for turn in range(1, self.turns)] for i in range(episodes)]

    def latency(self, seed: int, episode: int, turn: int) -> float:
        """Seconds that the tool takes after a turn, counted from 1."""
        share = (Random(f"latency {seed} {episode} {turn}").getrandbits(52) + 0.5) / 2**52
        return min(self.median_s * exp(LATENCY_SIGMA * NormalDist().inv_cdf(share)), self.longest_s)


@dataclass(frozen=True, slots=True)
class Workload:
    """`prompts` × `group` samples of known lengths, in `warmup` and then `repeats` measured rounds.

    All rounds have the same lengths in the same order, but different prompts.
    """

    kind: Kind
    model: str
    prompts: int
    group: int
    tokens: int
    """Tokens per sample; with `lengths`, the most that a sample has, which is all that an engine knows beforehand."""
    prompt_tokens: int
    dtype: str
    """The compute type; trained weights are float32."""
    engine: str
    device: str
    repeats: int
    warmup: int
    seed: int = 0
    settings: tuple[str, ...] = ()
    """Further settings, `key=value`, as for `dapo train`."""
    lengths: str = ""
    """The distribution of the lengths; empty if all samples have `tokens` tokens."""
    tools: ToolWork | None = None

    @property
    def group_lengths(self) -> tuple[tuple[int, ...], ...]:
        return draw_lengths(self.lengths or f"fixed:{self.tokens}", self.tokens, self.prompts, self.group, self.seed)

    @property
    def all_lengths(self) -> list[int]:
        return [length for row in self.group_lengths for length in row]

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def response_tokens(self) -> int:
        return sum(self.all_lengths)

    @property
    def longest_prompt(self) -> int:
        """Some tokenizers split a random text into a few more tokens than intended."""
        return 2 * self.prompt_tokens + 16

    @property
    def longest(self) -> int:
        observed = 0 if self.tools is None else self.tools.calls * (self.tools.observation_tokens + OBSERVATION_SLACK)
        return self.longest_prompt + self.tokens + observed

    @property
    def rounds(self) -> int:
        return self.warmup + self.repeats

    def config(self) -> Config:
        """The settings of a run that does this work, including those from the user."""
        fixed = {override.partition("=")[0] for override in self._overrides()} - {"sampling.max_batch"}
        for key in (setting.partition("=")[0].strip() for setting in self.settings):
            if key in fixed:
                option = OPTIONS.get(key)
                raise UserError(f"{key}: " + (f"use {option}" if option else "the benchmark sets it"))
        return Config.load(None, [*self._overrides(), *self.settings])

    def _overrides(self) -> list[str]:
        settings: dict[str, Any] = {
            "seed": self.seed,
            "engine": self.engine,
            "model.device": self.device,
            "model.dtype": self.dtype,
            "data.max_prompt_tokens": self.longest_prompt,
            "sampling.prompts_per_step": self.prompts,
            "sampling.group_size": max(self.group, 2),
            "sampling.max_new_tokens": self.tokens,
            "sampling.max_batch": self.samples if self.tools is None else min(self.samples, self.tools.at_a_time),
            "sampling.ignore_eos": True,
            "sampling.dynamic": False,
            "overlong.shape": "off",
            # The benchmark ends the run after `rounds`, and needs no disk space for checkpoints.
            "train.steps": self.rounds + 1,
            "train.warmup_steps": 0,
            "checkpoint.every": self.rounds + 2,
            "checkpoint.save_final": False,
            "log.rollouts": False,
        }
        if self.tools is not None:
            settings |= {
                "env.max_turns": self.tools.turns,
                "env.max_turn_tokens": self.tokens // self.tools.turns,
                "env.max_observation_tokens": self.longest,
                "env.timeout_s": 2 * self.tools.longest_s + 60,
            }
        return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The report of a contender's process."""

    seconds: tuple[float, ...]
    peak_memory_bytes: int
    memory: str
    parts: dict[str, float] = field(default_factory=dict)
    """The parts of the seconds, as medians over the repeats."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The number of parameters and other facts to report."""


def fixed_length(spec: str) -> int | None:
    """N of `fixed:N`; None for a distribution."""
    kind, numbers = _parse(spec)
    return int(numbers[0]) if kind == "fixed" else None


def longest_length(spec: str) -> int | None:
    """The upper bound of the distribution, if it has one."""
    kind, numbers = _parse(spec)
    return None if kind == "lognormal" else int(numbers[-1])


@lru_cache(maxsize=8)
def draw_lengths(spec: str, cap: int, prompts: int, group: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """For each prompt, the lengths of its samples: at least 1, at most `cap`.

    Only the generator's bits are used, so that the lengths do not depend on a library's version.
    """
    quantile, rng = _quantile(spec), Random(f"lengths {seed}")

    def one() -> int:
        share = (rng.getrandbits(52) + 0.5) / 2**52  # never 0 or 1
        return min(max(round(quantile(share)), 1), cap)

    return tuple(tuple(one() for _ in range(group)) for _ in range(prompts))


def _quantile(spec: str) -> Quantile:
    kind, numbers = _parse(spec)
    if kind == "fixed":
        return lambda share: numbers[0]
    if kind == "uniform":
        low, high = numbers
        return lambda share: low + int(share * (high - low + 1))
    median, sigma = numbers
    normal = NormalDist()
    return lambda share: median * exp(min(sigma * normal.inv_cdf(share), 700))


def _parse(spec: str) -> tuple[str, tuple[float, ...]]:
    kind, *words = spec.split(":")
    try:
        numbers = tuple(map(float, words))
    except ValueError:
        numbers = ()
    if kind == "lognormal" and len(numbers) == 1:
        numbers = (*numbers, SIGMA)
    whole = kind == "lognormal" or all(number.is_integer() for number in numbers)
    valid = len(numbers) == {"fixed": 1, "lognormal": 2, "uniform": 2}.get(kind) and whole
    if not valid or not all(map(isfinite, numbers)) or numbers[0] < 1 or numbers[-1] < 0:
        raise UserError(f"--lengths: {spec!r} is not {FORMS}")
    if kind == "uniform" and numbers[1] < numbers[0]:
        raise UserError(f"--lengths: in {spec!r} the highest length is below the lowest")
    return kind, numbers
