"""A critic on ranks is that of one process."""

import json
import math
import os
import signal

import numpy as np
import pytest
import torch
from rank_parts import WarmRanks
from safetensors.torch import load_file
from support import THOROUGH
from test_ranked_run import AtStep, engine_here

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cluster import build_policy
from dapo_rl.cluster.policy_worker import CriticWorker, PolicyWorker
from dapo_rl.cluster.ray_ranks import Place
from dapo_rl.config import TrainSettings
from dapo_rl.models import save
from dapo_rl.run import backend

pytestmark = pytest.mark.slow

RUN = [
    "preset=vapo", "critic.pretrain_steps=1", "train.steps=3", "train.warmup_steps=0", "sampling.max_new_tokens=24",
    "train.lr_schedule=constant", "checkpoint.every=1", "checkpoint.keep=9", "data.eval=null", "eval.every=null",
    "algo.kl_in=reward", "algo.kl_coef=0.01",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick_start(ray_instance):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_policy, "RayRanks", WarmRanks)
        patch.setattr(backend, "build_engine_pool", engine_here)
        yield


def run(path, *settings, resume=False, actions=()):
    config = Config.load("demo", [*THOROUGH, *RUN, *settings])
    callbacks = [AtStep(actions)] if actions else None
    with DAPOTrainer(config=config, run_dir=path, callbacks=callbacks) as trainer:
        assert trainer.train(resume=resume)["finished"]
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain") / "run")


def assert_same_run(mine, other):
    def rows(path):
        aside = ("timing_s/", "perf/", "rank/")
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return [{k: math.nan if v is None else v for k, v in row.items() if not k.startswith(aside)} for row in lines]

    for a, b in zip(rows(mine), rows(other), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5, nan_ok=True)
    theirs = load_file(other / "model" / "model.safetensors")
    for name, weight in load_file(mine / "model" / "model.safetensors").items():
        np.testing.assert_allclose(weight, theirs[name], atol=2e-5)


def test_the_copies_of_a_critic_come_on_top_of_those_of_the_policy(monkeypatch):
    """In host memory, on every rank."""
    workers = [object.__new__(kind) for kind in (PolicyWorker, CriticWorker)]
    for worker in workers:
        worker.model, worker._train, worker._offload = torch.nn.Linear(10, 10, bias=False), TrainSettings(), False
        worker._place = Place(0, 2, torch.device("cpu"), of_host=2)
    both = 2 * 2 * 1200  # on two ranks of a host: the weights and moments of the two, which are as large themselves
    for memory, critic_fits in ((2 * both / 0.75 + 2, True), (2 * both / 0.75 - 2, False)):
        monkeypatch.setattr(save, "host_memory", lambda memory=memory: memory)
        assert [worker._why_no_copy() is None for worker in workers] == [True, critic_fits]


def test_two_ranks(plain, tmp_path):
    assert_same_run(run(tmp_path / "run", "cluster.backend=ray", "cluster.ranks=2"), plain)


def test_a_lost_rank_and_another_number_of_ranks(plain, tmp_path):
    """Rank 0 is killed in the second step, so that the run goes on from the first checkpoint; the rest is computed by
    another number of ranks."""
    path, on_ranks = tmp_path / "run", ["cluster.backend=ray", "cluster.restarts=1"]
    run(path, *on_ranks, "cluster.ranks=2", "train.steps=2", actions={2: lambda pids: os.kill(pids[0], signal.SIGKILL)})
    assert_same_run(run(path, *on_ranks, "cluster.ranks=1", resume=True), plain)
