"""A teacher's part in advantages, worked by hand and against its counterpart."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_rl.algo import reference
from dapo_rl.objectives.advantages import distilled


def test_a_token_that_the_teacher_finds_more_likely_gains():
    teacher, own = torch.log(torch.tensor([0.5, 0.1, 0.2])), torch.log(torch.tensor([0.25, 0.4, 0.2]))
    mask = torch.tensor([True, True, False])
    got = distilled(torch.tensor([1.0, 1.0, 1.0]), teacher, own, mask, weight=2.0)
    expected = [1 + 2 * np.log(2), 1 - 2 * np.log(4), 0.0]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@given(seed=st.integers(0, 2**32 - 1), weight=st.floats(0.01, 10))
def test_the_counterpart_agrees(seed, weight):
    rng = np.random.default_rng(seed)
    advantages, teacher, own = rng.normal(size=(3, 7))
    mask = rng.random(7) < 0.6
    ours = distilled(*(torch.tensor(each) for each in (advantages, teacher, own, mask)), weight=weight)
    np.testing.assert_allclose(
        ours, reference.distilled(advantages, teacher, own, mask, weight=weight), rtol=1e-4, atol=1e-5
    )


def test_the_expectation_is_the_reverse_kl_divergence():
    """Over the tokens that a policy would sample, the mean is −KL(π ‖ teacher)."""
    own, teacher = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    zeros, mask = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    gains = distilled(zeros, teacher.log(), own.log(), mask, weight=1.0)
    kl = (own * (own / teacher).log()).sum()
    torch.testing.assert_close((own * gains).sum(), -kl)
