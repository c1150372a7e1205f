"""A run that diverges saves nothing that is not a number."""

import threading

import pytest
import torch
from support import SMALL

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.errors import DivergedError, NonFiniteError
from dapo_rl.train import checkpoint
from dapo_rl.train.checkpoint import Checkpoints

pytestmark = pytest.mark.slow

ONE_UPDATE = [
    "train.mini_batches=1",
    "train.epochs_per_step=1",
    "train.warmup_steps=0",
    "checkpoint.every=1",
    "data.eval=null",
    "eval.every=null",
]


def trainer_for(path, *overrides):
    config = Config.load(DEFAULT_RECIPE, [*SMALL[:5], *ONE_UPDATE, *overrides])
    return DAPOTrainer(config=config, run_dir=path)


def saved(path):
    return sorted(entry.name for entry in (path / "checkpoints").glob("*")), (path / "model").exists()


def test_an_update_to_infinity_is_not_saved(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(DivergedError, match=r"^diverged at step 1: the update made weights that are not finite, in "):
        trainer_for(run, "train.steps=1", "train.lr=1e38", "train.weight_decay=1e9").train()
    assert saved(run) == ([], False)
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.parametrize("what", ["weights", "moments"])
def test_the_last_good_checkpoint_is_finite_and_the_run_goes_on_from_it(tmp_path, what):
    run = tmp_path / "run"
    trainer = trainer_for(run, "train.steps=2")
    update = trainer._run.policy.update

    def break_the_second(*arguments):
        numbers = update(*arguments)
        if trainer._run.progress.step == 1:
            moments = next(iter(trainer._run.policy.optimizer.state.values()))["exp_avg_sq"]
            tensor = next(trainer.model.parameters()) if what == "weights" else moments
            with torch.no_grad():
                tensor.view(-1)[7] = float("inf")
        return numbers

    trainer._run.policy.update = break_the_second
    with pytest.raises(DivergedError, match=r"diverged at step 2: .* not finite, .*good checkpoint is .*/step-1\. "):
        trainer.train()
    assert saved(run) == (["step-1"], False)
    assert trainer_for(run, "train.steps=2").train(resume=True)["finished"]


def test_a_checkpoint_that_is_being_written_counts_as_the_last_good_one(tmp_path, monkeypatch):
    """The first is complete only once somebody waits for it; the second step diverges meanwhile."""
    run, waited = tmp_path / "run", threading.Event()
    trainer = trainer_for(run, "train.steps=2")
    wait, write, update = Checkpoints.wait, checkpoint._write_manifest, trainer._run.policy.update

    def wait_and_tell(checkpoints):
        waited.set()
        wait(checkpoints)

    def write_late(*arguments):
        waited.wait()
        write(*arguments)

    def diverge(*arguments):
        if trainer._run.progress.step == 1:
            raise NonFiniteError("the loss is nan")
        return update(*arguments)

    trainer._run.policy.update = diverge
    monkeypatch.setattr(Checkpoints, "wait", wait_and_tell)
    monkeypatch.setattr(checkpoint, "_write_manifest", write_late)
    monkeypatch.setattr(Checkpoints, "_wait_for_previous", lambda checkpoints: None)  # for the first, nobody waits
    with pytest.raises(DivergedError, match=r"diverged at step 2: the loss is nan; .*good checkpoint is .*/step-1\. "):
        trainer.train()
