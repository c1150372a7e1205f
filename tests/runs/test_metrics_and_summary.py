"""Lines of metrics and summaries that somebody else wrote: one line that names them, or none of their numbers."""

import json
import math
import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.plan import Arm
from dapo_rl.lab.ablate.results import final_metrics
from dapo_rl.lab.ablate.runs import ArmRun
from dapo_rl.runs.directory import RunDirectory, parse_metrics
from dapo_rl.runs.report_plot import report_figure

GOOD = {"step": 1, "acc/mean": 0.5, "reward/mean": None, "sampling/kept": 4, "actor/entropy": 0.25}
SUMMARY = {
    "finished": True,
    "steps": 2,
    "accuracy_before": 0.25,
    "accuracy_after": None,
    "evaluations": [{"step": 0, "accuracy": 0.25}, {"step": 2, "accuracy": None}],
    "wall_seconds": 3.5,
    "tokens": {"total": 50, "trained": 40},
}
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "run", Config())


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[1, 2]", "not a mapping of names to numbers"),
        ("7", "not a mapping of names to numbers"),
        ("{}", "'step' is not a step number"),
        ('{"step": "1"}', "'step' is not a step number"),
        ('{"step": -1}', "'step' is not a step number"),
        ('{"step": 1e999}', "'step' is not a step number"),
        ('{"step": true}', "'step' is not a step number"),
        ('{"step": 9007199254740992}', "'step' is not a step number"),
        ('{"step": 1, "a": "2"}', "'a' is not a number"),
        ('{"step": 1, "a": [2]}', "'a' is not a number"),
        ('{"step": 1, "a": NaN}', "'a' is not a number"),
        ('{"step": 1, "a": 1' + "0" * 400 + "}", "'a' is not a number"),
        ('{"step": 1, "a": 1e308}', "'a' is not a number"),
        ('{"step": 1, "a": ' + "9" * 5000 + "}", "4300 digits"),
        ("[" * 100_000, "not a mapping of names to numbers"),
    ],
    ids=lambda value: value[:30],
)
@pytest.mark.parametrize("last", [True, False])
def test_a_line_that_is_not_ours_is_named(run, line, why, last):
    run.metrics_path.write_text("\n".join([json.dumps(GOOD), line, *([] if last else [json.dumps(GOOD)])]) + "\n")
    for read in (run.read_metrics, lambda: run.truncate_metrics(5)):
        with pytest.raises(UserError) as caught:
            read()
        assert str(caught.value).startswith(f"{run.metrics_path}:2: not a line of metrics: ")
        assert why in str(caught.value)
        assert str(caught.value).endswith("; delete the line")


@pytest.mark.parametrize("record", [{"step": 0}, {"step": 2**53 - 1}, {"step": 1, "a": 1e100, "b": -1e100}])
def test_the_limits_of_a_line_are_included(record):
    assert parse_metrics(json.dumps(record).encode()) == record


def test_a_log_that_is_no_file_is_one_line(run):
    os.mkfifo(run.metrics_path)
    with pytest.raises(UserError, match="cannot be read: it is a pipe or a device"):
        run.read_metrics()
    run.metrics_path.unlink()
    run.metrics_path.mkdir()
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        run.metrics_length()


@settings(max_examples=15, deadline=None)
@given(st.dictionaries(st.sampled_from([*GOOD, "x"]), anything, max_size=5))
@example({"step": 3, "reward/mean": 1e100, "actor/entropy": -1e100, "sampling/kept": 10**99})
def test_what_is_taken_for_metrics_can_be_drawn_and_summed(changes):
    try:
        record = parse_metrics(json.dumps(GOOD | changes).encode())
    except ValueError:
        return
    rows = [record, GOOD | {"step": record["step"] + 1}]
    report_figure(rows, [(record["step"], 0.5)], "a run").draw_without_rendering()
    assert final_metrics(SUMMARY, rows)["accuracy_before"] == 0.25


def test_the_summary_of_a_run_comes_back(run):
    run.write_summary(SUMMARY | {"accuracy_after": math.nan})
    assert run.read_summary() == SUMMARY
    assert final_metrics(run.read_summary(), [])["generated_per_trained"] == 1.25


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*SUMMARY, "x"]), anything, max_size=4) | anything)
@example({"tokens": [1]})
@example({"evaluations": [{"step": "x"}]})
@example({"evaluations": [{"step": 1, "accuracy": 10**400}]})
@example({"accuracy_before": "much"})
def test_any_summary_is_one_or_none(tmp_path_factory, changes):
    run = RunDirectory(tmp_path_factory.mktemp("s"))
    run.summary_path.write_text(json.dumps(SUMMARY | changes if isinstance(changes, dict) else changes))
    if summary := run.read_summary():
        final_metrics(summary, [])


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b"{", b"null"])
def test_a_summary_that_is_none(run, content):
    run.summary_path.write_bytes(content)
    assert run.read_summary() == {}


def test_an_ablation_looks_at_odd_files_without_stopping(tmp_path):
    arm = Arm("a", "a", "vary", "a", None, {}, Config().resolved())
    home = tmp_path / "a" / "seed-0"
    run = RunDirectory.create(home, arm.config(0))
    run.metrics_path.write_text('{"step": 1e999}\n[1]\n{"step": 4, "eval/accuracy": 0.5}\n"x"\n' + "[" * 100_000 + "\n")
    run.summary_path.write_text(json.dumps({"finished": True, "steps": 100, "tokens": [3]}))
    looked = ArmRun(tmp_path, arm, 0)
    assert (looked.state, looked.step, looked.accuracy) == ("waiting", 4, 0.5)
    run.metrics_path.unlink()
    os.mkfifo(run.metrics_path)
    run.summary_path.unlink()
    os.mkfifo(run.summary_path)
    assert ArmRun(tmp_path, arm, 0).state == "waiting"
    run.config_path.write_bytes(run.config_path.read_bytes()[:900])
    with pytest.raises(UserError, match=r"config\.yaml.*"):
        ArmRun(tmp_path, arm, 0)
