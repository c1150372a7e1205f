"""The figures of an evaluation: by hand, and against counting and simulation."""

import itertools
import math

import numpy as np
import pytest
from support import make_prompt, make_sample

from dapo_rl.evals.metrics import (
    avg,
    bootstrap,
    consensus,
    difference,
    mean,
    passed,
    powers_of_two,
    read_metrics,
)
from dapo_rl.evals.responses import ResponseFile
from dapo_rl.types import Group, Verdict


def test_avg_by_hand():
    assert avg([True, False, False, True]) == 0.5
    assert math.isnan(avg([]))


def test_pass_at_k_by_hand():
    # 5 samples, 2 right: of the 10 pairs, 3 have none of them.
    assert passed([True, False, False, True, False], 2) == pytest.approx(0.7)
    assert passed([True, False, False, True, False], 4) == 1.0
    assert math.isnan(passed([True, False], 3))


@pytest.mark.parametrize("right", range(7))
def test_pass_at_k_is_the_share_of_all_draws(right):
    correct = np.arange(6) < right
    for k in range(1, 7):
        draws = [correct[list(chosen)].any() for chosen in itertools.combinations(range(6), k)]
        assert passed(correct.tolist(), k) == pytest.approx(np.mean(draws))


def test_pass_at_k_is_unbiased():
    """The mean over many problems is the truth 1 − (1 − p)^k, which the share of groups with a right one is not."""
    rng = np.random.default_rng(0)
    draws = rng.random((20_000, 8)) < 0.15
    values = [passed(row.tolist(), 4) for row in draws]
    truth = 1 - 0.85**4
    assert abs(np.mean(values) - truth) < 4 * np.std(values) / math.sqrt(len(values))
    assert abs(draws.any(axis=1).mean() - truth) > 0.1


def test_consensus_by_hand():
    assert consensus([True, False, False, True, True], ["4", "5", "5", "4", "4"]) == 1.0
    assert consensus([True, False, False], ["4", "5", "5"]) == 0.0
    # Two votes each: what was sampled first wins.
    assert consensus([True, False, False, True], ["4", "5", "5", "4"]) == 1.0
    assert consensus([False, True, True, False], ["5", "4", "4", "5"]) == 0.0
    # Abstentions do not count, and nobody voting is wrong.
    assert consensus([True, False, False, False], ["4", None, None, None]) == 1.0
    assert consensus([False, False], [None, None]) == 0.0
    assert math.isnan(consensus([], []))


def responses(directory, problems):
    """Four samples per problem: `4` and `5` are the votes of a right and a wrong one, and the verifier fails on `x`."""
    judged = []
    for draw, votes in enumerate(problems):
        verdicts = [
            Verdict(-1.0, False, "timeout", None, "it took too long")
            if vote == "x"
            else Verdict(float(vote == "4"), vote == "4", "correct" if vote == "4" else "wrong", vote)
            for vote in votes
        ]
        samples = [make_sample(length) for length in (1, 2, 3)] + [make_sample(6, "length")]
        group = Group(draw, make_prompt(f"p{draw}"), tuple(samples), tuple(verdicts))
        judged.append((group, [None if vote == "x" else vote for vote in votes]))
    file = ResponseFile(directory)
    (part,) = file.begin(len(problems), 4)
    file.write(part, judged)
    file.finish(len(problems), 4)
    return file


def test_metrics_are_of_the_samples_that_were_judged(tmp_path):
    found = read_metrics("m", responses(tmp_path, ["x454", "5445", "xxxx"]))
    nan = math.nan
    expected = {
        "avg@4": [2 / 3, 0.5, nan],
        "pass@1": [2 / 3, 0.5, nan],
        "pass@2": [1.0, 5 / 6, nan],
        "pass@4": [nan, 1.0, nan],
        "cons@4": [1.0, 0.0, nan],
        "score": [2 / 3, 0.5, nan],
        "response_length": [3.0] * 3,
        "truncated": [0.25] * 3,
    }
    assert list(found.values) == list(expected)
    for name, values in expected.items():
        assert found.values[name] == pytest.approx(values, nan_ok=True), name
    assert (found.k, found.prompt_ids, found.tokens) == (4, ["p0", "p1", "p2"], 36)
    assert found.statuses == {"correct": 4, "timeout": 5, "wrong": 3}
    assert (found.verifier_errors, found.first_error, found.graded) == (5, "it took too long", False)


