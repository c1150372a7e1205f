"""The disk space of checkpoints: what a run says before its first step is what it then takes."""

import os
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from support import SMALL, small_model

from dapo_rl import Config, DAPOTrainer, UserError
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.train.disk_space import DiskNeed

QUICK = [*SMALL, "data.eval=null", "eval.every=null", "train.steps=1", "log.rollouts=false"]


def taken(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["model.save_dtype=bfloat16"],
        ["model.lora.rank=4"],
        ["preset=ppo", "critic.pretrain_steps=0"],
        ["algo.kl_coef=0.1", "algo.ref_sync_steps=1"],
    ],
    ids=lambda settings: " ".join(settings) or "default",
)
def test_a_checkpoint_and_the_model_take_what_was_foreseen(settings, tmp_path):
    with DAPOTrainer(config=Config.load(DEFAULT_RECIPE, [*QUICK, *settings]), run_dir=tmp_path) as trainer:
        need = trainer._run.disk
        trainer.train()
    # The state of the sampler, the tokenizer and the settings come on top.
    assert need.checkpoint <= taken(tmp_path / "checkpoints" / "step-1") < 1.05 * need.checkpoint + 2**20
    assert need.model <= taken(tmp_path / "model") < 1.05 * need.model + 2**20


def need_of(gib, model=0.0):
    return DiskNeed(int(gib * 2**30), int(model * 2**30))


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Sets the free space of the disk, in GiB; the disk of the tests is as it is."""

    def usage(free, total=100.0):
        monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(int(total * 2**30), int(free * 2**30)))
        return tmp_path / "not" / "yet"

    return usage


class Usage:
    def __init__(self, total, free):
        self.total, self.free = total, free


CONFIG = Config.build({"train.steps": 100})


def refused(need, config, run_dir, step=0):
    with pytest.raises(UserError) as caught:
        need.check(config, run_dir, step)
    return str(caught.value)


def test_a_run_that_cannot_keep_its_checkpoints_is_refused_and_told_what_fits(disk):
    """Two are kept while the third is written."""
    need = need_of(20, model=3)
    need.check(CONFIG, disk(63), 0)
    run_dir = disk(62)
    assert refused(need, CONFIG, run_dir) == (
        f"{run_dir}: the run needs 63.0 GiB of disk space for 3 checkpoints of 20.0 GiB and the model, and its disk "
        "has 62.0 GiB free; free some space, or set checkpoint.keep=1, which needs 43.0 GiB, or choose another "
        "directory with --run"
    )
    one = Config.build({"train.steps": 100, "checkpoint.keep": 1})
    need.check(one, disk(43), 0)
    assert "free some space, or set checkpoint.every=100, which saves the last step alone and needs 23.0 GiB, or " in (
        refused(need, one, disk(42))
    )
    need.check(Config.build({"train.steps": 100, "checkpoint.every": 100}), disk(23), 0)
    assert "12.0 GiB free; free some space, or choose another directory" in refused(need, CONFIG, disk(12))
    need.check(CONFIG, disk(23), 95)  # only one more is going to be written
    need.check(CONFIG, disk(12), 100)  # nothing left to write
    need.check(CONFIG, disk(0, total=0), 0)


def test_without_the_last_step_less_is_written(disk):
    ten = Config.build({"train.steps": 100, "checkpoint.save_final": False})
    need_of(20, model=3).check(ten, disk(60), 0)
    assert "for 3 checkpoints of 20.0 GiB, and" in refused(need_of(20, model=3), ten, disk(59))
    need_of(20).check(ten, disk(12), 90)  # nothing left to write
    over = Config.build({"train.steps": 100, "checkpoint.every": 30})
    assert "for 1 checkpoint of" in refused(need_of(20), over, disk(12), 99)
    need_of(20).check(over, disk(12), 100)
    none = Config.build({"train.steps": 100, "checkpoint.every": 100, "checkpoint.save_final": False})
    need_of(20).check(none, disk(12), 0)


def test_what_a_resumed_run_has_written_is_room_for_what_replaces_it(disk):
    need = DiskNeed(1 << 20, 0)
    run_dir = disk(1.5 / 1024)
    for step in (10, 20):
        folder = run_dir / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "optimizer.pt").write_bytes(bytes(1 << 20))
    need.check(CONFIG, run_dir, 20)
    assert (
        "has 3.5 MiB with the 2 checkpoints there; free some space, or set checkpoint.keep=1, which needs 3.0 MiB"
        in (refused(replace(need, model=1 << 20), CONFIG, run_dir, 20))
    )
    disk(0.5 / 1024)
    assert refused(need, CONFIG, run_dir, 20).endswith("free some space, or set checkpoint.keep=1, which needs 2.0 MiB")
    shutil.rmtree(run_dir / "checkpoints" / "step-10")
    # It cannot go elsewhere.
    assert refused(need, CONFIG, run_dir, 20).endswith("has 1.5 MiB with the 1 checkpoint there; free some space")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_disk_that_is_too_small_ends_a_run_before_its_first_step(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("cannot mount a disk here")
    try:
        said = r"run: the run needs .* MiB of disk space for 1 checkpoint of .* its disk has 4\.0 MiB free"
        config = Config.load(DEFAULT_RECIPE, QUICK)
        with DAPOTrainer(config=config, run_dir=disk / "run") as trainer, pytest.raises(UserError, match=said):
            trainer.train()
        assert not (disk / "run").exists()
    finally:
        subprocess.run(["umount", disk], check=True)


def test_eight_bit_moments_and_narrow_types_take_less():
    model = small_model()
    count = sum(p.numel() for p in model.parameters())
    plain = DiskNeed.of(CONFIG, model, torch.float32)
    assert plain == DiskNeed(12 * count, 4 * count)
    assert DiskNeed.of(CONFIG, model, torch.bfloat16) == DiskNeed((2 + 4 + 8) * count, 2 * count)
    eight = Config.build({"train.optimizer": "adamw_8bit"})
    assert DiskNeed.of(eight, model, torch.float32) == DiskNeed(6 * count, 4 * count)
