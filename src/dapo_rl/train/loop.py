"""Algorithm 1: sample until the batch is full, compute rewards, update, send the new weights to the engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from dapo_rl.base.format import counted
from dapo_rl.compat.trl.callbacks import Callbacks
from dapo_rl.config import Config
from dapo_rl.engines.protocol import Engine, engine_metrics
from dapo_rl.errors import DivergedError, NonFiniteError, RankLostError, StopRequested, UserError
from dapo_rl.models.weights import PolicyWeights
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.rollout.batch_builder import FailedBatch, SampledBatch
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.runs.display import Display, evaluation_line
from dapo_rl.runs.rollouts import GroupRow
from dapo_rl.runs.write_errors import WriteErrors
from dapo_rl.train.batch import make_batch, shaped_rewards, with_diagnostics
from dapo_rl.train.checkpoint import Checkpoints
from dapo_rl.train.coefficients import Coefficients, Coefs
from dapo_rl.train.evaluate import Evaluation
from dapo_rl.train.metrics import mean_of, step_metrics
from dapo_rl.train.mismatch import MismatchNote, is_fresh, newest_mismatch
from dapo_rl.train.off_policy import with_off_policy_metrics
from dapo_rl.train.random_state import unless_stopped
from dapo_rl.train.schedule import critic_rate, policy_rate
from dapo_rl.train.trainer_state import Progress
from dapo_rl.train.transforms import Transform
from dapo_rl.types import Batch, FloatArray, Group, Trajectory, Update

Recover = Callable[[RankLostError], None]


class Policy(Protocol):
    """The policy to train, in one process or on many ranks with the same result."""

    def score(self, samples: Sequence[Trajectory]) -> list[FloatArray]: ...

    def update(self, samples: Sequence[Trajectory], lr: float, coefs: Coefs = ..., /) -> Update: ...

    def sync_reference(self, alpha: float) -> None: ...

    def weights(self) -> PolicyWeights: ...

    def figures(self) -> dict[str, float]:
        """Metrics of the ranks since the last call; none in one process."""

    def release_memory(self) -> None:
        """Frees the memory that only updates need."""


class Critic(Protocol):
    """The critic to train, in one process or on many ranks with the same result."""

    def update(self, samples: Sequence[Trajectory], lr: float) -> Update: ...

    def release_memory(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Training:
    """The parts of a run, assembled from the settings by the caller."""

    config: Config
    engine: Engine
    sampler: Sampler
    policy: Policy
    transforms: Sequence[Transform]
    """What is added to a batch before its first update, in this order."""
    evaluate: Callable[[Callable[[], None]], Evaluation | None]
    """Its argument is called every fraction of a second; it raises to abandon the evaluation."""
    save: Callable[[], None]
    """Starts to write a checkpoint; `checkpoints.wait()` returns when it is complete."""
    checkpoints: Checkpoints
    directory: RunDirectory
    display: Display
    progress: Progress
    unsaved: WriteErrors
    stop_requested: Callable[[], bool]
    track: Callable[[int, Mapping[str, float]], None]
    """Receives the metrics of each step, in addition to the run directory."""
    callbacks: Callbacks
    time_share: bool
    """Whether the engine and the policy take turns with the GPU's memory."""
    critic: Critic | None
    verifier: VerifierPool
    coefficients: Coefficients | None
    """Those of the loss that change during the run."""
    recover: Recover | None
    """Restores the run after a rank was lost; raises if it cannot."""

    @property
    def pretrain_steps(self) -> int:
        """The steps that train the critic alone, as far as it is known."""
        early = self.progress.pretrained
        return self.config.pretrain_steps if early is None else early

    def check(self) -> None:
        """Called during sampling, which a stop interrupts, and evaluation, which it abandons. An update is finished."""
        if self.stop_requested():
            raise StopRequested


def train(run: Training) -> None:
    """Trains from the current progress to the last step, or until a stop is requested."""
    run.callbacks.train_begin()
    with_restarts(partial(train_to_end, run), run.recover)
    run.callbacks.train_end()


def with_restarts(work: Callable[[], None], recover: Recover | None) -> None:
    """Does the work again after a rank was lost, from the last checkpoint."""
    lost: RankLostError | None = None
    while True:
        try:
            if lost is not None and recover is not None:
                recover(lost)
            return work()
        except RankLostError as error:
            if recover is None:
                raise
            lost = error


