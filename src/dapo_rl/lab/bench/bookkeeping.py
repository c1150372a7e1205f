"""Measures the cost of a step without the model: sampler, batch, metrics, rollout log and checkpoint state.

Engine and update are stand-ins that create arrays of the right size; everything else is the code of a real run.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console

from dapo_rl.base.format import counted
from dapo_rl.cluster.engine_pool import EnginePool
from dapo_rl.cluster.ray_session import ray_cluster
from dapo_rl.config import ClusterSettings, Config
from dapo_rl.engines.protocol import Completion, Engine, Request, SamplingParams
from dapo_rl.lab.simulated_world import EndlessPrompts, NoWeights, SaysSo
from dapo_rl.models.weights import WeightSource
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.runs.rollouts import GroupRow, write_table
from dapo_rl.train.batch import make_batch, shaped_rewards, with_advantages, with_diagnostics
from dapo_rl.train.custom import build_advantages
from dapo_rl.train.ledger import Ledger
from dapo_rl.train.metrics import step_metrics
from dapo_rl.types import Trajectory, Update

CHARACTERS_PER_TOKEN = 4
AT_ONCE = 1024
"""Sequences that the engine runs concurrently."""


def measure_bookkeeping(
    prompts: int,
    group: int,
    tokens: int,
    seed: int = 0,
    tell: Callable[[str], None] = lambda what: None,
    engines: int = 0,
) -> dict[str, Any]:
    """Measures one step of `prompts × group` samples: seconds by stage, peak memory, and live Python objects. With
    `engines`, that many engines are Ray actors."""
    with _engine(partial(_stand_in, tokens, seed), engines) as engine:
        return _measure(engine, prompts, group, tokens, seed, tell) | {"engines": engines}


def _measure(
    engine: Engine, prompts: int, group: int, tokens: int, seed: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    config = Config.build(
        {
            "sampling.prompts_per_step": prompts,
            "sampling.group_size": group,
            "sampling.max_new_tokens": tokens,
            "train.mini_batches": min(16, prompts),
        }
    )
    params = SamplingParams.of(config.sampling)
    sampler = Sampler(EndlessPrompts(), engine, SaysSo(), params, config.sampling, cap=config.sampling_cap, seed=seed)
    before, cpu_before = _live_objects(), time.process_time()
    parts: dict[str, float] = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        tell(name)
        started = time.perf_counter()
        yield
        parts[name] = time.perf_counter() - started

    with TemporaryDirectory(prefix="dapo-bench-") as name:
        directory = Path(name)
        with stage("sampler"):
            fill = sampler.fill(prompts)
        if isinstance(engine, StandInEngine):
            parts["engine (stand-in)"] = engine.seconds
            parts["sampler"] -= engine.seconds
        with stage("batch"):
            rewards = shaped_rewards([*fill.sampled, *fill.kept], config)
            batch = with_advantages(
                make_batch(fill.kept, config, fill.version, rewards=rewards),
                build_advantages(config.algo, config.overlong.factor),
            )
        with stage("update (stand-in)"):
            updates = [_update(part) for part in batch.mini_batches(config.train.mini_batches)]
        with stage("metrics"):
            batch = with_diagnostics(batch, updates)
            metrics = step_metrics(fill, batch, [update.metrics for update in updates], rewards)
            Ledger().add(fill, batch)
        with stage("rollout log"):
            write_table(directory / "rollouts.parquet", 1, [GroupRow(one, "kept") for one in batch])
        with stage("checkpoint state"):
            sampler.save(directory)
        written = {path.name: path.stat().st_size for path in directory.iterdir()}
    cpu_seconds = time.process_time() - cpu_before  # before garbage is collected again
    return {
        "bench": "bookkeeping",
        "prompts": prompts,
        "group": group,
        "tokens": tokens,
        "seconds": sum(parts.values()),
        "parts": parts,
        "tokens_trained": int(metrics["sampling/tokens_trained"]),
        "tokens_in_flight": sampler.in_flight_tokens,
        "written_bytes": written,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "objects": _live_objects() - before,
    }


def _live_objects() -> int:
    """Without garbage, also that of whatever this process did before."""
    gc.collect()
    return sys.getallocatedblocks()


def print_bookkeeping(result: dict[str, Any]) -> None:
    console = Console(highlight=False)
    samples = result["prompts"] * result["group"]
    through = f", through {counted(result['engines'], 'engine')} on Ray" if result["engines"] else ""
    console.print(f"bookkeeping: {samples:,} samples of {result['tokens']:,} tokens{through}", style="bold")
    for name, seconds in sorted(result["parts"].items(), key=lambda part: -part[1]):
        console.print(f"{name:<18} {seconds:8.2f} s")
    console.print(f"{'total':<18} {result['seconds']:8.2f} s, {result['peak_bytes'] / 2**30:.2f} GiB peak")


@contextmanager
def _engine(build: Callable[[Any], Engine], engines: int) -> Iterator[Engine]:
    if not engines:
        yield build(None)
        return
    settings = ClusterSettings(backend="ray", engines=engines)
    with ray_cluster(settings), closing(EnginePool(build, NoWeights(), settings)) as pool:
        yield pool


def _stand_in(tokens: int, seed: int, _weights: Any) -> Engine:
    return StandInEngine(np.random.default_rng(seed), tokens)


@dataclass(slots=True)
class StandInEngine(Engine):
    """Finishes samples in the order of their requests; running samples have half their tokens."""

    random: np.random.Generator
    length: int
    version: int = 0
    seconds: float = 0.0
    _queue: deque[tuple[Request, int]] = field(default_factory=deque)

    def submit(self, request: Request) -> None:
        self._queue.extend((request, index) for index in request.indices)

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        started = time.perf_counter()
        now = [self._queue.popleft() for _ in range(min(len(self._queue), 64))]
        done = [Completion(request.id, index, self._sample(index)) for request, index in now]
        self.seconds += time.perf_counter() - started
        return done

    def cancel(self, ids: Collection[str]) -> int:
        raise NotImplementedError("nothing is cancelled here")

    def receive(self, version: int, source: WeightSource) -> None:
        self.version = version

    def take_unfinished(self) -> list[Request]:
        started = time.perf_counter()
        requests = {request.id: request for request, _ in self._queue}
        written: dict[str, list[Trajectory]] = {name: [] for name in requests}
        for place, (request, index) in enumerate(self._queue):
            begun = Trajectory.nothing(index)
            written[request.id].append(
                begun.then(*self._tokens(self.length // 2), self.version) if place < AT_ONCE else begun
            )
        self._queue.clear()
        self.seconds += time.perf_counter() - started
        return [request.left(written[name]) for name, request in requests.items()]

    def _tokens(self, length: int) -> tuple[Any, Any]:
        ids = self.random.integers(0, 32_000, length, dtype=np.int32)
        return ids, -self.random.random(length, dtype=np.float32)

    def _sample(self, index: int) -> Trajectory:
        ids, logps = self._tokens(self.length)
        text = ids.astype(np.uint16).tobytes().hex()[: self.length * CHARACTERS_PER_TOKEN - 5]
        versions = np.full(self.length, self.version, np.int32)
        return Trajectory(ids, logps, "right" if index == 0 else text, "stop", versions)


def _update(samples: Sequence[Trajectory]) -> Update:
    columns = tuple(
        {
            "train_logps": sample.logps * np.float32(0.9),
            "entropies": -sample.logps,
            "clipped": np.zeros(len(sample.logps), np.int8),
        }
        for sample in samples
    )
    return Update({"actor/mismatch_kl": 0.0}, columns)
