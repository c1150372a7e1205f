"""Runs of which only the newest rollout files are left (log.keep_rollouts)."""

import pytest
from board_runs import make_run
from fastapi.testclient import TestClient

from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.files import UnreadableError
from dapo_rl.board.groups import groups_of, search
from dapo_rl.board.launcher import Launcher
from dapo_rl.board.ledger import ledger
from dapo_rl.board.routes import create_app

DELETED = "The groups of step 1 were deleted: log.keep_rollouts=2 keeps those of the newest steps."


@pytest.fixture
def run(tmp_path):
    """Four steps of which the last two are left."""
    run = make_run(tmp_path / "a", steps=4, **{"log.keep_rollouts": 2})
    assert run.rollout_steps() == [3, 4]
    return run


@pytest.fixture
def client(run):
    root = run.path.parent
    return TestClient(create_app(Catalogue([root]), Launcher(root), "token"), base_url="http://127.0.0.1")


def test_a_step_whose_groups_were_deleted_says_so(client):
    assert client.get("/api/steps?run=a").json() == {"ranges": [[3, 4]]}
    assert client.get("/api/groups?run=a&step=1").json() == {"groups": [], "why": DELETED}
    answer = client.get("/api/group?run=a&step=1&draw=10")
    assert (answer.status_code, answer.json()) == (404, {"error": DELETED})
    assert [group["draw"] for group in client.get("/api/groups?run=a&step=3").json()["groups"]] == [30, 31]
    assert client.get("/api/groups?run=a&step=5").json()["why"] == "No groups were written at step 5."


def test_a_value_that_is_no_count_is_not_repeated(run, client):
    run.config_path.write_text(run.config_path.read_text().replace("keep_rollouts: 2", "keep_rollouts: <b>"))
    assert client.get("/api/groups?run=a&step=1").json()["why"] == "No groups were written at step 1."


def test_search_and_ledger_use_what_is_left(run, client):
    entry = Catalogue([run.path.parent]).find("a")
    assert [hit["step"] for hit in search(entry, "idea", [1, 2, 3, 4])["hits"]] == [4, 3]
    account = client.get("/api/ledger?run=a").json()
    assert [bar["step"] for bar in account["bars"]] == [3, 4]
    assert (account["steps"], account["last_step"]) == (2, 4)
    assert account["totals"]["total"] == 48  # of all four steps, by the log


def test_the_row_of_the_run_has_no_problem(run):
    row = Catalogue([run.path.parent]).find("a").row()
    assert (row["rollouts"], row["problem"]) == (True, None)


def test_the_ledger_chooses_the_same_steps_while_others_go(tmp_path, monkeypatch):
    """So that a look at a running run reads the new file alone."""
    monkeypatch.setattr("dapo_rl.board.ledger.BARS", 4)
    run = make_run(tmp_path / "a", steps=12, **{"log.keep_rollouts": 8})
    entry = Catalogue([tmp_path]).find("a")
    assert [bar["step"] for bar in ledger(entry)["bars"]] == [5, 7, 9, 11, 12]
    run.write_rollouts(13, [], keep=8)
    assert [bar["step"] for bar in ledger(entry)["bars"]] == [7, 9, 11, 13]
    assert sorted(step for step, _ in entry.cache["ledger"]) == [7, 9, 11, 13]


def test_a_file_that_goes_while_it_is_asked_for(run):
    path = Catalogue([run.path.parent]).find("a").rollout(3)
    path.unlink()
    with pytest.raises(UnreadableError, match=r"^step-000003\.parquet: was deleted just now$"):
        groups_of(path)
