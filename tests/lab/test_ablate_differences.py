"""Differences between arms: corrected intervals, effect sizes, the power of the test, and what it takes to learn."""

import io
import itertools
import json
import math
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.ablation import _compared, _plan
from dapo_rl.lab.ablate.plan import AblationPlan, arms_by_part, grid, paper_table
from dapo_rl.lab.ablate.quantities import COMPARABLE, OTHERS, TABLE
from dapo_rl.lab.ablate.report import ablation_json, markdown, print_ablation
from dapo_rl.lab.ablate.results import (
    collect,
    final_metrics,
    repeated_share,
    repetition_by_step,
    step_of_accuracy,
    tokens_until,
)
from dapo_rl.lab.ablate.runs import all_runs
from dapo_rl.lab.ablate.statistics import (
    detectable_errors,
    fewest_for_exact,
    paired_difference,
    power_of_test,
    sign_flip_interval,
    t_interval,
)
from dapo_rl.lab.ablate.techniques import TABLES, PaperTable, Technique
from dapo_rl.recipes import packaged_recipe
from dapo_rl.runs.directory import RunDirectory

DEMO = packaged_recipe("demo")
TWO = ["algo.clip_high=0.2,0.28"]


def test_a_difference_by_hand():
    # 1, 2, 3 from 0, 0, 0, and a seed that only one of them has: mean 2, deviation 1, standard error 1/√3.
    found = paired_difference({0: 1.0, 1: 2.0, 2: 3.0, 9: 50.0}, {0: 0.0, 1: 0.0, 2: 0.0}, comparisons=5)
    error = 1 / math.sqrt(3)
    assert (found.mean, found.n, found.comparisons, found.effect_size) == (2.0, 3, 5, 2.0)
    assert found.half_width == pytest.approx(4.302653 * error, rel=1e-6)
    # Bonferroni: 99 % of Student's t with two degrees of freedom is within 9.924843.
    assert found.corrected_half_width == pytest.approx(9.924843 * error, rel=1e-6)
    assert not found.excludes_zero  # 2 ± 5.7
    assert paired_difference({0: 1.0, 1: 1.01, 2: 1.02}, {0: 0.0, 1: 0.0, 2: 0.0}, 2).excludes_zero


def test_without_seeds_or_with_one_there_is_no_interval():
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    one = paired_difference({0: 1.0}, {0: 0.25})
    assert (one.mean, one.half_width, one.corrected_half_width, one.detectable) == (0.75, None, None, None)


