"""The update on a rank with a GPU, whose weights are sharded, against the plain policy."""

import gc
import os
import sys
import time
from contextlib import closing
from functools import cache, partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from support import small_model, tokenizer, train_sample

from dapo_rl.cluster.distributed_policy import DistributedPolicy
from dapo_rl.cluster.policy_worker import PolicyWorker
from dapo_rl.cluster.ray_ranks import RayRanks
from dapo_rl.cluster.ray_session import ray_cluster
from dapo_rl.config import AlgoSettings, ClusterSettings, TrainSettings
from dapo_rl.lab.bench.model_shapes import open_model
from dapo_rl.train.policy import HFPolicy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray"),
]

FUSED = TrainSettings(gradient_checkpointing=True)


def settings(dtype):
    return {
        "pad_id": 0,
        "tokenizer": tokenizer(),
        "temperature": 1.0,
        "algo": AlgoSettings(),
        "train": TrainSettings(gradient_checkpointing=True, fused=False),
        "norm_length": 20,
        "token_budget": 60,
        "dtype": dtype,
    }


def on_rank(place, dtype=torch.float32, offload=False, train=None):
    how = settings(dtype) | ({} if train is None else {"train": train})
    return PolicyWorker(lambda: (small_model(), {}), place=place, offload=offload, **how)


@pytest.fixture(scope="module")
def one_rank():
    """Starts a policy on one rank with a GPU, which finds the modules of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        with ray_cluster(ClusterSettings(backend="ray")):
            yield lambda make: closing(DistributedPolicy(lambda: RayRanks(make, 1, on_gpu=True, gpus=1)))


@cache
def samples():
    """Sampled by the model itself: a token at a bound of the clip range would count in one type and not in another."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 24, 12)
    drawn = [
        train_sample([5, 6, 7 + i // 3], rng.integers(3, 60, n), 0.0, rng.normal(), i // 3)
        for i, n in enumerate(lengths)
    ]
    scores = HFPolicy(small_model(), **settings(torch.float32)).score(drawn)
    return [sample.replace(logps=logps) for sample, logps in zip(drawn, scores, strict=True)]


@pytest.mark.parametrize(
    ("make", "dtype", "tolerance"),
    [
        (on_rank, torch.float32, 1e-4),
        (partial(on_rank, offload=True), torch.float32, 1e-4),
        (partial(on_rank, dtype=torch.bfloat16), torch.bfloat16, 0.05),
        (partial(on_rank, dtype=torch.bfloat16, train=FUSED), torch.bfloat16, 0.05),
    ],
)
def test_a_sharded_update_is_that_of_the_plain_policy(one_rank, make, dtype, tolerance, tmp_path):
    plain = HFPolicy(small_model().cuda(), **settings(dtype))
    expected = plain.update(samples(), 1e-4)
    with one_rank(make) as ranked:
        mine = ranked.update(samples(), 1e-4)
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert mine.metrics[name] == pytest.approx(expected.metrics[name], rel=tolerance, abs=tolerance), name
        ranked.save(tmp_path)(lambda: False)
        scores = ranked.score(samples())
        ranked.update(samples(), 1e-2)
        assert any((a != b).any() for a, b in zip(ranked.score(samples()), scores, strict=True))
        ranked.load(tmp_path)
        for before, after in zip(scores, ranked.score(samples()), strict=True):
            np.testing.assert_array_equal(before, after)
        for name, weight in (entry for bucket in ranked.weights().buckets(1 << 16) for entry in bucket):
            torch.testing.assert_close(
                weight, plain.model.get_parameter(name).cpu(), atol=max(tolerance / 100, 3e-4), rtol=0
            )


def bench_model():
    return open_model("qwen2.5-1.5b", torch.float32, "cuda", seed=0)[0]


def bench_settings(token_budget):
    train = TrainSettings(gradient_checkpointing=False)
    return settings(torch.bfloat16) | {"norm_length": 512, "token_budget": token_budget, "train": train}


def bench_rank(place, token_budget):
    return PolicyWorker(lambda: (bench_model(), {}), place=place, **bench_settings(token_budget))


def seconds_of(policy, batch):
    for _ in range(2):
        policy.update(batch, 1e-6)
    started = time.perf_counter()
    for _ in range(3):
        policy.update(batch, 1e-6)
    return (time.perf_counter() - started) / 3


@pytest.mark.parametrize("token_budget", [16384, 33000])
def test_how_long_a_sharded_update_takes(one_rank, capsys, token_budget):
    """The goal is within 5 % of the plain policy. Printed, since a shared GPU is not quiet."""
    rng = np.random.default_rng(0)
    batch = [
        train_sample(rng.integers(1000, 9000, 100), rng.integers(1000, 9000, length), -11.0, rng.normal(), i // 8)
        for i, length in enumerate(rng.integers(100, 400, 128).tolist())
    ]
    plain = seconds_of(HFPolicy(bench_model(), **bench_settings(token_budget)), batch)
    gc.collect()
    torch.cuda.empty_cache()
    with one_rank(partial(bench_rank, token_budget=token_budget)) as ranked:
        sharded = seconds_of(ranked, batch)
    with capsys.disabled():
        tokens = sum(100 + len(sample.token_ids) for sample in batch)
        what = f"update of {tokens:,} tokens in micro-batches of {token_budget:,}"
        print(f"\n{what}: plain {plain:.3f} s, one rank {sharded:.3f} s, {sharded / plain:.3f}x")
