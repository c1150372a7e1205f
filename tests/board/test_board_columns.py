"""Rollout tables whose columns have other types than ours, in every route that reads them."""

import datetime
import decimal
import json
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from board_runs import make_run
from fastapi.testclient import TestClient

from dapo_rl.board import rollout_table as table_module
from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.files import UnreadableError
from dapo_rl.board.groups import groups_of
from dapo_rl.board.launcher import Launcher
from dapo_rl.board.rollout_table import TYPES
from dapo_rl.board.routes import create_app
from dapo_rl.board.samples import Order
from dapo_rl.codec import TURN

ROWS = 4
VALUES = {
    "texts": pa.array(["1", "x", None, "10"]),
    "large texts": pa.array(["1", "x", None, "10"], pa.large_string()),
    "text views": pa.array(["1", "x", None, "10"], pa.string_view()),
    "dictionary": pa.array(["1", "x", None, "1"]).dictionary_encode(),
    "numbers in a dictionary": pa.array([10, 10, 11, None]).dictionary_encode(),
    "bytes": pa.array([b"\xff\xfe", b"10", b"", None]),
    "fixed bytes": pa.array([b"\xff\xfe"] * ROWS, pa.binary(2)),
    "no UTF-8": pa.array([b"\xff\xfe", b"10", b"", None]).view(pa.string()),
    "booleans": pa.array([True, False, None, True]),
    "small": pa.array([10, 11, 10, -3], pa.int8()),
    "unsigned": pa.array([10, 2**64 - 1, 10, 0], pa.uint64()),
    "floats": pa.array([10.0, 10.5, float("nan"), float("inf")]),
    "half floats": pa.array([10, 11, 10, -3]).cast(pa.float16()),
    "decimals": pa.array([decimal.Decimal("10.5")] * ROWS),
    "whole decimals": pa.array([decimal.Decimal(10)] * ROWS, pa.decimal128(38, 0)),
    "times": pa.array([datetime.datetime(2030, 1, 1)] * ROWS),
    "times beyond Python's": pa.array([2**50] * ROWS, pa.timestamp("ms")),
    "dates": pa.array([10] * ROWS, pa.date32()),
    "durations": pa.array([10] * ROWS, pa.duration("s")),
    "nulls": pa.nulls(ROWS),
    "lists": pa.array([[10, None], [], None, [2**40, -1]]),
    "large lists": pa.array([[1, 2], [], None, [3]], pa.large_list(pa.int64())),
    "fixed lists": pa.array([[1, 2]] * ROWS, pa.list_(pa.int16(), 2)),
    "lists of texts": pa.array([["1", "2"], ["x"], None, []]),
    "lists of floats": pa.array([[float("nan"), -1e300], [float("inf")], None, []]),
    "lists of lists": pa.array([[[1], []], [], None, [None]]),
    "lists of structs": pa.array([[{"role": "user", "content": "10"}], [], None, [None]]),
    "structs": pa.array([{"a": 1, "b": [1]}] * ROWS),
    "maps": pa.array([[("a", 1)], [], None, [("b", 2)]], pa.map_(pa.string(), pa.int64())),
}
COLUMNS = (
    ("draw",),
    ("sample", "logps", "messages"),
    ("prompt", "train_logps", "turns"),
    ("response", "clipped", "policy_turns"),
    ("token_ids", "correct", "tools", "env_reward"),
    ("advantage", "fate", "tool_errors", "prompt_ids"),
    ("forked",),
)
"""Those of a line are of another type at the same time; what is read or shown together is on different lines."""


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    root = tmp_path_factory.mktemp("foreign")
    run = make_run(root / "a", steps=1)
    app = create_app(Catalogue([root]), Launcher(root), "token")
    with TestClient(app, base_url="http://127.0.0.1") as client:  # one event loop for thousands of requests
        yield run.rollout(1), pq.read_table(run.rollout(1)), client


