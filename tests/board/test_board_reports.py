"""Ablations and evaluations in the list and on their pages."""

import json
import os
import shutil
import socket
import time
from contextlib import suppress

import pytest
from board_reports import ARMS, make_ablation, make_evaluation, make_plan
from board_runs import HOSTILE, make_run
from fastapi.testclient import TestClient
from fuzz.fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from dapo_rl.board.ablation import BoardAblation, _steps, band
from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.evaluation import BoardEvaluation
from dapo_rl.board.files import UnreadableError
from dapo_rl.board.routes import create_app
from dapo_rl.board.watcher import Watcher, dumps
from dapo_rl.demo import DEFAULT_RECIPE


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    made = tmp_path_factory.mktemp("made")
    make_ablation(made / "study")
    make_evaluation(made / "exam")
    make_run(made / "plain")
    return made


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made, tmp_path / "runs")


def opened(root):
    catalogue = Catalogue([root])
    app = create_app(catalogue, None, "token")
    app.state.catalogue = catalogue
    return TestClient(app, base_url="http://127.0.0.1")


@pytest.fixture
def client(root):
    return opened(root)


def rows(client):
    """The reports by name, and the names of the runs, after a look that is complete."""
    watcher = Watcher(client.app.state.catalogue, lambda: None)
    watcher.look()
    answer = json.loads(watcher.since(0)[1][0].removeprefix(b"data: "))
    return {row["name"]: row for row in answer["reports"]}, [row["name"] for row in answer["runs"]]


def test_they_stand_in_the_list(client):
    reports, runs = rows(client)
    assert runs == ["plain", *(f"study/{arm}/seed-{seed}" for arm in ARMS for seed in (0, 1))]
    study, exam = reports["study"], reports["exam"]
    assert (study["kind"], study["state"], study["what"]) == (
        "ablation",
        "finished",
        f"2 arms, 2 seeds: {DEFAULT_RECIPE.name}",
    )
    assert (study["step"], study["steps"], study["best"]) == (4, 4, "algo.clip_high=0.28")
    # The last quarter of the steps is step 4: 0.25 + 0.4 for seed 0, and 0.1 more for seed 1.
    assert study["accuracy"] == pytest.approx(0.7)
    assert (exam["kind"], exam["state"], exam["model"]) == ("evaluation", "finished", "2 models")
    assert (exam["accuracy"], exam["best"]) == (0.75, "avg@2 of runs/mine")
    assert exam["what"] == "arithmetic: 4 problems, 2 samples each"


def test_an_ablation_stands_above_its_runs(root, client):
    later = time.time() + 100
    os.utime(root / "study" / ARMS[0] / "seed-1" / "config.yaml", (later, later))
    assert rows(client)[0]["study"]["started"] == pytest.approx(later, abs=1)


def test_the_page_of_an_ablation(client):
    page = client.get("/api/report?name=study").json()
    assert [arm["label"] for arm in page["arms"]] == ["algo.clip_high=0.2", "algo.clip_high=0.28"]
    assert page["parts"] == [{"part": "vary", "arms": list(ARMS)}]
    assert (page["done"], page["total"], page["seeds"], page["steps"]) == (4, 4, [0, 1], 4)
    heads, second = page["table"]["heads"], page["table"]["rows"][1]
    cells = {head: cell["text"] for head, cell in zip(heads, second, strict=True)}
    # Two seeds are too few for an interval.
    assert cells["accuracy %"] == "70.0 (65.0 to 75.0)"
    assert cells["difference"] == "+25.0 (all equal)"
    assert cells["seeds"] == "2/2"
    assert cells["tokens per trained"] == "1.50"
    entropy = second[heads.index("entropy")]
    assert entropy["text"] == "0.55"
    assert entropy["title"].startswith("0.55 (0.")
    assert [(run["run"], run["seed"], run["state"]) for run in page["runs"]][:2] == [
        (f"study/{ARMS[0]}/seed-0", 0, "finished"),
        (f"study/{ARMS[0]}/seed-1", 1, "finished"),
    ]
    assert page["runs"][3]["cells"][:2] == ["35.0", "75.0"]


