"""The list of a step's samples: sorted, filtered, searched, and with columns that the board does not know."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from board_runs import kept, make_group, make_run
from fastapi.testclient import TestClient

from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.groups import group_of, groups_of, search
from dapo_rl.board.launcher import Launcher
from dapo_rl.board.routes import create_app
from dapo_rl.board.samples import SampleFilter, rows_of, samples_of
from dapo_rl.runs.directory import GroupRow
from dapo_rl.types import Trajectory, Verdict


@pytest.fixture
def run(tmp_path):
    """A step with a kept group of two samples, a dropped one of three lengths, and one whose verifier failed."""
    written = make_run(tmp_path / "runs" / "a", steps=1)
    longer = make_group(5, [("one (1+1)", True), ("two", True), ("three", True)], prompt="Count [x]")
    samples = tuple(
        Trajectory((5,) * n, (-0.5,) * n, sample.text, "stop")
        for sample, n in zip(longer.samples, (9, 2, 4), strict=True)
    )
    longer = dataclasses.replace(longer, samples=samples)
    broken = make_group(6, [("?", False), ("!", False)])
    verdicts = (Verdict(0.0, False, "timeout"), Verdict(-1.0, False, "unparseable"))
    broken = dataclasses.replace(broken, verdicts=verdicts)
    rows = [
        kept(make_group(1, [("I think 2", True), ("no idea", False)])),
        GroupRow(longer, "all_correct"),
        GroupRow(broken, "verifier_error"),
    ]
    written.write_rollouts(1, rows, 0)
    return written


@pytest.fixture
def client(run):
    root = run.path.parent
    return TestClient(create_app(Catalogue([root]), Launcher(root), "token"), base_url="http://127.0.0.1")


def places(run, **wanted):
    answer = samples_of(run.rollout(1), SampleFilter(**wanted), 0, 100)
    assert answer["matched"] == len(answer["rows"])
    return [(row["draw"], row["sample"]) for row in answer["rows"]]


ALL = [(1, 0), (1, 1), (5, 0), (5, 1), (5, 2), (6, 0), (6, 1)]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, ALL),
        # Rewards 0.75 and −1.25 after the length penalty; those not trained on count by their score. Ties: by draw.
        ({"sort": "reward"}, [(1, 1), (6, 1), (6, 0), (1, 0), (5, 0), (5, 1), (5, 2)]),
        ({"sort": "reward", "down": True}, [(5, 0), (5, 1), (5, 2), (1, 0), (6, 0), (6, 1), (1, 1)]),
        ({"sort": "length"}, [(5, 1), (1, 0), (1, 1), (6, 0), (6, 1), (5, 2), (5, 0)]),
        ({"sort": "length", "down": True}, [(5, 0), (5, 2), (1, 0), (1, 1), (6, 0), (6, 1), (5, 1)]),
        # Right, wrong, unparseable, timeout.
        ({"sort": "verdict"}, [(1, 0), (5, 0), (5, 1), (5, 2), (1, 1), (6, 1), (6, 0)]),
        # Without an advantage comes last in either direction.
        ({"sort": "advantage", "down": True}, [(1, 0), (1, 1), *ALL[2:]]),
        ({"sort": "advantage"}, [(1, 1), (1, 0), *ALL[2:]]),
        ({"verdicts": ("timeout", "unparseable")}, [(6, 0), (6, 1)]),
        ({"outcomes": ("kept", "verifier_error"), "verdicts": ("correct", "timeout")}, [(1, 0), (6, 0)]),
        ({"min_reward": 0.0, "max_reward": 0.75}, [(1, 0), (6, 0)]),
        ({"min_length": 3, "max_length": 4, "outcomes": ("all_correct",)}, [(5, 2)]),
        ({"words": "IDEA"}, [(1, 1)]),
        ({"words": "[X]"}, [(5, 0), (5, 1), (5, 2)]),  # in the prompt, as plain text
        ({"words": "(1+1)"}, [(5, 0)]),
        ({"words": ".*"}, []),
        ({"words": "3", "outcomes": ("kept",)}, [(1, 1)]),  # in its answer only
        ({"outcomes": ("nothing",)}, []),
    ],
)
def test_order_and_filters(run, wanted, expected):
    assert places(run, **wanted) == expected


def test_a_page_and_what_can_be_filtered_on(client):
    answer = client.get("/api/samples?run=a&step=1&sort=length&down=true&first=1&limit=2").json()
    assert [(row["draw"], row["sample"], row["length"]) for row in answer["rows"]] == [(5, 2, 4), (1, 0, 3)]
    assert (answer["total"], answer["matched"]) == (7, 7)
    assert answer["outcomes"] == {"kept": 2, "all_correct": 3, "verifier_error": 2}
    assert answer["verdicts"] == {"correct": 4, "wrong": 1, "timeout": 1, "unparseable": 1}
    assert (answer["rewards"], answer["lengths"]) == ([-1.25, 1.0], [2, 9])
    assert client.get("/api/samples?run=a&step=1&verdict=wrong&verdict=timeout").json()["matched"] == 2
    assert client.get("/api/samples?run=a&step=9").json() == {
        "rows": [],
        "why": "No groups were written at step 9.",
    }


def test_samples_of_a_run_that_failed_before_they_were_judged(run, client):
    group = dataclasses.replace(make_group(7, [("a", False), ("b", False)]), verdicts=())
    run.write_rollouts(1, [kept(make_group(1, [("2", True)])), GroupRow(group, "unfinished")], 0)
    assert client.get("/api/samples?run=a&step=1").json()["verdicts"] == {"correct": 1, "not judged": 2}
    answer = client.get("/api/samples?run=a&step=1&verdict=not+judged").json()
    assert [(row["draw"], row["sample"], row["status"]) for row in answer["rows"]] == [
        (7, 0, "not judged"),
        (7, 1, "not judged"),
    ]


@pytest.mark.parametrize(
    "rest", ["sort=token_ids", "limit=0", "limit=1001", "first=-1", "min_reward=x", f"q={'x' * 201}"]
)
def test_other_requests_are_refused(client, rest):
    assert client.get(f"/api/samples?run=a&step=1&{rest}").status_code == 422


def test_a_file_that_is_written_again_is_read_again(run):
    assert len(places(run)) == 7
    run.write_rollouts(1, [kept(make_group(3, [("new", True)]))], 0)
    assert places(run) == [(3, 0)]
    assert places(run, words="new") == [(3, 0)]


def without_signal(group):
    """As `on_cap: fill` adds a group to a batch: trained on with advantages of 0."""
    row = kept(group)
    samples = tuple(s.replace(advantages=0.0) for s in row.group.samples)
    return GroupRow(dataclasses.replace(row.group, samples=samples), "kept")


def test_a_group_that_filled_the_batch_is_not_said_to_differ(run, client):
    rows = [kept(make_group(1, [("2", True), ("3", False)])), without_signal(make_group(2, [("2", True)] * 2))]
    run.write_rollouts(1, rows, 0)
    assert [group["fate"] for group in groups_of(run.rollout(1))] == ["kept", "filled"]
    assert client.get("/api/group?run=a&step=1&draw=2").json()["fate"] == "filled"
    assert places(run, outcomes=("filled",)) == [(2, 0), (2, 1)]
    assert places(run, outcomes=("kept",)) == [(1, 0), (1, 1)]
    assert {hit["fate"] for hit in search(Catalogue([run.path]).find("a"), "2", [1])["hits"]} == {"kept", "filled"}
    said = {outcome["key"]: outcome["why"] for outcome in client.get("/api/vocabulary").json()["outcomes"]}
    assert "all advantages are 0" in said["filled"]
    assert "differ" not in said["filled"]
    # Its tokens were trained on.
    assert client.get("/api/ledger?run=a").json()["bars"][0]["tokens"] == {"kept": 12}


def test_search_covers_answers_and_says_where(run):
    hits = search(Catalogue([run.path]).find("a"), "2", [1])["hits"]
    assert [(hit["draw"], hit["sample"], hit["where"], hit["count"], hit["text"]) for hit in hits] == [
        (1, 0, "truth", 1, "2"),
        (5, 0, "truth", 1, "2"),
        (6, 0, "truth", 1, "2"),
        (1, 0, "response", 1, "I think 2"),
        (5, 0, "answer", 1, "2"),
        (5, 1, "answer", 1, "2"),
        (5, 2, "answer", 1, "2"),
    ]
    assert search(Catalogue([run.path]).find("a"), "E", [1])["hits"][-1] | {"text": ""} == {
        **{"step": 1, "draw": 5, "sample": 2, "where": "response", "count": 2},
        **{"correct": True, "fate": "all_correct", "text": ""},
    }


def test_columns_that_the_board_does_not_know_are_shown_by_name(run):
    path, size = run.rollout(1), 7
    table = pq.read_table(path)
    columns = {
        "reward/format": pa.array([0.5, float("nan")] + [None] * (size - 2)),
        "extra/note": pa.array(["<b>", None] * 3 + ["x"]),
        "parts": pa.array([[("a", 1.0), ("b", 2.0)]] + [None] * (size - 1), pa.map_(pa.string(), pa.float64())),
        "struct": pa.array([{"ok": True, "inner": [1]}] * size),
        "big": pa.array([2**62] * size),
        "words": pa.array(["y" * 5000] * size).dictionary_encode(),
        "broken": pa.array([b"\xff"] * size).view(pa.string()),
        "list": pa.array([[1, 2]] * size),
        "bytes": pa.array([b"x"] * size),
        "late": pa.array([2**50] * size, pa.timestamp("ms")),
    }
    for name, values in columns.items():
        table = table.append_column(name, values)
    pq.write_table(table, path)
    first, second = group_of(Catalogue([run.path]).find("a"), path, 1)["samples"]
    assert first["extra"] == {
        **{"reward/format": 0.5, "extra/note": "<b>", "parts.a": 1.0, "parts.b": 2.0, "struct.ok": True},
        **{"big": str(2**62), "words": "y" * 1999 + "…", "broken": "\N{REPLACEMENT CHARACTER}"},
    }
    assert second["extra"]["reward/format"] == "nan"
    assert "extra/note" not in second["extra"]
    rows = rows_of(path, SampleFilter(verdicts=("timeout",)), ("prompt",))
    assert rows.column("extra/note").to_pylist() == [None]
    assert rows.column("reward/format").to_pylist() == [None]


def test_most_unknown_columns_are_left_out(run):
    path = run.rollout(1)
    table = pq.read_table(path)
    for number in range(100):
        table = table.append_column(f"x{number:02d}", pa.array(range(7)))
    pq.write_table(table, path)
    extra = group_of(Catalogue([run.path]).find("a"), path, 1)["samples"][1]["extra"]
    assert extra == {f"x{number:02d}": 1 for number in range(64)}


def test_thousands_of_samples_come_a_page_at_a_time(run, client):
    table = pq.read_table(run.rollout(1))
    many = pa.concat_tables([table] * 1000)
    many = many.set_column(1, "draw", pa.array(np.arange(len(many)) // 7))
    pq.write_table(many, run.rollout(1))
    answer = client.get("/api/samples?run=a&step=1&sort=length&down=true&verdict=correct&limit=100")
    assert len(answer.content) < 50_000
    content = json.loads(answer.content)
    assert (content["total"], content["matched"], len(content["rows"])) == (7000, 4000, 100)
    assert [(row["draw"], row["length"]) for row in content["rows"]] == [(draw, 9) for draw in range(100)]
