"""The summary of a run: the accuracies before and after, and whether it is finished."""

import json
from types import SimpleNamespace

import pytest

from dapo_rl.config import Config
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.runs.write_errors import WriteErrors
from dapo_rl.train.results import write_results
from dapo_rl.train.trainer_state import Progress

CONFIG = Config.build({"train.steps": 4, "log.report": False})


def summary_of(path, progress, **how):
    run = RunDirectory.create(path / "run", CONFIG)
    prompts = SimpleNamespace(counts=lambda: {"train_prompts": 3})
    summary = write_results(run, CONFIG, progress, prompts, WriteErrors(), waiting=2, in_flight=3, **how)
    assert json.loads(run.summary_path.read_text()) == summary
    return summary


@pytest.mark.parametrize(
    ("evaluations", "before", "after"),
    [
        ([], None, None),
        ([(0, 0.25)], 0.25, None),
        ([(4, 0.75)], None, 0.75),
        ([(0, 0.25), (4, 0.75)], 0.25, 0.75),
        ([(0, 0.25), (2, 0.5), (4, 0.75)], 0.25, 0.75),
        ([(2, 0.5), (4, 0.75)], None, 0.75),
    ],
)
def test_the_accuracies_are_those_before_the_first_step_and_after_the_last(tmp_path, evaluations, before, after):
    summary = summary_of(tmp_path, Progress(step=4, evaluations=evaluations))
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (before, after)
    assert [(each["step"], each["accuracy"]) for each in summary["evaluations"]] == evaluations
    assert summary["tokens"] == {"carried": 5, "total": 3}


@pytest.mark.parametrize(
    ("progress", "failed", "finished"),
    [
        (Progress(step=4), False, True),
        (Progress(step=3), False, False),
        (Progress(step=4, evaluation_due=True), False, False),
        (Progress(step=4), True, False),
    ],
)
def test_a_run_is_finished_after_its_last_step_unless_something_is_left(tmp_path, progress, failed, finished):
    summary = summary_of(tmp_path, progress, failed=failed)
    assert summary["finished"] is finished
    assert ("model" in summary["paths"]) is finished
