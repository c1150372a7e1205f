"""Drawing a token: the distribution, truncation, log-probabilities, and random numbers that belong to a position."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dapo_rl.config import SamplingSettings
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.engines.token_sampling import DrawParams, derive_seed, draw_tokens, row_keys, truncate, uniforms

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf]])
PLAIN = SamplingParams(max_new_tokens=1)


def draw(logits, u, params):
    drawn = draw_tokens(logits, u, DrawParams.of([params] * len(logits)))
    return drawn.tokens_B, drawn.logps_B


def kept(probabilities, params):
    return (truncate(torch.tensor([probabilities]), DrawParams.of([params])) > 0).tolist()[0]


def frequencies(params, draws=20_000):
    u = torch.rand(draws, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens, _ = draw(LOGITS.expand(draws, -1), u, params)
    return np.bincount(tokens.numpy(), minlength=5) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_distribution_at_the_temperature(temperature):
    expected = torch.softmax(LOGITS[0] / temperature, -1).numpy()
    np.testing.assert_allclose(frequencies(SamplingParams(1, temperature)), expected, atol=0.012)


def test_top_k_and_top_p_leave_out_the_tail():
    p = torch.softmax(LOGITS[0], -1).numpy()
    np.testing.assert_allclose(frequencies(SamplingParams(1, top_k=2)), [*p[:2] / p[:2].sum(), 0, 0, 0], atol=0.012)
    # 0.64 + 0.24 reaches 0.7 with the second token, which therefore stays.
    np.testing.assert_allclose(frequencies(SamplingParams(1, top_p=0.7)), [*p[:2] / p[:2].sum(), 0, 0, 0], atol=0.012)
    assert frequencies(SamplingParams(1, top_p=0.01))[0] == 1


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    probabilities = [0.1, 0.5, 0.15, 0.25]
    assert kept(probabilities, SamplingParams(1, top_p=0.75)) == [False, True, False, True]
    assert kept(probabilities, SamplingParams(1, top_p=0.76)) == [False, True, True, True]


def test_a_run_samples_with_its_settings():
    given = {"max_new_tokens": 7, "temperature": 0.6, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ("x",)}
    settings = SamplingSettings(**given, ignore_eos=True, keep_mask=True)
    assert SamplingParams.of(settings) == SamplingParams(**given, ignore_eos=True, keep_mask=True)


def test_min_p_is_a_share_of_the_likeliest():
    probabilities = [0.1, 0.5, 0.15, 0.25]
    assert kept(probabilities, SamplingParams(1, min_p=0.29)) == [False, True, True, True]
    assert kept(probabilities, SamplingParams(1, min_p=0.31)) == [False, True, False, True]
    assert kept(probabilities, SamplingParams(1, min_p=1.0)) == [False, True, False, False]


def kept_by_numpy(logits, params):
    """Top-k, then top-p of what top-k leaves, then min-p. One token at a time, in float64."""
    logits = np.asarray(logits, np.float64) / params.temperature
    p = np.exp(logits - logits.max())
    left = set(range(len(p)))
    if params.top_k:
        least = sorted(p, reverse=True)[min(params.top_k, len(p)) - 1]
        left = {i for i in left if p[i] >= least}
    if params.top_p < 1:
        total, before, nucleus = sum(p[i] for i in left), 0.0, set()
        for i in sorted(left, key=lambda i: -p[i]):
            if nucleus and before >= params.top_p * total:
                break
            nucleus.add(i)
            before += p[i]
        left = nucleus
    return [i in left and p[i] >= params.min_p * p.max() for i in range(len(p))]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    temperature=st.sampled_from([0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 2, 4, 20, 99]),
    top_p=st.sampled_from([0.05, 0.37, 0.61, 0.83, 1.0]),
    min_p=st.sampled_from([0.0, 0.043, 0.29]),
)
def test_top_k_top_p_and_min_p_together(seed, temperature, top_k, top_p, min_p):
    """Against NumPy, and against the warpers of transformers in the order of its `generate`."""
    logits = 2 * torch.randn(1, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    params = SamplingParams(1, temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    mass = torch.softmax(logits / temperature, -1)
    ours = kept(mass[0].tolist(), params)
    assert ours == kept_by_numpy(logits[0], params)
    scores = logits / temperature
    for warper, is_on in (
        (TopKLogitsWarper(max(top_k, 1)), top_k > 0),
        (TopPLogitsWarper(top_p), top_p < 1),
        (MinPLogitsWarper(min_p), min_p > 0),
    ):
        scores = warper(None, scores) if is_on else scores
    assert ours == scores.isfinite()[0].tolist()


def test_top_p_is_a_share_of_what_top_k_leaves():
    """Of 0.5 and 0.25, the first is two thirds: alone it reaches 0.6. Of the whole distribution it does not."""
    probabilities = [0.1, 0.5, 0.15, 0.25]
    assert kept(probabilities, SamplingParams(1, top_p=0.6)) == [False, True, False, True]
    assert kept(probabilities, SamplingParams(1, top_p=0.6, top_k=2)) == [False, True, False, False]


def test_each_row_is_drawn_in_its_own_way():
    ways = [
        SamplingParams(1, temperature=0),
        SamplingParams(1, top_k=1),
        SamplingParams(1),
        SamplingParams(1, temperature=2.0, top_p=0.85),
    ]
    u = torch.full((4,), 0.97, dtype=torch.float64)
    together = draw_tokens(LOGITS.expand(4, -1), u, DrawParams.of(ways))
    alone = [draw(LOGITS, u[:1], way) for way in ways]
    assert together[0].tolist() == [token.item() for token, _ in alone] == [0, 0, 3, 2]
    torch.testing.assert_close(together[1], torch.cat([logp for _, logp in alone]))


@pytest.mark.parametrize("vocabulary", [3, 1024, 1025, 5000])
def test_the_inverse_cdf_finds_the_token_in_any_chunk(vocabulary):
    """Against NumPy's cumulative sum in float64; numbers that fall within rounding of a boundary are left out."""
    torch.manual_seed(vocabulary)
    logits = 3 * torch.randn(64, vocabulary)
    u = torch.rand(64, dtype=torch.float64)
    p = torch.softmax(logits.double(), -1).numpy()
    cdf = np.cumsum(p, -1) / p.sum(-1, keepdims=True)
    expected = (cdf <= u[:, None].numpy()).sum(-1)
    clear = np.abs(cdf - u[:, None].numpy()).min(-1) > 1e-6
    tokens, _ = draw(logits, u, PLAIN)
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(tokens.numpy()[clear], expected[clear])


