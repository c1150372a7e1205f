"""Runs that are killed, stopped, damaged or out of room, and go on as if nothing had happened."""

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import chaos
import forked
import pytest
import support
import torch
from safetensors.torch import load_file
from support import DAPO, dapo

from dapo_rl import Config, DAPOTrainer, UserError
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.train.disk_space import DiskNeed

pytestmark = pytest.mark.slow

SMALL = ["train.warmup_steps=0", *support.THOROUGH]


def trainer_for(path, *overrides, **arguments):
    config = Config.load(DEFAULT_RECIPE, [*SMALL, *overrides])
    return DAPOTrainer(config=config, run_dir=path, **arguments)


def one_line(result):
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("dapo: ")
    return line


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run of three steps, with all its checkpoints."""
    path = tmp_path_factory.mktemp("finished") / "run"
    trainer_for(path, "train.steps=3", "checkpoint.every=1", "checkpoint.keep=9").train()
    return path


@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_run_killed_again_and_again_is_the_run_that_was_not(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = [*SMALL, "train.steps=6", "checkpoint.every=1", "eval.prompts=8", "eval.every=3"]
    kills, found = chaos.chaos(tmp_path, 5, settings, seed=1, launch=chaos.command(forked.Popen))
    assert found == []
    assert len(kills) >= 4, kills
    assert "writing .step-1.part" in kills[0].found


def test_a_run_that_does_not_save_its_last_step_goes_on_from_the_one_before(tmp_path, capsys):
    run = tmp_path / "run"
    summary = trainer_for(run, "train.steps=2", "checkpoint.every=1", "checkpoint.save_final=false").train()
    assert summary["finished"]
    assert summary["paths"].keys() == {"summary"}
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-1"]
    assert (run / "model" / "tokenizer.json").exists()  # for the board
    assert not list((run / "model").glob("*.safetensors"))
    trainer_for(run, "train.steps=3").train(resume=True)
    assert f"resumed from {run}/checkpoints/step-1" in capsys.readouterr().out
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
    assert (run / "model" / "model.safetensors").exists()


def test_a_finished_run_without_a_checkpoint_is_not_started_again(tmp_path):
    run = tmp_path / "run"
    trainer_for(run, "train.steps=1", "checkpoint.save_final=false", "eval.every=null").train()
    before = contents(run)
    with pytest.raises(UserError, match=r"run: the log reaches step 1, but there is no checkpoint to resume from; "):
        trainer_for(run, "train.steps=2", "eval.every=null").train(resume=True)
    assert contents(run) == before


def test_the_kill_test_notices_a_bit(finished, copy):
    assert chaos.differences(finished, copy) == []
    flip_a_bit(copy / "model" / "model.safetensors")
    flip_a_bit(copy / "checkpoints" / "step-3" / "optimizer.pt")
    lines = (copy / "metrics.jsonl").read_text().replace('"step": 2, "', '"step": 2, "more": 1, "')
    (copy / "metrics.jsonl").write_text(lines)
    (copy / "rollouts" / "step-000001.parquet").unlink()
    shutil.copy(copy / "rollouts" / "step-000002.parquet", copy / "rollouts" / "step-000003.parquet")
    (copy / "checkpoints" / ".step-4.part").mkdir()
    found = " ".join(chaos.differences(finished, copy))
    for name in (
        "model/model.safetensors", "checkpoints/step-3/optimizer.pt", "metrics.jsonl", "rollouts: ",
        "rollouts/step-000003.parquet", "left over: checkpoints/.step-4.part",
    ):  # fmt: skip
        assert name in found


def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(finished, copy, capsys):
    flip_a_bit(copy / "checkpoints" / "step-3" / "optimizer.pt")
    (copy / "checkpoints" / ".step-4.part").mkdir()
    (copy / ".report.png.tmp").touch()
    (copy / "rollouts" / ".step-000004.parquet.tmp").touch()
    trainer_for(copy, "train.steps=3", "checkpoint.every=1", "checkpoint.keep=9").train(resume=True)
    output = capsys.readouterr().out
    assert f"{copy}/checkpoints/step-3: the checksum of optimizer.pt is wrong" in output
    assert f"resumed from {copy}/checkpoints/step-2" in output
    assert chaos.differences(finished, copy) == []


def test_a_smaller_keep_makes_room_before_the_disk_is_checked(copy, monkeypatch):
    found, check = [], DiskNeed.check

    def looked(need, config, run_dir, step):
        found.append([path.name for path in (run_dir / "checkpoints").iterdir()])
        return check(need, config, run_dir, step)

    monkeypatch.setattr(DiskNeed, "check", looked)
    trainer_for(copy, "train.steps=3", "checkpoint.every=1", "checkpoint.keep=1").train(resume=True)
    assert found == [["step-3"]]


def test_when_every_checkpoint_is_damaged_nothing_is_touched(copy):
    for path in (copy / "checkpoints").iterdir():
        flip_a_bit(path / "model" / "model.safetensors")
    before = contents(copy)
    line = one_line(dapo("train", "--resume", "--run", copy, "train.steps=5", cwd=copy.parent))
    assert all(f"step-{step}: the checksum of model/model.safetensors is wrong" in line for step in (1, 2, 3))
    assert contents(copy) == before


def test_a_log_without_its_checkpoints_is_not_thrown_away(copy):
    shutil.rmtree(copy / "checkpoints")
    before = contents(copy)
    with pytest.raises(UserError, match="the log reaches step 3, but there is no checkpoint"):
        trainer_for(copy, "train.steps=3", "checkpoint.every=1", "checkpoint.keep=9").train(resume=True)
    assert contents(copy) == before


def test_a_trainer_compares_its_settings_as_the_command_does(copy):
    before = contents(copy)
    with pytest.raises(UserError, match=r"was started with different settings: algo\.clip_high 0\.28 → 0\.3;"):
        trainer_for(copy, "train.steps=4", "algo.clip_high=0.3").train(resume=True)
    assert contents(copy) == before
    assert trainer_for(copy, "train.steps=4", "train.lr=1e-5", "eval.every=1").train(resume=True)["steps"] == 4


def test_another_model_or_other_data_is_one_line(tmp_path):
    rows = [{"prompt": f"{a}+{b}=?\n", "answer": str(a + b)} for a in range(1, 9) for b in range(1, 9)]
    data = tmp_path / "rows.jsonl"
    words = ["data.train=rows.jsonl", "sampling.max_new_tokens=56", "--run", "run"]

    def write(rows):
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(rows)
    first = dapo("train", *SMALL[:5], "train.steps=1", *words, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    before = contents(tmp_path / "run")
    write([*rows[:-1], rows[-1] | {"answer": "17"}])
    line = one_line(dapo("train", "--resume", "--run", "run", "train.steps=2", cwd=tmp_path))
    assert "data.train has different prompts or answers than the checkpoint was written with" in line
    assert contents(tmp_path / "run") == before
    write(rows)
    assert dapo("train", "--resume", "--run", "run", "train.steps=2", cwd=tmp_path).returncode == 0


def started(*words, cwd, until="step "):
    process = forked.Popen(
        [DAPO, *words], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith(until):
            break
    return process


def test_a_directory_in_use_is_one_line_and_stays_as_it_is(tmp_path):
    process = started("train", *SMALL, "train.steps=500", "--run", "run", cwd=tmp_path)
    try:
        config = (tmp_path / "run" / "config.yaml").read_bytes()
        line = one_line(dapo("train", "--resume", "--run", "run", cwd=tmp_path))
        assert f"run: in use by process {process.pid} on " in line
        with pytest.raises(UserError, match=f"in use by process {process.pid} on "):
            trainer_for(tmp_path / "run", "train.steps=500").train(resume=True)
        assert "already contains a run" in one_line(dapo("train", *SMALL, "--run", "run", cwd=tmp_path))
        assert (tmp_path / "run" / "config.yaml").read_bytes() == config
    finally:
        process.kill()
        process.communicate()
    resumed = dapo("train", "--resume", "--run", "run", "train.steps=1", "eval.prompts=4", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr


def test_a_signal_before_the_first_step_leaves_nothing_to_save(tmp_path):
    """It comes while the model is evaluated."""
    process = started("train", *SMALL, "train.steps=500", "--run", "run", cwd=tmp_path, until="dapo: ")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)  # as sent to a whole group of processes and by each of them again
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors
    assert "stopping: saving the run" in output
    assert not (tmp_path / "run" / "checkpoints").exists()
    resumed = dapo("train", "--run", "run", "--resume", "train.steps=1", "eval.prompts=4", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "no checkpoint yet; starting from the first step" in resumed.stdout


def test_ctrl_c_while_everything_is_loaded_is_one_line(tmp_path):
    process = subprocess.Popen(
        [DAPO, "train", "--run", "run"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT), errors  # the latter before our own code runs


def test_stopping_at_once_in_the_middle_of_saving_loses_nothing(tmp_path, monkeypatch):
    """The second Ctrl-C is a KeyboardInterrupt wherever the run is; here in a checkpoint, then in the model."""
    path, settings = tmp_path / "run", ("train.steps=2", "checkpoint.every=1", "eval.every=null")

    def interrupt(*arguments, **named):
        raise KeyboardInterrupt

    trainer = trainer_for(path, *settings)
    update = trainer._run.policy.update

    def interrupt_the_second_checkpoint(*arguments):
        if (path / "checkpoints" / "step-1").exists():
            monkeypatch.setattr(torch, "save", interrupt)
        return update(*arguments)

    trainer._run.policy.update = interrupt_the_second_checkpoint
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    monkeypatch.undo()
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == [".step-2.part", "step-1"]

    trainer = trainer_for(path, *settings)
    trainer._run.policy.export = interrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume=True)
    assert not (path / "model").exists()
    assert trainer_for(path, *settings).train(resume=True)["finished"]
    assert load_file(path / "model" / "model.safetensors").keys()
    whole = tmp_path / "whole"
    trainer_for(whole, *settings).train()
    assert chaos.differences(whole, path) == []


def test_ctrl_c_in_python_finishes_the_step_saves_and_raises(tmp_path, capsys):
    path, settings = tmp_path / "run", ("train.steps=3", "checkpoint.every=3", "eval.every=null")
    trainer = trainer_for(path, *settings)
    update = trainer._run.policy.update

    def interrupt_once(*arguments):
        trainer._run.policy.update = update
        signal.raise_signal(signal.SIGINT)
        return update(*arguments)

    trainer._run.policy.update = interrupt_once
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    output = capsys.readouterr().out
    assert "stopping: saving the run; press Ctrl-C again to stop immediately" in output
    assert f"make the trainer again with run_dir='{path}' and call train(resume=True)" in output.splitlines()[-1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [p.name for p in (path / "checkpoints").iterdir()] == ["step-1"]
    trainer_for(path, *settings).train(resume=True)
    trainer_for(tmp_path / "whole", *settings).train()
    assert (path / "model" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model" / "model.safetensors"
    ).read_bytes()


def test_a_second_ctrl_c_in_python_raises_at_once(tmp_path, capsys):
    path, settings = tmp_path / "run", ("train.steps=1", "eval.every=null")
    trainer = trainer_for(path, *settings)

    def interrupt_twice(*arguments):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    trainer._run.policy.update = interrupt_twice
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert capsys.readouterr().out.splitlines()[-1].startswith("stopped; to continue from the last checkpoint")
    assert not (path / "summary.json").exists()
    assert trainer_for(path, *settings).train(resume=True)["finished"]


def test_a_program_that_handles_ctrl_c_itself_keeps_its_handler(tmp_path):
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        trainer = trainer_for(tmp_path / "run", "train.steps=1", "eval.every=null")
        update = trainer._run.policy.update
        trainer._run.policy.update = lambda *arguments: signal.raise_signal(signal.SIGINT) or update(*arguments)
        assert trainer.train()["finished"]
    finally:
        signal.signal(signal.SIGINT, before)
    assert set(seen) == {signal.SIGINT}


@pytest.mark.parametrize("kilobytes", [1, 8], ids=["settings", "rollouts"])
def test_a_full_disk_is_one_line_wherever_it_is_met(copy, kilobytes):
    """A limit on the size of files fails in the middle of a write, as a full disk does."""
    before = contents(copy / "checkpoints")
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (kilobytes << 10, kilobytes << 10))
    result = dapo("train", "--run", copy, "--resume", "train.steps=4", cwd=copy.parent, preexec_fn=limit)
    assert "cannot be written" in one_line(result)
    after = contents(copy / "checkpoints")
    assert {path: after.get(path) for path in before} == before
    again = dapo("train", "--run", copy, "--resume", "train.steps=4", cwd=copy.parent)
    assert again.returncode == 0, again.stderr


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    assert "file/run: is not a directory" in one_line(dapo("train", *SMALL, "--run", "file/run", cwd=tmp_path))
    assert "/proc/run: cannot be written" in one_line(dapo("train", *SMALL, "--run", "/proc/run", cwd=tmp_path))


def test_a_reward_that_draws_random_numbers_goes_on_where_it_was(tmp_path):
    rows = [{"prompt": f"{a}+{b}=?\n", "answer": str(a + b)} for a in range(1, 9) for b in range(1, 9)]

    def trainer(name):
        config = Config.load(DEFAULT_RECIPE, [*SMALL[:5], "train.steps=4", "data.eval=null", "eval.every=null"])
        return DAPOTrainer(config=config, train_dataset=rows, run_dir=tmp_path / name)

    drawn = {"whole": [], "parts": []}

    def watched(built, name):
        update = built._run.policy.update

        def draw(*arguments):
            drawn[name].append(float(torch.rand(())))
            return update(*arguments)

        built._run.policy.update = draw
        return built

    watched(trainer("whole"), "whole").train()
    first = watched(trainer("parts"), "parts")
    first.stop_requested = lambda: first._run.progress.step == 2
    assert first.train()["steps"] == 2
    watched(trainer("parts"), "parts").train(resume=True)
    assert drawn["parts"] == drawn["whole"]
    assert len(set(drawn["whole"])) == len(drawn["whole"]) > 4
