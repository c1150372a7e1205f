"""The routes, and who may ask for what."""

import json
import re
import signal
import subprocess
import sys
import tomllib
import urllib.request

import pytest
from board_runs import HOSTILE, make_run
from fastapi.testclient import TestClient

from dapo_rl.board.access import host_allowed, token_matches
from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.launcher import DEFAULT_RECIPE, Launcher, Start, overrides_for
from dapo_rl.board.routes import STATIC, create_app, ranges
from dapo_rl.config import Config
from dapo_rl.errors import UserError

TOKEN = "the-token"


@pytest.fixture
def client(tmp_path):
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b", **{"algo.clip_high": 0.2}, text=HOSTILE)
    make_run(tmp_path / "outside")
    app = create_app(Catalogue([tmp_path / "runs"]), Launcher(tmp_path / "runs"), TOKEN)
    return TestClient(app, base_url="http://127.0.0.1:8765")


def test_the_runs(client):
    assert [row["name"] for row in client.get("/api/runs").json()["runs"]] == ["a", "b"]


def test_settings_side_by_side(client):
    answer = client.get("/api/settings?run=a&run=b").json()
    different = [key for key in answer["keys"] if answer["runs"]["a"].get(key) != answer["runs"]["b"].get(key)]
    assert different == ["algo.clip_high"]


def test_curves(client):
    answer = client.get("/api/curves", params={"run": "a", "metric": ["acc/mean", "eval/accuracy", "none"], "share": 0})
    curves = answer.json()["a"]
    assert curves["acc/mean"] == {
        "raw": [[1, 2, 3], [0.1, 0.2, 0.3]],
        "smooth": [[1, 2, 3], [0.1, 0.2, 0.3]],
        "steps": 3,
    }
    assert curves["eval/accuracy"]["raw"] == [[2], [0.5]]
    assert curves["none"]["raw"] == [[], []]


def test_groups_steps_and_search(client):
    assert client.get("/api/steps?run=a").json() == {"ranges": [[1, 3]]}
    assert [g["draw"] for g in client.get("/api/groups?run=a&step=2").json()["groups"]] == [20, 21]
    assert client.get("/api/groups?run=a&step=77").json() == {
        "groups": [],
        "why": "No groups were written at step 77.",
    }
    assert client.get("/api/group?run=a&step=2&draw=5").status_code == 404
    assert len(client.get("/api/search?run=a&q=IDEA").json()["hits"]) == 3
    assert len(client.get("/api/search?run=a&q=IDEA&step=2").json()["hits"]) == 1


def test_ranges():
    assert ranges([]) == []
    assert ranges([1, 2, 3, 7, 9, 10]) == [[1, 3], [7, 7], [9, 10]]


def test_hostile_text_travels_as_data(client):
    answer = client.get("/api/group?run=b&step=1&draw=10")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["samples"][0]["response"] == HOSTILE
    assert answer.content.isascii()


@pytest.mark.parametrize(
    "path",
    [
        "/api/groups?run=../outside&step=1",
        "/api/groups?run=outside&step=1",
        "/api/ledger?run=/etc",
        "/api/settings?run=a&run=a/../../outside",
        "/api/curves?run=%2e%2e&metric=acc/mean",
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static//etc/passwd",
        "/etc/passwd",
        "/docs",
        "/openapi.json",
    ],
)
def test_nothing_else_can_be_read(client, path):
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("step", ["-1", "../1", "1e3", "x", "9999999999999999999"])
def test_a_step_is_a_number(client, step):
    assert client.get("/api/groups", params={"run": "a", "step": step}).status_code == 422