def train_to_end(run: Training) -> None:
    with suppress(StopRequested):
        _train(run)
    run.checkpoints.wait()


def _train(run: Training) -> None:
    config, progress, callbacks = run.config, run.progress, run.callbacks
    progress.failed = None
    origin, mismatch = time.perf_counter() - progress.wall_seconds, MismatchNote(config)
    if progress.evaluation_due:
        _finish_last_step(run, origin)
        if callbacks.should_stop:
            return
    elif progress.step == 0 and not progress.evaluations and (metrics := _evaluate(run)):
        _log(run, 0, metrics)
        run.display.note(evaluation_line(0, config.train.steps, metrics))
    for step in range(progress.step + 1, config.train.steps + 1):
        run.checkpoints.check()
        progress.current = step
        callbacks.step_begin()
        filled: list[SampledBatch] = []
        try:
            with _keeping(run, step, filled), _or_diverged(run, step):
                done = _step(run, step, filled)
        except StopRequested:
            if filled:  # a transform has stopped the run, and nothing was learnt from the batch
                run.sampler.take_back()
            progress.wall_seconds = time.perf_counter() - origin
            _save(run, step)
            run.checkpoints.wait()
            if run.checkpoints.failure is None:
                when = "before the update" if filled else "while sampling"
                run.display.note(f"step {step}: stopped {when}; resuming continues with what was sampled")
            raise
        progress.step, progress.metrics = step, done.metrics
        progress.ledger.add(done.fill, done.batch)
        callbacks.step_end(step, done.metrics)
        last = step == config.train.steps
        progress.evaluation_due = bool(
            last or (config.eval.every and step % config.eval.every == 0) or callbacks.should_evaluate
        )
        with suppress(StopRequested):
            _evaluate_and_log(run, origin)
        if config.log.rollouts:
            rows = _rows(done, run.sampler.carried if last else ())
            with run.unsaved.trying("rollouts", "the run continues without the samples of this step"):
                run.directory.write_rollouts(step, rows, config.log.keep_rollouts)
        stopping = progress.evaluation_due or run.stop_requested() or callbacks.should_stop
        if stopping or _save_due(run):
            _save(run, step)
        for note in (*done.fill.notes, _verifier_failures(done.fill), *done.notes, mismatch.take(done.metrics)):
            if note:
                run.display.note(f"step {step}: {note}")
        if progress.evaluation_due:
            run.display.note(f"step {step}: stopped in the evaluation; resuming repeats it")
        else:
            run.display.step(step, progress.metrics)
        if stopping or callbacks.should_stop:
            if callbacks.stopped_by and not last:
                run.display.note(f"step {step}: stopped by {callbacks.stopped_by}")
            break


def _finish_last_step(run: Training, origin: float) -> None:
    """Evaluates and logs the step of a checkpoint that was saved before that."""
    progress = run.progress
    run.callbacks.step_end(progress.step, progress.metrics)
    _evaluate_and_log(run, origin)
    if _save_due(run):
        _save(run, progress.step)
    run.display.step(progress.step, progress.metrics)


def _evaluate_and_log(run: Training, origin: float) -> None:
    progress = run.progress
    progress.wall_seconds = time.perf_counter() - origin
    if progress.evaluation_due:
        with unless_stopped():
            progress.metrics = progress.metrics | _evaluate(run)
        progress.evaluation_due = False
    progress.wall_seconds = time.perf_counter() - origin
    _log(run, progress.step, progress.metrics)


def _log(run: Training, step: int, metrics: Mapping[str, float]) -> None:
    with run.unsaved.trying("metrics.jsonl", "the run continues, and writes the line with the next one"):
        run.directory.append_metrics(step, metrics)
    run.track(step, metrics)


def _save_due(run: Training) -> bool:
    """Whether a checkpoint is due after the step that was made last."""
    config, step = run.config, run.progress.step
    due = config.checkpoint.save_final if step == config.train.steps else step % config.checkpoint_every == 0
    return due or run.callbacks.should_save


def _save(run: Training, step: int) -> None:
    with _or_diverged(run, step):
        run.save()
    if run.callbacks.wait_for_saves:
        run.checkpoints.wait()
    run.callbacks.saved(is_saved=run.checkpoints.failure is None)


