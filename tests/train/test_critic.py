"""The critic: what it computes, how it learns, and the credit that it gives to tokens."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import full_batch, make_prompt, make_sample, small_model, tokenizer, train_sample
from transformers import Llama4ForCausalLM, Llama4TextConfig

from dapo_rl import Config
from dapo_rl.algo import reference
from dapo_rl.config import AlgoSettings, TrainSettings
from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.models.values import ResponseValues, value_model
from dapo_rl.train.checkpoint import Checkpoints
from dapo_rl.train.critic import HFCritic
from dapo_rl.train.gae import with_values
from dapo_rl.train.policy import HFPolicy
from dapo_rl.train.schedule import critic_rate, policy_rate
from dapo_rl.train.transforms import scored
from dapo_rl.types import Group, Verdict


def make_model(seed=0, policy=None):
    """A critic with an opinion, unlike a new one."""
    model = value_model(policy or small_model())
    torch.manual_seed(seed)
    head = model.get_output_embeddings()
    torch.nn.init.normal_(head.weight, std=0.3)
    torch.nn.init.constant_(head.bias, 0.1)
    return model


def make_critic(model=None, token_budget=10**6, packed=True, **changes):
    train = TrainSettings(lr=1e-2, max_grad_norm=1e9, packed=packed)
    how = {"pad_id": tokenizer().pad_token_id, "train": train, "token_budget": token_budget}
    return HFCritic(model or make_model(), **how, **changes)


def make_samples(seed=0, count=6, masked=()):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 250, rng.integers(2, 7)) for _ in range(count // 2)]
    lengths = rng.integers(2, 9, count)
    return [
        train_sample(
            prompt_ids=prompts[i // 2],
            token_ids=rng.integers(3, 250, lengths[i]),
            logps=0.0,
            advantages=0.0,
            group=i // 2,
            in_loss=i not in masked,
            values=rng.normal(0, 1, lengths[i]),
            returns=rng.normal(0, 1, lengths[i]),
            mask=rng.random(lengths[i]) < 0.8,
        )
        for i in range(count)
    ]


def gradient(learner, samples):
    learner.update(samples, lr=0.0)
    return torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None])


@torch.no_grad()
def by_hand(model, sample, backbone=None):
    """The head on the hidden state of the token before each response token."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
    hidden = (backbone or model.base_model)(input_ids=ids).last_hidden_state[0]
    head = model.get_output_embeddings()
    return (hidden @ head.weight.T + head.bias)[len(sample.prompt_ids) - 1 : -1, 0].numpy()


@pytest.mark.parametrize("packed", [True, False])
def test_a_value_is_that_of_the_state_before_the_token(packed):
    model, samples = make_model(), make_samples()
    for values, sample in zip(make_critic(model, packed=packed).score(samples), samples, strict=True):
        np.testing.assert_allclose(values, by_hand(model, sample), atol=1e-5)


