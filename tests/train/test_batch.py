"""From verdicts to advantages: shaping, masking, and the split into mini-batches."""

import numpy as np
import pytest
from support import full_batch, make_prompt, make_sample

from dapo_rl.config import Config
from dapo_rl.train.schedule import learning_rate
from dapo_rl.types import Group, Verdict


def config(**settings):
    base = {"sampling.max_new_tokens": 100, "sampling.group_size": 4, "overlong.cache_length": 20}
    return Config.build(base | settings)


def group(*samples, draw=0):
    """Samples given as (right?, length, truncated?)."""
    return Group(
        draw,
        make_prompt(f"p{draw}"),
        tuple(make_sample(length, "length" if cut else "stop") for _, length, cut in samples),
        tuple(Verdict(1.0 if right else -1.0, right, "correct" if right else "wrong") for right, _, _ in samples),
    )


GROUP = group((True, 10, False), (True, 90, False), (False, 10, False), (False, 100, True))


def rewards(batch):
    return [s.scalars["reward"] for s in batch.samples]


def advantages(batch):
    return [float(s["advantages"][0]) for s in batch.groups[0].samples]


def test_soft_punishment_is_added_to_the_reward():
    batch = full_batch([GROUP], config())
    assert rewards(batch) == pytest.approx([1.0, 0.5, -1.0, -2.0])
    assert [s.scalars["length_penalty"] for s in batch.samples] == pytest.approx([0, -0.5, 0, -1])
    mean, std = -0.375, (((1.375**2) + (0.875**2) + (0.625**2) + (1.625**2)) / 3) ** 0.5
    assert advantages(batch) == pytest.approx([(r - mean) / (std + 1e-6) for r in (1.0, 0.5, -1.0, -2.0)], rel=1e-5)


def test_other_shapes():
    assert rewards(full_batch([GROUP], config(**{"overlong.shape": "off"}))) == [1, 1, -1, -1]
    linear = config(**{"overlong.shape": "linear", "overlong.max_length": 50, "overlong.factor": 0.1})
    assert rewards(full_batch([GROUP], linear)) == pytest.approx([1, 1 - 0.08, -1, -1 - 0.1])


def test_overlong_filtering_masks_what_the_engine_cut_off():
    batch = full_batch([GROUP], config(**{"overlong.mask_truncated": True}))
    assert [s.loss_mask.any() for s in batch.groups[0].samples] == [True, True, True, False]
    assert all(s.loss_mask.any() for s in full_batch([GROUP], config()).samples)


def test_a_masked_sample_counts_in_the_baseline_unless_told_otherwise():
    settings = {"overlong.mask_truncated": True, "overlong.shape": "off", "algo.normalize": "none"}
    counted = full_batch([GROUP], config(**settings))
    assert advantages(counted) == pytest.approx([1, 1, -1, -1])
    left_out = full_batch([GROUP], config(**settings, **{"overlong.masked_in_baseline": False}))
    assert advantages(left_out) == pytest.approx([2 / 3, 2 / 3, -4 / 3, 0], rel=1e-6)


def test_every_token_of_a_sample_has_its_old_log_probability():
    batch = full_batch([GROUP], config())
    for trained, sample in zip(batch.groups[0].samples, GROUP.samples, strict=True):
        assert np.array_equal(trained.token_ids, sample.token_ids)
        assert np.array_equal(trained.logps, sample.logps)
        assert len(set(trained["advantages"].tolist())) == 1


def test_tokens_of_older_weights_are_marked():
    assert all(s.fresh.all() for s in full_batch([GROUP], config(), version=0).samples)
    assert not any(s.fresh.any() for s in full_batch([GROUP], config(), version=1).samples)


@pytest.mark.parametrize(("groups", "count", "sizes"), [(8, 4, [2, 2, 2, 2]), (5, 4, [1, 1, 2, 1]), (2, 4, [1, 1])])
def test_mini_batches_hold_whole_groups(groups, count, sizes):
    batch = full_batch([group((True, 3, False), (False, 4, False), draw=i) for i in range(groups)], config())
    mini_batches = batch.mini_batches(count)
    assert [len({s.group for s in m}) for m in mini_batches] == sizes
    assert [s.group for m in mini_batches for s in m] == [g for g in range(groups) for _ in range(2)]


def test_learning_rate_warms_up_and_falls():
    settings = config(**{"train.lr": 1.0, "train.warmup_steps": 4, "train.steps": 14}).train
    assert [learning_rate(s, settings) for s in (1, 2, 4, 5, 14)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    falling = settings.model_copy(update={"lr_schedule": "linear", "min_lr_share": 0.2})
    assert learning_rate(9, falling) == pytest.approx(0.6)
    assert learning_rate(14, falling) == pytest.approx(0.2)
    cosine = settings.model_copy(update={"lr_schedule": "cosine", "min_lr_share": 0.0})
    assert learning_rate(9, cosine) == pytest.approx(0.5)
    assert learning_rate(1, settings.model_copy(update={"warmup_steps": 0})) == 1.0
