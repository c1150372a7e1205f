"""Records what a step had sampled when an error ends the run in it: its rollouts, and its tokens in the ledger."""

from __future__ import annotations

from dapo_rl.config import LogSettings
from dapo_rl.errors import DivergedError, UserError
from dapo_rl.rollout.batch_builder import FailedBatch
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.runs.display import Display
from dapo_rl.runs.rollouts import GroupRow
from dapo_rl.train.trainer_state import Progress


def record_failed_step(
    step: int,
    remains: FailedBatch,
    error: Exception,
    *,
    log: LogSettings,
    directory: RunDirectory,
    progress: Progress,
    display: Display,
) -> None:
    """Says where the samples are in the message of an error that is shown as one line; otherwise in a note."""
    progress.failed = progress.ledger.with_failed(remains)
    dropped = [GroupRow(group, outcome) for group, outcome in remains.fill.dropped]
    rows = [*dropped, *(GroupRow(group, "unfinished") for group in remains.unfinished)]
    if not rows or not log.rollouts:
        return
    directory.write_rollouts(step, sorted(rows, key=lambda row: row.group.draw), log.keep_rollouts)
    where = f"samples of this step are in {directory.rollout(step)}, which `dapo board {directory.path}` shows"
    if isinstance(error, UserError | DivergedError):
        sentences = str(error).endswith(".")
        error.args = (f"{error} The {where}." if sentences else f"{error}; the {where}", *error.args[1:])
    else:
        display.note(f"step {step}: the {where}")
