"""A disk that fills up during a run: the run trains to the end, and saves what fits."""

import io
import json

import pytest
from small_disk import FULL, FillUp, needs_root, small_disk
from support import SMALL
from transformers import AutoModelForCausalLM

from dapo_rl import Config, DAPOTrainer, UserError
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.runs.display import PlainDisplay

pytestmark = [pytest.mark.slow, needs_root]

QUICK = [*SMALL, "data.eval=null", "eval.every=null", "checkpoint.every=1", "checkpoint.keep=1"]


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as path:
        yield path


class Notes(PlainDisplay):
    def __init__(self):
        self.notes = []
        super().__init__(io.StringIO())

    def note(self, text):
        self.notes.append(text)

    def about(self, word):
        return [note for note in self.notes if word in note]


def trainer_for(disk, display, *settings, callbacks=()):
    config = Config.load(DEFAULT_RECIPE, [*QUICK, *settings])
    return DAPOTrainer(config=config, run_dir=disk / "run", display=display, callbacks=list(callbacks))


def checkpoints(disk):
    return sorted(path.name for path in (disk / "run" / "checkpoints").iterdir())


KINDS = {
    "policy": [],
    "lora": ["model.lora.rank=4"],
    "critic": ["preset=ppo", "critic.pretrain_steps=0"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_loses_neither_the_run_nor_the_model(disk, kind):
    """From the second step on there is room for the model but not for a checkpoint."""
    steps = ["train.steps=3", *KINDS[kind]]
    display = Notes()
    filling = FillUp(disk, 1, 6.5)
    with trainer_for(disk, display, *steps, callbacks=[filling]) as trainer, pytest.raises(UserError) as ended:
        trainer.train()
    run = disk / "run"
    assert [row["step"] for row in map(json.loads, (run / "metrics.jsonl").open())] == [1, 2, 3]
    (note,) = display.about("cannot be written")
    assert note.startswith(f"{run}/checkpoints/step-2: the checkpoint cannot be written: {FULL}; the run continues, ")
    assert note.endswith("; free some space")
    said = f"{run}/checkpoints/step-3: the checkpoint cannot be written: {FULL}; free some space; "
    said += f"the model is in {run}/model, and --resume continues from {run}/checkpoints/step-1"
    assert str(ended.value) == said
    assert ended.value.exit_code == 2
    assert json.loads((run / "error.json").read_text())["message"] == said
    assert json.loads((run / "summary.json").read_text())["finished"]
    assert checkpoints(disk) == ["step-1"]
    AutoModelForCausalLM.from_pretrained(run / "model")

    (disk / "ballast").unlink()
    with trainer_for(disk, Notes(), *steps) as trainer:
        assert trainer.train(resume=True)["finished"]
    assert checkpoints(disk) == ["step-3"]
    assert [row["step"] for row in map(json.loads, (run / "metrics.jsonl").open())] == [1, 2, 3]
    assert not (run / "error.json").exists()


def test_a_disk_that_is_freed_in_time_is_no_error(disk):
    display = Notes()
    filling = FillUp(disk, 1, 1, free_at=2)
    with trainer_for(disk, display, "train.steps=3", callbacks=[filling]) as trainer:
        assert trainer.train()["finished"]
    assert len(display.about("step-2: the checkpoint cannot be written")) == 1
    assert display.about("checkpoints") == [*display.about("cannot be written"), "checkpoints: can be written again"]
    assert checkpoints(disk) == ["step-3"]


def test_a_disk_without_any_room_loses_no_line_of_the_log(disk):
    """Not even the rollouts fit; the log is complete once there is room again."""
    display = Notes()
    filling = FillUp(disk, 1, 0, free_at=3)
    with trainer_for(disk, display, "train.steps=4", callbacks=[filling]) as trainer:
        assert trainer.train()["finished"]
    run = disk / "run"
    assert [row["step"] for row in map(json.loads, (run / "metrics.jsonl").open())] == [1, 2, 3, 4]
    assert sorted(path.name[-9:-8] for path in (run / "rollouts").iterdir()) == ["1", "4"]
    for what in ("rollouts", "metrics.jsonl", "checkpoints"):
        assert display.about(f"{what}: can be written again"), what
    assert checkpoints(disk) == ["step-4"]
    with trainer_for(disk, Notes(), "train.steps=5") as trainer:
        assert trainer.train(resume=True)["finished"]


def test_results_that_do_not_fit_are_one_line(disk):
    display = Notes()
    settings = ["train.steps=2", "log.report=true"]
    with trainer_for(disk, display, *settings, callbacks=[FillUp(disk, 1, 0)]) as trainer:
        with pytest.raises(UserError) as ended:
            trainer.train()
        said = str(ended.value)
        assert "\n" not in said
        for what in ("step-2: the checkpoint", "model: the model", "summary.json:", "report.png:"):
            assert f"{what} cannot be written: {FULL}" in said, what
        assert said.count("free some space") == 1
        assert said.endswith(f"--resume continues from {disk}/run/checkpoints/step-1")
        trainer.save_model(disk.parent / "elsewhere")  # the model is still in memory
    AutoModelForCausalLM.from_pretrained(disk.parent / "elsewhere")


def test_a_stop_that_cannot_be_saved_is_an_error(disk):
    with trainer_for(disk, Notes(), "train.steps=4", callbacks=[FillUp(disk, 1, 0)]) as trainer:
        trainer.stop_requested = lambda: (disk / "ballast").exists()
        said = rf"step-1: the checkpoint cannot be written: {FULL}; .* --resume continues from .*/step-1$"
        with pytest.raises(UserError, match=said):
            trainer.train()
