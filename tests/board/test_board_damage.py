"""Runs whose files were cut, forged, or replaced by something else: one bad run is one bad row."""

import asyncio
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from board_runs import finish, make_run
from fastapi.testclient import TestClient
from fuzz.fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from dapo_rl.board import run as run_module
from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.curves import curve
from dapo_rl.board.launcher import Launcher
from dapo_rl.board.ledger import ledger
from dapo_rl.board.routes import create_app, events
from dapo_rl.board.run import BoardRun
from dapo_rl.board.watcher import Watcher, dumps
from dapo_rl.runs.metrics_log import MOST_NAMES, MetricsLog

FILES = (
    "config.yaml",
    "summary.json",
    "metrics.jsonl",
    ".lock",
    "rollouts/step-000001.parquet",
    "model/tokenizer.json",
    "rollouts",
    "checkpoints",
)


def written(content):
    return lambda path: path.write_bytes(content)


def made(make):
    """In the place of what there was."""

    def damage(path):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return damage


def huge(path):
    """A file of 3 TiB with nothing in it."""
    path.write_bytes(b"{")
    os.truncate(path, 3 << 40)


def endless_link(path):
    other = path.with_name("other")
    path.symlink_to(other)
    other.symlink_to(path)


def half(path):
    """In YAML at the end of a line, where it cannot be told from a whole file."""
    before = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(before[: before.rindex(b"\n") + 1] if path.suffix == ".yaml" else before)


INSTEAD = {
    "directory": made(Path.mkdir),
    "pipe": made(os.mkfifo),
    "endless": made(lambda path: path.symlink_to("/dev/zero")),
    "outside": made(lambda path: path.symlink_to("/etc/passwd")),
    "dangling": made(lambda path: path.symlink_to("nowhere")),
    "loop": made(endless_link),
    "file": made(written(b"a file")),
}
LAUGHS = b"a: &a {x: 1}\n" + b"".join(
    b"%c: &%c {<<: [%b]}\n" % (98 + i, 98 + i, b", ".join([b"*%c" % (97 + i)] * 9)) for i in range(12)
)
CONTENT = {
    "empty": written(b""),
    "half": half,
    "binary": written(bytes(range(256)) * 40),
    "zeros": written(bytes(1000)),
    "huge": huge,
    "list": written(b"[1, 2]\n"),
    "text": written(b'"text"\n'),
    "number": written(b"1\n"),
    "null": written(b"null\n"),
    "nan": written(b'{"finished": NaN, "wall_seconds": Infinity, "tokens": {"total": NaN}, "step": NaN}\n'),
    "nested": written(b"[" * 100_000),
    "nested mapping": written(b'{"a":' * 100_000),
    "nested dashes": written(b"- " * 100_000),
    "laughs": written(LAUGHS),
    "types": written(
        json.dumps(
            {
                "finished": "yes",
                "evaluations": [{"step": "x", "accuracy": []}, {"step": None, "accuracy": 1}, 7, {"accuracy": "1"}],
                "tokens": {"total": "many", "trained": [1], "kept": -5},
                "wall_seconds": {"a": 1},
                "step": [],
                "preset": [1],
                "seed": {"a": 2},
                "model": 7,
                "train": {"steps": "many"},
                "algo": [1],
            }
        ).encode()
        + b"\n"
    ),
    "giant": written(
        b'{"wall_seconds": %b, "tokens": {"total": %b}, "evaluations": [{"step": %b, "accuracy": %b}], "step": %b}\n'
        % ((b"9" * 4000,) * 5)
    ),
    "more digits than Python reads": written(b'{"wall_seconds": %b, "step": %b}\n' % ((b"9" * 9000,) * 2)),
    "surrogates": written(b'{"finished": true, "tokens": {"\\ud800": 1}, "preset": "\\ud800", "\\udfff": 1}\n'),
    "process": written(b"99999999999999999999999 here\n"),
    "process 0": written(b"0 here\n"),
}
DAMAGES = [
    (file, name, damage)
    for file in FILES
    for name, damage in (INSTEAD if file in ("rollouts", "checkpoints") else CONTENT | INSTEAD).items()
]
QUERIES = {
    "/api/settings": {},
    "/api/metrics": {},
    "/api/curves": {"metric": ["eval/accuracy", "acc/mean"]},
    "/api/evaluations": {},
    "/api/ledger": {},
    "/api/steps": {},
    "/api/groups": {"step": 1},
    "/api/group": {"step": 1, "draw": 10},
    "/api/search": {"q": "idea"},
    "/api/samples": {"step": 1, "q": "idea"},
    "/api/reports": {},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("whole") / "run", steps=2)
    finish(run, {"trained": 18, "total": 36})
    (run.path / "model").mkdir()
    (run.path / "model" / "tokenizer.json").write_text("{}")
    (run.path / "checkpoints" / "step-000001").mkdir(parents=True)
    (run.path / ".lock").write_text("4194305 nobody\n")
    return run.path


