"""Tokens of an environment are context only: nothing that is trained, penalised or measured depends on them."""

import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support import full_batch, make_prompt, small_model, tokenizer, train_sample

from dapo_rl import Config
from dapo_rl.config import AlgoSettings, TrainSettings
from dapo_rl.models.values import value_model
from dapo_rl.objectives import LOSSES
from dapo_rl.objectives.aggregation import aggregate
from dapo_rl.objectives.kl import kl_penalty
from dapo_rl.rollout.batch_builder import SampledBatch
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.runs.rollouts import GroupRow
from dapo_rl.train.batch import make_batch, shaped_rewards
from dapo_rl.train.critic import HFCritic
from dapo_rl.train.custom import build_advantages, build_losses
from dapo_rl.train.gae import with_values
from dapo_rl.train.metrics import step_metrics
from dapo_rl.train.policy import HFPolicy
from dapo_rl.types import Group, Trajectory, Verdict

MASK = np.array([True, True, False, False, True, False, True])
WORLD = ~MASK
RIGHT, WRONG = Verdict(1.0, True, "correct"), Verdict(0.0, False, "wrong")


def samples(seed=0, at_world=0.0, **columns):
    """Two episodes. `at_world` is what their columns have at tokens of the environment."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(2):
        own = {name: rng.normal(0, 0.3, 7) for name in ("advantages", "logps", *columns)}
        own = {name: np.where(MASK, column, at_world).astype(np.float32) for name, column in own.items()}
        own["logps"] = np.where(MASK, own["logps"] - 5, at_world)
        made.append(train_sample((5, 6), rng.integers(3, 250, 7), mask=MASK, group=0, correct=i == 0, **own))
    return made


def policy(**algo):
    model = small_model()
    train = TrainSettings(lr=1e-3, max_grad_norm=1e9)
    how = {"pad_id": tokenizer().pad_token_id, "temperature": 1.0, "norm_length": 20, "token_budget": 10**6}
    return HFPolicy(model, algo=AlgoSettings(**algo), train=train, **how)


def learned(learner, of):
    update = learner.update(of, lr=0.0)
    return update, torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_no_loss_has_a_gradient_at_them(loss, aggregation):
    torch.manual_seed(0)
    new, old, reference, advantages = (torch.randn(2, 7) * 0.3 for _ in range(4))
    new.requires_grad_()
    mask = torch.from_numpy(MASK).expand(2, 7)
    settings = AlgoSettings(loss=loss)
    losses = build_losses(settings)(new, old, advantages, mask, clip_low=0.2, clip_high=0.28, clip_ratio_c=None)
    total = aggregate(losses, mask, aggregation=aggregation) + aggregate(
        kl_penalty(new, reference, "k3"), mask, aggregation=aggregation
    )
    total.backward()
    assert new.grad[:, MASK].abs().sum() > 0
    assert not new.grad[:, WORLD].any()


@pytest.mark.parametrize("algo", [{}, {"kl_coef": 0.1}, {"importance_cap": 2.0}, {"positive_lm_coef": 0.1}], ids=str)
def test_an_update_does_not_depend_on_their_columns(algo):
    more = ("ref_logps",) if "kl_coef" in algo else ()
    columns = dict.fromkeys(more)
    learner = policy(**algo)
    update, gradient = learned(learner, samples(**columns))
    other, other_gradient = learned(learner, samples(at_world=50.0, **columns))
    assert gradient.abs().max() > 0
    assert torch.equal(gradient, other_gradient)
    assert update.metrics == pytest.approx(other.metrics, nan_ok=True)


def test_the_entropy_and_the_probability_are_means_over_the_policy_s_tokens():
    learner, given = policy(), samples()
    update, _ = learned(learner, given)
    entropy = np.concatenate([row[MASK] for row in learner.score_entropy(given)])
    assert update.metrics["actor/entropy"] == pytest.approx(entropy.mean(), rel=1e-5)
    probability = np.exp(np.concatenate([row[MASK] for row in learner.score(given)]))
    assert update.metrics["actor/prob"] == pytest.approx(probability.mean(), rel=1e-5)


def test_a_critic_does_not_learn_from_them():
    model = value_model(small_model())
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.3)
    learner = HFCritic(model, pad_id=tokenizer().pad_token_id, train=TrainSettings(), token_budget=10**6)
    _, gradient = learned(learner, samples(values=0, returns=0))
    _, other = learned(learner, samples(at_world=50.0, values=0, returns=0))
    assert gradient.abs().max() > 0
    assert torch.equal(gradient, other)


def critic_config(**critic):
    return Config.build({"preset": "vapo", "critic": {"lambda_policy": 0.9, **critic}, "overlong": {"shape": "off"}})


def episodes(mask=MASK, count=2):
    length = len(mask)
    made = tuple(Trajectory(range(5, 5 + length), -0.5, "", "stop", mask=mask, index=i) for i in range(count))
    return Group(0, make_prompt("p"), made, (RIGHT, WRONG)[:count])


@pytest.mark.parametrize("whiten", [False, True])
def test_gae_takes_the_policy_s_tokens_as_consecutive(whiten):
    """As for the same episodes without the environment's tokens, whatever the critic says of those."""
    settings = critic_config(whiten=whiten)
    values = np.linspace(-1, 1, 7, dtype=np.float32)

    def estimated(group, rows):
        batch = make_batch([group], settings)
        return with_values(batch, settings, lambda given: [rows.astype(np.float32)] * len(given))

    with_world = estimated(episodes(), np.where(MASK, values, 1e4))
    without = estimated(episodes(np.ones(4, bool)), values[MASK])
    for sample, alone in zip(with_world.samples, without.samples, strict=True):
        for column in ("advantages", "returns"):
            np.testing.assert_allclose(sample[column][MASK], alone[column], atol=1e-6)
            assert not sample[column][WORLD].any()
    assert with_world.metrics == pytest.approx(without.metrics, abs=1e-6)