def test_the_papers_figures_have_a_column_if_there_are_any(root):
    def heads_and_rows():
        table = opened(root).get("/api/report?name=study").json()["table"]
        return table["heads"], [[cell["text"] for cell in row] for row in table["rows"]]

    heads, rows = heads_and_rows()
    assert "paper" not in heads
    for name in ("plan.json", "ablation.json"):
        saved = json.loads((root / "study" / name).read_text())
        saved["arms"][1]["paper"] = 36
        (root / "study" / name).write_text(json.dumps(saved))
    assert heads_and_rows() == (
        ["arm", "paper", *heads[1:]],
        [[row[0], paper, *row[1:]] for row, paper in zip(rows, ("", "36"), strict=True)],
    )


def test_the_curves_of_the_arms(client):
    curves = client.get("/api/arms?name=study&share=0").json()
    accuracy = curves[ARMS[1]]["eval/accuracy"]
    assert accuracy["steps"] == [0, 2, 4]
    assert accuracy["mean"] == pytest.approx([0.3, 0.5, 0.7])
    assert accuracy["low"] == pytest.approx([0.25, 0.45, 0.65])
    assert accuracy["high"] == pytest.approx([0.35, 0.55, 0.75])
    assert accuracy["seeds"] == 2
    assert curves[ARMS[0]]["actor/entropy"]["mean"] == pytest.approx([1.05, 0.55, 1 / 3 + 0.05, 0.3], rel=1e-5)
    assert curves[ARMS[0]]["reward/mean"]["steps"] == []
    assert client.get("/api/arms?name=exam").status_code == 404


def test_a_band_has_the_steps_that_all_seeds_have():
    found = band([{1: 1.0, 2: 2.0, 3: 5.0}, {1: 3.0, 2: 6.0}, {}], 0.0, 100)
    assert found == {"steps": [1, 2], "mean": [2.0, 4.0], "low": [1.0, 2.0], "high": [3.0, 6.0], "seeds": 2}
    assert band([], 0.0, 100)["steps"] == []
    assert band([{1: 1.0}, {2: 1.0}], 0.0, 100)["steps"] == []
    assert len(band([{float(step): 1.0 for step in range(5000)}], 0.1, 100)["steps"]) == 100


def test_the_steps_of_an_ablation_are_those_of_every_arm():
    four, eight = {"settings": {"train": {"steps": 4}}}, {"settings": {"train": {"steps": 8}}}
    assert _steps([four, four]) == 4
    assert _steps([four, eight]) is _steps([four, {"settings": 4}]) is _steps([{}]) is None


def test_an_ablation_in_progress(tmp_path):
    plan = make_plan(tmp_path / "study")
    (tmp_path / "study" / ".lock").write_text(f"{os.getpid()} {socket.gethostname()}\n")
    run = make_run(tmp_path / "study" / ARMS[0] / "seed-0", steps=2)
    client = opened(tmp_path)
    assert rows(client)[0]["study"]["state"] == "running"
    page = client.get("/api/report?name=study").json()
    assert (page["state"], page["done"], page["total"], page["table"]) == ("running", 0, 4, None)
    assert [each["state"] for each in page["runs"]] == ["stopped", "waiting", "waiting", "waiting"]
    curves = client.get("/api/arms?name=study&share=0").json()
    assert curves[ARMS[0]]["acc/mean"]["mean"] == [0.1, 0.2]
    run.write_summary({"finished": True})
    (tmp_path / "study" / ".lock").unlink()
    watcher = Watcher(Catalogue([tmp_path]), lambda: None)
    watcher.look()
    row = json.loads(watcher._lists["reports"])[0]
    assert (row["state"], row["step"], row["steps"]) == ("stopped", 1, len(plan.arms) * 2)


def test_a_run_of_an_ablation_that_failed(root, client):
    report = json.loads((root / "study" / "ablation.json").read_text())
    report["arms"][0]["runs"][1] = {"seed": 1, "state": "failed", "message": "out of memory (exit code 1)"}
    (root / "study" / "ablation.json").write_text(json.dumps(report))
    (root / "study" / ARMS[0] / "seed-1" / "summary.json").unlink()
    page = client.get("/api/report?name=study").json()
    assert (page["state"], page["done"]) == ("failed", 3)
    assert (page["runs"][1]["state"], page["runs"][1]["message"]) == ("failed", "out of memory (exit code 1)")
    assert rows(client)[0]["study"]["error"] == "algo.clip_high=0.2, seed 1: out of memory (exit code 1)"


