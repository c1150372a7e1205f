import io
import math
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from dapo_rl.base.format import count, duration, sparkline
from dapo_rl.config import Config
from dapo_rl.runs.display import LiveDisplay, Pace, PlainDisplay, evaluation_line, make_display, step_line
from dapo_rl.runs.metric_text import closing_rows, dropped, engines, ranks

METRICS = {
    "reward/mean": -0.12,
    "acc/mean": 0.53,
    "actor/entropy": 0.41,
    "response_length/mean": 31.2,
    "response_length/clip_ratio": 0.02,
    "actor/pg_clipfrac_high": 0.008,
    "actor/pg_clipfrac_low": 0.003,
    "sampling/drawn": 26,
    "sampling/kept": 16,
    "sampling/all_correct": 5,
    "sampling/all_wrong": 3,
    "sampling/surplus": 2,
    "perf/throughput": 4100.0,
    "timing_s/step": 1.6,
}
SUMMARY = {
    "steps": 150,
    "seed": 0,
    "accuracy_before": 0.125,
    "accuracy_after": 0.65,
    "wall_seconds": 3725.0,
    "tokens": {"all_correct": 200_000, "trained": 800_000, "all_wrong": 0, "total": 1_000_000},
    "metrics": {},
    "paths": {"model": "run/model", "report": "/elsewhere/report.png"},
}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def plain(clock=None):
    stream = io.StringIO()
    return PlainDisplay(stream, clock or Clock()), stream


def live(width=100, **options):
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None, **options)
    return LiveDisplay(console, Clock()), stream


