"""What a run directory keeps of a run's notes and of its failure."""

import json
import os
from io import StringIO

import pytest

from dapo_rl.config import Config
from dapo_rl.errors import DivergedError, UserError
from dapo_rl.runs.directory import NOTHING, RunDirectory
from dapo_rl.runs.display import PlainDisplay
from dapo_rl.runs.error_file import forget_failure, write_failure
from dapo_rl.runs.notes import LONGEST_NOTE, NotedDisplay, Notes, forget_notes_after


def written(path):
    return [json.loads(line) for line in (path / "notes.jsonl").read_text().splitlines()]


def failure(path):
    return json.loads((path / "error.json").read_text())


def test_notes_have_a_time_a_step_and_a_text(tmp_path):
    step = 0
    notes = Notes(tmp_path, lambda: step)
    notes.add("before anything is checked")
    assert not (tmp_path / "notes.jsonl").exists()
    step = 4
    notes.begin()
    notes.add("a\x1b[31m\n" + "x" * 3000)
    first, second = written(tmp_path)
    assert first.keys() == {"time", "step", "text"}
    assert (first["step"], first["text"]) == (4, "before anything is checked")
    assert first["time"] <= second["time"]
    assert second["text"].startswith("a\\x1b[31m\nxxx")
    assert "characters cut" in second["text"]
    assert len(second["text"]) < LONGEST_NOTE + 100


def test_a_note_that_cannot_be_written_does_not_stop_the_run(tmp_path):
    os.mkfifo(tmp_path / "notes.jsonl")  # nobody reads it
    notes = Notes(tmp_path, lambda: 1)
    notes.begin()
    notes.add("lost")


def test_notes_end_where_the_log_does(tmp_path):
    run = RunDirectory.create(tmp_path / "run", Config())
    position = [0]
    notes = Notes(run.path, lambda: position[0])
    notes.begin()
    for position[0] in range(4):
        notes.add(f"at {position[0]}")
        run.append_metrics(position[0], {"acc/mean": 0.5})
    with (run.path / "notes.jsonl").open("a") as file:
        file.write('{"time": 1, "st')
    run.forget_after(2)
    assert [note["text"] for note in written(run.path)] == ["at 0", "at 1", "at 2"]
    assert [row["step"] for row in run.read_metrics()] == [0, 1, 2]
    run.forget_after(NOTHING)
    assert written(run.path) == []
    assert run.read_metrics() == []


def test_lines_that_are_no_notes_are_forgotten(tmp_path):
    lines = ["[]", '{"step": "1"}', "nonsense", '{"step": 1, "text": "kept"}', "[" * 100_000]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines) + "\n")
    forget_notes_after(tmp_path, 1)
    assert [note["text"] for note in written(tmp_path)] == ["kept"]


def test_a_display_notes_only_during_a_run(tmp_path):
    shown = []

    class Shows:
        def note(self, text):
            shown.append(text)

    display = NotedDisplay(Shows())
    display.note("before")
    display.notes = Notes(tmp_path, lambda: 1)
    display.notes.begin()
    display.note("during")
    display.notes = None
    display.note("after")
    assert shown == ["before", "during", "after"]
    assert [note["text"] for note in written(tmp_path)] == ["during"]


def test_a_display_that_notes_opens_and_closes_its_display():
    events = []

    class Opens(PlainDisplay):
        def __enter__(self):
            events.append("open")
            return super().__enter__()

        def __exit__(self, kind, error, trace):
            events.append("close")
            super().__exit__(kind, error, trace)

    stream = StringIO()
    with NotedDisplay(Opens(stream)) as display:
        display.note("a note")
    assert (events, stream.getvalue()) == (["open", "close"], "a note\n")


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_an_error_of_the_user_is_its_line(tmp_path):
    write_failure(tmp_path, 3, UserError("train.lr:  is\nodd\x07"))
    record = failure(tmp_path)
    assert record.pop("time") > 1e9
    assert record == {"step": 3, "kind": "UserError", "message": "train.lr: is odd\\x07"}
    write_failure(tmp_path, 4, raised(DivergedError(4, "a loss is not finite", None)))
    assert failure(tmp_path)["kind"] == "DivergedError"
    assert failure(tmp_path)["message"].startswith("diverged at step 4: a loss is not finite; no checkpoint")
    write_failure(tmp_path, 5, UserError("f raised ValueError: x", more="Traceback of f"))
    assert failure(tmp_path)["traceback"] == "Traceback of f"


def test_an_unexpected_exception_comes_with_its_traceback_and_is_cut(tmp_path):
    write_failure(tmp_path, 7, raised(RuntimeError("y" * 100_000)))
    record = failure(tmp_path)
    assert record.keys() == {"time", "step", "kind", "message", "traceback"}
    assert (record["step"], record["kind"]) == (7, "RuntimeError")
    assert record["message"].startswith("RuntimeError: yyy")
    assert record["traceback"].startswith("Traceback (most recent call last)")
    assert (tmp_path / "error.json").stat().st_size < 10_000


def test_an_error_of_the_machine_needs_no_traceback(tmp_path):
    write_failure(tmp_path, 1, OSError(28, "No space left on device", "/data/x"))
    assert failure(tmp_path)["message"] == "/data/x: No space left on device; free some space"
    assert "traceback" not in failure(tmp_path)


def test_a_failure_that_cannot_be_written_is_not_another_failure(tmp_path):
    write_failure(tmp_path / "gone", 1, UserError("x"))
    forget_failure(tmp_path)


def test_a_run_that_failed_before_its_first_step_can_be_started_again(tmp_path):
    run = RunDirectory.create(tmp_path / "run", Config())
    run.append_metrics(0, {"eval/accuracy": 0.5})
    notes = Notes(run.path, lambda: 0)
    notes.begin()
    notes.add("eval 0/3")
    write_failure(run.path, 1, UserError("x"))
    again = RunDirectory.create(run.path, Config(seed=9))
    assert again.read_config().seed == 9
    assert again.read_metrics() == []
    assert written(run.path) == []
    assert not (run.path / "error.json").exists()
    again.append_metrics(0, {"eval/accuracy": 0.5})
    again.append_metrics(1, {"acc/mean": 0.5})
    with pytest.raises(UserError, match="already contains a run"):
        RunDirectory.create(run.path, Config())


@pytest.mark.parametrize("content", ["", "nonsense\n{}\n"])
def test_a_log_that_is_none_is_not_replaced(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match="already contains a run"):
        RunDirectory.create(tmp_path, Config())
    assert (tmp_path / "metrics.jsonl").read_text() == content
