"""The adaptive weight of the KL penalty: by hand and as in verl, measured in the loss and in the reward, restored."""

import json

import numpy as np
import pytest
from support import full_batch
from test_critic import constant, make_group, vapo
from test_policy import make_policy, samples_for, small_model

from dapo_rl.algo import reference
from dapo_rl.config import AlgoSettings, Config
from dapo_rl.errors import UserError
from dapo_rl.objectives.controllers import next_kl_coef
from dapo_rl.train.coefficients import FILE, KL_OF_REWARD, KL_OF_UPDATE, Coefficients
from dapo_rl.train.custom import build_advantages
from dapo_rl.train.gae import with_values
from dapo_rl.train.transforms import build_transforms, scored

ADAPTIVE = {"kl_coef": 0.1, "kl_target": 0.02, "kl_horizon": 80.0}


def test_the_weight_by_hand():
    """A horizon of 80 and 40 samples: half of the clipped error. 0.022 is 10 % above the target, so +5 %; 0.1 is far
    above it, so +10 %; 0 is far below, so −10 %."""
    coefficients = Coefficients.of(AlgoSettings(**ADAPTIVE))
    weights = []
    for kl in (0.022, 0.1, 0.0, 0.02):
        coefficients.follow({KL_OF_UPDATE: kl, KL_OF_REWARD: 9.0}, 40)
        weights.append(coefficients.now.kl)
    np.testing.assert_allclose(weights, [0.105, 0.1155, 0.10395, 0.10395], rtol=1e-12)
    coefficients.follow({}, 40)  # nothing was in the loss
    assert coefficients.now.kl == weights[-1]
    assert coefficients.kl == weights[-1]
    for _ in range(2):
        coefficients.follow({KL_OF_UPDATE: 0.0}, 10**6)
    assert coefficients.now.kl == pytest.approx(0.10395 * 0.8**2), "at most a fifth, however many samples"


def test_it_is_verls_controller():
    """`AdaptiveKLController.update`, written out, up to as many samples as the horizon."""
    rng = np.random.default_rng(0)
    ours = theirs = 0.05
    for _ in range(200):
        kl, samples = rng.exponential(0.03), int(rng.integers(1, 1000))
        ours = next_kl_coef(ours, kl, 0.02, samples=samples, horizon=1000.0)
        theirs *= 1 + np.clip(kl / 0.02 - 1, -0.2, 0.2) * samples / 1000.0
        assert ours == theirs


@pytest.mark.parametrize("token_budget", [10**6, 24])
def test_an_update_measures_the_mean_over_samples(token_budget):
    """Each sample's mean over its tokens counts once, whatever its length and the split into micro-batches."""
    model = small_model()
    samples = samples_for(model, masked=(1,))
    samples = [s.replace(ref_logps=s.logps - 0.1 * (i + 1)) for i, s in enumerate(samples)]
    policy = make_policy(model, token_budget, reference=small_model(1), **ADAPTIVE, kl_kind="k2")
    metrics = policy.update(samples, lr=0.0).metrics
    logps = make_policy(model).score(samples)
    means = [
        reference.kl_penalty(lp, s["ref_logps"], "k2").mean()
        for lp, s in zip(logps, samples, strict=True)
        if s.trained_tokens
    ]
    assert len({len(s.token_ids) for s in samples}) > 2
    assert metrics[KL_OF_UPDATE] == pytest.approx(np.mean(means), rel=1e-4)
    assert metrics["actor/kl_coef"] == 0.1
    fixed = make_policy(model, reference=small_model(1), kl_coef=0.1).update(samples, lr=0.0).metrics
    assert not {KL_OF_UPDATE, "actor/kl_coef"} & fixed.keys()


def test_the_weight_in_the_reward_by_hand():
    """log π − log π_ref is 0.2 at three tokens of one sample and 0.4 at one of another: their means' mean is 0.3, three
    times the target. The first batch still has the weight 0.1, the second 0.1 · (1 + 0.2 · 2 / 10)."""
    settings = ("algo.kl_in=reward", "algo.kl_coef=0.1", "algo.kl_kind=k1", "critic.lambda_policy=1")
    config = vapo(*settings, "algo.kl_target=0.1", "algo.kl_horizon=10")
    batch = full_batch([make_group(0, (1.0, -1.0), (3, 1))], config)
    batch = scored("ref_logps", lambda samples: [s.logps - 0.2 * (i + 1) for i, s in enumerate(samples)])(batch)
    coefficients = Coefficients.of(config.algo)
    transform = build_transforms(config, Nobody(), build_advantages(config.algo), constant(0.0), coefficients)[-1]
    for weight in (0.1, 0.104):
        done = transform(batch)
        assert done.metrics[KL_OF_REWARD] == pytest.approx(0.3)
        assert done.metrics[f"{KL_OF_REWARD}_coeff"] == pytest.approx(weight)
        first, second = done.groups[0].samples
        np.testing.assert_allclose(first["returns"], 1 - 0.2 * weight * np.array([3, 2, 1]), rtol=1e-5)
        np.testing.assert_allclose(second["returns"], [-1 - 0.4 * weight], rtol=1e-5)
        coefficients.follow(done.metrics, len(done.trained))
    assert coefficients.now.kl == 0, "the loss has no penalty"
    fixed = with_values(batch, vapo(*settings), constant(0.0))
    assert KL_OF_REWARD not in fixed.metrics


class Nobody:
    """A policy that scores nothing."""

    score = score_reference = score_entropy = staticmethod(lambda samples: [])


def test_the_weight_is_restored_exactly(tmp_path):
    algo = AlgoSettings(**ADAPTIVE)
    first, second = Coefficients.of(algo), Coefficients.of(algo)
    for kl in (0.3, 0.021, 0.017):
        first.follow({KL_OF_UPDATE: kl}, 7)
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.now == first.now
    assert first.now.kl not in (0.1, second._algo.kl_coef)
    for coefficients in (first, second):
        coefficients.follow({KL_OF_UPDATE: 0.05}, 7)
    assert second.now == first.now
    (tmp_path / FILE).unlink()
    second.load(tmp_path)
    assert second.now.kl == 0.1
    for damage in (-1.0, "much", float("nan")):
        (tmp_path / FILE).write_text(json.dumps({"entropy_coef": 0.0, "entropy": None, "kl_coef": damage}))
        with pytest.raises(UserError, match=r"coefficients\.json.*kl_coef"):
            second.load(tmp_path)


def test_both_weights_adapt_side_by_side(tmp_path):
    algo = AlgoSettings(**ADAPTIVE, entropy_target=0.5, entropy_coef_delta=0.125)
    both = Coefficients.of(algo)
    both.follow({KL_OF_UPDATE: 1.0, "actor/entropy": 0.4}, 80)
    assert both.now == (0.125, pytest.approx(0.12))
    both.save(tmp_path)
    other = Coefficients.of(algo)
    other.load(tmp_path)
    assert other.now == both.now
    entropy = Coefficients.of(AlgoSettings(entropy_target=0.5))
    entropy.save(tmp_path)
    assert set(json.loads((tmp_path / FILE).read_text())) == {"entropy_coef", "entropy"}


def test_a_target_without_a_penalty_is_a_mistake():
    words = r"^algo\.kl_target: 0\.1 with algo\.kl_coef=0: there is no KL penalty to adapt; set algo\.kl_coef=0\.001"
    with pytest.raises(UserError, match=words):
        Config.build({"algo.kl_target": 0.1})
    assert Config.build({"algo.kl_target": 0.1, "algo.kl_coef": 0.2}).algo.kl_target == 0.1
