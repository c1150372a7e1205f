"""The update on a rank with a GPU, whose weights are sharded, against the plain policy."""

import numpy as np
import pytest
import torch
from support import small_model, tokenizer

from dapo_rl.cluster.policy import RankedPolicy
from dapo_rl.cluster.processes import RankProcesses
from dapo_rl.cluster.rank import RankPolicy
from dapo_rl.config import AlgoSettings, TrainSettings
from dapo_rl.train.policy import HFPolicy
from dapo_rl.types import TrainSample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


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


def in_float32(place):
    return RankPolicy(small_model(), place=place, **settings(torch.float32))


def in_bfloat16(place):
    return RankPolicy(small_model(), place=place, **settings(torch.bfloat16))


def offloaded(place):
    return RankPolicy(small_model(), place=place, offload=True, **settings(torch.float32))


def samples():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 24, 12)
    return [
        TrainSample([5, 6, 7 + i // 3], rng.integers(3, 60, n), -4.0, rng.normal(), i // 3)
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("make", "dtype", "tolerance"),
    [
        (in_float32, torch.float32, 1e-4),
        (offloaded, torch.float32, 1e-4),
        (in_bfloat16, torch.bfloat16, 0.05),
    ],
)
def test_a_sharded_update_is_that_of_the_plain_policy(make, dtype, tolerance, tmp_path):
    plain = HFPolicy(small_model().cuda(), **settings(dtype))
    expected = plain.update(samples(), 1e-4)
    with RankedPolicy(RankProcesses(make, 1, device="cuda")) as ranked:
        mine = ranked.update(samples(), 1e-4)
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert mine.metrics[name] == pytest.approx(expected.metrics[name], rel=tolerance, abs=tolerance), name
        ranked.save(tmp_path)
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