def test_ks():
    assert powers_of_two(1) == [1]
    assert powers_of_two(8) == [1, 2, 4, 8]
    assert powers_of_two(12) == [1, 2, 4, 8, 12]


def test_mean_leaves_out_what_has_no_value():
    assert mean([1.0, math.nan, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert math.isnan(mean([math.nan]))


def test_an_interval_by_hand():
    """Two problems, 0 and 1: drawn anew, their mean is 0, 1/2 or 1, with 1/4, 1/2 and 1/4."""
    found = bootstrap([0.0, 1.0, math.nan])
    assert (found["value"], found["low"], found["high"], found["problems"]) == (0.5, 0.0, 1.0, 2)
    assert bootstrap([0.25] * 5)["low"] == bootstrap([0.25] * 5)["high"] == 0.25
    assert math.isnan(bootstrap([])["value"])


def test_an_interval_is_that_of_an_independent_bootstrap():
    values = np.random.default_rng(1).beta(2, 3, size=60)
    rng = np.random.default_rng(2)
    means = np.array([rng.choice(values, size=60).mean() for _ in range(20_000)])
    found = bootstrap(values.tolist())
    assert found["low"] == pytest.approx(np.quantile(means, 0.025), abs=0.004)
    assert found["high"] == pytest.approx(np.quantile(means, 0.975), abs=0.004)
    assert found == bootstrap(values.tolist())


@pytest.mark.slow
def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Problems of a Beta(2, 3) difficulty, 8 samples each; the truth is the mean difficulty, 0.4."""
    rng = np.random.default_rng(3)
    covered = []
    for seed in range(300):
        difficulty = rng.beta(2, 3, size=50)
        found = bootstrap((rng.binomial(8, difficulty) / 8).tolist(), seed)
        covered.append(found["low"] <= 0.4 <= found["high"])
    assert 0.90 <= np.mean(covered) <= 0.985


def test_a_difference_by_hand():
    found = difference([0.0, 0.5, 1.0, math.nan], [0.5, 1.0, 1.0, 1.0])
    assert found["value"] == pytest.approx(1 / 3)
    assert found["problems"] == 3
    # Of the 8 ways to swap ½, ½ and 0, those with both halves on one side reach the sum 1: 4.
    assert found["p"] == pytest.approx(0.5)
    # Six problems, all in favour of one: 2 of 64.
    assert difference([0.0] * 6, [1.0] * 6)["p"] == pytest.approx(2 / 64)


def test_alike_models_do_not_differ():
    same = difference([0.1, 0.7, 0.3], [0.1, 0.7, 0.3])
    assert (same["value"], same["low"], same["high"], same["p"]) == (0.0, 0.0, 0.0, 1.0)


def test_many_problems_are_tested_by_sampling_as_few_are_by_counting():
    """13 problems, one beyond those that are counted: 6 wins and 1 loss have p = 2 · (1 + 7) / 2^7."""
    deltas = [1.0] * 6 + [-1.0] + [0.0] * 6
    assert difference([0.0] * 13, deltas)["p"] == pytest.approx(16 / 128, abs=0.015)
    assert difference([0.0] * 12, deltas[:12])["p"] == pytest.approx(16 / 128)


@pytest.mark.slow
def test_the_paired_test_errs_as_often_as_it_says():
    """Two models that are alike on problems of very different difficulty: p below 0.05 in a twentieth of the cases."""
    rng = np.random.default_rng(4)
    found = []
    for seed in range(300):
        difficulty = rng.beta(0.5, 0.5, size=30)
        a, b = (rng.binomial(8, difficulty) / 8 for _ in range(2))
        found.append(difference(a.tolist(), b.tolist(), seed)["p"] < 0.05)
    assert 0.015 <= np.mean(found) <= 0.09
