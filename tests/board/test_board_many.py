"""Two thousand runs and fifty live pages: one look for all of them, and no file is read twice."""

import asyncio
import json
import os
import socket
import sys
import threading
import time
import urllib.request
from collections import Counter

import pytest
import uvicorn
from fastapi.testclient import TestClient

from dapo_rl.board import routes, server
from dapo_rl.board import watcher as watch
from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.launcher import Launcher
from dapo_rl.board.run import BoardRun
from dapo_rl.board.watcher import ALL_FILES_EVERY, Watcher

RUNS, PAGES = 2000, 50
FINISHED = json.dumps({"finished": True, "tokens": {"total": 5}, "evaluations": [], "wall_seconds": 1.0})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Every second run is finished; one in a hundred has a summary that is none."""
    root = tmp_path_factory.mktemp("many")
    for number in range(RUNS):
        run = root / f"run-{number:04d}"
        run.mkdir()
        (run / "config.yaml").write_text(f"seed: {number}\n")
        (run / "metrics.jsonl").write_text('{"step": 1, "acc/mean": 0.5}\n')
        if number % 2:
            (run / "summary.json").write_text(FINISHED)
        elif number % 100 == 0:
            (run / "summary.json").write_text("{")
    return root


@pytest.fixture
def counted(monkeypatch):
    """Counts the files that this thread opens in a call and the directories that it lists, and notes what it looks at.

    An audit hook could not be taken away again, and all later tests would be slower."""
    thread, stats = threading.get_ident(), []

    def noting(real):
        def call(path, *arguments, **options):
            if threading.get_ident() == thread:
                stats.append(str(path))
            return real(path, *arguments, **options)

        return call

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))

    def count(call):
        called = Counter()
        stats.clear()

        def note(frame, event, function):
            if event == "c_call" and frame.f_code is not os.fdopen.__code__:  # that file is open already
                called[function] += 1

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(before)
        return called[open] + called[os.open], called[os.scandir] + called[os.listdir], list(stats)

    return count


@pytest.fixture(scope="module")
def looked(directory):
    watcher = Watcher(Catalogue([directory]), lambda: [])
    assert not watcher.look()
    return watcher


def test_a_look_at_what_has_not_changed_opens_nothing(looked, counted):
    rows = dict(looked._rows)
    assert len(rows) == RUNS
    version = looked.version
    opened, listed, stats = counted(looked.look)
    assert (opened, listed) == (0, 1)
    over, others = RUNS // 2, RUNS // 2
    # One for a run that is over, and a few more for one that is not, or whose turn it is.
    assert len(stats) < 1.2 * (over + 8 * others) + 8 * RUNS / ALL_FILES_EVERY
    assert looked.version == version
    assert looked._rows == rows


def test_a_look_reads_only_the_file_that_changed(looked, counted, directory):
    with (directory / "run-0002" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "acc/mean": 1.0}\n')
    opened, _, _ = counted(looked.look)
    assert opened == 1
    row = json.loads(looked._rows["run-0002"])
    assert (row["step"], row["correct"]) == (2, 0.75)


def test_a_run_that_is_over_costs_one_stat_and_is_still_followed(tmp_path, counted):
    run = tmp_path / "run"
    run.mkdir()
    for name, text in {"config.yaml": "", "metrics.jsonl": '{"step": 1}\n', "summary.json": FINISHED}.items():
        (run / name).write_text(text)
    watcher = Watcher(Catalogue([tmp_path]), lambda: [])
    watcher.look()
    opened, listed, stats = counted(watcher.look)
    assert (opened, listed) == (0, 1)
    assert [path for path in stats if path.startswith(str(run))] == [str(run)]
    (run / ".lock").write_text(f"{os.getpid()} elsewhere\n")  # it is resumed
    watcher.look()
    assert json.loads(watcher._rows["run"])["state"] == "running"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n')
    watcher.look()
    assert json.loads(watcher._rows["run"])["step"] == 2
    (run / ".lock").unlink()
    watcher.look()
    assert json.loads(watcher._rows["run"])["state"] == "finished"
    (run / "summary.json").write_text(FINISHED.replace("1.0", "2.0"))  # edited where it is: the directory is the same
    for _ in range(ALL_FILES_EVERY):
        watcher.look()
    assert json.loads(watcher._rows["run"])["seconds"] == 2


def test_a_list_reads_no_files_and_a_failed_read_is_not_tried_again(directory, counted, monkeypatch):
    monkeypatch.setattr(watch, "LOOK_SECONDS", 3600)
    monkeypatch.setattr(watch, "PATIENCE_SECONDS", 60)
    read = []
    row = BoardRun.row
    monkeypatch.setattr(BoardRun, "row", lambda self: (read.append(self.name), row(self))[1])
    watcher = Watcher(Catalogue([directory]), lambda: [])
    first = watcher.rows()
    assert len(read) == RUNS
    assert counted(lambda: [watcher.rows() for _ in range(10)]) == (0, 0, [])
    assert watcher.rows() is first
    rows = {row["name"]: row for row in json.loads(first)["runs"]}
    assert rows["run-0100"]["problem"] == "summary.json: not valid JSON"
    assert rows["run-0001"]["problem"] is None
    assert len(read) == RUNS
    assert watcher.looks == 1


def test_the_first_list_comes_before_all_is_read(directory, monkeypatch):
    """And the rest through the live pages."""
    monkeypatch.setattr(watch, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(watch, "PATIENCE_SECONDS", 0.0)
    goes_on, row, read = threading.Event(), BoardRun.row, []

    def slowly(self):
        if read:
            goes_on.wait(60)
        read.append(self.name)
        return row(self)

    monkeypatch.setattr(BoardRun, "row", slowly)
    watcher = Watcher(Catalogue([directory]), lambda: [])
    rows = json.loads(watcher.rows())["runs"]
    assert len(rows) == RUNS
    assert sum(row["state"] == "reading" for row in rows) == RUNS - 1
    assert all(row["started"] for row in rows)  # enough for the page to sort by, and to pick the newest
    version, (message,) = watcher.since(0)
    monkeypatch.setattr(watch, "TELL_SECONDS", 60.0)
    goes_on.set()
    shown = {row["name"]: row for row in json.loads(message.removeprefix(b"data: "))["runs"]}
    deadline = time.monotonic() + 120
    while any(row["state"] == "reading" for row in shown.values()):
        assert time.monotonic() < deadline
        version, messages = watcher.since(version)
        for message in messages:
            shown |= {row["name"]: row for row in json.loads(message.removeprefix(b"data: "))["runs"]}
        time.sleep(0.02)
    assert list(shown) == [row["name"] for row in rows]


def test_fifty_pages_share_each_look_and_each_message(directory, monkeypatch):
    monkeypatch.setattr(routes, "LIVE_SECONDS", 0.01)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.02)
    watcher = Watcher(Catalogue([directory]), lambda: [])
    watcher.look()
    made = []
    event = watch._event
    monkeypatch.setattr(watch, "_event", lambda message: (made.append(1), event(message))[1])

    async def follow(ready):
        stream = routes.events(watcher)
        first = await anext(stream)
        ready.release()
        second = await anext(stream)
        await stream.aclose()
        return first, second

    async def all_pages():
        ready = asyncio.Semaphore(0)
        pages = [asyncio.create_task(follow(ready)) for _ in range(PAGES)]
        for _ in range(PAGES):
            await ready.acquire()
        with (directory / "run-0004" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 9}\n')
        return await asyncio.wait_for(asyncio.gather(*pages), 120)

    firsts, seconds = zip(*asyncio.run(all_pages()), strict=True)
    assert len({id(text) for text in firsts}) == len({id(text) for text in seconds}) == 1
    assert len(made) == 2
    whole, change = (json.loads(text.removeprefix(b"data: ")) for text in (firsts[0], seconds[0]))
    assert (whole["whole"], len(whole["runs"])) == (True, RUNS)
    assert (change["whole"], [(row["name"], row["step"]) for row in change["runs"]]) == (False, [("run-0004", 9)])


def test_a_page_that_has_missed_too_much_gets_everything(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("")
    watcher = Watcher(Catalogue([tmp_path]), lambda: [])
    monkeypatch.setattr(Watcher, "ask", lambda self: None)
    for step in range(1, watch.MESSAGES_KEPT + 3):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}}}\n')
        watcher.look()
    version, missed = watcher.since(watcher.version - 2)
    assert [json.loads(text.removeprefix(b"data: "))["whole"] for text in missed] == [False, False]
    _, missed = watcher.since(1)
    assert [json.loads(text.removeprefix(b"data: "))["whole"] for text in missed] == [True]
    assert watcher.since(version) == (version, [])


def test_runs_come_and_go(tmp_path):
    def make(name):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("")

    make("b")
    watcher = Watcher(Catalogue([tmp_path]), lambda: [{"name": "job"}] if (tmp_path / "c").exists() else [])
    watcher.look()
    make("a")
    watcher.look()
    assert list(watcher._rows) == ["a", "b"]
    version = watcher.version
    (tmp_path / "b").rename(tmp_path / "c")
    watcher.look()
    _, (message,) = watcher.since(version)
    message = json.loads(message.removeprefix(b"data: "))
    assert ([row["name"] for row in message["runs"]], message["gone"]) == (["c"], ["b"])
    assert message["jobs"] == [{"name": "job"}]


def test_the_watcher_rests_when_nobody_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.02)
    (tmp_path / "config.yaml").write_text("")
    watcher = Watcher(Catalogue([tmp_path]), lambda: [])
    monkeypatch.setattr(watch, "IDLE_SECONDS", 0.05)
    watcher.rows()
    thread = watcher._thread
    thread.join(30)
    assert not thread.is_alive()
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    assert json.loads(watcher.rows())["runs"][0]["step"] == 4


def test_logs_that_nobody_asks_for_are_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("dapo_rl.board.catalogue.MOST_LOGS", 2)
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("")
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "x": 1}\n')
    catalogue = Catalogue([tmp_path])
    client = TestClient(routes.create_app(catalogue, Launcher(tmp_path), "token"), base_url="http://127.0.0.1")
    for name in "abcacb":
        assert client.get("/api/metrics", params={"run": name}).json() == {"names": ["x"]}
    assert [name for name, run in catalogue.runs().items() if "log" in run.__dict__] == ["b", "c"]


def test_the_end_of_the_board_is_the_end_of_its_live_pages(tmp_path, caplog):
    app = routes.create_app(Catalogue([tmp_path]), Launcher(tmp_path), "token")
    listening = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=20, lifespan="off")
    board = server.Server(settings, app.state.watcher)
    thread = threading.Thread(target=board.run, kwargs={"sockets": [listening]})
    thread.start()
    with urllib.request.urlopen(f"http://127.0.0.1:{listening.getsockname()[1]}/api/live") as page:
        assert page.readline().startswith(b"data: ")
        board.should_exit = True
        assert page.read().strip() == b""
    thread.join(60)
    assert not thread.is_alive()
    assert app.state.watcher.is_closed
    assert [record.message for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize(
    ("glance", "is_behind", "pause"),
    [
        (0.0, False, 0.5),
        (0.09, False, 0.5),
        (0.2, False, 1.0),
        (0.6, False, 3.0),
        (60.0, False, 5.0),
        (60.0, True, 0.01),
    ],
)
def test_the_watcher_rests_in_proportion_to_its_work(tmp_path, monkeypatch, glance, is_behind, pause):
    """A glance at all runs takes at most a fifth of a core, and changes are seen after five seconds at most."""
    watcher, pauses = Watcher(Catalogue([tmp_path]), lambda: []), []

    def look():
        watcher._glance_seconds = glance
        return is_behind

    def wait(seconds):
        pauses.append(seconds)
        watcher.close()

    monkeypatch.setattr(watcher, "look", look)
    monkeypatch.setattr(watcher._closed, "wait", wait)
    watcher._asked = time.monotonic()
    watcher._go_on_looking()
    assert pauses == [pytest.approx(pause)]


def test_a_live_page_hears_something_every_fifteen_seconds(monkeypatch):
    """So that neither the browser nor a proxy closes the connection. What happens counts too."""
    clock = 0.0
    happens = {0.0, 20.0}

    class Quiet:
        is_closed = False

        def since(self, version):
            return version, [b"news"] if any(abs(clock - at) < 1e-6 for at in happens) else []

    async def sleep(seconds):
        nonlocal clock
        clock = round(clock + seconds, 6)
        Quiet.is_closed = clock > 60

    monkeypatch.setattr(routes.anyio, "sleep", sleep)

    async def heard():
        return [(clock, message) async for message in routes.events(Quiet())]

    told = asyncio.run(heard())
    assert [message for _, message in told] == [b"news", b": still here\n\n", b"news", *[b": still here\n\n"] * 2]
    assert [at for at, _ in told] == pytest.approx([0, 15, 20, 35, 50], abs=0.5)
