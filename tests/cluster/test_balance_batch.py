"""Samples are dealt to ranks by tokens, each once, with samples of one prompt together."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support import train_sample

from dapo_rl.cluster.balance_batch import deal


def sample(prompt, length):
    return train_sample([prompt] * 3, np.ones(length, np.int32), 0.0, 0.0, group=prompt)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 500)), max_size=40), st.integers(1, 6))
def test_every_sample_goes_to_one_rank_in_order(sizes, ranks):
    dealt = deal([sample(*size) for size in sizes], ranks)
    assert len(dealt) == ranks
    assert sorted(i for indices in dealt for i in indices) == list(range(len(sizes)))
    assert all(indices == sorted(indices) for indices in dealt)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 6))
def test_ranks_have_about_the_same_number_of_tokens(lengths, ranks):
    """A greedy deal is within one sample of a fair share."""
    dealt = deal([sample(i, length) for i, length in enumerate(lengths)], ranks)
    loads = [sum(lengths[i] + 3 for i in indices) for indices in dealt]
    assert max(loads) <= sum(loads) / ranks + max(lengths) + 3


def test_the_longest_samples_are_dealt_first():
    """In the order drawn, the last one would make a rank twice as slow as the other."""
    dealt = deal([sample(i, length) for i, length in enumerate((10, 10, 10, 10, 43))], 2)
    assert sorted(dealt) == [[0, 1, 2, 3], [4]]


def test_samples_of_one_prompt_stay_together_within_a_fair_share():
    assert deal([sample(p, 10) for p in (0, 1, 0, 1, 2, 3)], 2) == [[0, 2, 4], [1, 3, 5]]


def test_samples_of_one_prompt_are_split_beyond_a_fair_share():
    dealt = deal([sample(0, 100) for _ in range(8)], 4)
    assert [len(indices) for indices in dealt] == [2, 2, 2, 2]
