"""The 8-bit optimizer on ranks: each quantises the moments of its shards. Needs torchao."""

import pytest
import torch
from rank_parts import assert_close, make_samples, one_process, weights_of_policy
from test_ranked_policy import assert_same_update, write

from dapo_rl.config import LoraSettings, ModelSettings, TrainSettings
from dapo_rl.errors import NonFiniteError, UserError

pytest.importorskip("torchao.optim")

pytestmark = pytest.mark.slow

SMALL_MOMENTS = {"train": TrainSettings(max_grad_norm=0.5, optimizer="adamw_8bit")}
LR = 1e-4


@pytest.fixture
def ranked_on(policy_on):
    """Without the compiler here and on the ranks."""
    used = []

    def on(world_size, **how):
        used.append(policy := policy_on(world_size, **SMALL_MOMENTS, **how))
        policy.ranks.call("eager", "force_eager")
        return policy

    torch.compiler.set_stance("force_eager")
    yield on
    torch.compiler.set_stance("default")
    ranks = used[-1].ranks
    ranks.call("eager", "default")


def test_one_rank_is_one_process(ranked_on):
    one, ranked = one_process(**SMALL_MOMENTS), ranked_on(1)
    for seed in range(3):
        samples = make_samples(seed)
        assert ranked.update(samples, LR).metrics == one.update(samples, LR).metrics
    expected = weights_of_policy(one)
    for name, weight in weights_of_policy(ranked).items():
        assert torch.equal(weight, expected[name]), name
    exact = one_process()
    for seed in range(3):
        exact.update(make_samples(seed), LR)
    assert any(not torch.equal(weight, expected[name]) for name, weight in weights_of_policy(exact).items())


def test_two_ranks_differ_by_the_noise_of_quantisation(ranked_on):
    one, ranked = one_process(**SMALL_MOMENTS), ranked_on(2)
    before = weights_of_policy(one)
    for seed in range(3):
        samples = make_samples(seed)
        assert_same_update(ranked.update(samples, LR), one.update(samples, LR))
    expected = weights_of_policy(one)
    for name, weight in weights_of_policy(ranked).items():
        moved = (expected[name] - before[name]).abs().max()
        assert moved > LR
        assert (weight - expected[name]).abs().max() < 0.1 * moved, name


def test_shards_of_whole_blocks_are_quantised(ranked_on):
    """Of the embeddings, whose rows do not divide evenly, the shard of one rank is."""
    ranked = ranked_on(2)
    ranked.update(make_samples(), LR)
    quantised = [
        {name for name, (elements, nbytes) in of_rank.items() if nbytes == elements + 4 * elements // 256}
        for of_rank in ranked.ranks.call("moment_bytes")
    ]
    assert quantised[1] - quantised[0] == {"model.embed_tokens.weight"}
    assert quantised[0] == {name for name in weights_of_policy(ranked) if "_proj" in name}


def test_a_checkpoint_continues_bit_for_bit(ranked_on, tmp_path):
    first, second = make_samples(0), make_samples(1)
    two = ranked_on(2)
    two.update(first, LR)
    digests = write(two, tmp_path)
    assert sorted(digests) == ["shards/.metadata", "shards/__0_0.distcp", "shards/__1_0.distcp"]
    expected = two.update(second, LR)
    after = weights_of_policy(two)
    again = ranked_on(2)
    again.update(second, 1e-3)  # what it has learned is replaced
    again.load(tmp_path)
    assert again.update(second, LR).metrics == expected.metrics
    for name, weight in weights_of_policy(again).items():
        assert torch.equal(weight, after[name]), name
    fresh = ranked_on(2)
    fresh.load(tmp_path)  # before it has moments
    assert fresh.update(second, LR).metrics == expected.metrics
    with pytest.raises(UserError, match=r"quantised by the shards of 2 ranks \(.*\); resume with cluster\.ranks=2$"):
        ranked_on(1).load(tmp_path)


def test_a_checkpoint_of_plain_moments_is_rejected(ranked_on, policy_on, tmp_path):
    write(policy_on(2), tmp_path)
    with pytest.raises(UserError, match=r"belongs to a different model: "):
        ranked_on(2).load(tmp_path)


def test_a_scale_that_is_not_finite(ranked_on, tmp_path):
    ranked = ranked_on(2)
    ranked.update(make_samples(), LR)
    ranked.ranks.call("spoil_moment")
    with pytest.raises(NonFiniteError, match=r"not finite, in moments\.[\w.]+\.rank1of2\.scale"):
        ranked.save(tmp_path)


def test_adapters_are_close_to_one_process(ranked_on):
    lora = {"settings": ModelSettings(lora=LoraSettings(rank=64))}
    one, ranked = one_process(**SMALL_MOMENTS, **lora), ranked_on(2, **lora)
    for seed in range(2):
        samples = make_samples(seed)
        assert_same_update(ranked.update(samples, LR), one.update(samples, LR))
    expected = weights_of_policy(one)
    for name, weight in weights_of_policy(ranked).items():
        assert_close(weight, expected[name], atol=2e-5, rtol=0)
