"""Micro-batches: every sample once, within the budget, as few and as even as they go, groups together."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import train_sample

from dapo_rl.train.micro_batches import packed_batches, padded_batches


def samples_of(prompts, responses):
    """`prompts`: for each sample the number of its prompt, whose length is that number + 1."""
    return [
        train_sample(tuple(range(p + 1)), tuple(range(r)), 0.0, 0.0, p) for p, r in zip(prompts, responses, strict=True)
    ]


def computed(samples, batch):
    """Tokens that are computed for a micro-batch, prompts shared."""
    prompts = {tuple(samples[i].prompt_ids.tolist()) for i in batch}
    return sum(map(len, prompts)) + sum(len(samples[i].token_ids) - 1 for i in batch)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), min_size=1, max_size=30), st.integers(1, 80))
def test_every_sample_once_within_the_budget(pairs, budget):
    samples = samples_of(*zip(*pairs, strict=True))
    packed, padded = packed_batches(samples, budget), padded_batches(samples, budget)
    for batches in (packed, padded):
        assert sorted(i for batch in batches for i in batch) == list(range(len(samples)))
    assert all(len(batch) == 1 or computed(samples, batch) <= budget for batch in packed)
    for batch in padded:
        width = max(len(samples[i].prompt_ids) for i in batch) + max(len(samples[i].token_ids) for i in batch)
        assert len(batch) == 1 or len(batch) * width <= budget


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 20), min_size=2, max_size=9), st.integers(22, 60))
def test_no_split_in_this_order_has_fewer_or_a_smaller_largest(lengths, budget):
    samples = samples_of(sorted(i % 3 for i in range(len(lengths))), lengths)
    batches = packed_batches(samples, budget)
    best = None
    for cuts in range(2 ** (len(samples) - 1)):
        bounds = [0, *(i + 1 for i in range(len(samples) - 1) if cuts >> i & 1), len(samples)]
        sizes = [computed(samples, range(a, b)) for a, b in pairwise(bounds)]
        if max(sizes) <= budget and (best is None or (len(sizes), max(sizes)) < best):
            best = (len(sizes), max(sizes))
    assert (len(batches), max(computed(samples, b) for b in batches)) == best


def test_samples_of_a_prompt_are_together_and_their_prompt_counts_once():
    samples = samples_of([9, 0, 9, 0], [3, 3, 3, 3])
    assert packed_batches(samples, 19) == [[0, 2, 1, 3]]
    assert packed_batches(samples, 18) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("budget", [333, 1000])
def test_the_micro_batches_of_a_real_step_are_about_equal(budget):
    rng = np.random.default_rng(0)
    samples = samples_of(np.repeat(np.arange(8) % 6, 8).tolist(), rng.integers(1, 30, 64).tolist())
    sizes = [computed(samples, batch) for batch in packed_batches(samples, budget)]
    assert max(sizes) - min(sizes) < 0.3 * max(sizes)
