"""Whole runs with a critic: value pre-training, exact resuming, PPO with KL in the reward."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import THOROUGH

from dapo_rl import Config, DAPOTrainer
from dapo_rl.models.load import TINY

pytestmark = pytest.mark.slow

VAPO = [
    "preset=vapo", "critic.pretrain_steps=2", "train.steps=4", "train.warmup_steps=0", "train.lr_schedule=constant",
    "sampling.max_new_tokens=24", "critic.lambda_lowest=0", "critic.whiten=false",
]  # fmt: skip


def run(path, *settings, resume=False):
    config = Config.load("demo", [*THOROUGH, "checkpoint.every=1", "checkpoint.keep=9", *VAPO, *settings])
    with DAPOTrainer(config=config, run_dir=path) as trainer:
        return trainer.train(resume=resume)


def metrics(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in rows]


def weights_at(path, step):
    return load_file(path / "checkpoints" / f"step-{step}" / "model" / "model.safetensors")


def critic_at(path, step):
    return torch.load(path / "checkpoints" / f"step-{step}" / "critic.pt", weights_only=True)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("vapo") / "run"
    run(path)
    return path


def test_value_pre_training_trains_the_critic_alone(finished):
    start = load_file(TINY / "model.safetensors")
    assert same(weights_at(finished, 2), start)
    assert not same(weights_at(finished, 3), start)
    assert not same(critic_at(finished, 1)["weights"], critic_at(finished, 2)["weights"])
    rows = metrics(finished)[1:]
    assert ["actor/pg_loss" in row for row in rows] == [False, False, True, True]
    assert [row["actor/updates"] for row in rows] == [0, 0, 4, 4]
    for row in rows:
        assert row["critic/vf_loss"] > 0
        assert 0 <= row["critic/lambda"] < 0.2  # responses of up to 24 tokens
    rates = [row["critic/lr"] for row in rows]
    assert rates == [4e-4] * 4
    assert [row["actor/lr"] for row in rows[2:]] == [2e-4] * 2
    assert rows[0]["critic/vf_explained_var"] == 0  # its values are 0
    assert rows[3]["critic/vf_explained_var"] != 0


def test_a_run_that_was_stopped_resumes_bit_for_bit(finished, tmp_path):
    """After pre-training, so that the critic's moments and the policy's schedule count."""
    path = Path(shutil.copytree(finished, tmp_path / "run"))
    for step in (3, 4):
        shutil.rmtree(path / "checkpoints" / f"step-{step}")
    shutil.rmtree(path / "model")
    assert run(path, resume=True)["finished"]
    assert metrics(path) == metrics(finished)
    assert same(weights_at(path, 4), weights_at(finished, 4))
    mine, other = critic_at(path, 4), critic_at(finished, 4)
    assert same(mine["weights"], other["weights"])
    for i, moments in other["optimizer"]["state"].items():
        assert same(mine["optimizer"]["state"][i], moments)


def test_the_critic_learns_the_returns_of_the_starting_policy(tmp_path):
    """Most of value pre-training at the demo's own learning rate: the loss falls below the variance of the returns."""
    path = tmp_path / "run"
    more = ["sampling.prompts_per_step=8", "sampling.group_size=8", "data.eval=null", "eval.every=null"]
    run(path, "train.steps=8", "critic.pretrain_steps=7", "critic.lr=1e-3", "checkpoint.every=8", *more)
    explained = [row["critic/vf_explained_var"] for row in metrics(path)]
    assert np.mean(explained[-3:]) > 0.1 > explained[0]


def test_ppo_with_kl_in_the_reward(tmp_path):
    path = tmp_path / "run"
    kl = ["algo.kl_in=reward", "algo.kl_coef=0.01", "algo.kl_kind=k1"]
    run(path, "preset=ppo", "critic.pretrain_steps=0", "critic.whiten=true", "train.steps=2", *kl)
    first, second = metrics(path)[1:]
    assert first["actor/updates"] == 4
    assert "actor/kl_loss" not in first
    assert first["critic/lambda"] == pytest.approx(0.95)
    assert first["critic/advantages/mean"] == pytest.approx(0, abs=1e-6)  # whitened
    assert first["critic/vf_clipfrac"] >= 0
    # Under the policy that sampled, KL is 0 in the first step; later it is part of the returns.
    assert second["critic/returns/mean"] != pytest.approx(second["reward/batch"], abs=1e-9)