def test_a_directory_that_is_an_ablation_itself(root):
    client = opened(root / "study")
    reports, runs = rows(client)
    assert list(reports) == ["study"]
    assert runs[0] == f"{ARMS[0]}/seed-0"
    assert client.get("/api/report?name=study").json()["runs"][0]["run"] == f"{ARMS[0]}/seed-0"


def test_the_page_of_an_evaluation(client):
    page = client.get("/api/report?name=exam").json()
    assert (page["data"], page["k"], [model["model"] for model in page["models"]]) == (
        "arithmetic",
        2,
        ["tiny", "runs/mine"],
    )
    first = page["models"][0]["metrics"]
    assert first["avg@2"]["value"] == 0.25
    assert first["avg@2"]["low"] <= 0.25 <= first["avg@2"]["high"]
    assert list(first) == ["avg@2", "pass@1", "pass@2", "cons@2", "response_length", "truncated"]
    change = page["comparisons"][0]
    assert (change["metric"], change["model"], change["value"]) == ("avg@2", "runs/mine", 0.5)
    # All four differences are 0.5: of the 16 ways to swap the models, two are as far from zero.
    assert change["p"] == 2 / 16


def test_the_pictures(client, root):
    for name, kind in (("study", "ablation"), ("exam", "evaluation")):
        answer = client.get(f"/api/picture?name={name}")
        assert answer.headers["content-type"] == "image/png"
        assert answer.content == (root / name / f"{kind}.png").read_bytes()
    (root / "exam" / "evaluation.png").write_text("<svg onload='owned()'>")
    assert client.get("/api/picture?name=exam").status_code == 422
    (root / "exam" / "evaluation.png").unlink()
    (root / "exam" / "evaluation.png").symlink_to("/etc/hostname")
    assert client.get("/api/picture?name=exam").status_code == 404
    assert client.get("/api/report?name=exam").json()["picture"] is None


@pytest.mark.parametrize("name", ["", "../runs/study", "plain", "study/", "/etc", "study/ablation.json"])
def test_only_what_is_listed_has_a_page(client, name):
    for path in ("report", "picture", "arms"):
        assert client.get(f"/api/{path}", params={"name": name}).status_code == 404


