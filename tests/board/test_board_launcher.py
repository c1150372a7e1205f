"""The Lab: which recipes it offers, how runs wait for each other, and what can be stopped."""

import time

import pytest
from board_runs import make_run
from fastapi.testclient import TestClient

from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.job_queue import JobQueue
from dapo_rl.board.launcher import DEMO, Launcher, RecipeMenu, Start, overrides_for
from dapo_rl.board.routes import create_app
from dapo_rl.config import Config, known_keys
from dapo_rl.errors import UserError
from dapo_rl.recipes import recipe_names

TOKEN = {"X-Dapo-Token": "token"}
GOOD = "preset: dapo\nmodel: {name: tiny}\ndata: {train: arithmetic, eval: arithmetic}\nalgo: {clip_high: 0.35}\n"
SMALL = "sampling: {prompts_per_step: 2, group_size: 4, max_new_tokens: 40}\noverlong: {cache_length: 8}\n"


@pytest.fixture
def folder(tmp_path):
    """Runs, and recipes in and beside their folder; one cannot be read, and one is a link to elsewhere."""
    runs = tmp_path / "project" / "runs"
    recipes = tmp_path / "project" / "recipes"
    for path in (runs, runs / "deep", recipes):
        path.mkdir(parents=True)
    (tmp_path / "secret.yaml").write_text(GOOD)
    (runs / "mine.yaml").write_text(GOOD)
    (runs / "deep" / "hidden.yaml").write_text(GOOD)
    (runs / "notes.txt").write_text("text")
    (recipes / "sums.yml").write_text(GOOD)
    (recipes / "bad.yaml").write_text("algo: {clip_hihg: 0.2}\n")
    (recipes / "a=b.yaml").write_text(GOOD)
    (recipes / "link.yaml").symlink_to(tmp_path / "secret.yaml")
    make_run(runs / "run")
    return runs


def test_the_recipes_of_the_folder(folder):
    offered = RecipeMenu([folder]).offered()
    packaged = [DEMO, *(name for name in recipe_names() if name != DEMO)]
    assert list(offered)[: len(packaged)] == packaged
    own = {name: recipe.problem for name, recipe in offered.items() if name not in packaged}
    assert {name for name, problem in own.items() if problem is None} == {"runs/mine.yaml", "recipes/sums.yml"}
    assert "clip_hihg" in own["recipes/bad.yaml"]
    assert "points out" in own["recipes/link.yaml"]
    assert "=" in own["recipes/a=b.yaml"]
    assert RecipeMenu([folder / "run"]).offered().keys() & {"run/config.yaml"} == set()


def test_a_recipe_is_read_again_when_it_changes(folder):
    menu = RecipeMenu([folder])
    assert menu.offered()["runs/mine.yaml"].problem is None
    (folder / "mine.yaml").write_text("[1, 2, 3]\n")
    assert "not a mapping" in menu.offered()["runs/mine.yaml"].problem
    (folder / "mine.yaml").unlink()
    assert "runs/mine.yaml" not in menu.offered()


@pytest.mark.parametrize(
    "name",
    ["../secret.yaml", "recipes/link.yaml", "recipes/bad.yaml", "/etc/passwd", "mine.yaml", "runs/deep/hidden.yaml"],
)
def test_a_name_that_is_not_offered_is_not_opened(folder, name):
    client = TestClient(create_app(Catalogue([folder]), Launcher(folder), "token"), base_url="http://127.0.0.1")
    body = {"techniques": [], "recipe": name}
    assert client.post("/api/lab/start", json=body, headers=TOKEN).status_code == 409
    assert client.get("/api/lab", params={"recipe": name}).status_code == 409
    assert not list(folder.glob("lab-*"))


def test_the_switches_of_a_recipe(folder):
    lab = Launcher(folder)
    answer = lab.describe("runs/mine.yaml")
    on = {technique["name"]: technique["on"] for technique in answer["techniques"]}
    assert on["Clip-Higher"] is True
    assert (answer["steps"], answer["eval_prompts"]) == (Config.load(folder / "mine.yaml").train.steps, None)
    names = [name for name, is_on in on.items() if is_on]
    same = Start(recipe="runs/mine.yaml", techniques=names, steps=7, seed=2, eval_prompts=None)
    base = lab.menu.load("runs/mine.yaml")[1]
    assert overrides_for(same, base) == ["train.steps=7", "seed=2"]
    off = same.model_copy(update={"techniques": [name for name in names if name != "Clip-Higher"]})
    assert overrides_for(off, base) == ["algo.clip_high=0.2", "train.steps=7", "seed=2"]


