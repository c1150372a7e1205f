"""A stop in the middle of a step acts within seconds, and the resumed run continues with what was sampled."""

import json
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import chaos
import forked
import numpy as np
import pyarrow.parquet as parquet
import pytest
from support import DAPO, THOROUGH, dapo

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cli import DEFAULT_RECIPE

pytestmark = pytest.mark.slow

SETTINGS = (
    *THOROUGH, "train.steps=3", "train.warmup_steps=0", "eval.every=2", "eval.prompts=8", "checkpoint.every=2",
    "sampling.skip_solved_epochs=1", "sampling.selection=informative", "data.train.size=20",
)  # fmt: skip
EXACT = ("step", "draw", "sample", "prompt_id", "response", "finish_reason", "version_first", "version_last", "fate")


VERIFIER = f"[math, {{verifier: '{Path(__file__).with_name('told_reward.py')}:told', weight: 0.5}}]"


def trainer_for(path):
    """A reward function logs what it is told of the run's progress."""
    config = Config.load(DEFAULT_RECIPE, [*SETTINGS, f"reward.verifier={VERIFIER}"])
    return DAPOTrainer(config=config, run_dir=path)


class StopAtCall:
    """Requests a stop from the n-th time it is asked on."""

    def __init__(self, n=None):
        self.n, self.calls = n, 0

    def __call__(self):
        self.calls += 1
        return self.n is not None and self.calls >= self.n


def rollouts(path):
    """The rows of every sample of a run."""
    files = sorted(Path(path).glob("rollouts/*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


def log(path):
    lines = [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(("timing_s/", "perf/"))} for line in lines]


def check_tokens(path):
    """Every token is in one column."""
    columns = Counter(json.loads((Path(path) / "summary.json").read_text())["tokens"])
    assert columns.pop("total") == columns.total()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    with trainer_for(path) as trainer:
        trainer.stop_requested = StopAtCall()
        trainer.train()
        return path, trainer.stop_requested.calls


@pytest.mark.parametrize("seed", range(2))
def test_the_resumed_run_is_the_undisturbed_one(undisturbed, tmp_path, seed):
    """Stopped at two of the moments at which a run can stop, in new trainers and in the same one. What was sampled
    before a stop and continued after it agrees up to rounding."""
    expected, calls = undisturbed
    path, moments = tmp_path / "run", random.Random(seed)
    trainer = trainer_for(path)
    for resume in (False, True):
        trainer.stop_requested = StopAtCall(moments.randint(1, calls * 2 // 3))
        summary = trainer.train(resume=resume)
        check_tokens(path)
        if summary["finished"]:
            break
        if seed % 2:
            trainer.close()
            trainer = trainer_for(path)
    else:
        trainer.stop_requested = lambda: False
        summary = trainer.train(resume=True)
    trainer.close()
    assert summary["finished"]
    assert summary["tokens"] == json.loads((expected / "summary.json").read_text())["tokens"]
    for row, other in zip(rollouts(path), rollouts(expected), strict=True):
        assert [row[name] for name in EXACT] == [other[name] for name in EXACT]
        assert row["token_ids"] == other["token_ids"]
        np.testing.assert_allclose(row["logps"], other["logps"], rtol=0, atol=1e-3)
    for line, other in zip(log(path), log(expected), strict=True):
        assert line.keys() == other.keys()
        for name, value in line.items():
            assert value == other[name] or value == pytest.approx(other[name], rel=0.01, abs=1e-4), name


def test_a_stop_in_an_evaluation_is_not_the_end_and_repeats_it(undisturbed, tmp_path):
    """To the last bit: nothing is continued in the middle."""
    expected, _ = undisturbed
    for step, logged in ((2, [0, 1]), (3, [0, 1, 2])):
        with trainer_for(tmp_path / "run") as trainer:
            trainer.stop_requested = lambda run=trainer._run, step=step: run.progress.step == step
            summary = trainer.train(resume=step > 2)
            assert (summary["finished"], summary["steps"]) == (False, step)
        assert not (tmp_path / "run" / "model").exists()
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == logged
    with trainer_for(tmp_path / "run") as trainer:
        assert trainer.train(resume=True)["finished"]
    assert chaos.differences(expected, tmp_path / "run") == []


def test_a_signal_in_the_middle_of_sampling(tmp_path):
    """Sampling takes long, with few samples at a time; after the stop it does not."""
    words = ["train", "train.steps=1", "data.eval=null", "eval.every=null", "sampling.prompts_per_step=64"]
    words += ["sampling.max_batch=8", "log.report=false", "train.epochs_per_step=1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forked.Popen([DAPO, *words, "--run", "run"], cwd=tmp_path, **pipes) as process:
        while not process.stdout.readline().startswith("dapo: "):
            assert process.poll() is None
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        signalled = time.monotonic()
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert time.monotonic() - signalled < 15
    assert "stopping: saving the run" in output
    assert "step 1: stopped while sampling; resuming continues with what was sampled" in output
    check_tokens(tmp_path / "run")
    before = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (before["steps"], before["tokens"]["total"]) > (0, 0)
    saved = tmp_path / "run" / "checkpoints" / "step-0"
    state = json.loads((saved / "sampler.json").read_text())
    tokens = parquet.read_table(saved / "trajectories.parquet").column("tokens/token_ids")
    assert sum(len(flight["begun"]) for flight in state["flights"]) > 0
    assert sum(map(len, tokens)) == before["tokens"]["total"]

    resumed = dapo("train", "--run", "run", "--resume", "sampling.max_batch=256", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    check_tokens(tmp_path / "run")
    after = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = rollouts(tmp_path / "run")
    assert len({(row["draw"], row["sample"]) for row in rows}) == len(rows)
    in_rows, in_flight = sum(len(row["token_ids"]) for row in rows), after["tokens"]["carried"]
    in_rows -= sum(len(row["token_ids"]) for row in rows if row["fate"] == "carried")
    assert in_rows + in_flight + after["tokens"]["cancelled"] == after["tokens"]["total"] > before["tokens"]["total"]