DAMAGE = {
    "empty": b"",
    "half": b'{"arms": [{"name": "a", ',
    "list": b"[1, 2]",
    "nested": b"[" * 100_000,
    "no content": b"{}",
    "types": json.dumps(
        {
            "name": [1],
            "k": 2,
            "seeds": [0],
            "overrides": {"a": 1},
            "arms": [
                {"name": "a", "label": 7, "part": [], "directory": "../..", "changes": [1], "runs": [7, {"seed": "x"}]},
                {"name": "b", "runs": {}, "accuracy": {"mean": "1", "n": "2"}, "difference": [1], "entropy": 5},
                {"name": "c", "runs": [], "accuracy": {"mean": 1e308, "half_width": -1e308, "n": 10**30}},
            ],
            "models": [
                {"model": 7, "metrics": {"avg@2": {"value": "x", "low": [1]}, "b": 3}, "statuses": [1]},
                {"model": "m", "metrics": [], "tokens": -5, "problems": 1e99},
            ],
            "comparisons": [1, {"metric": {}, "p": "0"}, {"metric": "avg@2", "model": "m", "value": 1e400}],
            "settings": [1],
        }
    ).encode(),
    "arms of another kind": b'{"arms": [1], "seeds": [0], "models": [1], "k": 1}',
    "seeds of another kind": b'{"arms": [{"name": "a"}], "seeds": ["../x"], "models": [], "k": "1"}',
    "too many": json.dumps({"arms": [{"name": str(i)} for i in range(300)], "seeds": [0]}).encode(),
    "binary": bytes(range(256)) * 40,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("files", [("plan.json",), ("ablation.json",), ("plan.json", "ablation.json")])
def test_a_damaged_ablation_is_one_bad_row(root, damage, files):
    for file in files:
        (root / "study" / file).write_bytes(DAMAGE[damage])
    client = opened(root)
    reports, runs = rows(client)
    assert set(reports) == {"study", "exam"}
    assert len(runs) == 5
    if damage != "types":
        assert files[0] in reports["study"]["problem"]
    assert client.get("/api/report?name=study").status_code == 200
    assert client.get("/api/arms?name=study").status_code == 200


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_evaluation_is_one_bad_row(root, damage):
    (root / "exam" / "evaluation.json").write_bytes(DAMAGE[damage])
    client = opened(root)
    reports, _ = rows(client)
    assert reports["study"]["problem"] is None
    if damage == "types":
        assert reports["exam"]["state"] == "finished"
    else:
        assert (reports["exam"]["state"], reports["exam"]["problem"][:16]) == ("unreadable", "evaluation.json:")
    assert client.get("/api/report?name=exam").status_code == (200 if damage == "types" else 422)


@pytest.mark.parametrize(("kind", "name"), [(BoardAblation, "study"), (BoardEvaluation, "exam")])
def test_a_mistake_of_ours_in_one_report_is_a_row_too(root, monkeypatch, kind, name):
    monkeypatch.setattr(kind, "row_of", lambda self, runs: 1 / 0)
    reports, runs = rows(opened(root))
    assert (reports[name]["state"], reports[name]["problem"]) == (
        "unreadable",
        "cannot be read: ZeroDivisionError: division by zero",
    )
    assert {row["name"]: row["problem"] for row in reports.values()} == {
        other: reports[name]["problem"] if other == name else None for other in ("study", "exam")
    }
    assert len(runs) == 5


@pytest.mark.parametrize("make", ["mkdir", "mkfifo", "link"])
def test_something_else_in_place_of_a_report(root, make):
    path = root / "exam" / "evaluation.json"
    path.unlink()
    {"mkdir": path.mkdir, "mkfifo": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("/dev/zero")}[make]()
    assert rows(opened(root))[0]["exam"]["state"] == "unreadable"


def test_hostile_text_travels_as_data(root):
    make_evaluation(root / "exam", second=HOSTILE)
    answer = opened(root).get("/api/report?name=exam")
    assert answer.json()["models"][1]["model"] == HOSTILE
    assert answer.content.isascii()


def test_they_come_and_go(root):
    watcher = Watcher(Catalogue([root]), lambda: [])
    watcher.look()
    version = watcher.version
    watcher.look()
    assert watcher.version == version
    shutil.rmtree(root / "exam")
    watcher.look()
    message = json.loads(watcher.since(version)[1][0].removeprefix(b"data: "))
    assert [row["name"] for row in message["reports"]] == ["study"]
    assert "jobs" not in message


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


def places(value, path=()):
    """The paths of all values of a document."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.slow
@fuzz(200)
@given(data=st.data())
@pytest.mark.parametrize("file", ["study/plan.json", "study/ablation.json", "exam/evaluation.json"])
def test_whatever_a_value_is_the_page_answers(made, tmp_path_factory, file, data):
    """Any value of a report may be anything."""
    document = json.loads((made / file).read_text())
    for arm in document.get("arms", []):
        if "settings" in arm:  # most of the plan, and not shown
            arm["settings"] = {"train": arm["settings"]["train"]}
    path = data.draw(st.sampled_from(list(places(document))))
    home = shutil.copytree((made / file).parent, tmp_path_factory.mktemp("any"), dirs_exist_ok=True, ignore=only_files)
    (home / file.partition("/")[2]).write_text(json.dumps(replaced(document, path, data.draw(JUNK))))
    kind = BoardAblation if "study" in file else BoardEvaluation
    report = kind("any", home, os.path.realpath(home))
    row = json.loads(dumps(report.row({})))
    assert (row["kind"], row["name"]) == (kind.kind, "any")
    assert "cannot be read" not in (row["problem"] or "")
    with suppress(UnreadableError):
        dumps(report.page({}))
    if isinstance(report, BoardAblation):
        dumps(report.curves({}, 0.1, 100))
    shutil.rmtree(home)


def only_files(directory, names):
    return [name for name in names if os.path.isdir(os.path.join(directory, name))]