def shown(display, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(display)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (1.64, "1.6s"), (9.97, "10s"), (59.7, "1m00s"), (220, "3m40s"), (7500, "2h05m"), (97200, "1d03h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999.4, "999"), (999.6, "1.0k"), (4100, "4.1k"), (813_000, "813k"), (999_700, "1.0M"), (2.5e9, "2.5G")],
)
def test_counts(value, text):
    assert count(value) == text


def test_sparklines_span_the_ramp_and_leave_gaps():
    assert sparkline([0, 1, math.nan, 0.5], "abc") == "ac b"
    assert sparkline([2, 2], "abc") == "bb"
    assert sparkline([math.nan]) == ""


def test_every_reason_for_a_drop_is_named():
    metrics = {"sampling/all_correct": 5, "sampling/verifier_error": 1, "sampling/stale": 0, "sampling/kept": 9}
    assert dropped(metrics) == ["5 all right", "1 verifier error"]


def test_the_line_of_a_step():
    assert step_line(12, 150, 16, METRICS, 220) == (
        "step  12/150  acc 0.53 reward -0.12  len  31.2 cut  2%  ent 0.41 clip +0.8/-0.3%  "
        "16 kept  5 right  3 wrong   4.1k tok/s   1.6s left 3m40s"
    )


GRADED = METRICS | {"sampling/kept": 2, "sampling/drawn": 43, "sampling/wasted_share": 0.921, "sampling/surplus": 0}
GRADED |= {"sampling/all_correct": 0, "sampling/all_wrong": 0, "sampling/no_spread": 41}


def test_the_line_of_a_step_with_graded_rewards_says_how_many_had_no_spread():
    line, usual = (step_line(12, 150, 16, GRADED, 220, graded) for graded in (True, False))
    assert "   2 kept 41 no spread  " in line
    assert "right" not in line
    assert len(line) == len(usual)
    assert line.index("tok/s") == usual.index("tok/s")


def test_what_has_no_column_is_listed_below_the_line():
    display, stream = plain()
    display.start(150, Config())
    display.step(1, METRICS | {"sampling/surplus": 0})
    display.step(2, GRADED | {"sampling/no_spread": 38, "sampling/verifier_error": 3})
    display.step(3, GRADED)
    display.step(4, GRADED | {"sampling/no_spread": 0})
    _, first, second, below, third, fourth = stream.getvalue().splitlines()
    assert "16 kept  5 right  3 wrong" in first
    assert " 2 kept 38 no spread" in second
    assert below == "  dropped 41 of 43 groups (92% of tokens): 38 no spread, 3 verifier errors"
    assert " 2 kept 41 no spread" in third
    assert " 2 kept  0 no spread" in fourth, "the columns stay"


@pytest.mark.parametrize(("others", "said"), [({}, " 0 dropped"), ({"surplus": 2, "verifier_error": 11}, "13 dropped")])
def test_a_step_without_groups_that_are_all_right_or_wrong_has_words_that_fit_graded_rewards(others, said):
    nothing = GRADED | {"sampling/no_spread": 0} | {f"sampling/{name}": groups for name, groups in others.items()}
    line, usual = (step_line(12, 150, 16, metrics, 220) for metrics in (nothing, METRICS))
    assert f"   2 kept {said}  " in line
    assert not re.search("right|wrong", line)
    assert line.index("tok/s") == usual.index("tok/s")
    for one in ("all_correct", "all_wrong"):
        assert f" {int(one == 'all_correct')} right " in step_line(1, 2, 16, nothing | {f"sampling/{one}": 1}, 220)


def test_groups_that_are_compared_by_score_are_so_from_the_first_step():
    display, stream = plain()
    display.start(150, Config.build({"sampling.metric": "score"}))
    display.step(1, GRADED | {"sampling/no_spread": 0})
    assert " 2 kept  0 no spread" in stream.getvalue()


@pytest.mark.parametrize(("score", "said"), [(0.61, ""), (0.22, ""), (0.4375, "  mean score 0.438"), (None, "")])
def test_an_evaluation_of_graded_rewards_has_the_mean_score(score, said):
    metrics = {"eval/accuracy": 0.61, "eval/reward": score}
    assert evaluation_line(12, 150, metrics) == f"eval  12/150  held-out accuracy 61.0%{said}"
    display, _ = live()
    with display:
        display.start(150, Config())
        display.step(1, METRICS | metrics)
        assert ("held-out score" in shown(display)) is bool(said)


def test_a_long_evaluation_says_how_far_it_is():
    clock = Clock()
    display, stream = plain(clock)
    display.start(150, Config())
    before = len(stream.getvalue())
    display.phase("evaluating", 0, 100)
    for done in range(1, 101):
        clock.now += 1
        display.phase("evaluating", done, 100)
        display.phase("sampling", done, 100)
    assert stream.getvalue()[before:].splitlines() == [
        "evaluating: 15 of 100 problems, 1m25s left",
        "evaluating: 30 of 100 problems, 1m10s left",
        "evaluating: 45 of 100 problems, 55s left",
        "evaluating: 60 of 100 problems, 40s left",
        "evaluating: 75 of 100 problems, 25s left",
        "evaluating: 90 of 100 problems, 10s left",
    ]
    before = len(stream.getvalue())
    for done in (0, 4, 8):  # a short one says nothing
        clock.now += 3
        display.phase("evaluating", done, 8)
    assert len(stream.getvalue()) == before


def test_groups_that_filled_the_batch_are_not_said_to_be_kept():
    metrics = METRICS | {"sampling/kept": 16, "sampling/filled_up": 7}
    assert "   9 kept  5 right  3 wrong" in step_line(12, 150, 16, metrics, 220)
    display, _ = live()
    with display:
        display.start(150, Config(), "1.1M parameters")
        display.step(1, metrics)
        assert "groups  9 kept  7 no signal  dropped: 5 all right, 3 all wrong" in shown(display)


def test_lines_stay_aligned_and_within_140_columns():
    other = METRICS | {"reward/mean": 0.5, "response_length/mean": 1234.5, "sampling/all_wrong": 12}
    for total, groups in ((150, 16), (10_000, 512)):
        lines = [step_line(step, total, groups, metrics, 220) for step, metrics in ((1, METRICS), (99, other))]
        assert {len(line) for line in lines} == {len(lines[0])}
        assert [m.start() for m in re.finditer("[a-z]+", lines[0])] == [
            m.start() for m in re.finditer("[a-z]+", lines[1])
        ]
        assert len(lines[0]) <= 140
    shares = {name: 1.0 for name in METRICS if "clip" in name}
    counts = {name: 4608 for name in METRICS if name.startswith("sampling/")}
    extreme = METRICS | shares | counts | {"actor/entropy": 12.34, "response_length/mean": 20480.0, "reward/mean": -1.5}
    assert len(step_line(10_000, 10_000, 512, extreme | {"timing_s/step": 3000.0}, 1e7)) <= 140


OF_CRITIC = {"critic/vf_loss": 0.4375, "critic/vf_explained_var": -0.04, "actor/updates": 8}
ALONE = {name: value for name, value in METRICS.items() if not name.startswith("actor/")} | OF_CRITIC
ALONE |= {"actor/updates": 0, "rollout/mismatch_kl": None}
"""A step of value pre-training."""


def test_the_line_of_a_step_with_a_critic_has_its_explained_variance():
    assert step_line(40, 150, 16, METRICS | OF_CRITIC, 220) == (
        "step  40/150  acc 0.53 reward -0.12  len  31.2 cut  2%  ent 0.41 clip +0.8/-0.3%  "
        "16 kept  5 right  3 wrong  ev -0.04   1.6s left 3m40s"
    )
    assert step_line(12, 150, 16, ALONE, 220) == (
        "step  12/150  acc 0.53 reward -0.12  len  31.2 cut  2%  value pre-training        "
        "16 kept  5 right  3 wrong  ev -0.04   1.6s left 3m40s"
    )
    # Nothing was trained on: neither the policy nor the critic.
    assert "ent    - clip      +-/--" in step_line(1, 150, 16, ALONE | {"critic/vf_loss": math.nan}, 220)


def test_value_pretraining_is_announced_until_it_is_over():
    config = Config.build({"preset": "vapo", "train.steps": 8, "critic.pretrain_steps": 2})
    said = "value pre-training: the policy is trained from step 3 on"
    display, stream = plain()
    display.start(8, config)
    assert stream.getvalue().splitlines()[1:] == [said]
    display, stream = plain()
    display.start(8, config, steps_done=2)
    assert len(stream.getvalue().splitlines()) == 1
    display, _ = live()
    with display:
        display.start(8, config)
        assert said in shown(display)
        display.step(1, ALONE)
        screen = shown(display)
        assert said in screen
        assert "entropy" not in screen
        assert re.search(r"explained variance +-0\.04 ", screen)
        assert re.search(r"value loss +0\.438 ", screen)
        display.step(2, ALONE)
        assert said not in shown(display)
        display.step(3, METRICS | OF_CRITIC)
        assert re.search(r"entropy +0\.41 ", shown(display))
    display, _ = live()
    with display:
        display.start(8, Config.build({"train.steps": 8}))
        display.step(1, METRICS)
        assert not re.search("value|explained", shown(display))


def test_missing_metrics_are_dashes():
    line = step_line(1, 2, 4, {"acc/mean": None, "reward/mean": math.nan}, math.nan)
    assert line.split()[:6] == ["step", "1/2", "acc", "-", "reward", "-"]


def test_time_left_follows_the_last_steps():
    clock = Clock()
    pace = Pace(100, 10, clock)
    assert math.isnan(pace.seconds_left)
    clock.now += 50  # an evaluation before the first step happens once
    pace.step(11, 2.0)
    assert pace.seconds_left == 89 * 2
    clock.now += 4
    pace.step(12, 2.0)  # what the step itself does not count, a checkpoint say, does count here
    assert pace.seconds_left == 88 * 3
    for step in range(13, 33):
        clock.now += 5
        pace.step(step, 2.0)
    assert pace.seconds_left == 68 * 5


def test_plain_output_of_a_run():
    display, stream = plain()
    with display:
        display.start(150, Config(), "1.1M parameters")
        display.phase("sampling", 3, 16)
        display.note("[bold]kept[/bold] \x1b[31m as it is")
        display.step(12, METRICS | {"eval/accuracy": 0.61})
        display.finish(SUMMARY)
    lines = stream.getvalue().splitlines()
    assert lines[0] == (
        "dapo: tiny (1.1M parameters) on arithmetic, 150 steps, 16 groups of 16, 1 update per step, seed 0"
    )
    assert lines[1] == "[bold]kept[/bold] \\x1b[31m as it is"
    assert lines[2].startswith("step  12/150  acc 0.53")
    assert lines[3] == "  dropped 10 of 26 groups: 5 all right, 3 all wrong, 2 surplus"
    assert lines[4] == "eval  12/150  held-out accuracy 61.0%"
    assert lines[5:] == [
        "held-out accuracy  12.5% -> 65.0%  (+52.5 points)",
        "steps              150",
        "wall time          1h02m",
        "tokens generated   1.0M",
        "  trained on       800k  (80%)",
        "  all right        200k  (20%)",
        "model              run/model",
        "report             /elsewhere/report.png",
    ]


def test_a_resumed_run_says_where_it_goes_on():
    display, stream = plain()
    display.start(150, Config(), steps_done=40)
    assert "steps 41 to 150" in stream.getvalue()


def test_a_stream_that_cannot_write_a_character_gets_its_number():
    raw = io.BytesIO()
    display = PlainDisplay(io.TextIOWrapper(raw, encoding="ascii"))
    display.note("π ok")
    assert raw.getvalue() == b"\\u03c0 ok\n"


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (None, None, "not measured: no data.eval"),
        (0.5, None, "50.0% before training"),
        (None, 0.5, "50.0% after training"),
        (0.5, 0.25, "50.0% -> 25.0%  (-25.0 points)"),
    ],
)
def test_accuracies_that_are_missing(before, after, text):
    rows = closing_rows(SUMMARY | {"accuracy_before": before, "accuracy_after": after})
    assert rows[0] == ("held-out accuracy", text)


