"""A reference policy that follows the policy: the mix by hand, as in TRL, and its part of a checkpoint."""

import pytest
import torch
from support import with_reference
from test_policy import make_policy, samples_for, small_model

from dapo_rl.base.hashing import Digests
from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.train.reference import FILE, move_towards

FOLLOWS = {"kl_coef": 0.5, "ref_sync_steps": 3}


def write(policy, directory) -> Digests:
    return policy.save(directory)(lambda: False)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_the_mix_by_hand_and_as_in_trl(alpha):
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    model, ours, theirs = small_model(), small_model(1), small_model(1)
    before = weights(ours)
    move_towards(ours, model, alpha)
    callbacks.SyncRefModelCallback._sync_target_model(model, theirs, alpha)
    for mixed, old, new, trl in zip(weights(ours), before, weights(model), weights(theirs), strict=True):
        assert not torch.equal(old, new) or not old.abs().max() or (old == 1).all()
        torch.testing.assert_close(mixed, alpha * new + (1 - alpha) * old, atol=1e-7, rtol=0)
        torch.testing.assert_close(mixed, trl, atol=1e-7, rtol=0)
        assert alpha < 1 or torch.equal(mixed, new)


def test_the_penalty_is_that_to_the_reference_where_it_is_now():
    model = small_model()
    samples = samples_for(model)
    policy = make_policy(model, reference=small_model(1), **FOLLOWS)
    assert policy.update(with_reference(policy, samples), 0.0).metrics["actor/kl_loss"] > 1e-3
    policy.sync_reference(1.0)
    assert policy.update(with_reference(policy, samples), 1e-2).metrics["actor/kl_loss"] < 1e-9
    assert policy.update(with_reference(policy, samples), 0.0).metrics["actor/kl_loss"] > 1e-6, "it stays where it was"


def test_a_checkpoint_has_the_reference(tmp_path):
    first = make_policy(small_model(), reference=small_model(1), **FOLLOWS)
    samples = samples_for(first.model)
    first.update(with_reference(first, samples), 1e-2)
    first.sync_reference(0.5)
    files = write(first, tmp_path)
    assert {FILE, "optimizer.pt"} <= files.keys()
    expected = weights(first._synced)
    second = make_policy(small_model(2), reference=small_model(3), **FOLLOWS)
    second.load(tmp_path)
    assert all(map(torch.equal, weights(second._synced), expected))
    assert all(map(torch.equal, weights(second.model), weights(first.model)))
    first.sync_reference(1.0)  # the copy that was written does not follow
    second.load(tmp_path)
    assert all(map(torch.equal, weights(second._synced), expected))
    fixed = make_policy(small_model(), reference=small_model(1), kl_coef=0.5)
    assert FILE not in write(fixed, tmp_path / "fixed")


def test_a_reference_that_does_not_fit_leaves_the_policy_as_it_is(tmp_path):
    policy = make_policy(small_model(), reference=small_model(1), **FOLLOWS)
    write(policy, tmp_path)
    before = weights(policy.model)
    policy.update(with_reference(policy, samples_for(policy.model)), 1e-2)
    changed = weights(policy.model)
    assert not all(map(torch.equal, before, changed))
    stored = torch.load(tmp_path / FILE)
    name = next(iter(stored))
    for damage, error, words in (
        (stored | {name: torch.full_like(stored[name], torch.nan)}, NonFiniteError, "reference policy are not finite"),
        (stored | {name: stored[name][:1]}, UserError, "has the reference policy of another model"),
    ):
        torch.save(damage, tmp_path / FILE)
        with pytest.raises(error, match=words):
            policy.load(tmp_path)
        assert all(map(torch.equal, weights(policy.model), changed))
    (tmp_path / FILE).unlink()
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        policy.load(tmp_path)