def test_a_model_that_does_not_name_its_base_has_a_critic():
    sizes = {"vocab_size": len(tokenizer()), "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2}
    model = make_model(policy=Llama4ForCausalLM(Llama4TextConfig(**sizes, **heads)).eval())
    assert model.base_model is model
    samples = make_samples()
    for values, sample in zip(make_critic(model, packed=False).score(samples), samples, strict=True):
        np.testing.assert_allclose(values, by_hand(model, sample, model.model), atol=1e-5)


def test_a_value_does_not_depend_on_what_comes_later():
    critic, sample = make_critic(), make_samples()[0]
    other = sample.replace(token_ids=[*sample.token_ids[:-1], 5])
    np.testing.assert_array_equal(critic.score([other])[0], critic.score([sample])[0])


def test_a_new_critic_expects_nothing_and_is_a_copy():
    policy = small_model()
    before = copy.deepcopy(policy.state_dict())
    critic = make_critic(value_model(policy))
    assert all((values == 0).all() for values in critic.score(make_samples()))
    for _ in range(3):  # the first changes the head alone, whose weights are 0
        critic.update(make_samples(), lr=0.1)
    assert any((values != 0).all() for values in critic.score(make_samples()))
    for name, weight in policy.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_a_new_critic_of_tied_embeddings_keeps_the_embeddings():
    policy = small_model(tie_word_embeddings=True)
    critic = value_model(policy)
    assert torch.equal(critic.get_input_embeddings().weight, policy.get_input_embeddings().weight)
    assert critic.get_output_embeddings().weight.shape == (1, 32)
    assert policy.get_output_embeddings().weight is policy.get_input_embeddings().weight


@pytest.mark.parametrize("clip", [None, 0.5])
def test_loss_and_metrics_equal_the_reference(clip):
    samples, model = make_samples(masked=(2,)), make_model()
    width = max(len(s.token_ids) for s in samples)

    def matrix(rows):
        return np.array([[*row, *[0] * (width - len(row))] for row in rows])

    new = matrix([by_hand(model, s) for s in samples])
    old, targets = (matrix([s[name] for s in samples]) for name in ("values", "returns"))
    mask = matrix([s.loss_mask for s in samples]).astype(bool)
    update = make_critic(model, 24, value_clip=clip).update(samples, lr=0.0)
    expected = reference.value_loss(new, old, targets, mask, clip=clip)
    assert update.metrics["critic/vf_loss"] == pytest.approx(expected, rel=1e-4)
    if clip is None:
        assert "critic/vf_clipfrac" not in update.metrics
        return
    limited = old + np.clip(new - old, -clip, clip)
    clipped = (limited - targets) ** 2 > (new - targets) ** 2
    assert update.metrics["critic/vf_clipfrac"] == pytest.approx(clipped[mask].mean(), abs=1e-6)
    assert 0 < update.metrics["critic/vf_clipfrac"] < 1


@settings(max_examples=12, deadline=None)
@given(st.integers(6, 28), st.integers(0, 10**6), st.booleans())
def test_the_gradient_is_the_same_for_any_split_into_micro_batches(token_budget, seed, packed):
    samples = make_samples(seed, masked=(1,))
    whole = gradient(make_critic(), samples)
    torch.testing.assert_close(gradient(make_critic(None, token_budget, packed), samples), whole, atol=1e-5, rtol=1e-4)


def test_it_learns_what_a_state_is_worth():
    """Each sample has a return of its own, which its states predict after a while."""
    samples = [s.replace(returns=np.full(len(s.token_ids), i % 2), mask=True) for i, s in enumerate(make_samples())]
    critic = make_critic(value_model(small_model()))
    losses = [critic.update(samples, lr=3e-3).metrics["critic/vf_loss"] for _ in range(60)]
    assert losses[0] == pytest.approx(
        sum(s["returns"].sum() for s in samples) / 2 / sum(s.trained_tokens for s in samples)
    )
    assert losses[-1] < 0.1 * losses[0]


def test_nothing_to_learn_from_changes_nothing():
    critic = make_critic()
    update = critic.update(make_samples(masked=range(6)), lr=1.0)
    assert update.metrics == {}
    assert not critic.optimizer.state


def test_a_checkpoint_restores_weights_and_moments_exactly(tmp_path):
    samples, critic = make_samples(), make_critic()
    critic.update(samples, lr=1e-2)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, [critic])
    other = make_critic(value_model(small_model()))
    assert checkpoints.restore([other]).step == 1
    for learner in (critic, other):
        learner.update(samples, lr=1e-2)
    for name, weight in critic.model.state_dict().items():
        assert torch.equal(weight, other.model.state_dict()[name]), name
    with pytest.raises(UserError, match="belongs to a different model"):
        make_critic(value_model(small_model(hidden_size=16))).load(tmp_path / "step-1")
    (tmp_path / "step-1" / "critic.pt").write_bytes(b"no")
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        make_critic().load(tmp_path / "step-1")


def test_a_critic_that_is_not_finite_is_neither_trained_on_nor_saved(tmp_path):
    critic, samples = make_critic(), make_samples()
    with pytest.raises(NonFiniteError, match="the critic's loss is nan"):
        critic.update([samples[0].replace(returns=np.nan * samples[0]["returns"], mask=True)], lr=1e-2)
    with torch.no_grad():
        critic.model.get_output_embeddings().weight[0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match="the critic is not finite"):
        critic.save(tmp_path)


def make_group(draw, scores, lengths=(3, 5), truncated=()):
    samples = [make_sample(n, "length" if i in truncated else "stop") for i, n in enumerate(lengths)]
    verdicts = tuple(Verdict(score, score > 0, "correct" if score > 0 else "wrong") for score in scores)
    return Group(draw, make_prompt(f"p{draw}"), tuple(samples), verdicts)