@pytest.mark.parametrize(
    ("header", "bound", "allowed"),
    [
        ("127.0.0.1:8765", "127.0.0.1", True),
        ("localhost", "127.0.0.1", True),
        ("[::1]:80", "127.0.0.1", True),
        ("evil.example", "127.0.0.1", False),
        ("evil.example:8765", "0.0.0.0", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("192.168.0.7", "127.0.0.1", False),
        ("192.168.0.7:8765", "0.0.0.0", True),
        ("box.lan:8765", "box.lan", True),
        ("", "127.0.0.1", False),
        *(
            (header, "127.0.0.1", False)
            for header in (
                *("localhost:8799@evil", "localhost:8799@evil.example:80", "evil@localhost", "user:pw@localhost:80"),
                *("localhost:", "localhost:x", "localhost:80:80", "localhost:999999", "localhost:-1", ":80", "::1"),
                *("[::1", "::1]", "[::1]x", "[::1]:80@evil", "[localhost]", "[127.0.0.1]", "[]", "[::1%lo]", "[::2]"),
                *("localhost.", "localhost/", "localhost#", "localhost?x", "localhost\\evil", "localhost evil", "*"),
                *("localhost,evil", "http://localhost", "127.0.0.1\n", "127.1", "0", "2130706433", "0x7f.1"),
                *("127.0.0.1:\u0661", "ｌocalhost", "loc\u0130lhost", "127.0.0.2", "0.0.0.0"),
            )
        ),
        ("LOCALHOST:80", "127.0.0.1", True),
        ("[2001:db8::7]:80", "::", True),
        ("2001:db8::7", "::", False),
        ("[fe80::1%eth0]", "::", False),
        ("evil.example", "::", False),
        ("[::1]", "::1", True),
        ("my_box:80", "my_box", True),
    ],
)
def test_the_host_header(header, bound, allowed):
    assert host_allowed(header, bound) is allowed


def test_another_host_gets_nothing(client):
    for path in ("/", "/api/runs", "/static/app.js"):
        answer = client.get(path, headers={"Host": "evil.example"})
        assert answer.status_code == 421
        assert "dapo board" not in answer.text


def test_every_answer_keeps_the_page_to_itself(client):
    for path in ("/", "/api/runs", "/static/app.js", "/nothing"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"


def test_the_page_has_no_script_of_its_own_and_nothing_from_elsewhere():
    page = (STATIC / "index.html").read_text()
    assert page.count("<script") == page.count("<script src=") == 3
    assert "style=" not in page
    assert " on" not in page.replace(" only", "")
    for file in STATIC.glob("*.*"):
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text, file
        assert "innerHTML" not in text, file
        assert "insertAdjacentHTML" not in text, file


def test_actions_need_the_token(client, monkeypatch):
    started = []
    monkeypatch.setattr(Launcher, "start", lambda self, wanted: started.append(wanted) or "lab-001")
    body = {"techniques": ["Clip-Higher"], "steps": 1}
    for headers in ({}, {"X-Dapo-Token": ""}, {"X-Dapo-Token": TOKEN[:-1]}, {"Authorization": TOKEN}):
        assert client.post("/api/lab/start", json=body, headers=headers).status_code == 403
        assert client.post("/api/lab/stop?run=a", headers=headers).status_code == 403
    assert client.post(f"/api/lab/start?token={TOKEN}", json=body).status_code == 403
    assert client.get("/api/lab/start", headers={"X-Dapo-Token": TOKEN}).status_code == 405
    assert started == []
    assert client.post("/api/lab/start", json=body, headers={"X-Dapo-Token": TOKEN}).json() == {"name": "lab-001"}
    assert started == [Start(techniques=["Clip-Higher"], steps=1)]


def test_a_body_without_end_is_not_read(client):
    assert client.post("/api/lab/start", content=b" " * 100_000).status_code == 413
    answer = client.post("/api/lab/start", headers={"Transfer-Encoding": "chunked"}, content=b"{}")
    assert answer.status_code == 413


def test_a_token_of_other_characters_is_refused_too():
    assert token_matches("abc", "abc")
    assert not token_matches("abç", "abc")
    assert not token_matches("\ud800", "abc")
    assert not token_matches(None, "abc")


@pytest.mark.parametrize(
    "body",
    [
        {"techniques": [], "steps": 0},
        {"techniques": [], "steps": "5; rm -rf"},
        {"techniques": [], "seed": -1},
        {"techniques": [], "run": "/tmp/x"},
        {"techniques": "Clip-Higher"},
    ],
)
def test_only_what_the_page_may_choose_can_be_chosen(client, body):
    assert client.post("/api/lab/start", json=body, headers={"X-Dapo-Token": TOKEN}).status_code == 422


def test_a_technique_that_does_not_exist_starts_nothing(client, tmp_path):
    answer = client.post("/api/lab/start", json={"techniques": ["--run=/x"]}, headers={"X-Dapo-Token": TOKEN})
    assert (answer.status_code, answer.json()) == (409, {"error": "there is no technique '--run=/x'"})
    assert not list((tmp_path / "runs").glob("lab-*"))


def test_only_runs_that_were_started_here_are_stopped(client):
    answer = client.post("/api/lab/stop?run=a", headers={"X-Dapo-Token": TOKEN})
    assert answer.status_code == 409


def test_the_switches_are_settings():
    off = Config.load(DEFAULT_RECIPE, overrides_for(Start(techniques=[], steps=3, seed=4)))
    assert (off.algo.clip_high, off.algo.aggregation, off.overlong.shape) == (0.2, "seq-mean-token-mean", "off")
    assert (off.sampling.dynamic, off.overlong.mask_truncated, off.train.steps, off.seed) == (False, False, 3, 4)
    names = ["Overlong Filtering", "Clip-Higher", "Soft Overlong Punishment", "Token-level Loss", "Dynamic Sampling"]
    on = Config.load(DEFAULT_RECIPE, overrides_for(Start(techniques=names)))
    assert (on.algo.clip_high, on.algo.aggregation, on.overlong.shape) == (0.28, "token-mean", "soft")
    assert (on.sampling.dynamic, on.overlong.mask_truncated) == (True, True)


def test_a_directory_for_runs_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be created|not a directory"):
        Launcher(tmp_path / "file").start(Start(techniques=[]))


def test_the_board_does_without_torch():
    code = "import sys, dapo_rl.board.server as s; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_uplot_comes_with_its_licence():
    assert "MIT" in (STATIC / "vendor" / "uPlot.LICENSE").read_text()
    assert (STATIC / "vendor" / "uPlot.min.js").read_text().startswith("/*! https://github.com/leeoniya/uPlot (v1.")


def test_the_packaged_files_are_declared():
    package = STATIC.parents[1]
    project = tomllib.loads((package.parents[1] / "pyproject.toml").read_text())
    declared = project["tool"]["setuptools"]["package-data"]["dapo_rl"]
    packaged = {path for pattern in declared for path in package.glob(pattern)}
    assert {path for path in STATIC.rglob("*") if path.is_file()} <= packaged


def test_nothing_is_not_a_number_on_the_wire(client, tmp_path):
    with (tmp_path / "runs" / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "acc/mean": NaN, "reward/mean": Infinity}\n')
    answer = client.get("/api/curves?run=a&metric=acc/mean&metric=reward/mean")
    json.loads(answer.text, parse_constant=lambda name: pytest.fail(name))
    assert answer.json()["a"]["reward/mean"]["raw"][0] == [1, 2, 3]


@pytest.mark.slow
def test_the_command(tmp_path):
    make_run(tmp_path / "runs" / "a")
    command = [sys.executable, "-m", "dapo_rl.cli", "board"]
    with subprocess.Popen([*command, tmp_path / "runs", "--port", "0"], stdout=subprocess.PIPE, text=True) as board:
        try:
            address, token = re.fullmatch(
                r"board +(http://127\.0\.0\.1:\d+/)#token=(\S+)\n", board.stdout.readline()
            ).groups()
            assert token in board.stdout.readline()
            with urllib.request.urlopen(f"{address}api/runs") as answer:
                assert json.load(answer)["runs"][0]["name"] == "a"
            with urllib.request.urlopen(f"{address}api/live") as stream:
                first = json.loads(stream.readline().removeprefix(b"data: "))
                assert [row["name"] for row in first["runs"]] == ["a"]
            port = re.search(r":(\d+)/", address)[1]
            taken = subprocess.run([*command, "--port", port], capture_output=True, text=True, cwd=tmp_path)
            assert taken.returncode == 2
            assert taken.stderr.count("\n") == 1
            assert "--port" in taken.stderr
        finally:
            board.send_signal(signal.SIGINT)
        assert board.wait(20) == 0


@pytest.mark.slow
def test_a_directory_that_is_not_there(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "dapo_rl.cli", "board", tmp_path / "no"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no such directory" in done.stderr
