"""A step trains on more than `prompts_per_step` groups if they would be too old later."""

import pyarrow.parquet as pq
import pytest
import support

from dapo_rl import Config, DAPOTrainer
from dapo_rl.runs.directory import RunDirectory

pytestmark = pytest.mark.slow

SMALL = [*support.SMALL[:4], "data.eval=null", "eval.every=null", "train.warmup_steps=0", "train.epochs_per_step=1"]
FILTER = "def late(group):\n    return group.draw >= 40\n"


def trainer_for(directory, name):
    (directory / "filters.py").write_text(FILTER)
    more = [
        f"sampling.filter={directory / 'filters.py'}:late",
        "sampling.cap=1000",
        "sampling.max_batch=96",
        "train.steps=2",
    ]
    return DAPOTrainer(config=Config.load("demo", [*SMALL, *more]), run_dir=directory / name)


def test_groups_that_would_be_too_old_are_trained_on_whether_or_not_the_step_is_interrupted(tmp_path):
    """The first 40 groups fail, so that many are in flight when the next ones pass; the second step has to take all."""
    summary = trainer_for(tmp_path, "whole").train()
    rows = RunDirectory(tmp_path / "whole").read_metrics()
    first, second = (row["sampling/kept"] for row in rows)
    assert first == 4
    assert second >= rows[0]["sampling/carried"] > 4
    assert [row["sampling/staleness"] for row in rows] == [0, 1]
    assert [row["actor/updates"] for row in rows] == [2, 2]
    tokens = dict(summary["tokens"])
    assert tokens.pop("total") == sum(tokens.values())
    assert tokens.get("surplus", 0) == tokens["cancelled"] == 0
    outcomes = pq.read_table(tmp_path / "whole" / "rollouts" / "step-000002.parquet")["fate"].to_pylist()
    assert outcomes.count("kept") == 4 * second

    calls = [0]

    def in_the_second_step():
        calls[0] += stopped._run.progress.step == 1
        return calls[0] > 2

    stopped = trainer_for(tmp_path, "parts")
    stopped.stop_requested = in_the_second_step
    assert stopped.train()["steps"] == 1
    assert stopped._run.sampler.so_far is not None
    again = trainer_for(tmp_path, "parts").train(resume=True)
    assert (again["tokens"], again["data"]) == (summary["tokens"], summary["data"])
    assert RunDirectory(tmp_path / "parts").read_metrics()[-1]["sampling/kept"] == second
