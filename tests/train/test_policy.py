"""The update: the same for any split, equal to the reference, blind to masked samples, loud when it diverges."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import small_model, tokenizer, train_sample, with_reference

from dapo_rl.algo import dapo_policy_loss, reference
from dapo_rl.config import AlgoSettings, TrainSettings
from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.models.response_logps import response_logps
from dapo_rl.train.policy import HFPolicy

AGGREGATIONS = ["token-mean", "token-mean-per-group", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def make_policy(
    model=None, token_budget=10**6, train=None, reference=None, dtype=torch.float32, time_share=False, **algo
):
    return HFPolicy(
        model or small_model(),
        pad_id=tokenizer().pad_token_id,
        temperature=1.0,
        algo=AlgoSettings(**algo),
        train=TrainSettings(**(train or {"lr": 1e-3, "max_grad_norm": 1e9})),
        norm_length=20,
        token_budget=token_budget,
        dtype=dtype,
        reference=reference,
        time_share=time_share,
    )


def samples_for(model, seed=0, count=6, masked=(), drift=0.3):
    """Random samples in groups of two, with old log-probabilities a random bit away from the policy's."""
    rng = np.random.default_rng(seed)
    raw = [
        train_sample(
            prompt_ids=tuple(rng.integers(3, 250, rng.integers(2, 7)).tolist()),
            token_ids=tuple(rng.integers(3, 250, rng.integers(1, 9)).tolist()),
            logps=0.0,
            advantages=float(rng.normal()),
            group=i // 2,
            in_loss=i not in masked,
        )
        for i in range(count)
    ]
    logps = make_policy(model).score(raw)
    old = [[p + rng.normal(0, drift) for p in lp.tolist()] for lp in logps]
    return [sample.replace(logps=o) for sample, o in zip(raw, old, strict=True)]


def gradient(policy, samples):
    policy.update(samples, lr=0.0)
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()])


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(AGGREGATIONS), st.integers(6, 28), st.integers(0, 10**6))
def test_the_gradient_is_the_same_for_any_split_into_micro_batches(aggregation, token_budget, seed):
    model = small_model()
    samples = samples_for(model, seed, masked=(1,))
    whole = gradient(make_policy(model, aggregation=aggregation), samples)
    split = make_policy(model, token_budget, aggregation=aggregation)
    assume(len(list(split._micro_batches(samples))) > 1)  # short samples may fit into one
    torch.testing.assert_close(gradient(split, samples), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_and_metrics_equal_the_reference(aggregation):
    """The number that the update reports is NumPy's, from each sample's log-probabilities computed by itself."""
    model = small_model()
    samples = samples_for(model, masked=(2,))
    width = max(len(s.token_ids) for s in samples)

    def matrix(rows):
        return np.array([[*row, *[0.0] * (width - len(row))] for row in rows])

    new = matrix([make_policy(model).score([s])[0] for s in samples])
    old = matrix([s.logps for s in samples])
    mask = np.array([[s.loss_mask.any() and t < len(s.token_ids) for t in range(width)] for s in samples])
    tokens = mask.sum(1)
    group_tokens = [sum(tokens[j] for j, o in enumerate(samples) if o.group == s.group) for s in samples]
    advantages = [float(s["advantages"][0]) for s in samples]
    metrics = make_policy(model, 40, aggregation=aggregation).update(samples, lr=0.0).metrics
    expected = reference.dapo_policy_loss(
        new, old, advantages, mask, aggregation=aggregation, group_tokens=group_tokens, norm_length=20
    )
    assert metrics["actor/pg_loss"] == pytest.approx(expected, rel=1e-4)
    fractions = reference.clip_fractions(new, old, advantages, mask)
    assert metrics["actor/pg_clipfrac_high"] == pytest.approx(fractions.high)
    assert metrics["actor/pg_clipfrac_low"] == pytest.approx(fractions.low)
    assert fractions.high > 0
    assert fractions.low > 0
    clipped = (np.array(advantages)[:, None] > 0) & (np.exp(new - old) > 1.28) & mask
    assert metrics["actor/clipped_high_prob"] == pytest.approx(np.exp(new[clipped]).mean(), rel=1e-4)
    assert metrics["actor/prob"] == pytest.approx(np.exp(new[mask]).mean(), rel=1e-4)
    assert metrics["actor/ppo_kl"] == pytest.approx((old - new)[mask].mean(), rel=1e-3, abs=1e-6)


def test_a_masked_sample_changes_nothing():
    model = small_model()
    samples = samples_for(model, masked=(3,))
    without = [s for s in samples if s.loss_mask.any()]
    for aggregation in AGGREGATIONS:
        policy = make_policy(model, aggregation=aggregation)
        torch.testing.assert_close(gradient(policy, samples), gradient(policy, without), atol=1e-6, rtol=1e-5)


def test_a_mini_batch_with_everything_masked_leaves_the_weights_alone():
    model = small_model()
    before = {n: p.clone() for n, p in model.named_parameters()}
    policy = make_policy(model)
    samples = samples_for(model, masked=range(6))
    update = policy.update(samples, lr=1e-2)
    assert (update.metrics, set(update.columns)) == ({}, {None})
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_an_update_raises_the_probability_of_what_was_good():
    model = small_model()
    policy = make_policy(model)
    samples = samples_for(model, drift=0.0)
    before = [sum(lp) for lp in policy.score(samples)]
    metrics = policy.update(samples, lr=1e-3).metrics
    after = [sum(lp) for lp in policy.score(samples)]
    gain = sum((a - b) * s["advantages"][0] for a, b, s in zip(after, before, samples, strict=True))
    assert gain > 0
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-5)
    assert metrics["actor/mismatch_kl"] == pytest.approx(0, abs=1e-6)


