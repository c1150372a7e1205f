"""docs/benchmarks.md and the README show the saved runs of gsm8k-qwen2.5-1.5b."""

import pytest
import real_runs
from support import REPOSITORY

BENCHMARKS, README = (REPOSITORY / "docs" / "benchmarks.md").read_text(), (REPOSITORY / "README.md").read_text()


def test_the_accuracies_are_those_of_the_saved_runs():
    assert "\n".join([real_runs.HEAD, *real_runs.table()]) in BENCHMARKS
    assert "gsm8k-runs.png)" in BENCHMARKS


def test_the_readme_has_the_range_over_the_seeds():
    runs = [real_runs.accuracies(real_runs.read(f"seed-{seed}")) for seed in (0, 1, 2)]
    first, last = ([100 * run[step] for run in runs] for step in (real_runs.EVALUATED[0], real_runs.EVALUATED[-1]))
    assert f"from {first[0]:.1f} % to {min(last):.1f}–{max(last):.1f} % on 400 GSM8K test problems" in README
    assert f"in {real_runs.EVALUATED[-1]} steps (three seeds;" in README


def test_the_engines_are_those_of_the_saved_runs():
    assert "\n".join([real_runs.ENGINES_HEAD, *real_runs.engines_table()]) in BENCHMARKS
    assert "\n".join([real_runs.TWO_ENGINES_HEAD, *real_runs.two_engines_table()]) in BENCHMARKS


def test_the_runs_with_a_tool_are_the_saved_ones():
    assert "\n".join([real_runs.TOOL_HEAD, *real_runs.tool_table()]) in BENCHMARKS


def test_the_seconds_of_a_step_are_those_of_the_saved_runs():
    assert f"A step takes {real_runs.seconds_of_a_step('seed-0'):.1f} s (median of 30)" in BENCHMARKS
    assert f"Seed 2 takes {real_runs.seconds_of_a_step('seed-2'):.1f} s a step" in BENCHMARKS
    cluster = (REPOSITORY / "docs" / "cluster.md").read_text()
    assert f"with `shared` took {real_runs.seconds_of_a_step('async-2'):.1f} s for a step" in cluster
    assert f"and {real_runs.seconds_of_a_step('sync'):.1f} s without" in cluster


def test_the_run_with_fresh_samples_is_the_saved_one():
    rows = real_runs.read("fresh")
    first, second, third = (f"{100 * real_runs.accuracies(rows)[step]:.1f}" for step in real_runs.EVALUATED[1:])
    tokens = sum(row.get("sampling/tokens_generated") or 0 for row in rows)
    text = " ".join(BENCHMARKS.split())
    assert f"Seed 0 then reaches {first}, {second} and {third} % after 10, 20 and 30 steps" in text
    seconds = real_runs.seconds_of_a_step("fresh")
    assert f"It samples {tokens:,} tokens instead of 7,113,979, and a step takes {seconds:.1f} s." in text
    assert {row["sampling/staleness"] for row in rows[1:]} == {0}


@pytest.mark.parametrize(
    ("draw", "runs"), [(real_runs.draw, real_runs.RUNS), (real_runs.draw_two_engines, real_runs.TWO_ENGINES)]
)
def test_the_pictures_have_every_run(draw, runs):
    names = [text.get_text() for text in draw().axes[0].get_legend().get_texts()]
    assert names == [label for label, _ in runs.values()]