def test_length_penalties_count_the_policy_s_tokens_of_whole_episodes():
    """10 tokens, or 4 of the policy; with a fork of 4 more, 8."""
    long = np.repeat([True, False, True], [2, 6, 2])
    group = episodes(long)
    soft = Config.build(
        {"overlong": {"shape": "soft", "cache_length": 4}, "sampling.max_new_tokens": 8, "env.name": "guess"}
    )
    assert shaped_rewards([group], soft)[0].tolist() == [1.0, 0.0]
    fork = Trajectory(range(4), -0.5, "", "stop", index=1)
    forked = Group(0, group.prompt, group.samples, group.verdicts, (fork,))
    assert forked.lengths == [4, 8]
    assert shaped_rewards([forked], soft)[0].tolist() == [1.0, -1.0]


def test_lengths_in_advantages_are_the_policy_s_tokens():
    """OPO weighs rewards by length: 4 and 2 tokens of the policy, of 7 each."""
    short = np.array([True, *[False] * 5, True])
    first, second = (episodes(mask, 1).samples[0] for mask in (MASK, short))
    group = Group(0, make_prompt("p"), (first, second), (RIGHT, WRONG))
    settings = Config.build({"algo.advantage": "opo", "overlong.shape": "off"})
    batch = full_batch([group], settings)
    assert [s["advantages"][0].item() for s in batch.samples] == pytest.approx([1 - 4 / 6, -4 / 6])


def test_metrics_count_the_policy_s_tokens_and_the_ends_by_turns():
    ended = episodes()
    samples = (ended.samples[0], ended.samples[1].replace(finish_reason="turns"))
    group = Group(0, ended.prompt, samples, ended.verdicts, (Trajectory(range(3), -0.5, "", "stop", index=1),))
    settings = Config.build({"overlong.shape": "off"})
    fill = SampledBatch((group,), (), (group,), tokens_finished=11)
    metrics = step_metrics(fill, make_batch([group], settings), [], shaped_rewards([group], settings))
    assert metrics["response_length/mean"] == 5.5
    assert metrics["response_length/max"] == 7
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["sampling/tokens_trained"] == 11
    assert metrics["reward/batch"] == 0.5, "an episode counts once, whether it forked or not"


def test_episodes_have_metrics_of_their_own():
    first = {"turns": 3, "tool_calls": 2, "tool_errors": 1, "env_wait_s": 0.5, "forks": 1}
    second = {"turns": 1, "env_wait_s": 0.25, "forks": 0, "env_failed": 1.0}
    group = episodes()
    played = tuple(s.replace(scalars=of) for s, of in zip(group.samples, (first, second), strict=True))
    late = Verdict(-1.0, False, "timeout", detail="timeout: not answered within 30 s (env.timeout_s)")
    settings = Config.build({"overlong.shape": "off"})

    def metrics(group):
        fill = SampledBatch((), (), (group,), tokens_finished=8)
        found = step_metrics(fill, make_batch([group], settings), [], shaped_rewards([group], settings))
        return {name: value for name, value in found.items() if name.startswith("env/")}

    assert metrics(Group(0, group.prompt, played, (group.verdicts[0], late))) == {
        "env/turns": 2, "env/tool_calls": 1, "env/tool_errors": 0.5, "env/wait_s": 0.375, "env/forks": 0.5,
        "env/failed": 0.5, "env/failed_timeout": 0.5, "env/failed_crashed": 0, "env/failed_too_long": 0,
        "env/failed_error": 0, "env/failed_lost": 0,
    }  # fmt: skip
    assert metrics(group) == {}


def test_custom_advantages_get_samples_without_forks(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def f(rewards, mask, response_mask, **settings):\n"
        "    assert response_mask.shape == (1, 2, 7), response_mask.shape\n"
        "    return response_mask.float() * rewards[..., None]\n"
    )
    fork = Trajectory(range(9), -0.5, "", "stop", index=0)
    group = Group(0, make_prompt("p"), episodes().samples, (RIGHT, WRONG), (fork,))
    settings = Config.build({"algo.advantage": f"{tmp_path}/mine.py:f", "overlong.shape": "off"})
    first, second, forked = (s["advantages"].tolist() for s in full_batch([group], settings).samples)
    assert first == MASK.tolist()
    assert second == [0.0] * 7
    assert forked == pytest.approx([4 / 7] * 9)
    assert build_advantages(settings.algo).takes("response_mask")


def test_the_rollout_log_has_the_mean_advantage_of_the_policy_s_tokens(tmp_path):
    sample = episodes(count=1).samples[0].replace(advantages=np.where(MASK, 0.5, 9.0))
    nothing = Trajectory.nothing(1).replace(finish_reason="stop")  # its environment did not open
    group = Group(0, make_prompt("p"), (sample, nothing), (RIGHT, Verdict(0.0, False, "error")))
    run = RunDirectory.create(tmp_path / "run", Config())
    run.write_rollouts(1, [GroupRow(group, "environment_error")])
    rows = pq.read_table(run.rollout(1)).to_pylist()
    assert [row["advantage"] for row in rows] == [0.5, None]
    assert [row["version_first"] for row in rows] == [0, None]
    assert math.isfinite(rows[0]["score"])
