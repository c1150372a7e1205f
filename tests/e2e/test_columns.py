"""Columns of tokens that the package does not know, from the engine to the update and through a kill."""

import signal
import time

import forked
import pyarrow.parquet as pq
import pytest
from column_engine import check_rollouts
from support import REPOSITORY, SMALL

pytestmark = pytest.mark.slow

COLUMNS = REPOSITORY / "tests" / "column_engine.py"
SETTINGS = [
    *SMALL,
    f"engine={COLUMNS}:ColumnEngine",
    f"algo.loss={COLUMNS}:loss",
    "train.steps=2",
    "sampling.max_new_tokens=8",
    "sampling.ahead=2",
    "overlong.shape=off",
    f"reward.verifier={COLUMNS}:odd",
    "data.eval=null",
    "eval.every=null",
    "checkpoint.every=1",
]


def train(path, *words):
    return forked.Popen([forked.DAPO, "train", *SETTINGS, "--run", str(path), *words], cwd=REPOSITORY)


def test_columns_survive_a_kill_and_reach_the_loss_and_the_log(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(whole).wait(120) == 0
    process = train(killed)
    saved = killed / "checkpoints" / "step-1" / "trajectories.parquet"
    until = time.monotonic() + 120
    while not saved.exists() and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert {"tokens/teacher_logps", "tokens/routing"} <= {*pq.read_schema(saved).names}
    assert train(killed, "--resume").wait(120) == 0
    counts = [check_rollouts(sorted((path / "rollouts").iterdir())) for path in (whole, killed)]
    assert counts[0] == counts[1] > 0
    weights = [(path / "model" / "model.safetensors").read_bytes() for path in (whole, killed)]
    assert weights[0] == weights[1]
