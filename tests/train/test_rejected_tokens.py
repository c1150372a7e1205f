"""What a step does about off-policy tokens: rejection, weights with mean 1, masks, stale tokens, and their metrics."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import full_batch, make_prompt, small_model, tokenizer, train_sample

from dapo_rl import Config
from dapo_rl.algo import reference
from dapo_rl.config import AlgoSettings, TrainSettings
from dapo_rl.train.batch import make_batch
from dapo_rl.train.custom import build_advantages
from dapo_rl.train.ledger import Ledger
from dapo_rl.train.off_policy import LEFT_OUT, SCALE, off_policy_metrics, with_corrections, with_off_policy_metrics
from dapo_rl.train.policy import HFPolicy
from dapo_rl.train.transforms import build_transforms
from dapo_rl.types import Batch, Group, Trajectory, Verdict

LN = math.log
AGGREGATIONS = ["token-mean", "token-mean-per-group", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
WEIGHTS = {"proximal": "recomputed", "importance_cap": 1.3, "importance_floor": 0.8}


def make_policy(model, token_budget=10**6, **algo):
    return HFPolicy(
        model,
        pad_id=tokenizer().pad_token_id,
        temperature=1.0,
        algo=AlgoSettings(**algo),
        train=TrainSettings(lr=1e-3, max_grad_norm=1e9),
        norm_length=20,
        token_budget=token_budget,
    )


def make_group(model, count=2, seed=0, index=0):
    """Samples of one prompt; the behaviour policy is a random bit away from the model, the proximal one another."""
    rng = np.random.default_rng(seed)
    samples = [
        train_sample(
            prompt_ids=rng.integers(3, 250, 4),
            token_ids=rng.integers(3, 250, rng.integers(2, 9)),
            logps=0.0,
            advantages=float(rng.normal()),
            group=index,
        )
        for _ in range(count)
    ]
    logps = make_policy(model).score(samples)
    return tuple(
        s.replace(logps=lp + rng.normal(0, 0.4, len(lp)), proximal_logps=lp + rng.normal(0, 0.2, len(lp)))
        for s, lp in zip(samples, logps, strict=True)
    )


def batch_of(*groups, step=1):
    return Batch(tuple(Group(i, make_prompt("p"), samples, ()) for i, samples in enumerate(groups)), step)


def ratio_sample(*ratios, advantages=1.0, group=0, **columns):
    """A sample with these ratios proximal / behaviour."""
    behaviour = np.full(len(ratios), -2.0)
    columns = {"proximal_logps": behaviour + np.log(ratios), **columns}
    return train_sample([5], [3] * len(ratios), behaviour, advantages, group, **columns)


def matrix(rows, width):
    return np.array([[*row, *[0.0] * (width - len(row))] for row in rows])


def columns(policy, samples):
    """Log-probabilities under the three policies, the advantages and the mask, padded."""
    width = max(len(s.token_ids) for s in samples)
    new = matrix([policy.score([s])[0] for s in samples], width)
    proximal, behaviour = (matrix([s[name] for s in samples], width) for name in ("proximal_logps", "logps"))
    mask = matrix([s.loss_mask for s in samples], width).astype(bool)
    return new, proximal, behaviour, np.array([s["advantages"][0] for s in samples]), mask


def gradient(policy, samples):
    policy.update(samples, lr=0.0)
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()])


def test_rejected_tokens_and_samples_leave_the_loss_and_are_counted():
    # Geometric means 1.5 and 0.6; the third sample has a token below the veto, and the fourth was masked before.
    first, second = ratio_sample(1.5, 1.5), ratio_sample(0.6, 0.6, 0.6)
    third, fourth = ratio_sample(1.0, 1e-5, 1.0, 1.0), ratio_sample(9.0, 9.0, loss_mask=False)
    settings = AlgoSettings(reject={"geometric": (0.7, 2.0), "veto": 1e-4})
    batch = with_corrections(batch_of((first, second), (third, fourth)), settings, 1)
    assert [s.loss_mask.tolist() for s in batch.samples] == [[True] * 2, [False] * 3, [False] * 4, [False] * 2]
    assert [s.scalars.get(LEFT_OUT, 0) for s in batch.samples] == [0, 3, 4, 0]
    assert batch.metrics["rollout_corr/rollout_rs_masked_fraction"] == 7 / 9
    assert batch.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 2 / 3
    # The metrics are those before rejection.
    squares = 2 * 1.5**2 + 3 * 0.6**2 + 3 + 1e-10
    assert batch.metrics["rollout_corr/chi2_token"] == pytest.approx(squares / 9 - 1)
    products = (1.5**2) ** 2 + (0.6**3) ** 2 + 1e-10
    assert batch.metrics["rollout_corr/chi2_seq"] == pytest.approx(products / 3 - 1)
    logs = 2 * LN(1.5) + 3 * LN(0.6) + LN(1e-5)
    assert batch.metrics["rollout_corr/kl"] == pytest.approx(-logs / 9, rel=1e-5)
    assert batch.metrics["rollout_corr/k3_kl"] == pytest.approx((3 + 1.8 + 3 + 1e-5 - 9 - logs) / 9, rel=1e-5)
    # The columns stay, and so do samples without a rejected token.
    assert batch.samples[0] == first
    assert batch.samples[2].replace(loss_mask=third.loss_mask, scalars={}) == third.replace(
        loss_mask=third.loss_mask, scalars={LEFT_OUT: 4}
    )


def test_single_tokens_are_rejected_and_others_of_the_sample_stay():
    sample = ratio_sample(1.0, 5.0, 0.9)
    batch = with_corrections(batch_of((sample, ratio_sample(1.0))), AlgoSettings(reject={"token": (0.5, 2.0)}), 1)
    assert [s.loss_mask.tolist() for s in batch.samples] == [[True, False, True], [True]]
    assert batch.metrics["rollout_corr/rollout_rs_masked_fraction"] == 1 / 4
    assert batch.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1 / 2


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("token_budget", [10**6, 24])
def test_the_loss_with_everything_on_is_the_reference_over_the_tokens_that_are_left(aggregation, token_budget):
    model = small_model()
    groups = [make_group(model, seed=seed, index=seed) for seed in range(3)]
    algo = {**WEIGHTS, "importance_level": "sequence", "importance_normalize": True, "aggregation": aggregation}
    settings = AlgoSettings(**algo, reject={"token": (0.6, 1.6), "k3": 0.06})
    batch = with_corrections(batch_of(*groups), settings, 1)
    samples = [s for s in batch.samples if s.trained_tokens]
    before = sum(s.trained_tokens for group in groups for s in group)
    assert 0 < sum(s.trained_tokens for s in samples) < before
    assert len(samples) < 6
    new, proximal, behaviour, advantages, mask = columns(make_policy(model), samples)
    weights = reference.importance_weights(proximal, behaviour, mask, cap=1.3, floor=0.8, level="sequence")
    of_samples = [row[kept][0] for row, kept in zip(weights, mask, strict=True)]
    weights = np.where(mask, weights / np.mean(of_samples), 1.0)
    of_group = {g: sum(s.trained_tokens for s in samples if s.group == g) for g in range(3)}
    expected = reference.dapo_policy_loss(
        new,
        proximal,
        advantages,
        mask,
        weights=weights,
        aggregation=aggregation,
        norm_length=20,
        group_tokens=[of_group[s.group] for s in samples],
    )
    metrics = make_policy(model, token_budget, **algo, reject=settings.reject).update(batch.samples, 0.0).metrics
    assert metrics["actor/pg_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_have_the_mean_1_in_each_mini_batch(level):
    groups = [
        (ratio_sample(2.0, 1.0), ratio_sample(0.5)),
        (ratio_sample(3.0, 1.0, 1.0), ratio_sample(4.0, loss_mask=False)),
    ]
    algo = AlgoSettings(
        proximal="recomputed",
        importance_cap=2.5,
        importance_floor=0.6,
        importance_level=level,
        importance_normalize=True,
    )
    scales = {
        # Tokens: 2, 1, 0.6; and 2.5, 1, 1. Samples: 2, 0.6; and 2.5.
        "token": [3 / 3.6] * 2 + [3 / 4.5],
        "sequence": [2 / 2.6] * 2 + [1 / 2.5],
    }[level]
    batch = with_corrections(batch_of(*groups), algo, 2)
    assert [s.scalars[SCALE] for s in batch.trained] == pytest.approx(scales)
    assert SCALE not in batch.samples[3].scalars
    # Over the step as one mini-batch.
    whole = {"token": 6 / 8.1, "sequence": 3 / 5.1}[level]
    assert [s.scalars[SCALE] for s in with_corrections(batch_of(*groups), algo, 1).trained] == pytest.approx(
        [whole] * 3
    )


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 100), level=st.sampled_from(["token", "sequence"]), budget=st.integers(13, 40))
def test_the_split_into_micro_batches_changes_nothing(seed, level, budget):
    model = small_model()
    algo = {**WEIGHTS, "importance_level": level, "importance_normalize": True, "off_policy_mask_threshold": 0.05}
    groups = [make_group(model, seed=seed + i, index=i) for i in range(3)]
    batch = with_corrections(batch_of(*groups), AlgoSettings(**algo, reject={"token": (0.5, 2.0)}), 1)
    whole, split = make_policy(model, **algo), make_policy(model, budget, **algo)
    assert len(split._micro_batches(batch.trained)) > 1
    torch.testing.assert_close(
        gradient(split, batch.samples[::-1]), gradient(whole, batch.samples), atol=1e-5, rtol=1e-4
    )


def test_every_loss_has_the_corrections():
    model = small_model()
    groups = [make_group(model, seed=seed, index=seed) for seed in range(2)]
    for loss in ("dapo", "gspo", "gspo-token", "cispo"):
        algo = AlgoSettings(loss=loss, **WEIGHTS, importance_normalize=True, reject={"veto": 0.7})
        batch = with_corrections(batch_of(*groups), algo, 1)
        assert 0 < len(batch.trained) < 4
        policy = make_policy(model, loss=loss, **WEIGHTS, importance_normalize=True)
        alone = gradient(policy, batch.trained)
        torch.testing.assert_close(gradient(policy, batch.samples), alone, atol=0, rtol=0)


def test_a_batch_without_an_accepted_token_changes_nothing():
    algo = AlgoSettings(**WEIGHTS, importance_normalize=True, reject={"token": (0.99, 1.01)})
    batch = with_corrections(batch_of((ratio_sample(2.0), ratio_sample(0.5, 0.5))), algo, 1)
    assert batch.trained == []
    update = make_policy(small_model(), **WEIGHTS).update(batch.samples, 1e-3)
    assert (update.metrics, update.columns) == ({}, (None, None))
    empty = batch_of((ratio_sample(2.0, loss_mask=False),))
    assert with_corrections(empty, algo, 1) is empty


def test_off_policy_samples_are_masked_by_the_current_policy():
    model = small_model()
    samples = [s for seed in range(4) for s in make_group(model, seed=seed, index=seed)]
    how = {"off_policy_mask_threshold": 0.0, "kl_coef": 0.1}
    samples = [s.replace(ref_logps=s["proximal_logps"]) for s in samples]
    new, _, behaviour, advantages, mask = columns(make_policy(model), samples)
    masked = reference.off_policy_mask(new, behaviour, advantages, mask, 0.0)
    assert 0 < masked.any(-1).sum() < (advantages < 0).sum()
    losses = reference.policy_token_losses(new, behaviour, advantages, mask, clip_low=0.2, clip_high=0.28)
    policy = make_policy(model, **how)
    metrics = policy.update(samples, 0.0).metrics
    # The masked tokens are in the denominator, and have a KL term.
    assert metrics["actor/pg_loss"] == pytest.approx((losses * ~masked).sum() / mask.sum(), rel=1e-4)
    plain = make_policy(model, kl_coef=0.1).update(samples, 0.0).metrics
    assert metrics["actor/kl_loss"] == plain["actor/kl_loss"]
    assert metrics["actor/opsm_clipfrac"] == masked.any(-1).mean()
    assert "actor/opsm_clipfrac" not in plain
    # They have no gradient; a positive advantage is never masked.
    kept = [s.replace(advantages=0.0) if row.any() else s for s, row in zip(samples, masked, strict=True)]
    torch.testing.assert_close(gradient(policy, samples), gradient(make_policy(model, kl_coef=0.1), kept))
    positive = [s.replace(advantages=np.abs(s["advantages"])) for s in samples]
    assert policy.update(positive, 0.0).metrics["actor/opsm_clipfrac"] == 0


VERDICTS = (Verdict(1.0, True, "correct"), Verdict(-1.0, False, "wrong"))


def stale_group():
    """Samples that were written by the versions 3, 4, 5, and 2; a token of an environment is in the first."""
    first = Trajectory([3] * 4, -1.0, "", "stop", [3, 3, 4, 5], [True, True, False, True])
    return Group(0, make_prompt("p"), (first, Trajectory([3] * 2, -1.0, "", "stop", 2)), VERDICTS)


def test_stale_tokens_are_left_out_and_newer_ones_of_the_sample_stay():
    config = Config.build({"sampling.group_size": 2, "algo.max_token_staleness": 1})
    batch = make_batch([stale_group()], config, version=5)
    assert [s.loss_mask.tolist() for s in batch.samples] == [[False, False, False, True], [False, False]]
    assert batch.metrics["rollout/stale_masked_share"] == pytest.approx(4 / 5)
    batch = make_batch([stale_group()], Config.build({"algo.max_token_staleness": 2}), version=5)
    assert [s.loss_mask.tolist() for s in batch.samples] == [[True, True, False, True], [False, False]]
    plain = make_batch([stale_group()], Config(), version=5)
    assert plain.metrics == {}
    assert sum(s.trained_tokens for s in plain.samples) == 5
    assert (
        make_batch([stale_group()], Config.build({"algo.max_token_staleness": 3}), version=5).samples == plain.samples
    )


def test_advantages_are_those_of_all_samples_of_the_group():
    config = Config.build({"sampling.group_size": 2, "algo.max_token_staleness": 0})
    batch = full_batch([stale_group()], config)
    assert [float(s["advantages"][0]) for s in batch.samples] == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-4)


class Fill:
    tokens_generated, tokens_cancelled, tokens_restarted, dropped = 5, 0, 0, ()


def test_the_ledger_counts_tokens_that_are_left_out():
    config = Config.build({"sampling.group_size": 2, "algo.max_token_staleness": 1})
    ledger = Ledger()
    ledger.add(Fill(), make_batch([stale_group()], config, version=5))
    assert ledger.columns() == {"cancelled": 0, "off_policy": 4, "total": 5, "trained": 1, "carried": 0}
    plain = Ledger()
    plain.add(Fill(), make_batch([stale_group()], Config(), version=5))
    assert plain.columns() == {"cancelled": 0, "total": 5, "trained": 5, "carried": 0}


def test_metrics_of_weights_by_hand():
    samples = [ratio_sample(2.0, 1.0), ratio_sample(0.5, 0.25)]
    algo = AlgoSettings(proximal="recomputed", importance_cap=1.5)
    metrics = off_policy_metrics(samples, [s["proximal_logps"] for s in samples], algo)
    weights = [1.5, 1.0, 0.5, 0.25]
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(1.5)
    assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(0.25)
    size = sum(weights) ** 2 / (4 * sum(w * w for w in weights))
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(size)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 1 / 4
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == 2 / 4  # below 1 / 1.5
    algo = AlgoSettings(proximal="recomputed", importance_cap=1.5, importance_level="sequence", importance_floor=0.1)
    metrics = off_policy_metrics(samples, [s["proximal_logps"] for s in samples], algo)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(1.5)  # of 2
    assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(0.125)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 1 / 2
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == 0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.625**2 / (2 * (1.5**2 + 0.125**2)))


def test_metrics_come_once_per_step_from_what_was_scored():
    sample = ratio_sample(2.0, 1.0)
    once = sample.replace(proximal_logps=None, train_logps=sample["proximal_logps"])
    single = Config.build({"algo.proximal": "recomputed", "algo.importance_cap": 1.5})
    several = Config.build({"algo.proximal": "recomputed", "algo.importance_cap": 1.5, "train.mini_batches": 2})
    expected = with_off_policy_metrics(batch_of((once,)), single).metrics
    assert expected["rollout_corr/rollout_is_max"] == pytest.approx(1.5)
    later = sample.replace(train_logps=sample.logps)
    assert with_off_policy_metrics(batch_of((later,)), several).metrics == expected
    for config in (Config(), Config.build({"algo.reject.k3": 1.0})):
        assert with_off_policy_metrics(batch_of((once,)), config).metrics == {}


def steps_of(config, scorer, values=None):
    return build_transforms(config, scorer, build_advantages(config.algo), values)


class Scorer:
    """Scores tokens by 0.1 more than the engine, and says how often it was asked."""

    asked = 0

    def score(self, samples):
        self.asked += 1
        return [s.logps + np.float32(0.1) for s in samples]


@pytest.mark.parametrize(
    ("changes", "asked", "left"),
    [
        ({}, 0, 5),
        ({"algo.reject.k3": 0.001}, 1, 0),  # of 0.1: 0.005
        ({"algo.reject.k3": 0.01}, 1, 5),
        ({"algo.reject.geometric": [0.9, 1.1]}, 1, 0),
        ({"algo.proximal": "recomputed", "algo.importance_cap": 2, "algo.importance_normalize": True}, 1, 5),
    ],
)
def test_a_single_update_is_scored_only_if_its_denominator_or_weights_need_it(changes, asked, left):
    config = Config.build({"sampling.group_size": 2, "sampling.prompts_per_step": 1, **changes})
    scorer = Scorer()
    batch = make_batch([stale_group()], config, version=5, step=1)
    for transform in steps_of(config, scorer):
        batch = transform(batch)
    assert (scorer.asked, sum(s.trained_tokens for s in batch.samples)) == (asked, left)


def test_value_pre_training_rejects_nothing():
    config = Config.build(
        {"algo.advantage": "gae", "train.steps": 16, "critic.pretrain_steps": 2, "algo.reject.k3": 0.001}
    )
    scorer = Scorer()
    for step, left in ((2, 5), (3, 0)):
        batch = replace(make_batch([stale_group()], config, version=5, step=step), trains_policy=step > 2)

        def values(samples):
            return [np.zeros(len(s.token_ids), np.float32) for s in samples]

        for transform in steps_of(config, scorer, values):
            batch = transform(batch)
        assert sum(s.trained_tokens for s in batch.samples) == left
    weighted = Config.build({**WEIGHTED, "algo.advantage": "gae", "train.steps": 16, "critic.pretrain_steps": 2})
    of_critic = batch_of((ratio_sample(2.0).replace(proximal_logps=None),), step=2)
    pretraining = replace(of_critic, trains_policy=False)
    assert with_off_policy_metrics(pretraining, weighted) is pretraining


def test_stale_tokens_count_in_the_length_that_gives_lambda():
    settings = {"algo.advantage": "gae", "critic.length_alpha": 1.0, "critic.pretrain_steps": 0}
    config = Config.build({**settings, "algo.max_token_staleness": 1})
    batch = make_batch([stale_group()], config, version=5, step=1)
    for transform in steps_of(config, Scorer(), lambda samples: [np.zeros(len(s.token_ids)) for s in samples]):
        batch = transform(batch)
    assert batch.metrics["critic/lambda"] == pytest.approx(1 - 1 / 3)  # of the 3 tokens, 2 are stale


WEIGHTED = {"algo.proximal": "recomputed", "algo.importance_cap": 2}
