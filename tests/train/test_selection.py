"""Tokens are selected over a whole mini-batch, and only they learn: by their entropy, and by Clip-Cov and KL-Cov."""

import numpy as np
import pytest
import torch
from test_policy import gradient, make_policy, samples_for, small_model

from dapo_rl.algo import reference
from dapo_rl.config import AlgoSettings, Config
from dapo_rl.train.custom import build_advantages
from dapo_rl.train.selection import with_cov_mask, with_entropy_mask
from dapo_rl.train.transforms import build_transforms
from dapo_rl.types import Batch, Group, Prompt


def batch_of(samples, step=3):
    """Groups of two samples."""
    pairs = [tuple(samples[i : i + 2]) for i in range(0, len(samples), 2)]
    return Batch(tuple(Group(i, Prompt(str(i), "", [1]), pair, ()) for i, pair in enumerate(pairs)), step)


def config_of(**algo):
    return Config.build({f"algo.{name}": value for name, value in algo.items()} | {
        "train.mini_batches": 2, "sampling.prompts_per_step": 4,
    })  # fmt: skip


def flat(samples, column):
    own = [s.loss_mask if column == "loss_mask" else s[column] for s in samples if s.trained_tokens]
    return np.concatenate(own)


def test_the_share_is_that_of_each_mini_batch():
    model = small_model()
    samples = samples_for(model, count=8, masked=(1,))
    scored = make_policy(model).score_entropy(samples)
    samples = [s.replace(entropy=row) for s, row in zip(samples, scored, strict=True)]
    batch = with_entropy_mask(batch_of(samples), config_of(top_entropy_quantile=0.3))
    for part in batch.mini_batches(2):
        wanted = reference.top_entropy_mask(flat(part, "entropy"), flat(part, "loss_mask"), 0.3)
        assert (flat(part, "entropy_mask") == wanted).all()
        assert 0 < wanted.sum() < len(wanted)
    assert "entropy_mask" not in batch.samples[1].columns
    chosen = flat(batch.trained, "entropy_mask")
    assert batch.metrics["actor/entropy_mask_share"] == pytest.approx(chosen.mean())


@pytest.mark.parametrize("budget", [14, 10**6])
def test_other_tokens_have_no_loss_and_stay_in_the_denominator(budget):
    """As if their advantage was 0. The entropy bonus is theirs alone too."""
    model, rng = small_model(), np.random.default_rng(0)
    samples = [s.replace(entropy_mask=rng.random(len(s.token_ids)) < 0.4) for s in samples_for(model)]
    without = [s.replace(advantages=np.where(s["entropy_mask"], s["advantages"], 0.0)) for s in samples]
    mine = gradient(make_policy(model, budget, top_entropy_quantile=0.4), samples)
    wanted = gradient(make_policy(model), without)
    assert wanted.norm() > 1e-3
    torch.testing.assert_close(mine, wanted, atol=1e-6, rtol=1e-4)
    bonus = gradient(make_policy(model, budget, top_entropy_quantile=0.4, entropy_coef=1.0), samples) - mine
    whole = gradient(make_policy(model, entropy_coef=1.0), samples) - gradient(make_policy(model), samples)
    none = [s.replace(entropy_mask=False) for s in samples]
    assert 0.1 < bonus.norm() / whole.norm() < 0.9
    assert gradient(make_policy(model, top_entropy_quantile=0.4, entropy_coef=1.0), none).abs().max() == 0


@pytest.mark.parametrize("loss", ["clip-cov", "kl-cov"])
def test_clip_cov_and_kl_cov_select_in_each_mini_batch(loss):
    model = small_model()
    samples = samples_for(model, count=8, masked=(1,))
    config = config_of(loss=loss, cov_share=0.2, clip_cov_low=-0.5)
    batch = with_cov_mask(batch_of(samples), config)
    for part in batch.mini_batches(2):
        mask = flat(part, "loss_mask")
        values = reference.token_covariances(flat(part, "logps"), flat(part, "advantages"), mask)
        chosen = flat(part, "cov_mask")
        assert chosen.sum() == max(int(0.2 * len(mask)), 1)
        if loss == "kl-cov":
            assert (chosen == reference.kl_cov_mask(values, mask, share=0.2)).all()
        assert ((values[chosen] > -0.5) & (values[chosen] < 5)).all()
    again = with_cov_mask(batch_of(samples), config)
    assert (flat(again.trained, "cov_mask") == flat(batch.trained, "cov_mask")).all()
    later = with_cov_mask(batch_of(samples, step=4), config)
    same = (flat(later.trained, "cov_mask") == flat(batch.trained, "cov_mask")).all()
    assert same == (loss == "kl-cov"), "Clip-Cov draws anew in each step"
    policy = make_policy(model, loss=loss)
    learnt, plain = gradient(policy, batch.trained), gradient(policy, samples)
    assert (learnt - plain).norm() > 1e-3


def test_a_run_scores_entropy_and_selects_before_its_updates():
    policy = make_policy(small_model())
    names = {}
    for key, algo in {"plain": {}, "top": {"top_entropy_quantile": 0.5}, "cov": {"loss": "kl-cov"}}.items():
        settings = config_of(**algo)
        transforms = build_transforms(settings, policy, build_advantages(AlgoSettings()))
        names[key] = len(transforms)
    assert names == {"plain": names["plain"], "top": names["plain"] + 2, "cov": names["plain"] + 1}
