import math
import time

import numpy as np
import pytest
from matplotlib.image import imread

from dapo_rl.runs.report_plot import draw_report, report_figure, smooth


def rows(n):
    return [
        {
            "step": step,
            "response_length/mean": 100.0 + step,
            "response_length/max": 200,
            "reward/mean": -0.5 + step / n,
            "acc/mean": step / n,
            "actor/entropy": 1 / step,
            "actor/prob": 0.5,
            "actor/pg_clipfrac_high": 0.004,
            "actor/pg_clipfrac_low": 0.002,
            "actor/clipped_high_prob": 0.2,
            "sampling/kept": 16,
            "sampling/all_correct": 3,
            "sampling/all_wrong": 1,
            "sampling/stale": 0,
            "sampling/all_correct_share": 0.15,
        }
        for step in range(1, n + 1)
    ]


def panel(figure, title):
    return next(axis for axis in figure.axes if axis.get_title("left").startswith(title))


def texts(axis):
    return [text.get_text() for text in axis.texts]


def labels(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_smooth_is_the_centred_mean_of_what_is_known():
    values = np.array([1.0, 2.0, math.nan, 4.0, 5.0, 6.0])
    # Half a window is 2: the mean of up to five values around each, missing ones left out.
    assert smooth(values) == pytest.approx([1.5, 7 / 3, 3.0, 17 / 4, 5.0, 5.0])
    assert np.isnan(smooth(np.full(4, np.nan))).all()


def test_a_few_steps_show_every_value():
    figure = report_figure(rows(4), [(0, 0.1), (4, 0.75)], "run $a_b$")
    assert figure.get_suptitle() == "run $a_b$"
    assert [axis.get_title("left") for axis in figure.axes[:8]] == [
        "Response length",
        "Reward and training accuracy",
        "Entropy",
        "Mean probability of sampled tokens",
        "Held-out accuracy",
        "Clipped tokens",
        "Outcome of the groups drawn",
        "Prompts that are all right",
    ]
    (entropy,) = panel(figure, "Entropy").lines
    assert list(entropy.get_ydata()) == [1, 1 / 2, 1 / 3, 1 / 4]
    (held_out,) = panel(figure, "Held-out").lines
    assert held_out.get_xydata().tolist() == [[0, 0.1], [4, 0.75]]
    assert sorted(texts(panel(figure, "Held-out"))) == ["10.0%", "75.0%"]
    assert labels(panel(figure, "Outcome of")) == ["kept", "all right", "all wrong"]  # no empty reasons
    assert labels(panel(figure, "Clipped"))[2] == "mean probability at the upper bound (right)"


def test_groups_that_filled_a_batch_have_their_own_colour():
    filled = [row | {"sampling/filled_up": 6} for row in rows(4)]
    axis = panel(report_figure(filled, [], "x"), "Outcome of")
    assert labels(axis) == ["kept", "no signal", "all right", "all wrong"]
    tops = [part.get_paths()[0].vertices[:, 1].max() for part in axis.collections]
    assert tops == [10, 16, 19, 20]


def test_many_steps_are_smoothed_over_the_raw_line():
    axis = panel(report_figure(rows(30), [], "x"), "Entropy")
    raw, smoothed = axis.lines
    assert raw.get_alpha() < 1
    assert list(smoothed.get_ydata()) == pytest.approx(smooth(np.array([1 / s for s in range(1, 31)])))


def test_the_stack_is_as_high_as_the_groups_drawn():
    for count in (1, 5, 30):
        axis = panel(report_figure(rows(count), [], "x"), "Outcome of")
        top = axis.dataLim.y1
        assert top == pytest.approx(20)
        assert axis.get_ylim()[0] == 0


@pytest.mark.slow
def test_a_critic_has_two_panels_and_its_pretraining_is_shaded(tmp_path):
    with_critic = [
        row | {"critic/vf_explained_var": -7.5 if row["step"] == 1 else 0.5, "critic/vf_loss": 1 / row["step"]}
        for row in rows(8)
    ]
    for row in with_critic[:2]:
        for name in [name for name in row if name.startswith("actor/")]:
            del row[name]
    alone = [row | {"actor/updates": 0 if row["step"] < 3 else 8} for row in with_critic]
    figure = report_figure(alone, [(0, 0.1), (8, 0.75)], "x")
    explained, loss = panel(figure, "Explained variance"), panel(figure, "Value loss")
    assert list(explained.lines[0].get_ydata()) == [-7.5, *[0.5] * 7]
    assert explained.get_ylim()[0] == -1
    assert list(loss.lines[0].get_ydata()) == [1 / step for step in range(1, 9)]
    assert panel(figure, "Entropy").lines[0].get_ydata()[:3] == pytest.approx([math.nan] * 2 + [1 / 3], nan_ok=True)
    for axis in [axis for axis in figure.axes if axis.get_title("left")]:
        (shaded,) = [patch for patch in axis.patches if patch.get_zorder() == 0]
        assert shaded.get_x() + shaded.get_width() == 2.5  # between the last step without the policy and the next
        assert shaded.get_x() == axis.get_xlim()[0]
        assert (" value\n pre-training" in texts(axis)) == (axis in (explained, loss))
    draw_report(alone, [], tmp_path / "report.png", "x")
    assert imread(tmp_path / "report.png").shape == (860, 2370, 4)
    # PPO has a critic, but trains the policy from the beginning.
    figure = report_figure([row | {"actor/updates": 8} for row in with_critic], [], "x")
    assert not panel(figure, "Value loss").patches
    assert len([axis for axis in figure.axes if axis.get_title("left")]) == 10


def test_without_held_out_prompts_the_reward_takes_the_place():
    axis = panel(report_figure(rows(3), [(1, None), (2, math.nan)], "x"), "Reward (no held-out")
    assert list(axis.lines[0].get_ydata()) == pytest.approx([-0.5 + s / 3 for s in (1, 2, 3)])


def test_missing_values_leave_gaps_and_empty_panels_say_so():
    metrics = [
        {"step": 2, "actor/entropy": None, "reward/mean": math.nan},
        {"step": 1, "actor/entropy": 0.5},
        {"step": 3, "actor/entropy": 0.25},
    ]
    figure = report_figure(metrics, [], "x")
    assert panel(figure, "Entropy").lines[0].get_ydata() == pytest.approx([0.5, math.nan, 0.25], nan_ok=True)
    assert texts(panel(figure, "Response length")) == ["no data"]
    assert texts(panel(figure, "Entropy")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("metrics", "evaluations"), [([], []), ([{"step": 1}], [(1, 0.5)]), (rows(1), [(0, 0.5)])])
def test_hardly_any_data_still_makes_a_picture(tmp_path, metrics, evaluations):
    draw_report(metrics, evaluations, tmp_path / "report.png", "x")
    assert imread(tmp_path / "report.png").shape == (860, 1900, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["report.png"]


def test_ten_thousand_steps_are_drawn_in_seconds(tmp_path):
    start = time.monotonic()
    draw_report(rows(10_000), [(s, 0.5) for s in range(0, 10_001, 100)], tmp_path / "report.png", "x")
    assert time.monotonic() - start < 20


def test_the_evaluation_before_the_first_step_starts_its_own_curve_alone():
    """Line 0 of the log has only an evaluation; the other curves start at step 1, as in logs without it."""
    before = {"step": 0, "eval/accuracy": 0.1}
    for n in (4, 40):
        figure = report_figure([before, *rows(n)], [(0, 0.1), (n, 0.75)], "run")
        without = report_figure(rows(n), [(0, 0.1), (n, 0.75)], "run")
        (curve,) = panel(figure, "Held-out accuracy").get_lines()
        assert curve.get_xydata().tolist() == [[0, 0.1], [n, 0.75]]
        for title in ("Response length", "Reward", "Entropy", "Clipped tokens"):
            drawn, expected = ([line.get_xydata() for line in panel(f, title).get_lines()] for f in (figure, without))
            assert len(drawn) == len(expected) > 0
            assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(drawn, expected, strict=True))
        outcomes = [panel(f, "Outcome of the groups").collections for f in (figure, without)]
        assert outcomes[0][0].get_paths()[0].vertices.tolist() == outcomes[1][0].get_paths()[0].vertices.tolist()


def test_several_reward_functions_have_a_line_each():
    rows = [{"step": n, "reward/mean": 0.1, "acc/mean": 0.2, "reward/math/mean": 0.3 * n} for n in (1, 2)]
    axis = report_figure(rows, [], "t").axes[1]
    assert [line.get_label() for line in axis.get_lines()] == ["reward, shaped", "accuracy"]
    rows = [row | {"reward/_size/mean": 2.0, "reward/_size/std": 1.0} for row in rows]
    axis = report_figure(rows, [], "t").axes[1]
    lines = {line.get_label(): list(line.get_ydata()) for line in axis.get_lines()}
    assert list(lines) == ["reward, shaped", "accuracy", "math", "size"]
    assert (lines["math"], lines["size"]) == ([0.3, 0.6], [2.0, 2.0])


@pytest.mark.parametrize("count", [1, 5, 30])
def test_every_value_lies_within_its_panel(count):
    figure = report_figure(rows(count), [(0, 0.0), (count, 1.0)], "x")
    drawn = [(axis, line) for axis in figure.axes for line in axis.lines]
    assert len(drawn) >= 10
    for axis, line in drawn:
        (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
        known = [point for point in line.get_xydata() if np.isfinite(point).all()]
        assert all(left < x < right and bottom <= y <= top for x, y in known), axis.get_title("left")


def test_only_the_longest_response_is_faint_in_a_short_run():
    figure = report_figure(rows(4), [], "x")
    faint = [line.get_label() for axis in figure.axes for line in axis.lines if line.get_alpha() is not None]
    assert faint == ["longest"]
