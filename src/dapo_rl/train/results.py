"""Writes the results of a run when it ends: the model, summary.json and report.png."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dapo_rl.base.files import directory_beside
from dapo_rl.base.os_errors import reason_and_remedy
from dapo_rl.config import Config
from dapo_rl.data import PromptSet
from dapo_rl.errors import RankLostError, UnsavedError, UserError
from dapo_rl.rollout.batch_builder import SampledBatch
from dapo_rl.runs.directory import RunDirectory, saved_so_far
from dapo_rl.runs.write_errors import WriteErrors
from dapo_rl.train.trainer_state import Progress

MODEL = "the model"
"""Its name among what a run cannot write."""


def save_result(save_model: Callable[[Path], None], path: Path) -> None:
    if path.is_file():
        raise UserError(f"{path}: the model is saved as a directory, but there is a file of that name")
    try:
        with directory_beside(path) as draft:
            save_model(draft)
    except OSError as error:
        raise UnsavedError.of(f"{path}: the model", *reason_and_remedy(error)) from error
    except RankLostError:  # the run continues
        raise
    except UserError as error:
        raise UserError(str(error).replace(str(draft), str(path))) from error


def write_results(
    directory: RunDirectory,
    config: Config,
    progress: Progress,
    prompts: PromptSet,
    unsaved: WriteErrors,
    *,
    waiting: int,
    in_flight: int,
    so_far: SampledBatch | None = None,
    failed: bool = False,
) -> dict[str, Any]:
    """Writes summary.json and, with `log.report`, report.png, or adds them to `unsaved`; returns the summary. `failed`:
    an error ends the run, and there is no report.

    `waiting` counts the tokens of finished samples that wait for the next step, `in_flight` those of unfinished ones;
    `so_far` is the result of a step that was interrupted.
    """
    ledger = progress.failed or progress.ledger
    ledger = ledger if so_far is None else ledger.with_interrupted(so_far)
    finished = progress.is_done(config.train.steps) and MODEL not in unsaved and not failed
    paths = {"summary": directory.summary_path}
    report = config.log.report and not failed
    if report:
        paths["report"] = directory.report_path
    if finished and config.checkpoint.save_final:
        paths["model"] = directory.model_path
    accuracies = progress.evaluations
    summary = {
        "finished": finished,
        "steps": progress.step,
        "seed": config.seed,
        "accuracy_before": accuracies[0][1] if accuracies and accuracies[0][0] == 0 else None,
        "accuracy_after": accuracies[-1][1] if accuracies and accuracies[-1][0] > 0 else None,
        "evaluations": [{"step": step, "accuracy": accuracy} for step, accuracy in accuracies],
        "wall_seconds": progress.wall_seconds,
        "tokens": ledger.columns(waiting, in_flight),
        "data": prompts.counts(),
        "metrics": progress.metrics,
        "paths": {name: str(path) for name, path in paths.items()},
    }
    with unsaved.at_the_end("summary.json"):
        directory.write_summary(summary)
    if report:
        with unsaved.at_the_end("report.png"):
            _draw_report(directory, accuracies)
    return summary


def _draw_report(directory: RunDirectory, accuracies: list[tuple[int, float]]) -> None:
    from dapo_rl.runs.report_plot import draw_report  # matplotlib takes a second to import

    with saved_so_far(directory.report_path):
        draw_report(directory.read_metrics(), accuracies, directory.report_path, title=directory.path.name)
    # matplotlib's parsers leave exceptions in reference cycles. Their tracebacks reference the frames of this run, and
    # so keep the model alive until the next collection.
    gc.collect()
