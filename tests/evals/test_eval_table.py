"""The report as a table and a picture: names are text, whatever they contain."""

import io

import pytest
from rich.console import Console

from dapo_rl.evals.metrics import ModelMetrics, compare
from dapo_rl.evals.plot import draw_evaluation, evaluation_figure
from dapo_rl.evals.table import print_evaluation

HOSTILE = "[bold]a\x1b[2J $x^2$ \u202emodel"


def report(k=2):
    def figures(model, shares, ids):
        values = {f"avg@{k}": shares, "pass@1": shares, f"pass@{k}": [float(s > 0) for s in shares]}
        values |= {f"cons@{k}": [float(s > 0.5) for s in shares]}
        values |= {"response_length": [10.0] * len(ids), "truncated": [0.0] * len(ids)}
        return ModelMetrics(model, k, ids, values, 100, {"correct": 1}, "")

    first = figures(HOSTILE, [0.5, 1.0, 0.0], ["0", "1", "2"])
    second = figures("other", [1.0, 1.0, 0.5, 0.0], ["1", "2", "3", "4"])
    return {
        "data": "some data",
        "k": k,
        "models": [first.report(0), second.report(0)],
        "comparisons": compare(first, second, 0),
    }


def test_models_are_compared_on_what_both_answered():
    """Problems 1 and 2: 1.0 and 0.0 became 1.0 and 1.0."""
    change = report()["comparisons"][0]
    assert change["metric"] == "avg@2"
    assert change["problems"] == 2
    assert change["value"] == 0.5
    assert change["p"] == 1.0


def test_the_table():
    stream = io.StringIO()
    print_evaluation(report(), Console(file=stream, width=120, force_terminal=True, color_system=None))
    lines = stream.getvalue().splitlines()
    assert "\x1b[2J" not in stream.getvalue()
    assert "\u202e" not in stream.getvalue()
    assert any("[bold]a" in line and "50.0%" in line for line in lines)
    assert any("avg@2" in line and "+50.0%" in line and "1.000" in line for line in lines)


def test_what_was_left_out_is_counted():
    def lines(found):
        stream = io.StringIO()
        print_evaluation(found, Console(file=stream, width=120))
        return [line.split() for line in stream.getvalue().splitlines() if "left out" in line]

    found = report()
    assert lines(found) == []
    found["models"][0]["verifier_errors"] = 2
    assert lines(found) == [["left", "out", "2", "of", "6"]]


@pytest.mark.slow
def test_the_picture(tmp_path):
    draw_evaluation(report(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    titles = [axis.get_title(loc="left") for axis in evaluation_figure(report()).axes]
    assert titles[:3] == ["Share correct", "pass@k", "Response length"]
    assert titles[3].startswith("Difference from")
    one = report(k=1)
    alone = evaluation_figure({**one, "models": one["models"][:1], "comparisons": []})
    assert [axis.get_title(loc="left") for axis in alone.axes] == ["Share correct", "Response length"]


def test_a_long_name_is_cut_from_the_left_to_its_room():
    found = report()
    found["models"][0]["model"] = "runs/" + "x" * 80 + "/model"
    title = evaluation_figure(found).axes[3].get_title(loc="left").removeprefix("Difference from ")
    assert (len(title), title[0], title[-6:]) == (24, "…", "/model")


def test_every_point_lies_within_its_panel_above_its_name():
    none_and_all = report()
    for model, share in zip(none_and_all["models"], (0.0, 1.0), strict=True):
        for name, row in model["metrics"].items():
            if "@" in name:
                row.update(value=share, low=share, high=share)
    for axis in evaluation_figure(none_and_all).axes:
        (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
        points = [point for line in axis.lines if line.get_marker() == "o" for point in line.get_xydata()]
        assert points
        assert all(left < x < right and bottom < y < top for x, y in points)
        if axis.get_xscale() == "linear":
            ticks = axis.get_xticks()
            assert all(min(abs(x - tick) for tick in ticks) < 0.5 for x, _ in points)
            assert sum(x for x, _ in points) / len(points) == pytest.approx(sum(ticks) / len(ticks))
    alone = evaluation_figure({**none_and_all, "models": none_and_all["models"][:1], "comparisons": []})
    for axis in (alone.axes[0], alone.axes[-1]):
        assert {x for line in axis.lines for x in line.get_xdata()} == set(axis.get_xticks())