def test_log_probabilities_are_those_before_truncation():
    """What the trainer recomputes knows no top-p: the ratio of an unchanged policy is 1."""
    u = torch.linspace(0, 0.999, 50, dtype=torch.float64)
    tokens, logps = draw(LOGITS.expand(50, -1), u, SamplingParams(1, temperature=0.7, top_p=0.6, top_k=3))
    expected = torch.log_softmax(LOGITS[0] / 0.7, -1)[tokens]
    torch.testing.assert_close(logps, expected)
    assert logps.max() < -0.1  # the truncated distribution would say 0: one token is left


def test_greedy_takes_the_likeliest():
    tokens, logps = draw(LOGITS, torch.tensor([0.999]), SamplingParams(1, temperature=0))
    assert tokens.item() == 0
    assert logps.item() == pytest.approx(torch.log_softmax(LOGITS[0], -1)[0].item())


def test_a_token_of_no_mass_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for u in (0.0, 0.4999999999, 0.5, 1 - 2**-53):
        token, _ = draw(logits, torch.tensor([u], dtype=torch.float64), PLAIN)
        assert token.item() == (1 if u < 0.5 else 3)


def test_uniforms_are_splitmix64():
    """The published first outputs of splitmix64 for the seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for position, output in enumerate(published):
        u = uniforms(torch.tensor([1234567]), position).item()
        assert u == (output >> 11) * 2.0**-53


def test_uniforms_are_uniform_and_depend_on_every_part():
    keys = row_keys([(seed, index) for seed in range(200) for index in range(8)])
    assert len(set(keys.tolist())) == 1600
    drawn = torch.stack([uniforms(keys, position) for position in range(20)]).flatten()
    assert len(set(drawn.tolist())) == 32_000
    np.testing.assert_allclose(np.histogram(drawn, bins=10, range=(0, 1))[0], 3200, rtol=0.1)


def test_derived_seeds_tell_parts_apart():
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed(0, "a") == derive_seed(0, "a")
    assert 0 <= derive_seed("x") < 2**63
