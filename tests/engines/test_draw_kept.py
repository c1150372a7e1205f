"""The tokens that truncation keeps are the support of the truncated distribution, and a draw is a draw from them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.engines.token_sampling import DrawParams, draw_tokens, truncate
from dapo_rl.objectives import numpy_twin_tokens


def draw(logits, params, u=0.5, device="cpu"):
    u = torch.as_tensor(u, dtype=torch.float64).expand(len(logits))
    return draw_tokens(logits, u, DrawParams.of([params] * len(logits), device))


def keeping(top_k, **more):
    return SamplingParams(**({"max_new_tokens": 1, "top_k": top_k, "keep_mask": True} | more))


def test_values_worked_out_by_hand():
    """Of 0.4, 0.3, 0.2 and 0.1, the first three are kept: top-p 0.75 of 0.9 needs the second, and it is enough."""
    logits = torch.tensor([[0.2, 0.4, 0.1, 0.3]]).log()
    for u, token, logp in ((0.0, 1, math.log(4 / 7)), (0.9, 3, math.log(3 / 7))):
        drawn = draw(logits, keeping(3, top_p=0.75), u)
        assert drawn.kept_BK.tolist() == [[1, 3, -1]]
        assert (drawn.tokens_B.item(), drawn.logps_B.item()) == (token, pytest.approx(logp, abs=1e-6))
    drawn = draw(logits, keeping(3), 0.0)
    assert drawn.kept_BK.tolist() == [[1, 3, 0]]
    assert (drawn.tokens_B.item(), drawn.logps_B.item()) == (0, pytest.approx(math.log(2 / 9), abs=1e-6))
    # At temperature 1/2 the odds are squared: 16, 9 and 4 of 29.
    drawn = draw(logits, keeping(3, temperature=0.5), 0.0)
    assert drawn.logps_B.item() == pytest.approx(math.log(4 / 29), abs=1e-6)


def test_of_equal_tokens_at_most_k_are_kept():
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    assert draw(logits, keeping(2)).kept_BK.tolist() == [[1, 0]]
    tied = SamplingParams(1, top_k=2)
    assert (truncate(logits.exp(), DrawParams.of([tied])) > 0).sum() == 4, "without a record, equal tokens stay"
    assert {draw(logits, keeping(2), u).tokens_B.item() for u in np.linspace(0, 0.999, 50)} == {0, 1}


def test_a_vocabulary_smaller_than_k_is_padded():
    drawn = draw(torch.tensor([[0.0, 1.0, -torch.inf]]), keeping(5))
    assert drawn.kept_BK.tolist() == [[1, 0, -1, -1, -1]]
    assert drawn.kept_BK.dtype == torch.int32


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    temperature=st.sampled_from([0.7, 1.0, 1.5]),
    top_k=st.sampled_from([1, 2, 4, 20, 99]),
    top_p=st.sampled_from([0.05, 0.37, 0.61, 0.83, 1.0]),
    min_p=st.sampled_from([0.0, 0.043, 0.29]),
    ties=st.booleans(),
)
def test_what_is_kept_is_the_support_of_the_truncated_distribution(seed, temperature, top_k, top_p, min_p, ties):
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(6, 24, generator=random)
    logits = logits.round() if ties else logits
    u = torch.rand(6, generator=random, dtype=torch.float64)
    params = keeping(top_k, temperature=temperature, top_p=top_p, min_p=min_p)
    how = DrawParams.of([params] * 6)
    drawn = draw_tokens(logits, u, how)
    mass = truncate(torch.softmax(logits / temperature, -1), how)
    kept = drawn.kept_BK.numpy()
    assert kept.shape == (6, top_k)
    for row in range(6):
        ids = kept[row][kept[row] >= 0]
        assert len(set(ids)) == len(ids) <= top_k
        assert set(ids) == set(torch.nonzero(mass[row]).flatten().tolist())
        assert drawn.tokens_B[row].item() in ids
        assert (kept[row][len(ids) :] == -1).all()
    expected, _ = numpy_twin_tokens.kept_logps(logits.double().numpy() / temperature, drawn.tokens_B, kept)
    np.testing.assert_allclose(drawn.logps_B, expected, atol=1e-5)


def test_rows_without_a_record_are_those_of_a_batch_without_any():
    """Bit for bit, whatever their neighbours record."""
    random = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4, 5000, generator=random)
    u = torch.rand(4, generator=random, dtype=torch.float64)
    plain = [
        SamplingParams(1),
        SamplingParams(1, top_p=0.8),
        SamplingParams(1, temperature=0),
        SamplingParams(1, top_k=4),
    ]
    alone = draw_tokens(logits, u, DrawParams.of(plain))
    assert alone.kept_BK.shape == (4, 0)
    mixed = draw_tokens(torch.cat([logits, logits]), torch.cat([u, u]), DrawParams.of([*plain, *[keeping(7)] * 4]))
    assert torch.equal(mixed.tokens_B[:4], alone.tokens_B)
    assert torch.equal(mixed.logps_B[:4], alone.logps_B)
    assert (mixed.kept_BK[:4] == -1).all()
    assert (mixed.kept_BK[4:] >= 0).all()


def test_a_record_needs_a_limit():
    with pytest.raises(ValueError, match="keep_mask needs top_k"):
        SamplingParams(1, top_p=0.9, keep_mask=True)