def test_neither_two_pairs_nor_equal_ones_have_an_interval():
    """Student's t of one degree of freedom is 12.7; and that three differences are equal says nothing of the spread."""
    two = paired_difference({0: 1.0, 1: 1.01}, {0: 0.0, 1: 0.0})
    assert (two.mean, two.low, two.high, two.half_width, two.excludes_zero) == (1.005, 1.0, 1.01, None, False)
    same = paired_difference({0: 1.0, 1: 1.0, 2: 1.0}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert (same.mean, same.low, same.half_width, same.effect_size, same.detectable) == (1.0, 1.0, None, None, None)
    assert not same.excludes_zero


def test_an_exact_interval_by_hand():
    """The means of the seven non-empty subsets of 1, 2, 6 are 1, 1.5, 2, 3, 3.5, 4, 6. A center below 1 is rejected at
    p = 1/8: only without a flip is the mean as large."""
    assert sign_flip_interval([1.0, 2.0, 6.0], 0.75) == (1.0, 6.0)
    assert sign_flip_interval([1.0, 2.0, 6.0], 0.5) == (1.5, 4.0)
    assert sign_flip_interval([1.0, 2.0, 6.0], 0.95) is None


@given(st.lists(st.integers(-40, 40), min_size=7, max_size=9), st.integers(-40, 40), st.sampled_from([0.9, 0.95]))
@settings(max_examples=60, deadline=None)
def test_an_exact_interval_holds_the_centers_that_no_sign_flip_test_rejects(values, whole, confidence):
    """Against all sign flips, in exact arithmetic."""
    low, high = sign_flip_interval([float(value) for value in values], confidence)
    center = whole + Fraction(1, 11)  # no subset has this mean
    shifted = [value - center for value in values]
    sums = [
        sum(sign * value for sign, value in zip(signs, shifted, strict=True))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    tail = (1 - Fraction(str(confidence))) / 2
    rejected = min(sum(x >= sum(shifted) for x in sums), sum(x <= sum(shifted) for x in sums)) <= tail * len(sums)
    assert (low <= center <= high) == (not rejected)


def test_exact_intervals_cover_as_often_as_they_say():
    """Differences of skewed values: 95 % within the noise of 400 trials. With 24 values, where subsets are sampled, an
    interval is about as wide as Student's t."""
    rng = np.random.default_rng(3)
    draws = rng.exponential(size=(400, 8)) - rng.exponential(size=(400, 8))
    covered = [low <= 0 <= high for low, high in (sign_flip_interval(list(row)) for row in draws)]
    assert 0.92 <= np.mean(covered) <= 0.98
    many = list(rng.normal(1, 1, size=24))
    low, high = sign_flip_interval(many)
    assert high - low == pytest.approx(2 * t_interval(many).half_width, rel=0.1)
    found = paired_difference(dict(enumerate(many)), dict.fromkeys(range(24), 0.0))
    assert found.exact == (low, high)
    assert not found.exact[0] <= 0 <= found.exact[1]


@pytest.mark.parametrize(("comparisons", "seeds"), [(1, 6), (2, 7), (11, 9), (16, 10)])
def test_the_fewest_seeds_of_an_exact_interval(comparisons, seeds):
    assert fewest_for_exact(comparisons) == seeds
    values = [float(n) for n in range(seeds)]
    zeros = dict.fromkeys(range(seeds), -1.0)
    assert paired_difference(dict(enumerate(values)), zeros, comparisons).exact == (1.0, float(seeds))
    del zeros[0]
    assert paired_difference(dict(enumerate(values)), zeros, comparisons).exact is None


def test_the_power_of_the_test_as_it_is_simulated():
    """Eight pairs, α = 5 %: 80 % for a true difference of 3.27 standard errors (1.156 standard deviations)."""
    assert detectable_errors(7, 2.364624) == pytest.approx(3.270, abs=2e-3)
    assert power_of_test(0.0, 7, 2.364624) == pytest.approx(0.05, abs=1e-5)
    rng = np.random.default_rng(0)
    for n, critical in ((2, 12.706205), (5, 4.604095), (8, 2.364624)):
        errors = detectable_errors(n - 1, critical)
        values = rng.normal(errors / math.sqrt(n), 1, size=(200_000, n))
        t = values.mean(axis=1) / (values.std(axis=1, ddof=1) / math.sqrt(n))
        assert np.mean(np.abs(t) > critical) == pytest.approx(0.8, abs=0.004)


def test_what_it_takes_to_reach_an_accuracy():
    curve = {0: 0.5, 4: 0.7, 8: 0.9, 12: 0.6, 16: 1.0}
    assert step_of_accuracy(curve, 0.8) == pytest.approx(6)  # half of the way from 4 to 8
    assert step_of_accuracy(curve, 0.9) == pytest.approx(8)
    assert step_of_accuracy(curve, 0.95) == pytest.approx(12 + 4 * 0.35 / 0.4)
    assert step_of_accuracy(curve, 0.4) == 0
    assert step_of_accuracy({0: 0.5, 4: 0.7}, 0.8) is None
    by_step = {1: 100.0, 2: 200.0, 3: 400.0, 4: 800.0}
    assert tokens_until(by_step, 2.25) == pytest.approx(400)
    assert tokens_until(by_step, 0) == 0
    assert tokens_until(by_step, 4) == 1500


def run_of(accuracies, tokens=100.0):
    summary = {"steps": 4, "evaluations": [{"step": s, "accuracy": a} for s, a in accuracies.items()]}
    metrics = [
        {
            "step": step,
            "sampling/tokens_generated": tokens * step,
            "actor/entropy": 1.0 / step,
            "response_length/mean": 10.0 * step,
            "response_length/clip_ratio": 0.1 * step,
            "actor/pg_clipfrac_high": 0.01,
            "actor/clipped_high_prob": 0.2 if step < 3 else math.nan,
        }
        for step in (1, 2, 3, 4)
    ]
    return summary, metrics


def test_the_numbers_of_a_run_by_hand():
    found = final_metrics(*run_of({0: 0.2, 2: 0.6, 4: 0.8}), 0.7)
    # 0.7 is half of the way from step 2 to 4: step 3, after 100 + 200 + 300 tokens.
    assert (found["steps_to"], found["tokens_to"], found["reached"]) == (pytest.approx(3), pytest.approx(600), True)
    assert found["mean_accuracy"] == pytest.approx(0.7)  # not the one before the first step
    assert found["mean_entropy"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert (found["mean_length"], found["mean_truncated"]) == (pytest.approx(25), pytest.approx(0.25))
    assert (found["clipped_high"], found["clipped_prob"]) == (pytest.approx(0.01), pytest.approx(0.2))
    late = final_metrics(*run_of({0: 0.2, 2: 0.6, 4: 0.8}), 0.9)
    assert (late["steps_to"], late["tokens_to"], late["reached"]) == (4, pytest.approx(1000), False)
    assert final_metrics(*run_of({0: 0.2}), None)["steps_to"] is None


def test_every_quantity_is_a_number_of_a_run():
    assert set(COMPARABLE) <= set(final_metrics(*run_of({0: 0.2})))
    assert not set(TABLE) & set(OTHERS)


def test_repeated_four_grams_by_hand(tmp_path):
    assert repeated_share([1, 2, 3]) == 0
    assert repeated_share([1, 2, 3, 4, 5]) == 0
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 - 4 / 5)  # 1234 twice, 2341, 3412, 4123
    assert repeated_share([7] * 8) == pytest.approx(1 - 1 / 5)
    directory = RunDirectory(tmp_path)
    directory.rollouts_path.mkdir()
    for step, rows in ((1, [[1, 2, 3], [7] * 8]), (12, [[7] * 8])):
        table = pa.table({"step": [step] * len(rows), "token_ids": rows, "other": [0] * len(rows)})
        pq.write_table(table, directory.rollouts_path / f"step-{step:06d}.parquet")
    assert repetition_by_step(directory) == {1: pytest.approx(0.4), 12: pytest.approx(0.8)}


def written(out, plan, tokens):
    """Runs that reach 0.8 at step 4, with so many tokens in step 1, by arm and seed; step k takes k times as many."""
    for arm, by_seed in zip(plan.with_own_runs(), tokens, strict=True):
        for seed, count in by_seed.items():
            run = RunDirectory.create(out / arm.name / f"seed-{seed}", arm.config(seed))
            summary, metrics = run_of({0: 0.2, 4: 0.8}, count)
            for row in metrics:
                run.append_metrics(row["step"], {name: x for name, x in row.items() if name != "step" and x == x})
            run.write_summary({"finished": True, "seed": seed, "wall_seconds": 1.0, "tokens": {}} | summary)
    return collect(plan, all_runs(plan, out))


def test_the_report_has_the_corrected_intervals(tmp_path):
    plan = _compared(grid(DEMO, ["train.steps=4"], 3, TWO), "tokens_to, accuracy", 0.8)
    assert plan.comparisons == 2
    results = written(tmp_path, plan, [{0: 100.0, 1: 100.0, 2: 100.0}, {0: 90.0, 1: 80.0, 2: 70.0}])
    # Ten times the tokens of step 1: −100, −200, −300. Mean −200, standard error 100/√3, t(2) at 97.5 % 6.205347.
    found = results[1].differences["tokens_to"]
    assert (found.mean, found.comparisons) == (pytest.approx(-200), 2)
    assert found.corrected_half_width == pytest.approx(6.205347 * 100 / math.sqrt(3), rel=1e-6)
    text = markdown(plan, results)
    low, high, wide = 248.4, 358.3, detectable_errors(2, 6.205347) * 100 / math.sqrt(3)
    line = f"| algo.clip_high=0.28 | tokens to accuracy | -200 | {-200 - low:+,.0f} to {-200 + low:+,.0f} |"
    assert f"{line} {-200 - high:+,.0f} to {-200 + high:+,.0f} | - | -2.00 | {wide:,.0f} |" in text
    assert "| algo.clip_high=0.28 | accuracy % | +0.0 (all equal) | - | - | - | - |  |" in text
    assert "Bonferroni's correction for 2 comparisons" in text
    assert "needs 7 or more seeds" in text  # of 2⁶ subsets, 2.5 % / 2 is less than one
    assert "To accuracy: to 80% held out" in text
    screen = io.StringIO()
    print_ablation(plan, results, Console(file=screen, width=200))
    assert "algo.clip_high=0.28, tokens to accuracy: -200; 95 % -448 to +48; corrected -558 to +158; d -2.00; " in (
        screen.getvalue()
    )
    report = json.loads(ablation_json(plan, results))
    assert (report["to_accuracy"], report["comparisons"]) == (0.8, 2)
    assert report["arms"][1]["differences"]["tokens_to"] == asdict(found)
    assert report["arms"][0]["tokens_to"]["mean"] == pytest.approx(1000)
    assert report["arms"][0]["runs"][0]["reached"] is True


def test_what_is_compared_comes_back_with_the_plan(tmp_path):
    plan = _compared(grid(DEMO, [], 1, TWO), None, 0.9)
    assert plan.compared == ("accuracy", "steps_to", "tokens_to")
    plan.save(tmp_path / "plan.json")
    assert AblationPlan.load(tmp_path / "plan.json") == plan
    older = json.loads((tmp_path / "plan.json").read_text())
    for name in ("table", "compared", "to_accuracy"):
        del older[name]
    (tmp_path / "plan.json").write_text(json.dumps(older))
    assert AblationPlan.load(tmp_path / "plan.json") == grid(DEMO, [], 1, TWO)
    for wrong in ({"table": "x"}, {"compared": ["x"]}, {"to_accuracy": 2}):
        (tmp_path / "plan.json").write_text(json.dumps(older | wrong))
        with pytest.raises(UserError, match="cannot be read as the plan"):
            AblationPlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("compare", "to_accuracy", "words"),
    [
        ("acuracy", None, "--compare: 'acuracy' is not one of accuracy, .*; did you mean accuracy?"),
        ("steps_to", None, "--compare: steps_to needs an accuracy; give it with --to-accuracy"),
        (None, 80.0, "--to-accuracy: 80 is not between 0 and 1"),
    ],
)
def test_mistakes_in_what_is_compared(compare, to_accuracy, words):
    with pytest.raises(UserError, match=words):
        _compared(grid(DEMO, [], 1, TWO), compare, to_accuracy)


@pytest.mark.parametrize(
    ("vary", "only", "table", "words"),
    [
        (TWO, None, "dapo", "--table: selects from"),
        (TWO, "ladder", None, "--only: selects from"),
        ([], None, "dappo", "--table: 'dappo' is not one of dapo, vapo; did you mean dapo?"),
        ([], "rungs", None, "--only: 'rungs' is not one of ladder, leave-one-out"),
    ],
)
def test_mistakes_in_the_table(vary, only, table, words):
    with pytest.raises(UserError, match=words):
        _plan(DEMO, [], 1, vary, [], only, table)


def test_a_table_is_one_entry(monkeypatch):
    """One without a ladder: the whole, each technique left out, and the baseline, all with the table's preset."""
    clip = Technique("Wide clip", {"algo.clip_high": 0.3}, {"algo.clip_high": 0.2}, "algo.clip_high > 0.2", "")
    other = Technique("Seconds", {"train.lr": 1e-3}, {"train.lr": 1e-4}, "train.lr > 1e-4", "", None, 11)
    table = PaperTable("New", "Old", (clip, other), "a figure", 5, 60, ("leave-one-out",), "dr_grpo")
    monkeypatch.setitem(TABLES, "new", table)
    plan = _plan(DEMO, [], 1, [], [], None, "new")
    assert [(arm.label, arm.paper, arm.compared_with) for arm in plan.arms] == [
        ("New", 60, None),
        ("New without Wide clip", None, "new"),
        ("New without Seconds", 11, "new"),
        ("Old", 5, "new"),
    ]
    bounds = [(arm.config(0).algo.clip_high, arm.config(0).train.lr) for arm in plan.arms]
    assert bounds == [(0.3, 2e-4), (0.2, 2e-4), (0.3, 1e-4), (0.2, 1e-4)]
    assert {arm.config(0).algo.normalize for arm in plan.arms} == {"none"}
    assert plan.table == "new"
    assert arms_by_part(plan.arms) == {"leave-one-out": list(plan.arms)}
    assert paper_table(DEMO, [], 1).table == "dapo"