@contextmanager
def _or_diverged(run: Training, step: int) -> Iterator[None]:
    try:
        yield
    except NonFiniteError as error:
        with suppress(UserError):  # a rank is lost, and the checkpoint with it
            run.checkpoints.wait()
        latest = run.checkpoints.latest()
        raise DivergedError(step, str(error), str(latest.path) if latest else None) from error


@dataclass(frozen=True, slots=True)
class _Done:
    """The result of one step: what was sampled, the batch after its last pass, and the metrics."""

    fill: SampledBatch
    batch: Batch
    metrics: dict[str, float]
    notes: Sequence[str]


@contextmanager
def _keeping(run: Training, step: int, filled: Sequence[SampledBatch]) -> Iterator[None]:
    """Records what a step had sampled if an error ends the run in it, and says where in the error's message. `filled`
    has the batch if it was full."""
    try:
        yield
    except StopRequested:
        raise
    except Exception as error:
        with suppress(Exception):  # the error that ends the run is the one to show
            remains = FailedBatch.of_update(filled[0]) if filled else run.sampler.remains()
            if remains is not None and not (isinstance(error, RankLostError) and run.recover is not None):
                _record_failed_step(run, step, remains, error)
        raise


def _record_failed_step(run: Training, step: int, remains: FailedBatch, error: Exception) -> None:
    """Records its rollouts, and its tokens in the ledger. Says where the samples are in the message of an error that is
    shown as one line; otherwise in a note."""
    run.progress.failed = run.progress.ledger.with_failed(remains)
    dropped = [GroupRow(group, outcome) for group, outcome in remains.fill.dropped]
    rows = [*dropped, *(GroupRow(group, "unfinished") for group in remains.unfinished)]
    if not rows or not run.config.log.rollouts:
        return
    directory = run.directory
    directory.write_rollouts(step, sorted(rows, key=lambda row: row.group.draw), run.config.log.keep_rollouts)
    where = f"samples of this step are in {directory.rollout(step)}, which `dapo board {directory.path}` shows"
    if isinstance(error, UserError | DivergedError):
        sentences = str(error).endswith(".")
        error.args = (f"{error} The {where}." if sentences else f"{error}; the {where}", *error.args[1:])
    else:
        run.display.note(f"step {step}: the {where}")


def _step(run: Training, step: int, filled: list[SampledBatch]) -> _Done:
    """One step of Algorithm 1. The batch goes to `filled` before the update."""
    config, started, cpu = run.config, time.perf_counter(), time.process_time()
    run.display.phase("sampling", 0, config.sampling.prompts_per_step)
    preempted, prefix_hits = run.engine.preempted, run.engine.prefix_hits
    fill = run.sampler.fill(config.sampling.prompts_per_step, run.check)
    filled.append(fill)
    rewards = shaped_rewards([*fill.sampled, *fill.kept], config)
    batch = make_batch(fill.kept, config, fill.version, fill.filled_up, rewards, step)
    batch = replace(batch, trains_policy=step > run.pretrain_steps)

    run.display.phase("updating")
    sampled = time.perf_counter()
    if run.time_share:
        run.engine.release_memory()
        run.verifier.release_memory()
    for transform in run.transforms:
        batch = transform(batch)
    if run.coefficients is not None and batch.trains_policy:
        run.coefficients.follow(batch.metrics, len(batch.trained))
    mismatch = _mismatch(run, batch)
    passes, of_critic = _update(run, step, batch)
    early = _end_pretraining(run, batch)
    if passes[-1]:
        batch = with_diagnostics(batch, passes[-1])
        batch = with_off_policy_metrics(batch, config)
    weights = run.policy.weights()
    if name := weights.not_finite():
        raise NonFiniteError(f"the update made weights that are not finite, in {name}")
    if config.syncs_reference(step):
        run.policy.sync_reference(config.algo.ref_mixup_alpha)
    if run.time_share:
        run.policy.release_memory()
        if run.critic is not None:
            run.critic.release_memory()
    run.engine.receive(step, weights)

    ended = time.perf_counter()
    seconds = fill.earlier_seconds + ended - started
    of_policy, stages = [update for of_pass in passes for update in of_pass], config.sampling.length_stages
    measured = [update.metrics for update in of_policy if update.metrics]
    metrics = step_metrics(fill, batch, measured, rewards, mismatch) | {
        **batch.metrics,
        **mean_of([update.metrics for update in of_critic if update.metrics]),
        **({"sampling/max_new_tokens": config.sampling.longest_response(fill.version)} if stages else {}),
        "sampling/preempted": run.engine.preempted - preempted,
        **({"engine/prefix_hits": run.engine.prefix_hits - prefix_hits} if run.sampler.has_environment else {}),
        "timing_s/gen": fill.generate_seconds,
        "timing_s/verify": fill.verify_seconds,
        "timing_s/update": ended - sampled,
        "timing_s/step": seconds,
        "perf/throughput": fill.tokens_generated / seconds,
        **engine_metrics(run.engine),
        **run.verifier.figures(),
        **run.policy.figures(),
    }
    if config.cluster.backend is not None:
        metrics["perf/driver_share"] = (time.process_time() - cpu) / (ended - started)
    notes = [note for update in (*of_policy, *of_critic) for note in update.notes]
    return _Done(fill, batch, metrics, [*notes, *early])