def vapo(*settings):
    return Config.load(None, ["preset=vapo", "overlong.shape=off", *settings])


def constant(value):
    return lambda samples: [np.full(len(s.token_ids), value, np.float32) for s in samples]


def credited(config, groups, values=None, reference=None):
    batch = full_batch(groups, config)
    if reference is not None:
        batch = scored("ref_logps", reference)(batch)
    done = with_values(batch, config, values or constant(0.5))
    return done, done.metrics


def test_credit_by_hand():
    """V is 0.5 everywhere and the reward 1 or −1 at the last token: δ is 0 except at the end, where it is 0.5 or −1.5.
    With λ = 1/2 it halves with each token before."""
    batch, metrics = credited(vapo("critic.lambda_policy=0.5"), [make_group(0, (1.0, -1.0))])
    first, second = batch.groups[0].samples
    assert first["advantages"].tolist() == [0.125, 0.25, 0.5]
    assert second["advantages"].tolist() == [-1.5 / 16, -1.5 / 8, -0.375, -0.75, -1.5]
    assert first["returns"].tolist() == [1.0] * 3
    assert second["returns"].tolist() == [-1.0] * 5  # λ = 1: the return
    assert first["values"].tolist() == [0.5] * 3
    assert metrics["critic/values/mean"] == 0.5
    assert metrics["critic/returns/mean"] == pytest.approx((3 - 5) / 8)
    assert metrics["critic/vf_explained_var"] == pytest.approx(0)  # a constant explains nothing
    assert metrics["critic/lambda"] == 0.5
    assert (metrics["critic/advantages/max"], metrics["critic/advantages/min"]) == (0.5, -1.5)


def test_lambda_adapts_to_the_length():
    """1 − 1 / (0.05 · 40) = 0.5, and for 100 tokens 0.8."""
    batch, metrics = credited(vapo(), [make_group(0, (1.0, 1.0), lengths=(40, 100))])
    assert metrics["critic/lambda"] == pytest.approx(0.65)
    for sample, decay in zip(batch.groups[0].samples, (0.5, 0.8), strict=True):
        assert sample["advantages"][-1] == 0.5
        assert sample["advantages"][-2] == pytest.approx(0.5 * decay)
    _, metrics = credited(vapo("critic.lambda_lowest=0.7"), [make_group(0, (1.0, 1.0), lengths=(40, 100))])
    assert metrics["critic/lambda"] == pytest.approx(0.75)


def test_a_perfect_critic_gives_no_advantage_after_the_deciding_token():
    """The third token decides: before it the critic expects 0, after it the reward."""

    def values(samples):
        rows = [np.zeros(len(s.token_ids), np.float32) for s in samples]
        for row, reward in zip(rows, (1.0, -1.0), strict=True):
            row[3:] = reward
        return rows

    batch, metrics = credited(vapo("critic.lambda_lowest=0.9"), [make_group(0, (1.0, -1.0), (6, 8))], values)
    for sample, reward in zip(batch.groups[0].samples, (1.0, -1.0), strict=True):
        assert sample["advantages"][2] == reward
        assert sample["advantages"][3:].tolist() == [0.0] * (len(sample.token_ids) - 3)
        assert sample["advantages"][1] == pytest.approx(0.9 * reward)
    assert metrics["critic/vf_explained_var"] > 0.4


def test_whitened_advantages_have_mean_0_and_variance_1_over_all_groups():
    groups = [make_group(0, (1.0, -1.0)), make_group(1, (1.0, 1.0), (4, 2))]
    batch, _ = credited(vapo("critic.whiten=true", "critic.lambda_policy=0.5"), groups)
    plain, _ = credited(vapo("critic.lambda_policy=0.5"), groups)
    white, raw = (np.concatenate([s["advantages"] for g in b for s in g.samples]) for b in (batch, plain))
    assert white.mean() == pytest.approx(0, abs=1e-6)
    assert white.std(ddof=1) == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(white, (raw - raw.mean()) / raw.std(ddof=1), atol=1e-5)


