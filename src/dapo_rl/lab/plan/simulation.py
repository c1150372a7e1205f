"""Simulates the steps of a run on timed engines: sampling in rounds, streaming, and asynchronous."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dapo_rl.config import SamplingSettings
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.lab.bench.sampling_simulation import Rounds
from dapo_rl.lab.plan.layout import GpuMemory, Layout
from dapo_rl.lab.plan.rates import Rates, UpdateTime, update_time
from dapo_rl.lab.simulated_engine import Load, Replica, SimulatedEngine
from dapo_rl.lab.simulated_world import EndlessPrompts, NoWeights, SaysSo, World
from dapo_rl.memory.sizes import trained_parameters
from dapo_rl.rollout.batch_builder import SampledBatch
from dapo_rl.rollout.sampler import Sampler

Way = Literal["rounds", "streaming", "asynchronous"]
VERL_ROUND = 3
"""verl's recipe samples rounds of three batches."""
POLLS = 150
"""Polls of the engine during the longest sample: the resolution of virtual time."""
ENOUGH = 128
"""The fewest prompts per step when one engine stands for several."""
FEW = 32
"""The same, to compare splits of the GPUs."""
TAIL = 0.25
"""Sampling is in its tail while fewer samples run than this share of the maximum."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    start: float
    sampled: float
    update_start: float
    end: float
    update: UpdateTime
    trained_tokens: int
    generated_tokens: int
    stale: float
    """Mean age of its groups in weight versions."""


@dataclass(frozen=True, slots=True)
class WayResult:
    way: Way
    layout: Layout
    steps: tuple[PlannedStep, ...]
    warmup: int
    loads: tuple[Load, ...]
    preempted: int

    @property
    def counted(self) -> tuple[PlannedStep, ...]:
        return self.steps[self.warmup :]

    @property
    def begin(self) -> float:
        return self.steps[self.warmup - 1].end if self.warmup else 0.0

    @property
    def step_seconds(self) -> float:
        return (self.steps[-1].end - self.begin) / len(self.counted)

    def mean(self, figure: Callable[[PlannedStep], float]) -> float:
        return sum(map(figure, self.counted)) / len(self.counted)

    @property
    def sampling_seconds(self) -> float:
        return self.mean(lambda step: step.sampled - step.start)

    @property
    def update_seconds(self) -> float:
        return self.mean(lambda step: step.update.total)

    @property
    def tokens(self) -> tuple[float, float]:
        """Tokens per step: generated, trained on."""
        return self.mean(lambda step: step.generated_tokens), self.mean(lambda step: step.trained_tokens)

    @property
    def staleness(self) -> float:
        return self.mean(lambda step: step.stale)

    def sampling_parts(self) -> dict[str, float]:
        """Seconds per step with samples waiting for pages, in the tail, and in between."""
        parts = {"decode": 0.0, "tail": 0.0, "pages": 0.0}
        most = max((load.running for load in self.loads), default=0)
        for load, following in zip(self.loads, self.loads[1:], strict=False):
            seconds = following.time - max(load.time, self.begin)
            if seconds > 0 and load.running:
                part = "pages" if load.waiting else "tail" if load.running < TAIL * most else "decode"
                parts[part] += seconds / len(self.counted)
        return parts


@dataclass(frozen=True, slots=True)
class Simulation:
    memory: GpuMemory
    rates: Rates
    world: World
    prompt_tokens: int
    steps: int = 4
    warmup: int = 1
    share: int = 1
    """Simulates one engine in so many, and the same share of the prompts: all engines have the same load."""
    round_size: int = VERL_ROUND

    def run(self, way: Way) -> WayResult:
        """Asynchronous engines keep sampling during updates, up to `max_staleness` steps ahead."""
        engine, k, ahead = self._engine(), self.share, max(1, self.settings.max_staleness)
        strategy = self._strategy(way, engine)
        steps: list[PlannedStep] = []
        for number in range(self.steps):
            if way == "asynchronous" and number > ahead:
                engine.rest_until(steps[number - 1 - ahead].end)
            start = engine.now
            fill = strategy.fill(self.prompts)
            sampled, update = engine.now, self._update(fill)
            if way == "asynchronous":
                begin = max(sampled, steps[-1].end if steps else 0.0)
                end = begin + update.updating
                engine.receive_at(end, number + 1, update.transfer)
            else:
                begin, end = sampled, sampled + update.total
                engine.rest_until(end)
                engine.receive(number + 1, NoWeights())
            ages = [fill.version - int(group.samples[0].versions[0]) for group in fill.kept]
            trained, stale = k * sum(group.tokens for group in fill.kept), sum(ages) / max(1, len(ages))
            steps.append(PlannedStep(start, sampled, begin, end, update, trained, k * fill.tokens_generated, stale))
        loads = tuple(Load(time, k * running, k * waiting) for time, running, waiting in engine.loads)
        return WayResult(way, self.memory.layout, tuple(steps), self.warmup, loads, k * engine.preempted)

    def _update(self, fill: SampledBatch) -> UpdateTime:
        memory, config, train = self.memory, self.memory.config, self.memory.config.train
        scores = (
            config.scores_first,
            config.needs_reference or config.teacher.loaded,
            config.algo.top_entropy_quantile < 1,
        )
        return update_time(
            self.rates,
            self.share * [len(sample.token_ids) for group in fill.kept for sample in group.samples],
            self.prompt_tokens,
            gpus=memory.layout.trainers,
            token_budget=memory.token_budget,
            recompute=memory.recompute,
            mini_batches=train.mini_batches,
            epochs=train.epochs_per_step,
            critic=config.has_critic,
            scored=sum(scores),
            adapters=None if config.model.lora is None else trained_parameters(config, memory.size),
            transfer=self.rates.transfer(memory.layout.gpus),
        )

    @property
    def prompts(self) -> int:
        return self.settings.prompts_per_step // self.share

    @property
    def settings(self) -> SamplingSettings:
        return self.memory.config.sampling

    def _engine(self) -> SimulatedEngine:
        memory = self.memory
        count, limits = memory.layout.engines // self.share, (memory.pages, memory.sizes.sequences)
        replicas = [Replica(self.rates, *limits, self.prompt_tokens) for _ in range(count)]
        alone = self.rates.decode(1, self.world.longest // 2) * self.world.longest
        return SimulatedEngine(self.world, replicas, alone / POLLS)

    def _strategy(self, way: Way, engine: SimulatedEngine) -> Rounds | Sampler:
        settings = self.settings
        params = SamplingParams(max_new_tokens=settings.max_new_tokens)
        if way == "rounds":
            once = settings.dynamic_batch
            size, most = self.round_size if settings.dynamic and not once else 1, 1 if once else 10**9
            return Rounds(engine, params, settings.group_size, round_size=size, most=most)
        carry = SamplingSettings(
            group_size=settings.group_size,
            prompts_per_step=self.prompts,
            max_new_tokens=settings.max_new_tokens,
            dynamic=settings.dynamic,
            dynamic_batch=settings.dynamic_batch,
            surplus="carry",
            max_staleness=max(1, settings.max_staleness),
            ahead=settings.ahead,
        )
        return Sampler(EndlessPrompts(), engine, SaysSo(), params, carry, cap=10**9, seed=self.world.seed)


def simulated_share(prompts: int, engines: int, enough: int = ENOUGH) -> int:
    """The largest power of two by which both can be divided with enough prompts left."""
    share = 1
    while prompts % (2 * share) == 0 and engines % (2 * share) == 0 and prompts // (2 * share) >= enough:
        share *= 2
    return share
