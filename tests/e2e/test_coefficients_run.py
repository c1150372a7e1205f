"""Coefficients of the loss that follow a measurement, in real runs: they do what they say, and resume exactly."""

import shutil

import pytest
from safetensors.torch import load_file
from support import SMALL

from dapo_rl import Config, DAPOTrainer
from dapo_rl.errors import UserError
from dapo_rl.runs.directory import RunDirectory

pytestmark = pytest.mark.slow
SETTINGS = (*SMALL, "data.eval=null", "eval.every=null", "log.rollouts=false", "train.warmup_steps=0",
            "train.lr_schedule=constant", "sampling.dynamic=false")  # fmt: skip


def trained(path, *settings, resume=False):
    trainer = DAPOTrainer(config=Config.load("demo", [*SETTINGS, *settings]), run_dir=path)
    with trainer:
        trainer.train(resume=resume)
    return RunDirectory(path).read_metrics()


def same_when_resumed(path, *settings, steps=4):
    """From its checkpoint of step 2, in another trainer, a run has the weights and metrics that it has without one."""
    settings = (*settings, f"train.steps={steps}", "checkpoint.every=2", "checkpoint.keep=9")
    whole = trained(path / "whole", *settings)
    shutil.copytree(path / "whole", path / "parts")
    for checkpoint in (path / "parts" / "checkpoints").iterdir():
        if checkpoint.name != "step-2":
            shutil.rmtree(checkpoint)
    (path / "parts" / "model" / "model.safetensors").unlink()
    parts = trained(path / "parts", *settings, resume=True)
    names = [name for name in whole[0] if not name.startswith(("timing_s/", "perf/"))]
    assert [[row[name] for name in names] for row in parts] == [[row[name] for name in names] for row in whole]
    mine, other = (load_file(path / name / "model" / "model.safetensors") for name in ("parts", "whole"))
    assert all((mine[name] == weight).all() for name, weight in other.items())
    return whole


def test_an_adaptive_kl_penalty_resumes_exactly(tmp_path):
    """The policy is far from the target, so the weight rises by the most that an update allows."""
    adaptive = ("algo.kl_coef=0.01", "algo.kl_target=1e-6", "algo.kl_horizon=100")
    rows = same_when_resumed(tmp_path, *adaptive, "train.mini_batches=2", "train.lr=3e-4")
    coefs = [row["actor/kl_coef"] for row in rows]
    assert coefs == sorted(set(coefs))
    assert all(row["actor/kl"] > 1e-6 for row in rows[1:])


def test_an_adaptive_kl_penalty_in_the_reward_resumes_exactly(tmp_path):
    ppo = ("preset=ppo", "critic.pretrain_steps=1", "sampling.group_size=4", "train.lr=3e-4")
    adaptive = ("algo.kl_coef=0.01", "algo.kl_in=reward", "algo.kl_kind=k3", "algo.kl_target=1e-6")
    rows = same_when_resumed(tmp_path, *ppo, *adaptive, "algo.kl_horizon=10")
    coefs = [row["actor/reward_kl_penalty_coeff"] for row in rows]
    assert coefs[:2] == [0.01, 0.01], "value pre-training does not count"
    assert len(set(coefs)) == 3


def test_a_reference_that_follows_the_policy_resumes_exactly(tmp_path):
    """It moves after steps 1, 2, …: a resumed run needs the one of step 2, which is not the initial model."""
    settings = ("algo.kl_coef=0.1", "algo.ref_sync_steps=2", "train.mini_batches=1", "train.lr=1e-3")
    rows = same_when_resumed(tmp_path, *settings, "algo.ref_mixup_alpha=0.7", steps=5)
    assert all(row["actor/kl_loss"] > 0 for row in rows[1:])
    hard = trained(tmp_path / "hard", *settings, "train.steps=5")
    # Steps 3 and 5 start from the reference itself.
    assert [row["actor/kl_loss"] < 1e-8 for row in hard] == [True, False, True, False, True]


def test_a_reference_that_follows_needs_a_model_of_its_own():
    words = r"^algo\.ref_sync_steps: 5 with algo\.kl_coef=0: there is no reference policy; set algo\.kl_coef=0\.001"
    with pytest.raises(UserError, match=words):
        Config.build({"algo.ref_sync_steps": 5})
    with pytest.raises(UserError, match=r"^algo\.ref_sync_steps: with model\.lora the reference is the model without"):
        Config.build({"algo.ref_sync_steps": 5, "algo.kl_coef": 0.1, "model.lora.rank": 4})


def test_an_adaptive_bonus_keeps_entropy_up_and_resumes_exactly(tmp_path):
    settings = ("train.mini_batches=4", "train.lr=3e-4", "sampling.prompts_per_step=8")
    adaptive = ("algo.entropy_target=0.3", "algo.entropy_coef_delta=0.02")
    rows = same_when_resumed(tmp_path, *settings, *adaptive, steps=6)
    plain = trained(tmp_path / "plain", *settings, "train.steps=6")
    coefs = [row["actor/entropy_coef"] for row in rows]
    assert coefs[0] < coefs[-1]
    assert "actor/entropy_coef" not in plain[0]
    assert rows[-1]["actor/entropy"] > plain[-1]["actor/entropy"] + 0.02