@pytest.fixture(scope="module")
def board(whole, tmp_path_factory):
    """A run for every damage, between two that are whole."""
    root = tmp_path_factory.mktemp("damaged")
    shutil.copytree(whole, root / "a whole one")
    shutil.copytree(whole, root / "zz another")
    names = {}
    for number, (file, name, damage) in enumerate(DAMAGES):
        names[file, name] = f"bad-{number:03d}"
        copy = shutil.copytree(whole, root / names[file, name])
        damage(copy / file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dapo_rl.runs.metrics_log.LARGEST_LOG", 8 << 20)  # so that the huge one is read in no time
        yield create_app(Catalogue([root]), Launcher(root), "token"), names


def first_event(app):
    async def read():
        async for event in events(app.state.watcher):
            return json.loads(event.removeprefix(b"data: "))

    return asyncio.run(asyncio.wait_for(read(), 60))


def all_rows(client):
    """Once every run has been read."""
    deadline = time.monotonic() + 120
    while True:
        rows = client.get("/api/runs").json()["runs"]
        if all(row["state"] != "reading" for row in rows):
            return {row["name"]: row for row in rows}
        assert time.monotonic() < deadline


def test_one_bad_run_is_one_bad_row(board, whole):
    app, names = board
    rows = all_rows(TestClient(app, base_url="http://127.0.0.1"))
    assert list(rows) == ["a whole one", *names.values(), "zz another"]
    expected = BoardRun("", whole).row() | {"name": "", "started": 0}
    assert expected["problem"] is None
    for name in ("a whole one", "zz another"):
        assert rows[name] | {"name": "", "started": 0} == expected
    live = first_event(app)
    assert live["whole"]
    assert {row["name"]: row for row in live["runs"]} == rows
    keys = set(expected)
    for row in rows.values():
        assert set(row) == keys
        assert row["state"] in ("running", "finished", "stopped")
        assert row["problem"] is None or (len(row["problem"]) <= 200 and "\n" not in row["problem"])


SILENT = {
    "config.yaml": {"empty", "null", "half"},
    "summary.json": {"surrogates"},
    "metrics.jsonl": {
        "empty",
        "half",
        "zeros",
        "nested",
        "nested mapping",
        "nested dashes",
        "file",
    },  # no whole line yet
    ".lock": {"empty", "process"},
    "rollouts": {"directory"},
}
"""What a run can have written, or may still be writing."""


@pytest.mark.parametrize("file", SILENT)
def test_the_row_says_which_file_is_bad_and_nothing_of_the_rest(board, file):
    app, names = board
    rows = all_rows(TestClient(app, base_url="http://127.0.0.1"))
    said = {name: rows[run]["problem"] for (damaged, name), run in names.items() if damaged == file}
    assert {name for name, problem in said.items() if problem is None} == SILENT[file]
    for name, problem in said.items():
        assert problem is None or (problem.startswith(f"{file}: ") and not any(f"; {f}" in problem for f in FILES)), (
            name
        )


@pytest.mark.slow
@pytest.mark.parametrize("path", QUERIES)
def test_no_route_fails_on_a_bad_run(board, path):
    app, names = board
    client = TestClient(app, base_url="http://127.0.0.1")
    for (file, damage), run in names.items():
        answer = client.get(path, params={"run": run, **QUERIES[path]})
        assert answer.status_code in (200, 404, 422), (file, damage)
        json.loads(answer.text, parse_constant=lambda name: pytest.fail(name))
        assert answer.content.isascii()
    if path in ("/api/settings", "/api/metrics", "/api/curves", "/api/evaluations"):
        together = [*list(names.values())[:60], "a whole one"]
        assert client.get(path, params={"run": together, **QUERIES[path]}).status_code == 200


def test_a_mistake_of_ours_in_one_run_is_a_row_too(whole, tmp_path, monkeypatch):
    for name in ("a", "b"):
        shutil.copytree(whole, tmp_path / name)
    row = BoardRun.row
    monkeypatch.setattr(BoardRun, "row", lambda self: 1 / 0 if self.name == "a" else row(self))
    watcher = Watcher(Catalogue([tmp_path]), lambda: [])
    rows = json.loads(watcher.rows())["runs"]
    assert [(r["name"], r["state"]) for r in rows] == [("a", "unreadable"), ("b", "running")]
    assert rows[0]["problem"] == "cannot be read: ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    "body", ['{"techniques": NaN}', '{"techniques": ["\\ud800"], "steps": Infinity}', "[" * 2000, '"\\ud800"']
)
def test_a_request_that_json_cannot_repeat_is_answered(board, body):
    client = TestClient(board[0], base_url="http://127.0.0.1")
    headers = {"X-Dapo-Token": "token", "Content-Type": "application/json"}
    answer = client.post("/api/lab/start", content=body.encode(), headers=headers)
    assert answer.status_code in (400, 422)


def test_a_name_that_is_not_utf_8_can_be_asked_for(whole, tmp_path):
    shutil.copytree(whole, os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    client = TestClient(create_app(Catalogue([tmp_path]), Launcher(tmp_path), "token"), base_url="http://127.0.0.1")
    name = client.get("/api/runs").json()["runs"][0]["name"]
    assert name == "caf\N{REPLACEMENT CHARACTER}"
    assert client.get("/api/settings", params={"run": name}).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**400), 10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
METRIC = st.sampled_from(["eval/accuracy", "acc/mean", "timing_s/step", "sampling/tokens_generated", "x"])
SUMMARY = st.fixed_dictionaries(
    {},
    optional={
        "finished": JSON,
        "wall_seconds": JSON,
        "tokens": JSON | st.dictionaries(st.text(max_size=3), JSON),
        "evaluations": JSON | st.lists(st.fixed_dictionaries({}, optional={"step": JSON, "accuracy": JSON})),
    },
)
LINES = st.lists(
    st.fixed_dictionaries({"step": st.integers(-2, 9) | JSON}, optional={"x": JSON}).flatmap(
        lambda line: st.dictionaries(METRIC, JSON).map(lambda more: more | line)
    ),
    max_size=5,
)


CONFIG = JSON | st.dictionaries(st.sampled_from(["train.steps", "seed", "preset", "model", "algo"]), JSON)


@pytest.fixture(scope="module")
def changing(tmp_path_factory):
    """A directory with one run, whose files change from example to example."""
    root = tmp_path_factory.mktemp("changing")
    (root / "run").mkdir()
    (root / "run" / "config.yaml").write_text("")
    client = TestClient(create_app(Catalogue([root]), Launcher(root), "token"), base_url="http://127.0.0.1")
    return root / "run", client


@fuzz(60)
@given(summary=SUMMARY, lines=LINES, config=CONFIG, lock=st.binary(max_size=9))
def test_whatever_the_files_say_the_routes_answer(changing, summary, lines, config, lock):
    run, client = changing
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "config.yaml").write_text(json.dumps(config))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / ".lock").write_bytes(lock)
    row = json.loads(dumps(BoardRun("run", run).row()))
    assert row["problem"] is None or "\n" not in row["problem"]
    assert type(row["step"]) is int
    for path in ("/api/settings", "/api/curves", "/api/evaluations", "/api/ledger"):
        assert client.get(path, params={"run": "run", **QUERIES[path]}).status_code == 200