def ask(client):
    """Every route that reads rollouts; the groups' draws are opened one by one."""
    answers = [client.get(f"/api/{rest}") for rest in ("groups?run=a&step=1", "ledger?run=a", "search?run=a&q=1")]
    listed = [client.get(f"/api/samples?run=a&step=1&q=1&sort={sort}") for sort in get_args(Order)]
    listed.append(client.get("/api/rows.jsonl?run=a&step=1&min_reward=0"))
    listed.append(client.get("/api/samples?run=a&step=1&tool=1&tool_errors=true&min_turns=1"))
    assert {answer.status_code for answer in listed} == {answers[0].status_code}
    groups = answers[0].json().get("groups", [])
    for draw in [group["draw"] for group in groups] or [10]:
        answers.append(client.get("/api/group", params={"run": "a", "step": 1, "draw": draw}))
    for answer in answers:
        assert answer.status_code in (200, 404, 422), answer.text
        json.loads(answer.text, parse_constant=lambda name: pytest.fail(name))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("kind", VALUES)
def test_columns_of_foreign_types(board, kind):
    path, table, client = board
    for names in COLUMNS:
        foreign = table
        for name in names:
            foreign = foreign.set_column(table.column_names.index(name), name, VALUES[kind])
        pq.write_table(foreign, path)
        groups, ledger, search, *opened = ask(client)
        assert (ledger.status_code, search.status_code) == (200, 200)
        if names != ("draw",):
            assert [answer.status_code for answer in (groups, *opened)] == [200, 200, 200], names


def test_all_columns_at_once_of_another_type(board):
    path, table, client = board
    for values in VALUES.values():
        pq.write_table(pa.table(dict.fromkeys(table.column_names, values)), path)
        ask(client)


@pytest.mark.parametrize("large", [False, True])
def test_the_same_values_in_other_types_are_shown_the_same(board, large):
    path, table, client = board
    pq.write_table(table, path)
    expected = [answer.json() | {"written": None} for answer in ask(client)]
    other = {
        pa.string(): pa.large_string() if large else pa.dictionary(pa.int32(), pa.string()),
        pa.int64(): pa.string() if large else pa.decimal128(38, 0),
        pa.int32(): pa.uint8(),
        pa.float64(): pa.decimal128(10, 3) if large else pa.float32(),
        pa.bool_(): pa.int8(),
        pa.list_(pa.int32()): pa.large_list(pa.int64()),
        pa.list_(pa.float32()): pa.large_list(pa.float64()) if large else pa.list_(pa.float64()),
        pa.list_(pa.int8()): pa.list_(pa.uint8()) if large else pa.list_(pa.float32()),
        pa.list_(pa.bool_()): pa.list_(pa.int8()),
        pa.list_(pa.string()): pa.large_list(pa.large_string()),
        pa.list_(TURN): pa.large_list(TURN),
        TYPES["forked"]: pa.large_list(TYPES["forked"].value_type),
    }
    pq.write_table(table.cast(pa.schema([(name, other[TYPES[name]]) for name in table.column_names])), path)
    assert [answer.json() | {"written": None} for answer in ask(client)] == expected


def test_text_that_is_not_utf_8_is_shown_as_far_as_it_goes(board):
    path, table, client = board
    place = table.column_names.index("response")
    values = pa.array([b"good", b"b\xffd", None, b""]).view(pa.string())
    pq.write_table(table.set_column(place, "response", values), path)
    *_, first, _second = ask(client)
    assert [sample["response"] for sample in first.json()["samples"]] == ["good", "b\N{REPLACEMENT CHARACTER}d"]


def test_a_column_that_is_there_twice(board):
    path, table, client = board
    pq.write_table(table.append_column("draw", VALUES["texts"]).append_column("fate", VALUES["structs"]), path)
    groups, *_ = ask(client)
    assert [group["draw"] for group in groups.json()["groups"]] == [10, 11]


def test_numbers_that_are_no_tokens(board):
    path, table, client = board
    place = table.column_names.index("token_ids")
    pq.write_table(table.set_column(place, "token_ids", pa.array([[-5, 2**31 - 1, None], [], None, [7]])), path)
    assert [answer.status_code for answer in ask(client)] == [200] * 5


def test_without_draws_it_is_no_table_of_rollouts(board):
    path, table, client = board
    pq.write_table(table.set_column(table.column_names.index("draw"), "draw", VALUES["structs"]), path)
    answer = client.get("/api/groups?run=a&step=1")
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("step-000001.parquet: not a table of rollouts: the column draw is struct<")


def test_a_table_of_more_samples_than_a_page_can_show(board, monkeypatch):
    path, table, _ = board
    pq.write_table(table, path)
    monkeypatch.setattr(table_module, "MOST_ROWS", 3)
    with pytest.raises(UnreadableError, match=r"step-000001\.parquet: too large to show: 4 samples"):
        groups_of(path)
