"""log.keep_rollouts: only the newest rollout files stay."""

import os
import re

import pyarrow.parquet as pq
import pytest
from support import SMALL, dapo

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.runs.directory import RunDirectory


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "run", Config())


def write(run, steps, keep=None):
    for step in steps:
        run.write_rollouts(step, [], keep)


def names(run):
    return sorted(os.listdir(run.path / "rollouts"))


def test_by_default_every_file_stays(run):
    assert Config().log.keep_rollouts is None
    write(run, range(1, 13))
    assert run.rollout_steps() == list(range(1, 13))


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_stay(run, keep):
    write(run, range(1, 4), keep)
    assert run.rollout_steps() == [1, 2, 3][-keep:]
    write(run, range(4, 13), keep)
    assert names(run) == [f"step-{step:06d}.parquet" for step in range(13 - keep, 13)]


def test_newest_means_the_highest_step(run):
    """Names of seven digits sort before those of six, and an old file may have been touched last."""
    write(run, (999_998, 999_999, 1_000_000))
    os.utime(run.rollout(999_998))
    write(run, [1_000_001], keep=2)
    assert names(run) == ["step-1000000.parquet", "step-1000001.parquet"]


def test_steps_without_a_file_do_not_count(run):
    write(run, (3, 7, 20))
    write(run, [21], keep=3)
    assert run.rollout_steps() == [7, 20, 21]


def test_nothing_else_is_deleted(run):
    write(run, [1, 2, 4])
    others = [
        *("step-1.parquet", "step-5.parquet", "step-0000001.parquet", "step-00001x.parquet", "step-٠٠٠٠٠١.parquet"),
        *("step-000001.parquet.bak", "my-step-000001.parquet", "notes.txt", ".step-000003.parquet.tmp"),
    ]
    for name in others:
        (run.rollouts_path / name).write_text("mine")
    (run.rollouts_path / "step-000000.parquet").mkdir()
    write(run, [5], keep=2)
    assert names(run) == sorted([*others, "step-000000.parquet", "step-000004.parquet", "step-000005.parquet"])
    run.truncate_metrics(0)
    assert names(run) == sorted([*others, "step-000000.parquet"])


def test_the_old_files_stay_until_the_new_one_is_written(run, monkeypatch):
    write(run, [1, 2], keep=2)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(UserError, match=r"step-000003\.parquet: cannot be written: No space left on device"):
        write(run, [3], keep=2)
    assert names(run) == ["step-000001.parquet", "step-000002.parquet"]


def test_a_run_killed_before_it_deleted_ends_with_the_same_files(run):
    write(run, range(1, 5), keep=3)
    write(run, [5])  # the new file is there, and the process is killed
    assert run.rollout_steps() == [2, 3, 4, 5]
    run.forget_after(3)
    assert run.rollout_steps() == [2, 3]
    write(run, range(4, 7), keep=3)
    assert run.rollout_steps() == [4, 5, 6]


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "true", "many"])
def test_values_that_are_no_count_of_files(value):
    with pytest.raises(UserError, match=r"^log\.keep_rollouts: "):
        Config.load(None, [f"log.keep_rollouts={value}"])


@pytest.mark.slow
def test_a_run_and_its_resumption(tmp_path):
    """Four steps in one go, and two that are resumed from the first, as the newest checkpoint is damaged."""
    settings = [*SMALL, "log.keep_rollouts=2", "eval.every=null", "checkpoint.every=1", "train.lr_schedule=constant"]
    for name, steps in {"whole": 4, "resumed": 2}.items():
        done = dapo("train", "--run", name, f"train.steps={steps}", *settings, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    whole, resumed = (RunDirectory.open(tmp_path / name) for name in ("whole", "resumed"))
    assert resumed.rollout_steps() == [1, 2]
    for file in (resumed.checkpoints_path / "step-2").rglob("*"):
        if file.is_file():
            file.write_bytes(b"damaged")  # the run goes on from step 1
    done = dapo("train", "--run", "resumed", "--resume", "train.steps=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"resumed from \S+step-1", done.stdout), done.stdout
    assert whole.rollout_steps() == resumed.rollout_steps() == [3, 4]
    for step in (3, 4):
        assert pq.read_table(whole.rollout(step)).equals(pq.read_table(resumed.rollout(step)))
    assert [row["step"] for row in whole.read_metrics()] == [0, 1, 2, 3, 4]
