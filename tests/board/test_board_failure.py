"""A failed run says so and why, its notes are shown, and the evaluation before step 1 is the first point."""

import json
import os
import socket

import pytest
from board_runs import append_line, finish, make_run
from fastapi.testclient import TestClient

from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.files import MOST_NOTES, read_notes
from dapo_rl.board.routes import create_app
from dapo_rl.board.run import BoardRun
from dapo_rl.board.watcher import Watcher

ERROR = {
    "time": 1.8e9,
    "step": 4,
    "kind": "UserError",
    "message": "reward.verifier: judge failed\nmore",
    "traceback": "Traceback\n  <b>",
}


def fail(run, error=None):
    (run.path / "error.json").write_text(json.dumps(ERROR if error is None else error))
    return BoardRun("run", run.path)


def test_a_failed_run_says_why(tmp_path):
    run = make_run(tmp_path / "run")
    assert BoardRun("run", run.path).row()["state"] == "stopped"
    row = fail(run).row()
    assert (row["state"], row["error"], row["problem"]) == ("failed", "UserError: reward.verifier: judge failed", None)
    client = TestClient(create_app(Catalogue([tmp_path]), None, "token"), base_url="http://127.0.0.1")
    assert client.get("/api/record?run=run").json() == {"run": {"error": ERROR, "notes": []}}


def test_a_run_that_goes_on_or_has_finished_has_not_failed(tmp_path):
    run = make_run(tmp_path / "run")
    lock = run.path / ".lock"
    lock.write_text(f"{os.getpid()} {socket.gethostname()}\n")
    assert fail(run).row()["state"] == "running"
    lock.unlink()
    finish(run, {"total": 1})
    row = fail(run).row()
    assert (row["state"], row["error"]) == ("finished", None)


def test_a_failure_shows_at_the_next_look(tmp_path):
    run = make_run(tmp_path / "run")
    watcher = Watcher(Catalogue([tmp_path]), lambda: None)
    watcher.look()
    fail(run)
    watcher.look()
    assert json.loads(watcher._rows["run"])["state"] == "failed"
    (run.path / "error.json").unlink()  # resumed
    watcher.look()
    assert json.loads(watcher._rows["run"])["state"] == "stopped"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"[" * 100_000, bytes(range(256)), b" " * (2 << 20)])
def test_a_failure_that_cannot_be_read(tmp_path, content):
    run = make_run(tmp_path / "run")
    (run.path / "error.json").write_bytes(content)
    board = BoardRun("run", run.path)
    row = board.row()
    assert (row["state"], row["error"]) == ("failed", None)
    assert row["problem"].startswith("error.json: ")
    assert board.error()["message"].startswith("error.json: ")


def test_values_of_other_types_are_left_out(tmp_path):
    run = make_run(tmp_path / "run")
    found = fail(run, {"time": [], "step": "x", "kind": 7, "message": {"a": 1}, "traceback": 5}).error()
    assert found == dict.fromkeys(ERROR)
    assert fail(run, {"message": "x" * 10**5, "traceback": "y" * 10**5 + "end"}).error()["traceback"].endswith("end")
    assert len(fail(run).row()["error"]) <= 200
    assert fail(run, {}).row()["state"] == "failed"


def test_a_link_out_of_the_run_is_not_followed(tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / "secret").write_text(json.dumps(ERROR))
    (run.path / "error.json").symlink_to(tmp_path / "secret")
    assert "judge" not in json.dumps(BoardRun("run", run.path).row())
    (run.path / "notes.jsonl").symlink_to(tmp_path / "secret")
    assert BoardRun("run", run.path).file("notes.jsonl") is None


def test_notes(tmp_path):
    path = tmp_path / "notes.jsonl"
    notes = [{"time": 5.0, "step": step, "text": f"note {step}"} for step in range(3)]
    lines = [json.dumps(note) for note in notes]
    path.write_text("\n".join([lines[0], "not JSON", '{"text": 7}', "[1]", "", *lines[1:], '{"text": "tor']))
    assert read_notes(path) == notes
    assert read_notes(None) == read_notes(tmp_path / "none") == []


def test_only_the_latest_notes(tmp_path):
    path = tmp_path / "notes.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"step": step, "text": "x" * 100}) + "\n" for step in range(10_000))
    found = read_notes(path)
    assert [note["step"] for note in found] == list(range(10_000 - MOST_NOTES, 10_000))


def test_the_evaluation_before_the_first_step(tmp_path):
    """From a row of step 0 in the log; older directories have it in the summary only, or not at all."""
    new, old, _ = (make_run(tmp_path / name) for name in ("new", "old", "oldest"))
    content = new.metrics_path.read_text()
    new.metrics_path.write_text("")
    append_line(new, **{"step": 0, "eval/accuracy": 0.25, "eval/truncated": 0.5})
    with new.metrics_path.open("a") as file:
        file.write(content)
    finish(old, {"total": 1})
    client = TestClient(create_app(Catalogue([tmp_path]), None, "token"), base_url="http://127.0.0.1")
    curves = client.get("/api/curves?run=new&run=old&run=oldest&metric=eval/accuracy&metric=acc/mean&share=0").json()
    assert curves["new"]["eval/accuracy"]["raw"] == [[0, 2], [0.25, 0.5]]
    assert curves["new"]["eval/accuracy"]["smooth"] == [[0, 2], [0.25, 0.5]]
    assert curves["old"]["eval/accuracy"]["raw"] == [[0, 2], [0.25, 0.5]]
    assert curves["oldest"]["eval/accuracy"]["raw"] == [[2], [0.5]]
    assert curves["new"]["acc/mean"]["raw"] == [[1, 2, 3], [0.1, 0.2, 0.3]]
    first = client.get("/api/evaluations?run=new").json()["new"][0]
    assert first == {"step": 0, "eval/accuracy": 0.25, "eval/truncated": 0.5}
    row = BoardRun("new", new.path).row()
    assert (row["before"], row["accuracy"], row["step"]) == (0.25, 0.5, 3)


def test_of_many_evaluations_the_last_are_listed(tmp_path):
    run = make_run(tmp_path / "run")
    run.metrics_path.write_text("".join(f'{{"step": {step}, "eval/accuracy": 0.5}}\n' for step in range(1, 251)))
    client = TestClient(create_app(Catalogue([tmp_path]), None, "token"), base_url="http://127.0.0.1")
    listed = client.get("/api/evaluations?run=run").json()["run"]
    assert [row["step"] for row in listed] == list(range(51, 251))


def test_before_the_first_step_there_is_no_gain_yet(tmp_path):
    run = make_run(tmp_path / "run")
    run.metrics_path.write_text('{"step": 0, "eval/accuracy": 0.25}\n')
    row = BoardRun("run", run.path).row()
    assert (row["step"], row["accuracy"], row["before"]) == (0, 0.25, None)
