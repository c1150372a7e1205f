"""Runs with an environment that are killed or stopped, and go on as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import chaos
import forked
import numpy as np
import pyarrow.parquet as parquet
import pytest
import tool_model
from patience import lives, wait_until
from support import DAPO, dapo

pytestmark = pytest.mark.slow

GAME = Path(__file__).with_name("sleeping_game.py")
SMALL = (
    "guess", "log.report=false", "sampling.prompts_per_step=4", "sampling.group_size=4", "data.train.size=100",
    "data.eval=null", "eval.every=null", "train.mini_batches=2", "train.epochs_per_step=1", "train.warmup_steps=0",
)  # fmt: skip


def tokens(path):
    """The ledger of a run, in which every token is in one column."""
    columns = Counter(json.loads((path / "summary.json").read_text())["tokens"])
    assert columns["total"] == columns.total() - columns["total"]
    return columns


def rollouts(path):
    files = sorted(path.glob("rollouts/*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


def stopped(folder, *settings):
    """A run that is stopped while steps sleep; the seconds that this took, and those of CPU time."""
    (folder / "asleep").write_text("")
    words = ["train", *settings, "train.steps=2", "env.timeout_s=300", "--run", "run"]
    with forked.Popen(
        [DAPO, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        wait_until(lambda: (folder / "asleep").read_text() == "now" or process.poll() is not None)
        before, signalled = cpu_seconds(process.pid), time.monotonic()
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not lives(process.pid))
        seconds, busy = time.monotonic() - signalled, cpu_seconds(process.pid) - before
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    (folder / "asleep").unlink()
    tokens(folder / "run")
    return seconds, busy


def cpu_seconds(pid):
    """Also of a process that has ended, until it is waited for."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def resumed(folder):
    result = dapo("train", "--run", "run", "--resume", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "run"


def test_a_run_killed_again_and_again_is_the_run_that_was_not(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = [*SMALL, "train.steps=4", "checkpoint.every=1"]
    kills, found = chaos.chaos(tmp_path, 3, settings, seed=1, launch=chaos.command(forked.Popen))
    assert found == []
    assert kills


def test_a_run_with_tools_killed_again_and_again_is_the_run_that_was_not(tmp_path, monkeypatch):
    """The model's calls are whole tokens. Checkpoints have episodes after a call, which are replayed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = [*tool_model.recipe(tmp_path / "model"), "train.steps=4", "checkpoint.every=1"]
    kills, found = chaos.chaos(tmp_path, 3, settings, seed=1, launch=chaos.command(forked.Popen))
    assert found == []
    assert kills
    assert not tokens(tmp_path / "killed")["restarted"]
    assert any(row["tool_calls"] for row in rollouts(tmp_path / "killed"))
    lines = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert any(line["sampling/in_flight"] for line in lines[:-1]), "no checkpoint had unfinished episodes"


@pytest.mark.skipif(sys.platform != "linux", reason="CPU times of a process are read from /proc")
@pytest.mark.parametrize("kind", ["game", "tool"])
def test_a_run_that_is_stopped_while_steps_sleep_goes_on_where_it_was(kind, tmp_path):
    sleeping = (
        [*SMALL, f"env.name={GAME}:Sleeping"]
        if kind == "game"
        else [*tool_model.recipe(tmp_path / "model"), f"env.tools={GAME}:calculator"]
    )
    whole = dapo("train", *sleeping, "train.steps=2", "--run", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    seconds, busy = stopped(tmp_path, *sleeping)
    assert seconds < 60, "it waits for no step: each sleeps for ten minutes"
    assert busy < 2, "the driver's CPU time: a machine with other work takes longer"
    (state,) = [json.loads(path.read_text()) for path in tmp_path.glob("run/checkpoints/*/sampler.json")]
    assert state["steps"], "nothing was with its environment"
    run = resumed(tmp_path)
    assert tokens(run) == tokens(tmp_path / "whole")
    assert not tokens(run)["restarted"]
    for row, other in zip(rollouts(run), rollouts(tmp_path / "whole"), strict=True):
        assert row["token_ids"] == other["token_ids"]
        assert row["messages"] == other["messages"]
        assert row["reward"] == other["reward"]
        np.testing.assert_allclose(row["logps"], other["logps"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["game", "tool"])
def test_episodes_that_cannot_be_replayed_start_again_and_are_counted(kind, tmp_path):
    forgetful = (
        [*SMALL, f"env.name={GAME}:Forgetful"]
        if kind == "game"
        else [*tool_model.recipe(tmp_path / "model"), f"env.tools={GAME}:forgetful_calculator"]
    )
    stopped(tmp_path, *forgetful)
    run = resumed(tmp_path)
    assert tokens(run)["restarted"] > 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 2