def test_the_mismatch_of_engine_and_trainer_counts_the_tokens_of_the_current_weights():
    """A sample that was carried over has tokens of two versions."""
    model = small_model()
    samples = samples_for(model, drift=0.0)
    half = [np.arange(len(sample.token_ids)) >= len(sample.token_ids) // 2 for sample in samples]
    stale = [np.where(new, s.logps, s.logps - 0.5) for s, new in zip(samples, half, strict=True)]
    carried = [s.replace(logps=logps, fresh=new) for s, logps, new in zip(samples, stale, half, strict=True)]
    assert make_policy(model).update(carried, 0.0).metrics["actor/mismatch_kl"] == pytest.approx(0, abs=1e-6)
    whole = [sample.replace(fresh=True) for sample in carried]
    assert make_policy(model).update(whole, 0.0).metrics["actor/mismatch_kl"] > 0.01


def test_the_mismatch_of_engine_and_trainer_leaves_out_carried_samples():
    model = small_model()
    exact, drifted = samples_for(model, drift=0.0), samples_for(model, seed=1, drift=0.5)
    carried = [sample.replace(fresh=False, scalars={"group": 9}) for sample in drifted]
    assert make_policy(model).update([*exact, *carried], 0.0).metrics["actor/mismatch_kl"] == pytest.approx(0, abs=1e-6)
    assert make_policy(model).update([*exact, *drifted], 0.0).metrics["actor/mismatch_kl"] > 0.01
    assert math.isnan(make_policy(model).update(carried, 0.0).metrics["actor/mismatch_kl"])


def test_gradients_are_clipped_to_the_norm():
    model = small_model()
    samples = samples_for(model)
    plain = gradient(make_policy(model), samples)
    clipped = gradient(make_policy(model, train={"max_grad_norm": 0.01}), samples)
    assert plain.norm() > 0.02
    torch.testing.assert_close(clipped, plain * 0.01 / plain.norm(), atol=1e-6, rtol=1e-3)


def test_kl_to_the_starting_model_pulls_back():
    start, model = small_model(0), small_model(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    samples = [sample.replace(advantages=0.0) for sample in samples_for(model, drift=0.0)]
    policy = make_policy(model, reference=start, kl_coef=0.5)
    metrics = policy.update(with_reference(policy, samples), lr=0.0).metrics
    now, then = (make_policy(m).score(samples) for m in (model, start))
    d = np.concatenate(then) - np.concatenate(now)
    assert metrics["actor/kl_loss"] == pytest.approx((np.exp(d) - d - 1).mean(), rel=1e-3)
    assert metrics["actor/pg_loss"] == pytest.approx(0.0)
    assert metrics["actor/grad_norm"] > 0
    same = make_policy(start, reference=small_model(0), kl_coef=0.5)
    assert same.update(with_reference(same, samples), 0.0).metrics["actor/kl_loss"] < 1e-6


def test_an_unbiased_penalty_is_that_of_its_tokens():
    """`actor/kl_loss` by NumPy, from the behaviour's log-probabilities; its gradient pulls another way than k3's."""
    model, start = small_model(), small_model(1)
    samples = samples_for(model)
    policy = make_policy(model, 24, reference=start, kl_coef=0.5, kl_unbiased=True)
    samples = with_reference(policy, samples)
    logps = make_policy(model).score(samples)
    rows = zip(logps, samples, strict=True)
    tokens = np.concatenate([reference.unbiased_kl(lp, s["ref_logps"], s.logps) for lp, s in rows])
    assert policy.update(samples, lr=0.0).metrics["actor/kl_loss"] == pytest.approx(tokens.mean(), rel=1e-4)
    plain = make_policy(model, reference=start, kl_coef=0.5)
    assert torch.cosine_similarity(gradient(policy, samples), gradient(plain, samples), dim=0) < 0.99


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_divergence_is_met_before_the_weights_are_touched(poison):
    model = small_model()
    before = {n: p.clone() for n, p in model.named_parameters()}
    samples = samples_for(model)
    samples[0] = samples[0].replace(advantages=poison)
    with pytest.raises(NonFiniteError, match=r"the loss is (nan|-?inf)"):
        make_policy(model).update(samples, lr=1e-2)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("aggregation", [*AGGREGATIONS, "micro-batch-token-mean"])
@pytest.mark.filterwarnings("ignore:micro-batch-token-mean")
def test_packed_and_padded_updates_are_one_update(aggregation, packed):
    """Groups that share their prompts, in one micro-batch or several, against the padded computation of the whole."""
    model = small_model()
    samples = [s.replace(prompt_ids=(9 + s.group, 7, 5)) for s in samples_for(model, masked=(1,))]
    train = {"lr": 1e-3, "max_grad_norm": 1e9}
    whole = gradient(make_policy(model, train=train | {"packed": False}, aggregation=aggregation), samples)
    budget = 12 if aggregation != "micro-batch-token-mean" else 10**6
    policy = make_policy(model, budget, train=train | {"packed": packed}, aggregation=aggregation)
    torch.testing.assert_close(gradient(policy, samples), whole, atol=1e-5, rtol=1e-4)


def test_masked_samples_are_not_computed():
    model = small_model()
    samples = samples_for(model, masked=(1, 3))
    seen = []
    policy = make_policy(model)
    model.model.register_forward_pre_hook(
        lambda _module, _args, inputs: seen.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    policy.update(samples, lr=0.0)
    assert seen == [sum(len(s.prompt_ids) + len(s.token_ids) - 1 for s in samples if s.loss_mask.any())]


def test_small_updates_in_bfloat16_reach_float32_weights():
    """At 1e-6 a step is a thousandth of what bfloat16 can tell from a weight of 0.1."""
    model = small_model()
    before = {n: p.clone() for n, p in model.named_parameters()}
    make_policy(model, dtype=torch.bfloat16).update(samples_for(model), lr=1e-6)
    for name, p in model.named_parameters():
        assert p.dtype == p.grad.dtype == torch.float32
        assert not torch.equal(p, before[name]), name
        assert (p - before[name]).abs().max() < 2e-6


def test_bfloat16_is_close_to_float32():
    model = small_model(initializer_range=0.1)
    samples = samples_for(model)
    ours, exact = (gradient(make_policy(model, dtype=d), samples) for d in (torch.bfloat16, torch.float32))
    assert 0 < (ours - exact).norm() < 0.05 * exact.norm()


def test_the_reference_is_computed_as_the_policy_is():
    start, model = small_model(0), small_model(0)
    samples = samples_for(model)
    policy = make_policy(model, reference=start, kl_coef=0.5, dtype=torch.bfloat16)
    metrics = policy.update(with_reference(policy, samples), 0.0).metrics
    assert metrics["actor/kl_loss"] == pytest.approx(0.0, abs=1e-9)


def test_gradient_checkpointing_changes_nothing():
    model = small_model()
    samples = samples_for(model)
    plain = gradient(make_policy(model), samples)
    again = make_policy(model, train={"lr": 1e-3, "max_grad_norm": 1e9, "gradient_checkpointing": True})
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(gradient(again, samples), plain, atol=1e-6, rtol=1e-5)
    assert len(calls) == 2


def test_one_step_of_the_optimizer_is_adamw():
    """From the gradient by hand: matrices decay, vectors do not."""
    model = small_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    policy = make_policy(model, train={"lr": 1.0, "max_grad_norm": 1e9, "weight_decay": 0.1, "betas": (0.9, 0.99)})
    policy.update(samples_for(model), lr=1e-2)
    for name, p in model.named_parameters():
        decay = 0.1 if p.dim() == 2 else 0.0
        expected = before[name] * (1 - 1e-2 * decay) - 1e-2 * p.grad / (p.grad.abs() + 1e-8)
        torch.testing.assert_close(p.detach(), expected, atol=1e-6, rtol=1e-5)


def test_an_optimizer_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"train\.optimizer: adamw_8bit needs torchao: pip install torchao"):
        make_policy(train={"optimizer": "adamw_8bit"})


def with_memory_for(model, tokens, phase="forward"):
    """Makes a pass of more tokens fail as the GPU's allocator does; returns the sizes of all passes, as they come."""
    passes = []

    def run_out(count):
        if count > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def hook(_module, _args, inputs, output):
        count = inputs["input_ids"].numel()
        passes.append(count)
        if phase == "forward" or not output.last_hidden_state.requires_grad:
            run_out(count)
        else:
            output.last_hidden_state.register_hook(lambda _gradient: run_out(count))

    model.model.register_forward_hook(hook, with_kwargs=True)
    return passes


def ragged(model):
    """A short sample first, a pair of which the second is too much, and one that is as long as both."""
    lengths = [4, 9, 9, 18]
    samples = samples_for(model, count=4)
    return [
        train_sample((5 + i, 6, 7), range(20, 20 + n), -5.0, s["advantages"][0], s.group)
        for i, (s, n) in enumerate(zip(samples, lengths, strict=True))
    ]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_out_of_memory_halves_the_micro_batch_and_the_update_is_the_same(phase, packed):
    train = {"lr": 1e-3, "max_grad_norm": 1e9, "packed": packed}
    model, cautious = small_model(), small_model()
    samples = ragged(model)
    policy, expected = make_policy(model, 40, train=train), make_policy(cautious, 20, train=train)
    passes = with_memory_for(model, 21, phase)
    update = policy.update(samples, lr=1e-3)
    assert max(passes) > 21
    assert max(passes[-3:]) <= 21
    assert update.metrics == pytest.approx(expected.update(samples, lr=1e-3).metrics, nan_ok=True)
    for ours, theirs in zip(model.parameters(), cautious.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    (note,) = update.notes
    assert note.startswith("out of GPU memory: micro-batches now have 20 tokens instead of 40; ")
    passes.clear()
    assert policy.update(samples, lr=1e-3).notes == ()
    assert max(passes) <= 21, "the budget stays halved"


def test_gradients_made_before_memory_ran_out_are_dropped():
    """The first micro-batch fits and the second does not: twice the first one's gradient would be wrong."""
    model = small_model()
    last = ragged(model)[3]
    samples = [*ragged(model)[:3], train_sample(last.prompt_ids, [20] * 9, -5.0, last["advantages"][0], last.group)]
    whole = gradient(make_policy(model), samples)
    policy = make_policy(model, 26)
    passes = with_memory_for(model, 20)
    torch.testing.assert_close(gradient(policy, samples), whole, atol=1e-6, rtol=1e-5)
    assert passes[0] <= 20 < passes[1]


def test_a_budget_far_above_the_batch_is_halved_until_the_split_changes():
    model = small_model()
    samples = samples_for(model)
    total = sum(len(s.prompt_ids) + len(s.token_ids) - 1 for s in samples)
    policy = make_policy(model, 2**17)
    passes = with_memory_for(model, total - 1)
    update = policy.update(samples, lr=0.0)
    assert len(passes) == 3, "one that fails, then two"
    assert len(update.notes) == 1


def test_log_probabilities_survive_out_of_memory():
    model = small_model()
    samples = samples_for(model)
    expected = make_policy(model).score(samples)
    policy = make_policy(model)
    passes = with_memory_for(model, 20)
    for ours, theirs in zip(policy.score(samples), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert max(passes) > 20
    assert policy.update(samples, lr=0.0).notes, "the next update tells of it"


@pytest.mark.parametrize("recompute", [False, True])
def test_a_sample_that_does_not_fit_by_itself_is_one_line(recompute):
    model = small_model()
    samples = ragged(model)
    policy = make_policy(model, train={"lr": 1e-3, "gradient_checkpointing": recompute})
    before = {n: p.clone() for n, p in model.named_parameters()}
    with_memory_for(model, 19)
    for attempt in (lambda: policy.update(samples, lr=1e-3), lambda: policy.score(samples)):
        with pytest.raises(UserError) as caught:
            attempt()
        line = str(caught.value)
        assert line.startswith("out of GPU memory: a single sample of 21 tokens does not fit; ")
        assert ("train.gradient_checkpointing=true" in line) is not recompute
        assert line.endswith("lower sampling.kv_memory_gib or sampling.max_new_tokens")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_samples_of_single_tokens_do_not_fit_either():
    """Their prompt is computed once whatever the split: a budget of one token is the smallest there is."""
    model = small_model()
    samples = [train_sample((5,), (n,), (-5.0,), 1.0, 0) for n in (6, 7)]
    policy = make_policy(model)
    with_memory_for(model, 0)
    with pytest.raises(UserError, match="a single sample of 2 tokens does not fit"):
        policy.update(samples, lr=1e-3)


def test_a_resumed_policy_keeps_the_lowered_budget(tmp_path):
    model = small_model()
    samples = ragged(model)
    policy = make_policy(model, 40)
    with_memory_for(model, 21)
    policy.update(samples, lr=1e-3)
    split = policy._micro_batches(samples)
    resumed, lower = make_policy(small_model(), 40), make_policy(small_model(), 10)
    policy.save(tmp_path)(lambda: False)
    for other in (resumed, lower):
        other.load(tmp_path)
    assert resumed._micro_batches(samples) == split
    assert torch.load(tmp_path / "optimizer.pt")["lowered_budget"] == 20
    assert len(lower._micro_batches(samples)) > len(split), "a setting that is lower still wins"
    untouched = make_policy(small_model(), 40)
    torch.save({"optimizer": torch.load(tmp_path / "optimizer.pt")["optimizer"]}, tmp_path / "optimizer.pt")
    untouched.load(tmp_path)
    assert len(untouched._micro_batches(samples)) < len(split), "a checkpoint without it"


def test_out_of_memory_in_the_optimizer_is_one_line():
    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = small_model()
    policy = make_policy(model)
    policy.optimizer.register_step_pre_hook(run_out)
    with pytest.raises(UserError, match=r"out of GPU memory in the optimizer's step; lower sampling\.kv_memory_gib"):
        policy.update(samples_for(model), lr=1e-3)


@pytest.mark.parametrize("budget", [10**6, 20])
def test_the_tokens_that_an_update_saw_are_those_of_the_weights_before_it(budget):
    model = small_model()
    samples = samples_for(model, masked=(1, 4))
    policy = make_policy(model, token_budget=budget)
    before = policy.score(samples)
    update = policy.update(samples, lr=1e-3)
    metrics, tokens = update.metrics, update.columns
    assert [t is None for t in tokens] == [not s.loss_mask.any() for s in samples]
    for sample, seen, logps in zip(samples, tokens, before, strict=True):
        if sample.loss_mask.any():
            assert seen["train_logps"] == pytest.approx(logps, abs=1e-5)
            assert len(seen["entropies"]) == len(sample.token_ids)
    entropies = [e for seen in tokens if seen for e in seen["entropies"]]
    assert sum(entropies) / len(entropies) == pytest.approx(metrics["actor/entropy"], abs=1e-5)


def test_an_update_tells_which_bound_took_a_tokens_gradient_away():
    """One sample for each: log-ratios far beyond the bounds, and one inside them."""
    model = small_model()
    plain = [s.replace(advantages=1.0) for s in samples_for(model, count=4, drift=0.0)]
    low, high = (lambda s: s.replace(logps=s.logps + 1.0)), (lambda s: s.replace(logps=s.logps - 2.0))
    samples = [
        high(plain[0]),
        low(plain[1]).replace(advantages=-1.0),
        high(plain[2]).replace(advantages=-1.0),
        low(plain[3]),
    ]
    update = make_policy(model, clip_ratio_c=3.0).update(samples, lr=0.0)
    assert [set(seen["clipped"].tolist()) for seen in update.columns] == [{1}, {2}, {3}, {0}]
    share = [sum(int((seen["clipped"] == kind).sum()) for seen in update.columns) for kind in (1, 2, 3)]
    total = sum(len(s.token_ids) for s in samples)
    assert [update.metrics[f"actor/pg_clipfrac_{name}"] for name in ("high", "low", "lower")] == pytest.approx(
        [count / total for count in share]
    )


def test_tokens_that_the_policy_did_not_write_are_read_and_not_trained_on():
    """The gradient is that of the same contexts with the environment's tokens left out of the loss by hand."""
    model = small_model()
    samples = [s for s in samples_for(model, count=6) if len(s.token_ids) > 2]
    masks = [[i % 3 != 1 for i in range(len(s.token_ids))] for s in samples]
    masked = [s.replace(mask=mask) for s, mask in zip(samples, masks, strict=True)]
    policy = make_policy(model)
    ours = gradient(policy, masked)
    model.zero_grad()
    written = sum(map(sum, masks))
    for sample, mask in zip(samples, masks, strict=True):
        stats = response_logps(model, [sample], 1.0, 0)
        loss = dapo_policy_loss(
            stats.logps, torch.tensor(sample.logps)[None], torch.tensor(sample["advantages"])[None],
            torch.tensor([mask]), denominator=written,
        )  # fmt: skip
        loss.backward()
    theirs = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)
    assert [len(seen["train_logps"]) for seen in policy.update(masked, 0.0).columns] == [
        len(s.token_ids) for s in samples
    ]


def test_each_token_can_have_an_advantage_of_its_own():
    model = small_model()
    (sample,) = [s for s in samples_for(model, count=6, drift=0.0) if len(s.token_ids) > 2][:1]
    weights = np.linspace(-1, 1, len(sample.token_ids))
    metrics = make_policy(model).update([sample.replace(advantages=weights)], lr=0.0).metrics
    assert metrics["actor/pg_loss"] == pytest.approx(-weights.mean(), abs=1e-6)


def test_a_policy_that_rests_between_updates_trains_the_same():
    """Its gradients are allocated first, and freed by `release_memory`."""
    plain, turning = (small_model(seed=1) for _ in range(2))
    usual, ours = make_policy(plain), make_policy(turning, time_share=True)
    for step in range(3):
        samples = samples_for(plain, seed=step)
        for policy in (usual, ours):
            policy.update(samples, lr=1e-2)
            policy.update(samples[:4], lr=1e-2)
        ours.release_memory()
        assert all(p.grad is None for p in turning.parameters())
    for (name, theirs), mine in zip(plain.named_parameters(), turning.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
