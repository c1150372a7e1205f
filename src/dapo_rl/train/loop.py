"""Algorithm 1: sample until the batch is full, reward, update, hand the new weights to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from dapo_rl.algo.registry import Advantages
from dapo_rl.config import Config
from dapo_rl.errors import DivergedError, NonFiniteError
from dapo_rl.rollout.engine import Engine
from dapo_rl.rollout.sampler import Fill, Sampler
from dapo_rl.runs.directory import GroupRow, RunDirectory
from dapo_rl.runs.display import Display, evaluation_line
from dapo_rl.train.batch import make_batch, split_mini_batches
from dapo_rl.train.checkpoint import Checkpoint, Checkpoints
from dapo_rl.train.evaluate import Evaluation
from dapo_rl.train.finite import not_finite
from dapo_rl.train.ledger import Ledger
from dapo_rl.train.metrics import step_metrics
from dapo_rl.train.schedule import learning_rate
from dapo_rl.types import Batch, Group, TrainedTokens, TrainSample


class Policy(Protocol):
    """What is trained: in one process or on many ranks, with the same result."""

    def logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]: ...

    def update(self, mini_batch: Sequence[TrainSample], lr: float) -> dict[str, float]: ...

    def weights(self) -> Mapping[str, Tensor]: ...

    def take_notes(self) -> list[str]: ...

    def take_tokens(self) -> list[TrainedTokens | None]: ...


@dataclass(slots=True)
class Progress:
    """How far a run has come; in every checkpoint."""

    step: int = 0
    wall_seconds: float = 0.0
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """Steps and held-out accuracies; step 0 is before the first update."""
    ledger: Ledger = field(default_factory=Ledger)
    metrics: dict[str, float] = field(default_factory=dict)
    """Those of the last step."""


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run, put together by whoever reads the settings."""

    config: Config
    engine: Engine
    sampler: Sampler
    policy: Policy
    advantages: Advantages
    evaluate: Callable[[], Evaluation | None]
    save: Callable[[], Checkpoint]
    checkpoints: Checkpoints
    directory: RunDirectory
    display: Display
    progress: Progress
    stop_requested: Callable[[], bool] = lambda: False
    track: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None
    """Where metrics go beside the run directory."""


def train(run: Run) -> None:
    """From wherever the run's progress stands to its last step, or to the step at which a stop is requested."""
    config, progress = run.config, run.progress
    origin = time.perf_counter() - progress.wall_seconds
    if progress.step == 0 and not progress.evaluations and (metrics := _evaluate(run)):
        run.track(0, metrics)
        run.display.note(evaluation_line(0, config.train.steps, metrics))
    for step in range(progress.step + 1, config.train.steps + 1):
        with _or_diverged(run, step):
            fill, batch, tokens, metrics = _step(run, step)
        progress.step = step
        progress.ledger.add(fill, batch)
        last = step == config.train.steps
        if last or (config.eval.every and step % config.eval.every == 0):
            metrics |= _evaluate(run)
        progress.metrics = metrics
        progress.wall_seconds = time.perf_counter() - origin
        run.directory.append_metrics(step, metrics)
        run.track(step, metrics)
        if config.log.rollouts:
            rows = _rows(fill, batch, tokens, run.sampler.carried if last else ())
            run.directory.write_rollouts(step, rows, config.log.keep_rollouts)
        if (stopping := run.stop_requested()) or last or step % config.checkpoint_every == 0:
            with _or_diverged(run, step):
                run.save()
        for note in (fill.note, _verifier_failures(fill), *run.policy.take_notes()):
            if note:
                run.display.note(f"step {step}: {note}")
        run.display.step(step, metrics)
        if stopping:
            return


@contextmanager
def _or_diverged(run: Run, step: int) -> Iterator[None]:
    try:
        yield
    except NonFiniteError as error:
        latest = run.checkpoints.latest()
        raise DivergedError(step, str(error), str(latest.path) if latest else None) from error


def _step(run: Run, step: int) -> tuple[Fill, Batch, list[TrainedTokens | None], dict[str, float]]:
    """One step of Algorithm 1: what was sampled, what was trained on, what the last pass saw of it, and its numbers."""
    config, started = run.config, time.perf_counter()
    run.display.phase("sampling", 0, config.sampling.prompts_per_step)
    fill = run.sampler.fill(config.sampling.prompts_per_step)
    version = run.engine.version
    batch = make_batch(fill.kept, config, version, fill.filled_up, run.advantages)

    run.display.phase("updating")
    sampled = time.perf_counter()
    lr = learning_rate(step, config.train)
    updates: list[dict[str, float]] = []
    tokens: list[TrainedTokens | None] = []
    for _ in range(config.train.epochs_per_step):
        tokens.clear()
        for mini_batch in split_mini_batches(batch, config.train.mini_batches):
            updates.append(run.policy.update(mini_batch, lr))
            tokens += run.policy.take_tokens()
    weights = run.policy.weights()
    if name := not_finite(weights):
        raise NonFiniteError(f"the update made weights that are not finite, in {name}")
    run.engine.load_weights(step, weights)

    ended = time.perf_counter()
    metrics = step_metrics(fill, batch, [update for update in updates if update], config, version) | {
        "timing_s/gen": fill.generate_seconds,
        "timing_s/verify": fill.verify_seconds,
        "timing_s/update": ended - sampled,
        "timing_s/step": ended - started,
        "perf/throughput": fill.tokens_generated / (ended - started),
    }
    return fill, batch, tokens, metrics


def _evaluate(run: Run) -> dict[str, float]:
    evaluation = run.evaluate()
    if evaluation is None:
        return {}
    if evaluation.verifier_errors:
        run.display.note(
            f"evaluation: the verifier failed on {evaluation.verifier_errors} samples, which are left out; the first: "
            f"{evaluation.first_error}"
        )
    run.progress.evaluations.append((run.progress.step, evaluation.accuracy))
    return evaluation.metrics()


def _verifier_failures(fill: Fill) -> str | None:
    failed = [v for group, fate in fill.dropped if fate == "verifier_error" for v in group.verdicts if v.failed]
    if not failed:
        return None
    return f"the verifier failed on {len(failed)} samples, whose groups are dropped; the first: {failed[0].detail}"


def _rows(fill: Fill, batch: Batch, tokens: Sequence[TrainedTokens | None], carried: Sequence[Group]) -> list[GroupRow]:
    """All groups that were settled in a step, and after the last step those that wait for another one."""
    seen = iter(tokens)
    kept = [
        GroupRow(group, "kept", scores, [next(seen) for _ in group.samples])
        for group, scores in zip(batch.groups, batch.scores, strict=True)
    ]
    dropped = [GroupRow(group, fate, None) for group, fate in fill.dropped]
    waiting = [GroupRow(group, "carried", None) for group in carried]
    return sorted([*kept, *dropped, *waiting], key=lambda row: row.group.draw)


def progress_state(progress: Progress) -> dict[str, Any]:
    return {
        "step": progress.step,
        "wall_seconds": progress.wall_seconds,
        "evaluations": progress.evaluations,
        "ledger": progress.ledger.state(),
        "metrics": progress.metrics,
    }


def progress_from(state: Mapping[str, Any]) -> Progress:
    return Progress(
        step=state["step"],
        wall_seconds=state["wall_seconds"],
        evaluations=[(step, accuracy) for step, accuracy in state["evaluations"]],
        ledger=Ledger(state["ledger"]),
        metrics=dict(state["metrics"]),
    )