def test_kl_in_the_reward_by_hand():
    """log π − log π_ref is 0.2 at each token, k1, so each has the reward −0.1 · 0.2; γ = λ = 1 sums them up."""
    config = vapo("algo.kl_in=reward", "algo.kl_coef=0.1", "algo.kl_kind=k1", "critic.lambda_policy=1")
    groups = [make_group(0, (1.0, -1.0), (3, 1))]
    batch, _ = credited(config, groups, constant(0.0), lambda samples: [s.logps - 0.2 for s in samples])
    first, second = batch.groups[0].samples
    np.testing.assert_allclose(first["advantages"], [0.94, 0.96, 0.98], atol=1e-6)
    np.testing.assert_allclose(second["advantages"], [-1.02], atol=1e-6)
    np.testing.assert_allclose(first["returns"], first["advantages"], atol=1e-6)


def test_samples_outside_the_loss_are_left_alone():
    config = vapo("overlong.mask_truncated=true")
    groups = [make_group(0, (1.0, -1.0), truncated=(1,)), make_group(1, (1.0, 1.0), truncated=(0, 1))]
    asked = []

    def values(samples):
        asked.extend(samples)
        return constant(0.5)(samples)

    batch, _ = credited(config, groups, values)
    assert len(asked) == 1
    assert [["returns" in s.columns for s in group.samples] for group in batch] == [[True, False], [False, False]]
    masked = full_batch([make_group(1, (1.0, 1.0), truncated=(0, 1))], config)
    assert with_values(masked, config, values) == masked


@pytest.mark.parametrize("token_budget", [10**6, 20])
def test_the_loss_of_correct_samples_equals_the_reference(token_budget):
    model, samples = small_model(), make_samples(masked=(2,))
    samples = [s.replace(scalars={"correct": i % 2 == 0}) for i, s in enumerate(samples)]
    how = {"pad_id": tokenizer().pad_token_id, "temperature": 1.0, "norm_length": 20, "token_budget": token_budget}
    algo = AlgoSettings(positive_lm_coef=0.3)
    policy = HFPolicy(model, algo=algo, train=TrainSettings(lr=1e-3), **how)
    logps = policy.score(samples)
    positive = np.concatenate(
        [lp[s.mask] for lp, s in zip(logps, samples, strict=True) if s.correct and s.loss_mask.any()]
    )
    metrics = policy.update(samples, lr=0.0).metrics
    assert metrics["actor/positive_lm_loss"] == pytest.approx(-0.3 * positive.mean(), rel=1e-4)
    wrong = [s.replace(scalars={"correct": False}) for s in samples]
    assert policy.update(wrong, lr=0.0).metrics["actor/positive_lm_loss"] == 0


def test_the_loss_of_correct_samples_makes_them_more_likely():
    model, samples = small_model(), [s.replace(scalars={"correct": True}, mask=True) for s in make_samples(count=2)]
    how = {"pad_id": tokenizer().pad_token_id, "temperature": 1.0, "norm_length": 20, "token_budget": 10**6}
    policy = HFPolicy(model, algo=AlgoSettings(positive_lm_coef=0.1), train=TrainSettings(lr=1e-3), **how)
    before = sum(lp.sum() for lp in policy.score(samples))
    policy.update(samples, lr=1e-3)  # their advantages are 0
    assert sum(lp.sum() for lp in policy.score(samples)) > before + 0.5


def test_the_policys_schedule_begins_after_value_pre_training():
    schedule = ["train.warmup_steps=2", "train.lr=1e-3", "train.lr_schedule=cosine"]
    config = vapo("train.steps=20", "critic.pretrain_steps=10", *schedule)
    alone = Config.load(None, ["train.steps=10", *schedule])
    assert [policy_rate(10 + step, config) for step in range(1, 11)] == [
        policy_rate(step, alone) for step in range(1, 11)
    ]
    assert critic_rate(1, config) == pytest.approx(1e-3)  # half of 2 × train.lr
    assert critic_rate(2, config) == pytest.approx(2e-3)


def test_values_are_computed_in_float32_under_autocast():
    """In bfloat16, 0.1 + 1/300 and 0.1 would be the same."""
    model = make_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
        model.get_output_embeddings().bias.fill_(0.1 + 1 / 300)
    forward = ResponseValues(model, pad_id=0, dtype=torch.bfloat16)
    with torch.no_grad(), forward.compute(make_samples()) as stats:
        assert stats.values[stats.mask].unique().tolist() == [pytest.approx(0.1 + 1 / 300, abs=1e-7)]
