"""Every formula in PyTorch has a counterpart in NumPy that is written on its own, and both agree."""

import importlib
import inspect
import pkgutil
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl import objectives
from dapo_rl.algo import reference
from dapo_rl.objectives import (
    aggregation,
    importance,
    losses,
    numpy_twin,
    numpy_twin_credit,
    numpy_twin_kl,
    numpy_twin_off_policy,
    numpy_twin_tokens,
)
from dapo_rl.objectives.advantages import rewards_alone

TWINS = (numpy_twin, numpy_twin_credit, numpy_twin_kl, numpy_twin_off_policy, numpy_twin_tokens)

QUICK = settings(max_examples=60, deadline=None)
WITHOUT = {
    "advantages_like": "brings advantages into the shape of a ratio; the counterparts do so themselves",
    "mask_like": "brings a mask into the shape of log-probabilities; the counterparts do so themselves",
}
"""Functions of tensors that are no formula."""
OURS_ALONE = {
    **dict.fromkeys(
        ("as_matrices", "for_each_sample", "for_each_token"),
        "brings inputs into one shape, and applies a formula to each",
    ),
    **dict.fromkeys(("kl_slope", "unbiased_kl_slope"), "autograd computes the slope"),
    "kept_logps": "the log-probabilities of a model, not a formula of the objectives",
}
"""Functions of the reference without one in PyTorch."""


def in_torch():
    """The public functions of tensors, by name."""
    for module in pkgutil.iter_modules(objectives.__path__):
        found = importlib.import_module(f"{objectives.__name__}.{module.name}")
        if found in TWINS:
            continue
        for name, function in vars(found).items():
            if is_own(function, found) and "Tensor" in str(inspect.signature(function)):
                yield name, function


def is_own(function, module):
    """Whether it is a public function that the module defines."""
    public = inspect.isfunction(function) and not function.__name__.startswith("_")
    return public and function.__module__ == module.__name__


def test_every_formula_has_a_counterpart_of_its_own():
    formulas = dict(in_torch())
    assert len(formulas) > 25
    twins = {name for module in TWINS for name, function in vars(module).items() if is_own(function, module)}
    assert set(formulas) - set(WITHOUT) == twins - OURS_ALONE.keys()
    counterparts = [getattr(reference, name) for name in formulas if name not in WITHOUT]
    assert len(set(counterparts)) == len(counterparts), "none is another name of a second one"
    for name in formulas.keys() - WITHOUT.keys():
        assert getattr(reference, name).__name__ == name


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@pytest.mark.parametrize("name", sorted(name for name, _ in in_torch() if name not in WITHOUT))
def test_a_formula_and_its_counterpart_have_the_same_defaults(name):
    ours, theirs = defaults(dict(in_torch())[name]), defaults(getattr(reference, name))
    assert {key: theirs[key] for key in ours.keys() & theirs.keys()} == {
        key: ours[key] for key in ours.keys() & theirs.keys()
    }


@pytest.mark.parametrize("module", TWINS)
def test_counterparts_share_no_code_with_formulas(module):
    code = inspect.getsource(module)
    imported = re.findall(r"^\s*(?:from|import) ([\w.]+)", code, re.M)
    twins = {twin.__name__ for twin in TWINS}
    assert set(imported) <= {"__future__", "collections.abc", "functools", "typing", "numpy", "numpy.typing", *twins}


@st.composite
def batches(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    old, mask = rng.normal(-2, 1, (samples, tokens)), rng.random((samples, tokens)) < 0.7
    new = old + rng.normal(0, draw(st.sampled_from([1e-3, 0.3, 30.0])), old.shape)
    per_token = draw(st.booleans())
    advantages = rng.choice([-1.5, 0.0, 0.7], (samples, tokens) if per_token else samples)
    return new, old, advantages, mask


def tensors(*arrays):
    return tuple(torch.tensor(array) for array in arrays)


def assert_near(ours, theirs):
    np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-4, atol=1e-5)


@QUICK
@given(batch=batches(), clip_ratio_c=st.sampled_from([None, 3.0]))
def test_ratios_token_losses_and_clipped_tokens(batch, clip_ratio_c):
    new, old, _, mask = batch
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    given_tensors = tensors(*batch)
    for name in ("probability_ratio", "sequence_ratio"):
        theirs = getattr(reference, name)(new, old, mask)
        assert_near(getattr(losses, name)(*tensors(new, old, mask)), theirs)
    ours = losses.policy_token_losses(*given_tensors, **bounds, clip_ratio_c=clip_ratio_c)
    assert_near(ours, reference.policy_token_losses(*batch, **bounds, clip_ratio_c=clip_ratio_c))
    for per_sequence, ratio_of in ((False, losses.probability_ratio), (True, losses.sequence_ratio)):
        how = {**bounds, "clip_ratio_c": clip_ratio_c}
        ours = aggregation.clipped_tokens(*given_tensors, **how, ratio_of=ratio_of)
        for mine, theirs in zip(ours, reference.clipped_tokens(*batch, **how, per_sequence=per_sequence), strict=True):
            assert (mine.numpy() == theirs).all()


@QUICK
@given(batch=batches(), cap=st.sampled_from([0.9, 2.0, 1e9]))
def test_tokens_above_the_cap(batch, cap):
    new, old, _, mask = batch
    ours = importance.above_cap(*tensors(new, old, mask), cap)
    assert (ours.numpy() == reference.above_cap(new, old, mask, cap)).all()


@QUICK
@given(batch=batches(), bound=st.sampled_from([3e-4, 0.2]))
def test_the_token_variant_of_gspo_in_value_and_gradient(batch, bound):
    """The gradient is that of the counterpart by finite differences. At the bound itself it has none."""
    new, old, advantages, mask = batch
    bounds = {"clip_low": bound, "clip_high": bound}
    logps = torch.tensor(new, requires_grad=True)
    ours = losses.gspo_token_losses(logps, *tensors(old, advantages, mask), **bounds)
    ours.sum().backward()
    assert_near(ours, reference.gspo_token_losses(*batch, **bounds))
    np.testing.assert_allclose(
        reference.gspo_token_losses(*batch, **bounds), reference.gspo_losses(*batch, **bounds), rtol=1e-12
    )
    step = 1e-7
    slopes = np.zeros_like(new)
    for t in range(new.shape[1]):
        moved = np.zeros_like(new)
        moved[:, t] = step
        up, down = (
            reference.gspo_token_losses(*batch, **bounds, moved_logps=new + side * moved).sum(-1) for side in (1, -1)
        )
        slopes[:, t] = (up - down) / (2 * step)
    np.testing.assert_allclose(logps.grad, slopes, rtol=1e-3, atol=1e-4)


@QUICK
@given(seed=st.integers(0, 2**20), masked=st.booleans())
def test_rewards_alone(seed, masked):
    rng = np.random.default_rng(seed)
    rewards, mask = rng.normal(size=(3, 4)), rng.random((3, 4)) < 0.6 if masked else None
    ours = rewards_alone(torch.tensor(rewards), None if mask is None else torch.tensor(mask))
    np.testing.assert_allclose(ours, reference.rewards_alone(rewards, mask), rtol=1e-6)
