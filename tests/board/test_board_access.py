"""A board that others can reach: the token in the address, the cookie, and no runs from there."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from board_runs import make_run
from fastapi.testclient import TestClient

from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.launcher import Launcher
from dapo_rl.board.routes import create_app

TOKEN = "the-token"
ADDRESS = "http://192.168.0.7:8765"


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path / "runs" / "a")
    return tmp_path / "runs"


def shared(runs, lab=None):
    return TestClient(create_app(Catalogue([runs]), lab, TOKEN, "0.0.0.0"), base_url=ADDRESS)


PATHS = ("/", "/api/runs", "/api/live", "/static/app.js", "/api/settings?run=a", "/api/lab")


def test_without_the_token_there_is_one_plain_line(runs):
    client = shared(runs)
    for path in PATHS:
        answer = client.get(path)
        assert answer.status_code == 403
        assert answer.headers["content-type"].startswith("text/plain")
        assert answer.text == "this board needs a token: open it at the address that it printed\n"
        assert "set-cookie" not in answer.headers
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("given", ["", "the-tokem", "the-token2", "THE-TOKEN", "%ff", "the-token&token=the-token"])
def test_a_wrong_token(runs, given):
    answer = shared(runs).get(f"/api/runs?token={given}")
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


def test_the_first_visit_leaves_a_cookie(runs):
    client = shared(runs)
    first = client.get(f"/?token={TOKEN}")
    assert first.status_code == 200
    cookie = first.headers["set-cookie"]
    assert cookie == f"dapo-board-8765={TOKEN}; Path=/; HttpOnly; SameSite=Strict"
    assert client.get("/api/runs").json()["runs"][0]["name"] == "a"
    assert client.get("/static/app.js").status_code == 200
    assert "set-cookie" not in client.get("/api/runs").headers


def test_a_forged_cookie(runs):
    client = shared(runs)
    for cookie in ("dapo-board-8765=x", f"dapo-board-1={TOKEN}", f"other={TOKEN}", "\x01=;;;", "dapo-board-8765"):
        assert client.get("/api/runs", headers={"Cookie": cookie}).status_code == 403
    assert client.get("/api/runs", headers={"Cookie": f"a=b; dapo-board-8765={TOKEN}"}).status_code == 200


def test_the_host_is_still_checked(runs):
    answer = shared(runs).get(f"/?token={TOKEN}", headers={"Host": "evil.example"})
    assert answer.status_code == 421
    assert "set-cookie" not in answer.headers


def test_others_only_read(runs):
    client = shared(runs)
    client.get(f"/?token={TOKEN}")
    for action in ("start", "stop?run=a", "remove?run=a", "sooner?run=a", "token"):
        answer = client.post(f"/api/lab/{action}", json={"techniques": []}, headers={"X-Dapo-Token": TOKEN})
        assert answer.status_code == 403
        assert "read-only" in answer.json()["error"]
    assert client.get("/api/lab").status_code == 403
    assert client.get("/api/runs").json()["jobs"] is None
    assert [path.name for path in runs.iterdir()] == ["a"]


def test_where_runs_are_allowed_they_need_the_token_in_the_header_too(runs, monkeypatch):
    started = []
    monkeypatch.setattr(Launcher, "start", lambda self, wanted: started.append(wanted) or "lab-001")
    client = shared(runs, Launcher(runs))
    client.get(f"/?token={TOKEN}")
    assert client.get("/api/lab").status_code == 200
    body = {"techniques": []}
    # The cookie alone is what another site's form would send.
    assert client.post("/api/lab/start", json=body).status_code == 403
    assert client.post(f"/api/lab/start?token={TOKEN}", json=body).status_code == 403
    assert started == []
    assert client.post("/api/lab/start", json=body, headers={"X-Dapo-Token": TOKEN}).status_code == 200
    assert len(started) == 1


def test_on_this_machine_reading_needs_nothing(runs):
    client = TestClient(create_app(Catalogue([runs]), Launcher(runs), TOKEN), base_url="http://127.0.0.1:8765")
    for path in ("/", "/api/runs", "/static/app.js", "/api/lab", f"/?token={TOKEN}"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert "set-cookie" not in answer.headers


def get(address):
    try:
        with urllib.request.urlopen(address) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [False, True])
def test_the_command_beyond_this_machine(runs, allowed):
    command = [sys.executable, "-m", "dapo_rl.cli", "board", runs, "--host", "0.0.0.0", "--port", "0"]
    with subprocess.Popen(
        [*command, *(["--allow-runs"] if allowed else [])], stdout=subprocess.PIPE, text=True
    ) as board:
        try:
            line = board.stdout.readline()
            port, token = re.fullmatch(r"board +http://[\d.]+:(\d+)/\?token=(\S+)\n", line).groups()
            need = "to read and to start runs" if allowed else "to read the board"
            assert board.stdout.readline() == f"token   {token}   (needed {need}; included in the address above)\n"
            said = board.stdout.readline()
            assert said.startswith("access  not encrypted: anyone with the address can read the runs")
            assert ("--allow-runs" in said) is not allowed
            address = f"http://127.0.0.1:{port}/"
            assert get(f"{address}api/runs")[0] == 403
            status, text = get(f"{address}api/runs?token={token}")
            assert (status, json.loads(text)["runs"][0]["name"]) == (200, "a")
            assert get(f"{address}api/lab?token={token}")[0] == (200 if allowed else 403)
        finally:
            board.send_signal(signal.SIGINT)
        assert board.wait(20) == 0