def test_paths_are_relative_where_they_can_be(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rows = dict(closing_rows({"paths": {"model": tmp_path / "runs" / "model", "report": "/elsewhere/r.png"}}))
    assert rows["model"] == os.path.join("runs", "model")
    assert rows["report"] == "/elsewhere/r.png"


def test_the_live_table():
    display, _ = live()
    with display:
        display.start(150, Config(), "1.1M parameters")
        display.phase("sampling", 12, 16)
        for step, reward in enumerate((-0.5, 0.0, 0.5), start=1):
            display.step(step, METRICS | {"reward/mean": reward} | ({"eval/accuracy": 0.25} if step == 1 else {}))
        screen = shown(display)
    assert "step 3/150" in screen
    assert "1m18s left" in screen  # 147 steps of 1.6, 0 and 0 seconds on a clock that stands still
    assert "sampling 12/16" in screen
    assert re.search(r"reward +0\.50 +▁[▄▅]█\n", re.sub(r" +\n", "\n", screen))
    assert re.search(r"held-out accuracy +25\.0% ", screen)
    assert re.search(r"clipped high +0\.80% ", screen)
    assert re.search(r"clipped low +0\.30% ", screen)
    assert "16 kept  dropped: 5 all right, 3 all wrong, 2 surplus" in screen
    assert max(len(line) for line in screen.splitlines()) <= 80
    assert len(screen.splitlines()) <= 22


def test_no_text_is_taken_for_markup_on_a_terminal():
    display, stream = live()
    hostile = "[bold]x[/bold] [/nonsense] \x1b[2J"
    with display:
        display.start(2, Config.build({"model.name": "[red]m[/red]"}), "[/oops]")
        display.phase(hostile)
        display.note(hostile)
        display.step(1, METRICS)
        assert "[bold]x[/bold] [/nonsense]" in shown(display)
        assert "[red]m[/red] ([/oops])" in shown(display)
        display.finish(SUMMARY | {"paths": {"model": "/r/[b]x[/b]"}})
    output = stream.getvalue()
    assert "[bold]x[/bold] [/nonsense] \\x1b[2J" in output
    assert "\x1b[2J" not in output
    assert "/r/[b]x[/b]" in output
    assert "12.5% -> 65.0%" in output


def test_the_terminal_is_restored_after_an_error():
    display, stream = live()

    def fail():
        with display:
            display.start(2, Config())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    hidden, visible = stream.getvalue().rfind("\x1b[?25l"), stream.getvalue().rfind("\x1b[?25h")
    assert 0 <= hidden < visible


def test_what_is_chosen_for_a_stream(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_display(Terminal()), LiveDisplay)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(make_display(io.StringIO()), PlainDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(Terminal()), PlainDisplay)


def test_no_heavy_import():
    code = (
        "import sys, dapo_rl.runs.directory, dapo_rl.runs.display, dapo_rl.runs.display, dapo_rl.lab.check;"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_engines_and_ranks_are_one_line_each():
    assert engines(METRICS) is None
    figures = {
        "queue": (12, 30),
        "version": (4, 4),
        "tokens_per_s": (900.0, 1200.0),
        "busy": (0.91, 0.979),
        "lost": (0, 0),
    }
    metrics = {f"engine/{i}/{name}": values[i] for name, values in figures.items() for i in (0, 1)}
    assert engines(metrics) == "2 engines  busy 91% to 98%  2.1k tok/s  queue 42  version 4"
    metrics |= {"engine/1/lost": 2, "engine/1/busy": None, "engine/1/version": 3}
    assert engines(metrics) == "2 engines  busy 91%  2.1k tok/s  queue 42  version 3 to 4  lost 2"
    figures = {"tokens": (51200, 49800), "busy": (0.5, 0.497), "memory_gib": (71.25, 70.0)}
    metrics |= {f"rank/{i}/{name}": values[i] for name, values in figures.items() for i in (0, 1)}
    assert ranks(METRICS) is None
    assert ranks(metrics) == "2 ranks  busy 50%  49.8k to 51.2k tokens each  71.2 GiB"
    display, stream = live()
    with display:
        display.start(5, Config())
        display.step(1, METRICS | metrics)
    assert "2 engines  busy 91%" in stream.getvalue()
    assert "2 ranks  busy 50%" in stream.getvalue()
    display, stream = plain()
    display.start(5, Config())
    display.step(1, METRICS | metrics | {"sampling/surplus": 0})
    display.step(2, METRICS | {"sampling/surplus": 0})
    assert [line for line in stream.getvalue().splitlines() if line.startswith("  ")] == [
        "  2 engines  busy 91%  2.1k tok/s  queue 42  version 3 to 4  lost 2",
        "  2 ranks  busy 50%  49.8k to 51.2k tokens each  71.2 GiB",
    ]