def _end_pretraining(run: Training, batch: Batch) -> list[str]:
    """Ends value pre-training if the critic explains enough; a note says so."""
    until, explained = run.config.critic.pretrain_until, batch.metrics.get("critic/vf_explained_var", math.nan)
    if batch.trains_policy or until is None or not explained >= until or batch.step == run.pretrain_steps:
        return []
    run.progress.pretrained = batch.step
    return [
        f"value pre-training ends: the critic explains {explained:.2f} of the variance (critic.pretrain_until "
        f"{until:g}); the policy is trained from step {batch.step + 1} on"
    ]


def _mismatch(run: Training, batch: Batch) -> float:
    """The first update measures the mismatch of engine and trainer itself, unless its mini-batch, which has the oldest
    groups, was sampled with earlier weights. Then one group is scored."""
    first = batch.mini_batches(run.config.train.mini_batches)[0]
    if not batch.trains_policy or any(is_fresh(sample).any() for sample in first):
        return math.nan
    return newest_mismatch(batch, run.policy.score)


def _update(run: Training, step: int, batch: Batch) -> tuple[list[list[Update]], list[Update]]:
    """Trains the critic, if there is one, and after value pre-training the policy, on each mini-batch. Returns the
    policy's updates of each pass over the batch, and the critic's."""
    config, passes, of_critic = run.config, list[list[Update]](), list[Update]()
    for _ in range(config.train.epochs_per_step):
        passes.append([])
        for part in batch.mini_batches(config.train.mini_batches):
            if run.critic is not None:
                of_critic.append(run.critic.update(part, critic_rate(step, config)))
            if batch.trains_policy:
                passes[-1].append(_policy_update(run, step, part))
    return passes, of_critic


def _policy_update(run: Training, step: int, part: Sequence[Trajectory]) -> Update:
    rate = policy_rate(step, run.config, run.pretrain_steps)
    if run.coefficients is None:
        return run.policy.update(part, rate)
    update = run.policy.update(part, rate, run.coefficients.now)
    run.coefficients.follow(update.metrics, sum(sample.trained_tokens > 0 for sample in part))
    return update


def _evaluate(run: Training) -> dict[str, float]:
    evaluation = run.evaluate(run.check)
    if evaluation is None:
        return {}
    if evaluation.verifier_errors:
        judge = "environment or the verifier" if run.config.env.given else "verifier"
        run.display.note(
            f"evaluation: the {judge} failed on {counted(evaluation.verifier_errors, 'sample')}, left out; the first: "
            f"{evaluation.first_error}"
        )
    run.progress.evaluations.append((run.progress.step, evaluation.accuracy))
    metrics = evaluation.metrics()
    run.callbacks.evaluated(metrics)
    return metrics


def _verifier_failures(fill: SampledBatch) -> str | None:
    failed = [v for group, outcome in fill.dropped if outcome == "verifier_error" for v in group.verdicts if v.failed]
    if not failed:
        return None
    samples = counted(len(failed), "sample")
    return f"the verifier failed on {samples}, whose groups are dropped; the first: {failed[0].detail}"


def _rows(done: _Done, carried: Sequence[Group]) -> list[GroupRow]:
    kept = [GroupRow(group, "kept") for group in done.batch]
    dropped = [GroupRow(group, outcome) for group, outcome in done.fill.dropped]
    waiting = [GroupRow(group, "carried") for group in carried]
    return sorted([*kept, *dropped, *waiting], key=lambda row: row.group.draw)