def test_of_a_summary_only_what_a_run_writes_is_taken(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    evaluations = [(True, 0.1), (-1, 0.1), (10**400, 0.1), ("2", 0.1), (3, True), (4, "1"), (5, 10**400), (6, 0.25)]
    summary = {
        "tokens": {"total": 10, "kept": -5, "stale": True, "surplus": 10**400, "carried": "7", "trained": 4.5},
        "evaluations": [{"step": step, "accuracy": accuracy} for step, accuracy in evaluations],
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    run = BoardRun("run", tmp_path)
    assert run.evaluations() == {6: 0.25}
    assert ledger(run)["totals"] == {"total": 10}
    assert run.row()["problem"] == "summary.json: tokens has an unexpected value"


def test_a_log_that_adds_up_to_infinity(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    line = json.dumps(dict.fromkeys(("sampling/tokens_generated", "sampling/wasted_share", "timing_s/step"), 1e308))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, {line[1:]}\n' for step in range(4)))
    run = BoardRun("run", tmp_path)
    assert ledger(run)["totals"] == {"trained": 0, "dropped": 0, "waiting": 0, "total": 0}
    assert (run.row()["step"], run.row()["tokens"], run.row()["seconds"]) == (3, None, None)
    assert curve(run.log, "timing_s/step", points=10, share=0.5)["raw"] == [[0, 1, 2, 3], [1e308] * 4]


def log_of(path, content):
    path.write_bytes(content)
    log = MetricsLog(lambda: path)
    log.refresh()
    return log


@pytest.mark.parametrize(
    "line",
    [
        "[1, 2]",
        '{"step": [3], "a": 1}',
        '{"step": 1e308, "a": 1}',
        '{"step": -1, "a": 1}',
        '{"step": "3", "a": 1}',
        '{"step": 2.5, "a": 1}',
        '{"step": true, "a": 1}',
        '{"step": NaN, "a": 1}',
        '{"step": 1000000000000000000000, "a": 1}',
        '{"step": null}',
        '{"step": 3, "a": ' + "[" * 50_000,
        json.dumps({"step": 3, **{f"k{i}": 1 for i in range(MOST_NAMES + 1)}}),
        '{"step": 3, "a": "' + "x" * (3 << 20) + '"}',
    ],
    ids=lambda line: line[:24],
)
def test_a_forged_line_is_skipped_and_counted(tmp_path, line):
    log = log_of(tmp_path / "log", f'{{"step": 1, "a": 1}}\n{line}\n{{"step": 2, "a": 5}}\n'.encode())
    assert [column.tolist() for column in log.column("a")] == [[1, 2], [1, 5]]
    assert log.problem == "1 line skipped: not the metrics of a step"


def test_values_that_are_no_numbers_leave_the_rest_of_the_line(tmp_path):
    line = b'{"step": 1, "a": [1], "b": %b, "c": "7", "d": NaN, "e": {"f": 1}, "g": 2}\n' % (b"9" * 400)
    log = log_of(tmp_path / "log", line)
    assert {name: log.column(name)[1].tolist() for name in log.names if log.column(name)[1].size} == {"g": [2]}
    assert log.problem is None


def test_a_line_of_a_hundred_megabytes_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("dapo_rl.runs.metrics_log.LONGEST_LINE", 4096)
    path = tmp_path / "log"
    path.write_bytes(b'{"step": 1, "a": 1}\n' + b"x" * 100_000)
    log = MetricsLog(lambda: path)
    log.refresh()
    assert log.offset > 90_000  # what was passed over is not kept, nor read again
    with path.open("ab") as file:
        file.write(b'x\n{"step": 2, "a": 2}\n')
    log.refresh()
    assert log.column("a")[0].tolist() == [1, 2]
    assert log.problem == "1 line skipped: not the metrics of a step"


def test_a_million_names_take_no_memory(tmp_path):
    path = tmp_path / "log"
    with path.open("w") as file:
        for step in range(2000):
            file.write(
                json.dumps({"step": step, "a": 1.0, **{f"k{step}-{i}": 1 for i in range(100)}, "x" * 999: 1}) + "\n"
            )
    log = MetricsLog(lambda: path)
    log.refresh()
    assert len(log.names) == MOST_NAMES
    assert len(log.column("a")[0]) == 2000


def test_a_log_without_end_is_read_up_to_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("dapo_rl.runs.metrics_log.MOST_VALUES", 100)
    log = log_of(tmp_path / "log", b"".join(b'{"step": %d, "a": 1}\n' % step for step in range(1000)))
    assert log.problem == "too long, read up to step 49"
    monkeypatch.undo()
    monkeypatch.setattr("dapo_rl.runs.metrics_log.LARGEST_LOG", 10_000)
    path = tmp_path / "zeros"
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)
    monkeypatch.setattr("dapo_rl.runs.metrics_log.LONGEST_LINE", 5000)
    log = MetricsLog(lambda: path)
    log.refresh()
    assert log.problem == "too long, read up to step 0"


def test_a_long_log_is_read_in_parts_so_that_others_have_their_turn(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "AT_A_TIME", 2000)
    for name in ("long", "short"):
        shutil.copytree(whole, tmp_path / name)
    (tmp_path / "long" / "metrics.jsonl").write_bytes(b"".join(b'{"step": %d}\n' % step for step in range(1, 1001)))
    watcher = Watcher(Catalogue([tmp_path]), lambda: [])
    steps = []
    is_behind = True
    while is_behind:
        is_behind = watcher.look()
        steps.append(next(json.loads(row)["step"] for name, row in watcher._rows.items() if name == "long"))
    assert len(steps) > 3
    assert steps == sorted(set(steps))
    assert steps[-1] == 1000
