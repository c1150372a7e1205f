"""The entropy bonus: its gradient by autograd on the logits, in every way to compute an update, and its adaptive weight
by hand."""

import json
import math

import pytest
import torch
from test_policy import AGGREGATIONS, gradient, make_policy, samples_for, small_model

from dapo_rl.algo import aggregate
from dapo_rl.config import AlgoSettings, Config
from dapo_rl.errors import UserError
from dapo_rl.models import chunked_lm_head
from dapo_rl.models.response_logps import padded_inputs
from dapo_rl.train.coefficients import FILE, Coefficients, Coefs
from dapo_rl.train.learner import total

WAYS = {"lr": 1e-3, "max_grad_norm": 1e9}


def of_entropy(model, samples, aggregation):
    """The gradient of the aggregated entropy, from all logits of the padded samples, with −Σ p log p written out."""
    samples = [sample for sample in samples if sample.trained_tokens]
    inputs, mask = padded_inputs(samples, 0, torch.device("cpu"))
    logps = model(**inputs).logits[:, -mask.shape[1] - 1 : -1].log_softmax(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    tokens = {sample.group: sum(s.trained_tokens for s in samples if s.group == sample.group) for sample in samples}
    of_samples = torch.tensor([tokens[sample.group] for sample in samples])
    how = {"group_tokens": of_samples, "norm_length": 20, "denominator": len(tokens)}
    model.zero_grad()
    aggregate(entropy, mask, aggregation, **(how if "group" in aggregation else {"norm_length": 20})).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), total(entropy, mask).item() / mask.sum().item()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("packed", [True, False])
def test_the_bonus_adds_the_gradient_of_the_entropy(aggregation, packed, monkeypatch):
    """With micro-batches of a few samples, and the logits of a few tokens at a time."""
    monkeypatch.setitem(chunked_lm_head.CHUNK_ELEMENTS, "cpu", 1)
    model = small_model()
    samples = samples_for(model, masked=(1,))
    how = {"train": WAYS | {"packed": packed}, "aggregation": aggregation}
    plain = gradient(make_policy(model, 24, **how), samples)
    policy = make_policy(model, 24, entropy_coef=0.5, **how)
    assert len(list(policy._micro_batches(samples))) > 1
    with_bonus = gradient(policy, samples)
    wanted, mean = of_entropy(model, samples, aggregation)
    assert wanted.norm() > 1e-2
    torch.testing.assert_close(with_bonus, plain - 0.5 * wanted, atol=1e-5, rtol=1e-4)
    metrics = policy.update(samples, lr=0.0).metrics
    assert metrics["actor/entropy"] == pytest.approx(mean, rel=1e-5)
    assert metrics["actor/entropy_coef"] == 0.5
    assert "actor/entropy_coef" not in make_policy(model).update(samples, lr=0.0).metrics


def test_coefficients_replace_those_of_the_settings():
    model = small_model()
    samples = samples_for(model)
    constant = gradient(make_policy(model, entropy_coef=0.5), samples)
    policy = make_policy(model, entropy_target=1.0)
    torch.testing.assert_close(gradient(policy, samples), gradient(make_policy(model), samples), atol=0, rtol=0)
    assert policy.update(samples, 0.0, Coefs(entropy=0.5, kl=0.0)).metrics["actor/entropy_coef"] == 0.5
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), constant, atol=0, rtol=0)


def test_the_adaptive_weight_by_hand():
    """Up below the target and at it, down above, within 0 and 0.25; applied only where the last entropy is not above
    the target."""
    settings = {"entropy_coef": 0.1, "entropy_target": 0.5, "entropy_coef_delta": 0.125, "entropy_coef_max": 0.25}
    coefficients = Coefficients.of(AlgoSettings(**settings))
    assert coefficients.now.entropy == 0, "no entropy is known yet"
    applied = []
    for entropy in (0.4, 0.5, 0.3, 0.51, 0.6, 0.7, 0.2):
        coefficients.follow({"actor/entropy": entropy}, 1)
        applied.append(coefficients.now.entropy)
    assert applied == [0.225, 0.25, 0.25, 0.0, 0.0, 0.0, 0.125]
    coefficients.follow({}, 0)  # nothing was in the loss
    assert coefficients.now.entropy == 0.125
    assert Coefficients.of(AlgoSettings(entropy_coef=0.1)) is None


def test_the_adaptive_weight_is_restored_exactly(tmp_path):
    algo = AlgoSettings(entropy_target=0.5, entropy_coef_delta=0.1)
    first, second, fresh = (Coefficients.of(algo) for _ in range(3))
    fresh.save(tmp_path)
    for entropy in (0.3, 0.2, 0.1):
        first.follow({"actor/entropy": entropy}, 1)
    second.load(tmp_path)
    assert second.now.entropy == 0
    assert math.isinf(second._entropy)
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.now == first.now
    assert first.now.entropy == 0.1 + 0.1 + 0.1
    (tmp_path / FILE).unlink()
    second.load(tmp_path)  # of a run whose weight was constant
    assert (second.now, second._entropy) == (fresh.now, math.inf)
    for damage in ({"entropy_coef": -1.0, "entropy": 0.1}, {"entropy_coef": math.nan, "entropy": 0.1}, {}):
        (tmp_path / FILE).write_text(json.dumps(damage))
        with pytest.raises(UserError, match=r"coefficients\.json"):
            second.load(tmp_path)


def test_a_start_above_the_largest_weight_is_a_mistake():
    with pytest.raises(UserError, match=r"^algo\.entropy_coef: 2 is above algo\.entropy_coef_max 1, which limits it"):
        Config.build({"algo.entropy_coef": 2, "algo.entropy_target": 0.5})
    assert Config.build({"algo.entropy_coef": 2}).algo.entropy_coef == 2
