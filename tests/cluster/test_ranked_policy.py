"""The update on 1, 2 and 4 ranks is that of one process."""

import json
import math

import numpy as np
import pytest
import torch
from rank_parts import assert_close, make_samples, one_process, weights_of_policy
from support import make_prompt, with_reference

from dapo_rl.cluster import weights_object_store as stored_weights
from dapo_rl.cluster.weights_object_store import StoredWeights
from dapo_rl.config import AlgoSettings, TrainSettings
from dapo_rl.errors import NonFiniteError, UnsavedError, UserError
from dapo_rl.train.checkpoint import Checkpoints
from dapo_rl.train.off_policy import with_corrections
from dapo_rl.types import Batch, Group

AGGREGATIONS = ["token-mean", "token-mean-per-group", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
WORLDS = [1, 2, 4]

pytestmark = pytest.mark.slow


def write(policy, directory):
    """Saves at once what a run writes in the background."""
    return policy.save(directory)(lambda: False)


def gradients(policy):
    return {name: p.grad for name, p in policy.model.named_parameters() if p.requires_grad}


def assert_same_update(mine, other):
    assert mine.metrics.keys() == other.metrics.keys()
    for name, value in other.metrics.items():
        assert mine.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), name
    assert len(mine.columns) == len(other.columns)
    for a, b in zip(mine.columns, other.columns, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(a["train_logps"], b["train_logps"], atol=2e-5)
            np.testing.assert_allclose(a["entropies"], b["entropies"], atol=2e-5)
            np.testing.assert_array_equal(a["clipped"], b["clipped"])


def assert_same_gradients(policy, other):
    mine = policy.ranks.call("gradients")[0]
    expected = gradients(other)
    assert mine.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert_close(mine[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("world_size", WORLDS)
def test_scores_are_in_the_order_of_the_samples(policy_on, world_size):
    samples = make_samples(masked=(4,))
    expected = one_process().score(samples)
    for mine, theirs in zip(policy_on(world_size).score(samples), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


@pytest.mark.parametrize(
    ("world_size", "aggregation"), [(1, "token-mean"), (4, "token-mean"), *((2, name) for name in AGGREGATIONS)]
)
def test_loss_gradients_norm_metrics_and_tokens_are_those_of_one_process(policy_on, world_size, aggregation):
    samples = make_samples(masked=(4,))
    one, ranked = one_process(aggregation=aggregation), policy_on(world_size, aggregation=aggregation)
    update = one.update(samples, 1e-4)
    assert update.metrics["actor/pg_clipfrac"] > 0
    assert_same_update(ranked.update(samples, 1e-4), update)
    assert_same_gradients(ranked, one)


@pytest.mark.parametrize(
    "how",
    [
        {"train": TrainSettings(max_grad_norm=0.1, packed=False)},
        {"train": TrainSettings(max_grad_norm=0.1, gradient_checkpointing=True)},
        {"algo": AlgoSettings(kl_coef=0.1), "reference": True},
        {"algo": AlgoSettings(entropy_coef=0.5, aggregation="seq-mean-token-mean")},
        {"tied": False},
        {"token_budget": 10**6},
    ],
    ids=["padded", "recomputed", "reference", "entropy bonus", "untied", "one micro-batch"],
)
def test_the_ways_to_compute_are_the_same_on_two_ranks(policy_on, how):
    samples = make_samples(masked=(4,))
    one, ranked = one_process(**how), policy_on(2, **how)
    if "reference" in how:
        samples = with_reference(one, samples)
    assert_same_update(ranked.update(samples, 1e-4), one.update(samples, 1e-4))
    assert_same_gradients(ranked, one)


@pytest.mark.parametrize(("count", "how"), [(1, {}), (12, {}), (12, {"train": TrainSettings(packed=False)})])
def test_kept_tokens_are_the_same_on_two_ranks(policy_on, count, how):
    """Also where a rank has no sample."""
    rng = np.random.default_rng(0)
    samples = []
    for sample in make_samples(count=count):
        others = rng.integers(0, 20, (len(sample.token_ids), 3))
        samples.append(sample.replace(kept_ids=np.column_stack([sample.token_ids, others])))
    one, ranked = one_process(**how), policy_on(2, **how)
    scores = one.score(samples)
    for mine, theirs in zip(ranked.score(samples), scores, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
    samples = [sample.replace(logps=row - 0.1) for sample, row in zip(samples, scores, strict=True)]
    assert_same_update(ranked.update(samples, 1e-4), one.update(samples, 1e-4))
    assert_same_gradients(ranked, one)


@pytest.mark.parametrize("count", [1, 12])
def test_selected_tokens_are_the_same_on_two_ranks(policy_on, count):
    """Also where a rank has no sample."""
    rng = np.random.default_rng(0)
    samples = [
        s.replace(**{name: rng.random(len(s.token_ids)) < 0.5 for name in ("entropy_mask", "cov_mask")})
        for s in make_samples(count=count)
    ]
    how = {"algo": AlgoSettings(loss="kl-cov", top_entropy_quantile=0.5, entropy_coef=0.1)}
    one, ranked = one_process(**how), policy_on(2, **how)
    assert_same_update(ranked.update(samples, 1e-4), one.update(samples, 1e-4))
    assert_same_gradients(ranked, one)


LOSS = """
def loss(new_logps, old_logps, advantages, mask, *, trust, pairs, proximal_logps, clip_high=0.2):
    ratio = (new_logps - proximal_logps).exp().clamp(max=1 + clip_high)
    return -ratio * advantages * trust * pairs.sum(-1) * mask
"""


@pytest.mark.parametrize("count", [1, 5])
def test_a_custom_loss_gets_its_columns_on_two_ranks(policy_on, tmp_path, count):
    """Also where a rank has no sample, or fewer micro-batches than the other."""
    (tmp_path / "own.py").write_text(LOSS, encoding="utf-8")
    how = {"algo": AlgoSettings(loss=f"{tmp_path / 'own.py'}:loss"), "token_budget": 1}
    one, ranked = one_process(**how), policy_on(2, **how)
    samples = [
        s.replace(
            proximal_logps=s.logps,
            trust=np.linspace(0, 1, len(s.token_ids), dtype=np.float32),
            pairs=np.ones((len(s.token_ids), 2), np.float32),
        )
        for s in make_samples(count=count, group_size=1)
    ]
    assert_same_update(ranked.update(samples, 1e-4), one.update(samples, 1e-4))
    assert_same_gradients(ranked, one)


SCALED = """
def loss(new_logps, old_logps, advantages, mask):
    return -(new_logps - old_logps).exp() * advantages / advantages[mask].abs().max()
"""


def test_a_custom_loss_is_not_called_for_a_rank_without_samples(policy_on, tmp_path):
    """There is no token that it could expect."""
    (tmp_path / "scaled.py").write_text(SCALED, encoding="utf-8")
    how = {"algo": AlgoSettings(loss=f"{tmp_path / 'scaled.py'}:loss")}
    one, ranked = one_process(**how), policy_on(2, **how)
    samples = make_samples(count=1)
    assert_same_update(ranked.update(samples, 1e-4), one.update(samples, 1e-4))
    assert_same_gradients(ranked, one)


def test_off_policy_corrections_are_those_of_one_process_with_ranks_without_samples(policy_on):
    algo = AlgoSettings(
        **{"proximal": "recomputed", "importance_cap": 1.2, "importance_floor": 0.9, "importance_level": "sequence"},
        **{"importance_normalize": True, "reject": {"token": (0.7, 1.4)}, "off_policy_mask_threshold": 0.0},
    )
    how = {"algo": algo, "token_budget": 1}
    one, ranked = one_process(**how), policy_on(2, **how)
    samples = make_samples(seed=3, count=5, group_size=1)
    scored = [s.replace(proximal_logps=logps) for s, logps in zip(samples, one.score(samples), strict=True)]
    batch = with_corrections(Batch((Group(0, make_prompt("p"), tuple(scored), ()),)), algo, 1)
    left = sum(s.trained_tokens for s in batch.samples)
    assert 0 < left < sum(s.trained_tokens for s in samples)
    update = one.update(batch.samples, 1e-4)
    assert 0 < update.metrics["actor/opsm_clipfrac"] < 1
    assert_same_update(ranked.update(batch.samples, 1e-4), update)
    assert_same_gradients(ranked, one)


@pytest.mark.filterwarnings("ignore:micro-batch-token-mean")
def test_micro_batches_are_counted_on_all_ranks_and_none_for_ranks_without_samples(policy_on):
    """With a sample in each, they are those of one process. One rank has more of them than the other."""
    samples, how = make_samples(count=5, group_size=1), {"aggregation": "micro-batch-token-mean", "token_budget": 1}
    one, ranked = one_process(**how), policy_on(2, **how)
    assert_same_update(ranked.update(samples, 1e-4), one.update(samples, 1e-4))
    assert_same_gradients(ranked, one)


@pytest.mark.parametrize("world_size", WORLDS)
def test_three_updates_give_the_same_weights(policy_on, world_size):
    one, ranked = one_process(), policy_on(world_size)
    before = weights_of_policy(one)
    for seed in range(3):
        samples = make_samples(seed)
        one.update(samples, 1e-4)
        ranked.update(samples, 1e-4)
        ranked.score(samples)
    expected, mine = weights_of_policy(one), weights_of_policy(ranked)
    assert list(mine) == list(expected)
    for name, weight in expected.items():
        assert_close(mine[name], weight, atol=1e-5, rtol=0)
        assert (weight - before[name]).abs().max() > 1e-4, name


@pytest.mark.parametrize(("world_size", "layer", "recompute"), [(2, 1, False), (2, 0, True), (4, 2, False)])
def test_out_of_memory_on_one_rank_lowers_the_budget_of_all(policy_on, world_size, layer, recompute):
    samples = make_samples(masked=(4,))
    how = {"train": TrainSettings(max_grad_norm=0.5, gradient_checkpointing=recompute), "token_budget": 1000}
    one, ranked = one_process(**how), policy_on(world_size, **how)
    ranked.ranks.call("limit", world_size - 1, layer, 30)
    update = ranked.update(samples, 1e-4)
    assert_same_update(update, one.update(samples, 1e-4))
    assert_same_gradients(ranked, one)
    assert len(set(ranked.ranks.call("budget"))) == 1
    budget = ranked.ranks.call("budget")[0]
    assert budget < 1000
    assert "\n".join(update.notes).count(f"micro-batches now have {budget} tokens") == 1
    again = ranked.update(make_samples(1), 1e-4)
    assert_same_update(again, one.update(make_samples(1), 1e-4))


def test_a_single_sample_that_does_not_fit_is_an_error_of_all_ranks(policy_on):
    ranked = policy_on(2)
    ranked.ranks.call("limit", 1, 1, 1)
    with pytest.raises(UserError, match=r"^out of memory on rank 1 with micro-batches of"):
        ranked.score(make_samples())
    assert math.isfinite(policy_on(2).update(make_samples(), 1e-4).metrics["actor/grad_norm"])


def test_ranks_wait_for_one_that_loads_for_longer_than_torch_would_wait(policy_on):
    ranks = policy_on(2).ranks
    ranks.call("build_late", 2.0)
    assert ranks.call("budget") == [60, 60]


@pytest.mark.parametrize("count", [1, 3])
def test_ranks_without_samples_take_part(policy_on, count):
    samples = make_samples(count=count, group_size=1)
    one, ranked = one_process(), policy_on(4)
    assert_same_update(ranked.update(samples, 1e-4), one.update(samples, 1e-4))
    assert_same_gradients(ranked, one)
    np.testing.assert_allclose(ranked.score(samples)[0], one.score(samples)[0], atol=2e-5)


def test_a_mini_batch_with_everything_masked_leaves_the_weights_alone(policy_on):
    ranked = policy_on(2)
    before = weights_of_policy(ranked)
    update = ranked.update(make_samples(masked=range(12)), 1e-2)
    assert update.metrics == {}
    assert update.columns == (None,) * 12
    for name, weight in weights_of_policy(ranked).items():
        assert torch.equal(weight, before[name])


def test_every_rank_has_its_share_of_the_weights(policy_on):
    ranked, total = policy_on(4), sum(p.numel() for p in one_process().model.parameters())
    held = [sum(sizes) for sizes in ranked.ranks.call("sizes")]
    assert sum(held) == total
    assert max(held) <= 1.05 * total / 4


def test_weights_come_in_buckets(policy_on):
    largest = max(p.nbytes for p in one_process().model.parameters())
    buckets = list(policy_on(2).weights().buckets(largest // 2))
    assert len(buckets) > 3
    assert all(len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= largest // 2 for bucket in buckets)
    expected = dict(one_process().model.named_parameters())
    assert [name for bucket in buckets for name, _ in bucket] == list(expected)
    for name, tensor in (entry for bucket in buckets for entry in bucket):
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_are_stored_by_the_first_rank(policy_on, monkeypatch, dtype):
    expected = dict(one_process().model.named_parameters())
    monkeypatch.setattr(stored_weights, "STORED_BYTES", max(p.nbytes for p in expected.values()) // 2)
    stored = StoredWeights.put(3, policy_on(2).weights(), dtype)
    assert len(stored.refs) > 3
    assert not stored.lost
    found = [entry for bucket in stored.buckets(1) for entry in bucket]
    assert [name for name, _ in found] == list(expected)
    for name, tensor in found:
        assert torch.equal(tensor, expected[name].to(dtype or torch.float32))


def test_an_error_while_weights_are_stored_is_raised(policy_on):
    with pytest.raises(RuntimeError, match="KeyError: 'nothing'"):
        policy_on(2).ranks.store("packed_weights", ["nothing"], None)


def test_bfloat16_is_as_close_to_float32_as_in_one_process(policy_on):
    samples = make_samples()
    exact = np.concatenate(one_process().score(samples))
    mine = np.concatenate(policy_on(2, dtype=torch.bfloat16).score(samples))
    theirs = np.concatenate(one_process(dtype=torch.bfloat16).score(samples))
    assert 0 < abs(mine - exact).mean() < 3 * abs(theirs - exact).mean()
    norm = one_process().update(samples, 1e-4).metrics["actor/grad_norm"]
    metrics = policy_on(2, dtype=torch.bfloat16).update(samples, 1e-4).metrics
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=0.25)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_checkpoint_of_two_ranks_continues_on_another_number(policy_on, tmp_path, world_size):
    first, second = make_samples(0), make_samples(1)
    two = policy_on(2)
    two.update(first, 1e-4)
    write(two, tmp_path)
    weights, moments = weights_of_policy(two), two.ranks.call("moments")[0]
    expected = two.update(second, 1e-4)
    after = weights_of_policy(two)

    other = policy_on(world_size)
    other.update(second, 1e-3)  # what it has learned is replaced
    other.load(tmp_path)
    for name, weight in weights_of_policy(other).items():
        assert torch.equal(weight, weights[name])
    theirs = other.ranks.call("moments")[0]
    assert theirs.keys() == moments.keys()
    for name in moments:
        assert moments[name][0].abs().max() > 0
        assert all(torch.equal(a, b) for a, b in zip(theirs[name], moments[name], strict=True))
    assert_same_update(other.update(second, 1e-4), expected)
    theirs = weights_of_policy(other)
    for name, weight in after.items():
        assert_close(theirs[name], weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_a_reference_that_follows_the_policy_is_in_the_checkpoint(policy_on, tmp_path, alpha):
    """It is that of one process, and a checkpoint of two ranks has it on another number of them."""
    first, second = make_samples(0), make_samples(1)
    how = {"algo": AlgoSettings(kl_coef=0.1, ref_sync_steps=1), "reference": True}
    one, two = one_process(**how), policy_on(2, **how)
    before = one.score_reference(second)
    for policy in (one, two):
        policy.update(with_reference(policy, first), 1e-3)
        policy.sync_reference(alpha)
    expected = one.score_reference(second)
    assert max(abs(a - b).max() for a, b in zip(before, expected, strict=True)) > 1e-3
    write(two, tmp_path)
    for world_size in (2, 4):
        other = policy_on(world_size, **how)
        other.update(with_reference(other, second), 1e-3)
        other.sync_reference(1.0)  # is replaced
        other.load(tmp_path)
        for mine, theirs in zip(other.score_reference(second), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_a_run_publishes_and_restores_the_shards(policy_on, tmp_path):
    """A checkpoint that is damaged is skipped, as those of one process are."""
    ranked, checkpoints = policy_on(2), Checkpoints(tmp_path, keep=2)
    ranked.update(make_samples(0), 1e-4)
    checkpoints.save(1, [ranked])
    weights = weights_of_policy(ranked)
    ranked.update(make_samples(1), 1e-4)
    second = checkpoints.save(2, [ranked])
    shards = sorted(path.name for path in (second.path / "shards").iterdir())
    assert shards == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert not list(tmp_path.glob(".*"))
    damaged = second.path / "shards" / "__1_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    other = policy_on(1)
    assert checkpoints.restore([other]).step == 1
    for name, weight in weights_of_policy(other).items():
        assert torch.equal(weight, weights[name])


def test_shards_that_the_system_does_not_let_ranks_write_are_unsaved(policy_on, tmp_path):
    """The run goes on without the checkpoint, as that of one process does."""
    ranked = policy_on(2)
    ranked.ranks.call("copy_shards")
    with pytest.raises(UnsavedError, match="the checkpoint cannot be written: Disk quota exceeded") as raised:
        ranked.ranks.call("write_over_quota", tmp_path / "over")
    assert raised.value.remedy == "free some space"
    write(ranked, tmp_path / "again")


def test_a_checkpoint_is_written_while_the_ranks_go_on(policy_on, tmp_path):
    ranked = policy_on(2)
    ranked.update(make_samples(0), 1e-3)
    before = weights_of_policy(ranked)
    write = ranked.save(tmp_path)
    ranked.update(make_samples(1), 1e-3)
    digests = write(lambda: False)
    assert sorted(digests) == ["shards/.metadata", "shards/__0_0.distcp", "shards/__1_0.distcp"]
    assert any(not torch.equal(weight, before[name]) for name, weight in weights_of_policy(ranked).items())
    ranked.load(tmp_path)
    for name, weight in weights_of_policy(ranked).items():
        assert torch.equal(weight, before[name])


def test_a_checkpoint_before_the_first_update(policy_on, tmp_path):
    samples = make_samples()
    write(policy_on(2), tmp_path)
    ranked = policy_on(2)
    ranked.load(tmp_path)
    assert_same_update(ranked.update(samples, 1e-4), one_process().update(samples, 1e-4))


def test_a_checkpoint_of_another_model_is_rejected(policy_on, tmp_path):
    write(policy_on(2, tied=False), tmp_path)
    ranked = policy_on(2)
    with pytest.raises(UserError, match="belongs to a different model: "):
        ranked.load(tmp_path)
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        ranked.load(tmp_path / "nothing")
    assert math.isfinite(ranked.update(make_samples(), 1e-4).metrics["actor/grad_norm"])


def test_weights_that_are_not_finite_on_one_rank_stop_all(policy_on, tmp_path):
    ranked = policy_on(2)
    ranked.ranks.call("spoil", math.nan)
    with pytest.raises(NonFiniteError, match="not finite, in "):
        ranked.save(tmp_path)
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        ranked.update(make_samples(), 1e-4)


def test_the_export_is_that_of_one_process(policy_on, tmp_path):
    for world_size, dtype in ((1, None), (2, torch.bfloat16)):
        mine, theirs = tmp_path / f"ranks-{world_size}", tmp_path / f"one-{world_size}"
        policy_on(world_size, save_dtype=dtype).export(mine)
        one_process(save_dtype=dtype).export(theirs)
        names = sorted(path.name for path in theirs.iterdir())
        assert sorted(path.name for path in mine.iterdir()) == names
        for name in names:
            assert (mine / name).read_bytes() == (theirs / name).read_bytes(), name
        assert json.loads((mine / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
