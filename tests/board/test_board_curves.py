"""The run log as columns: read once, thinned, smoothed."""

import json
import time

import numpy as np
import pytest

from dapo_rl.board.curves import curve, smooth_curve, thin
from dapo_rl.runs.metrics_log import MetricsLog


def log_of(path):
    log = MetricsLog(lambda: path if path.is_file() else None)
    log.refresh()
    return log


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def test_a_column_leaves_out_the_steps_without_a_value(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines([{"step": 1, "a": 1.5}, {"step": 2, "a": None, "b": 7}, {"step": 3, "a": "no", "b": True}]))
    log = log_of(path)
    assert [column.tolist() for column in log.column("a")] == [[1], [1.5]]
    assert [column.tolist() for column in log.column("b")] == [[2, 3], [7, 1]]
    assert log.names == ["a", "b"]
    assert log.last_step == 3


def test_a_second_look_reads_only_what_is_new(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines({"step": s, "a": s} for s in range(1, 1001)))
    log = log_of(path)
    read = []
    add = MetricsLog._add
    monkeypatch.setattr(MetricsLog, "_add", lambda self, line: (read.append(line), add(self, line)))
    log.refresh()
    assert read == []
    with path.open("a") as file:
        file.write(lines([{"step": 1001, "a": 5}]) + '{"step": 1002, "a"')  # a line that is being written
    log.refresh()
    assert len(read) == 1
    assert log.last_step == 1001
    with path.open("a") as file:
        file.write(": 6}\n")
    log.refresh()
    assert log.column("a")[1].tolist()[-2:] == [5, 6]


def test_a_log_is_behind_until_its_end_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = log_of(path)
    assert not log.is_behind  # there is nothing to read
    path.write_text(lines({"step": s, "a": s} for s in range(1, 21)))
    log.refresh(most=64)
    assert log.is_behind
    assert log.last_step < 20
    log.refresh()
    assert not log.is_behind
    assert log.last_step == 20
    log.refresh(most=64)
    assert not log.is_behind  # nothing is new
    path.unlink()
    log.refresh()
    assert not log.is_behind


def test_a_log_that_a_resumed_run_rewrote_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines({"step": s, "a": s} for s in range(1, 10)))
    log = log_of(path)
    draft = tmp_path / "draft"
    draft.write_text(lines({"step": s, "a": -s} for s in range(1, 5)))
    draft.replace(path)
    log.refresh()
    assert log.column("a")[1].tolist() == [-1, -2, -3, -4]


def test_a_log_that_was_rewritten_twice_is_read_anew(tmp_path):
    """It can have the inode of the first again, and be longer by the time that somebody looks."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines({"step": s, "a": s} for s in range(1, 10)))
    log = log_of(path)
    path.write_text(lines({"step": s, "a": -s, "b": 0} for s in range(1, 20)))
    log.refresh()
    assert log.column("a")[1].tolist() == [-s for s in range(1, 20)]
    assert log.problem is None


def test_a_step_that_comes_again_replaces_what_came_after_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines([{"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 3, "a": 3}, {"step": 2, "a": 9}]))
    assert [c.tolist() for c in log_of(path).column("a")] == [[1, 2], [1, 9]]


def test_a_last_step_that_comes_again_is_there_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines([{"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 2, "a": 9}]))
    log = log_of(path)
    assert [c.tolist() for c in log.column("a")] == [[1, 2], [1, 9]]
    assert (log.total("a"), log.latest("a"), log.last_step) == (10, 9, 2)


def test_lines_that_are_no_metrics_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('nothing\n[]\n{"a": 1}\n{"step": "x"}\n{"step": 1e999}\n' + lines([{"step": 4, "a": 2}]))
    assert [c.tolist() for c in log_of(path).column("a")] == [[4], [2]]


def test_thinning_keeps_every_spike_and_both_ends():
    steps = np.arange(100_000.0)
    values = np.sin(steps / 5000)
    values[54_321] = 40
    values[70_007] = -40
    few_steps, few = thin(steps, values, 500)
    assert len(few) <= 502
    assert {40.0, -40.0} <= set(few)
    assert few_steps[0] == 0
    assert few_steps[-1] == 99_999
    assert (np.diff(few_steps) > 0).all()


def test_a_short_curve_is_left_as_it_is():
    steps, values = thin(np.array([1.0, 2, 5]), np.array([3.0, 1, 2]), 100)
    assert steps.tolist() == [1, 2, 5]
    assert values.tolist() == [3, 1, 2]


def test_smoothing_by_hand():
    # Over a share of 3 of 3 steps the weight of what was before is 1 - 2/(3+1) = 1/2.
    _, values = smooth_curve(np.arange(3.0), np.array([4.0, 0, 8]), 1.0, 100)
    assert values.tolist() == pytest.approx([4, (4 * 0.25) / 0.75, (4 * 0.125 + 8 * 0.5) / 0.875])


def test_no_smoothing_is_the_curve_and_a_constant_stays_one():
    assert smooth_curve(np.arange(4.0), np.array([1.0, 5, 2, 2]), 0.0, 100)[1].tolist() == [1, 5, 2, 2]
    steps, values = smooth_curve(np.arange(10_000.0), np.full(10_000, 3.0), 0.2, 100)
    assert len(values) == 100
    assert values == pytest.approx(3.0)
    assert steps[-1] == 9_999


def test_a_hundred_thousand_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    names = [f"m{i}" for i in range(20)]
    with path.open("w") as file:
        for step in range(1, 100_001):
            file.write(json.dumps({"step": step, **dict.fromkeys(names, step * 0.5)}) + "\n")
    log = log_of(path)
    assert log.last_step == 100_000
    began = time.process_time()
    log.refresh()
    drawn = {name: curve(log, name, points=600, share=0.1) for name in names}
    assert time.process_time() - began < 5
    assert all(len(c["raw"][0]) <= 602 and c["steps"] == 100_000 for c in drawn.values())
    zoomed = curve(log, "m0", points=600, share=0.0, first=500, last=600)
    assert zoomed["raw"] == [list(range(500, 601)), [s / 2 for s in range(500, 601)]]