def wait_until(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def states(queue):
    return {job["name"]: job["state"] for job in queue.listed()}


@pytest.mark.slow
def test_runs_wait_for_each_other(tmp_path):
    """With real processes that end at once, since their recipe does not exist."""
    queue = JobQueue(tmp_path / "runs")
    try:
        names = [queue.add("none", [f"no-{i}.yaml"]) for i in range(4)]
        assert names == ["lab-001", "lab-002", "lab-003", "lab-004"]
        assert states(queue) == {"lab-001": "running", "lab-002": "waiting", "lab-003": "waiting", "lab-004": "waiting"}
        queue.sooner("lab-004")
        assert [(job["name"], job["place"]) for job in queue.listed()] == [
            ("lab-002", 1),
            ("lab-004", 2),
            ("lab-003", 3),
            ("lab-001", None),
        ]
        for _ in range(2):  # the first cannot go further
            queue.sooner("lab-004")
            assert [job["name"] for job in queue.listed()] == ["lab-004", "lab-002", "lab-003", "lab-001"]
        queue.remove("lab-002")
        assert not (tmp_path / "runs" / "lab-002").exists()
        for name in ("lab-001", "lab-002"):  # one runs, one is gone
            with pytest.raises(UserError):
                queue.remove(name)
        wait_until(lambda: set(states(queue).values()) == {"failed"})
        written = [(tmp_path / "runs" / name / "lab.log") for name in ("lab-001", "lab-004", "lab-003")]
        assert [log.read_text().split()[1].rstrip(":") for log in written] == ["no-0.yaml", "no-3.yaml", "no-2.yaml"]
        times = [log.stat().st_mtime_ns for log in written]
        assert times == sorted(times)
    finally:
        queue.close()


@pytest.mark.slow
def test_no_run_outlives_the_board(folder):
    lab = Launcher(folder)
    wanted = Start(recipe="runs/mine.yaml", techniques=["Clip-Higher"], steps=100)
    try:
        assert [lab.start(wanted), lab.start(wanted)] == ["lab-001", "lab-002"]
        assert states(lab.queue) == {"lab-001": "running", "lab-002": "waiting"}
    finally:
        lab.queue.close()
    assert states(lab.queue) == {"lab-001": "stopped"}
    assert not (folder / "lab-002").exists()


@pytest.mark.slow
def test_a_run_that_is_stopped_saves(folder):
    lab = Launcher(folder)
    (folder / "mine.yaml").write_text(GOOD + SMALL)
    try:
        name = lab.start(Start(recipe="runs/mine.yaml", techniques=[], steps=5000, eval_prompts=2))
        metrics = folder / name / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
        lab.queue.stop(name)
        wait_until(lambda: states(lab.queue)[name] == "stopped")
    finally:
        lab.queue.close()
    assert list((folder / name / "checkpoints").glob("step-*"))
    assert "stopping: saving the run" in (folder / name / "lab.log").read_text()
    row = Catalogue([folder]).find(name).row()
    assert row["state"] == "stopped"
    assert Config.load(folder / name / "config.yaml").train.steps == 5000


def test_a_queue_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr("dapo_rl.board.job_queue.AT_ONCE", 0)
    monkeypatch.setattr("dapo_rl.board.job_queue.MOST_WAITING", 2)
    queue = JobQueue(tmp_path)
    queue.add("a", []), queue.add("b", [])
    with pytest.raises(UserError, match="2 runs are waiting already"):
        queue.add("c", [])
    queue.close()
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_beside_the_runs_is_offered_and_other_files_are_not(folder):
    project = folder.parent
    (project / "beside.yaml").write_text(GOOD)
    (project / "typo.yaml").write_text("algo: {clip_hihg: 0.2}\n")
    (project / "mkdocs.yml").write_text("site_name: docs\nnav: [index.md]\n")
    (project / "list.yaml").write_text("[1, 2]\n")
    (project / "dotted.yaml").write_text("train.steps: 3\n")
    (project / "link.yaml").symlink_to(project.parent / "secret.yaml")
    offered = RecipeMenu([folder]).offered()
    beside = {name.removeprefix("project/") for name in offered if name.startswith("project/")}
    assert beside == {"beside.yaml", "typo.yaml", "dotted.yaml"}
    assert offered["project/beside.yaml"].problem is None
    assert "clip_hihg" in offered["project/typo.yaml"].problem
    (project / "mkdocs.yml").write_text(GOOD)
    assert "project/mkdocs.yml" in RecipeMenu([folder]).offered()


def test_every_setting_is_described_with_the_value_of_the_recipe(folder):
    described = {row["key"]: row for row in Launcher(folder).describe("runs/mine.yaml")["settings"]}
    assert list(described) == list(known_keys())
    assert described["algo.clip_high"]["value"] == "0.35"
    assert described["sampling.dynamic"]["value"] == "true"
    assert described["sampling.dynamic"]["choices"] == ["true", "false"]
    assert described["algo.kl_kind"]["choices"][:3] == ["k1", "k2", "k3"]
    assert described["eval.prompts"]["value"] == "null"
    assert described["data.train"]["value"] == "arithmetic"
    assert described["train.betas"]["value"] == "[0.9, 0.999]"
    assert described["train.lr"]["meaning"] == "AdamW's learning rate."


def test_the_value_of_every_setting_is_one_that_the_lab_accepts(folder):
    lab = Launcher(folder)
    rows = [row for row in lab.describe("runs/mine.yaml")["settings"] if not row["key"].startswith("model.lora.")]
    lab.check(Start(recipe="runs/mine.yaml", techniques=[], settings={row["key"]: row["value"] for row in rows}))


def test_the_key_of_a_teacher_goes_to_no_other_server(folder):
    own = "http://teacher.test/v1"
    (folder / "taught.yaml").write_text(f"{GOOD}teacher: {{name: '{own}', api_key_env: SECRET}}\n")
    lab = Launcher(folder)

    def check(recipe, teacher):
        lab.check(Start(recipe=recipe, techniques=[], settings={"teacher.name": teacher}))

    with pytest.raises(UserError, match="would get the recipe's key"):
        check("runs/taught.yaml", "http://elsewhere.test/v1")
    check("runs/taught.yaml", own)
    check("runs/mine.yaml", "http://elsewhere.test/v1")  # it has no key


def test_other_settings_are_checked_and_passed_on(folder):
    base = Config.load(folder / "mine.yaml")
    settings = {"train.lr": "0.001", "sampling.stop": "[a, b]", "train.steps": "7"}
    words = overrides_for(Start(techniques=[], settings=settings), base)
    config = Config.load(folder / "mine.yaml", words)
    assert (config.train.lr, config.sampling.stop, config.train.steps) == (0.001, ("a", "b"), 7)
    client = TestClient(create_app(Catalogue([folder]), Launcher(folder), "token"), base_url="http://localhost")
    for wrong, why in {
        ("train.lr", "fast"): "train.lr",
        ("train.lrr", "1"): "did you mean train.lr",
        ("--run", "/somewhere"): "is not a setting",
        ("reward.verifier", "os:system"): "named in a recipe",
        ("reward.verifier", "[{verifier: evil.py:score}]"): "named in a recipe",
        ("algo.loss", "evil.py:loss"): "named in a recipe",
        ("engine", "evil:Engine"): "named in a recipe",
        ("engine", '"evil\\x3aEngine"'): "named in a recipe",
        ("env.name", "evil.py:Environment"): "named in a recipe",
        ("env.tools", "[evil:tool]"): "named in a recipe",
        ("env.mcp", "touch evil"): "commands are named in a recipe",
        ("env.agent", "touch evil"): "a command is named in a recipe",
        ("engine_options", "{trust_remote_code: true}"): "named in a recipe",
        ("train.transforms", "evil:columns"): "named in a recipe",
        ("teacher.api_key_env", "SECRET"): "named in a recipe",
        ("cluster.address", "ray://elsewhere:10001"): "a cluster is named in a recipe",
        ("data.system_prompt", "x" * 5000): "longer than",
    }.items():
        body = {"recipe": "runs/mine.yaml", "techniques": [], "settings": dict([wrong])}
        assert why in client.post("/api/lab/check", json=body, headers=TOKEN).json()["problem"], wrong
        assert client.post("/api/lab/start", json=body, headers=TOKEN).status_code == 409
    assert not list(folder.glob("lab-*"))
    body = {"recipe": "runs/mine.yaml", "techniques": [], "settings": {"reward.verifier": "exact"}}
    assert client.post("/api/lab/check", json=body, headers=TOKEN).json() == {"problem": None}
    assert client.post("/api/lab/check", json=body).status_code == 403
