"""Episodes on the board: turns with their tokens and messages, filters, search, and logs that are old or damaged."""

import json
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from board_episodes import (
    ATTACK,
    MISTAKEN,
    SUM,
    call,
    episode,
    group_of_episodes,
    make_episode_run,
    result,
    text_of,
    write_forked,
)
from board_runs import HOSTILE
from fastapi.testclient import TestClient

from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.conversations import LONGEST_TEXT
from dapo_rl.board.launcher import Launcher
from dapo_rl.board.routes import create_app
from dapo_rl.board.samples import SampleFilter, samples_of
from dapo_rl.runs.directory import GroupRow
from dapo_rl.runs.rollouts import SCHEMA
from dapo_rl.types import Turn


@pytest.fixture
def run(tmp_path):
    return make_episode_run(tmp_path / "runs" / "a")


@pytest.fixture
def client(run):
    root = run.path.parent
    return TestClient(create_app(Catalogue([root]), Launcher(root), "token"), base_url="http://127.0.0.1")


def samples(client, draw=1):
    answer = client.get(f"/api/group?run=a&step=1&draw={draw}")
    assert answer.status_code == 200
    return answer.json()["samples"]


def texts(sample):
    """The text of each turn's tokens."""
    return ["".join(text for text, _ in sample["pieces"][turn["first"] : turn["last"]]) for turn in sample["turns"]]


def test_an_episode_has_turns_with_tokens_and_messages(client):
    first, second = samples(client)
    assert [turn["author"] for turn in first["turns"]] == ["policy", "environment", "policy"]
    assert [(turn["seconds"], turn["reward"]) for turn in first["turns"]] == [(0.25, 0), (0.75, 0), (1.25, 1)]
    assert sum(turn["tokens"] for turn in first["turns"]) == len(first["ids"])
    assert texts(first)[1:] == ["84", "Answer: 84"]
    asked, answered, said = (turn["messages"] for turn in first["turns"])
    arguments = json.dumps({"expression": "12 * (3 + 4)"})
    assert asked[0]["calls"] == [{"id": "call_0", "name": "calculator", "arguments": arguments}]
    assert [(message["role"], message["name"], message["content"]) for message in answered] == [
        ("tool", "calculator", "84")
    ]
    assert said[0]["content"] == "Answer: 84"
    assert [len(turn["messages"]) for turn in second["turns"]] == [1, 1, 1, 3, 1]
    assert second["turns"][0]["messages"][0]["calls"][0]["arguments"] == '{"expression": 12 *'
    facts = ("policy_turns", "tool_calls", "tool_errors", "env_wait_s", "env_reward", "forks", "finish_reason")
    assert [second[name] for name in facts] == [3, 3, 1, 6.5, -0.25, 1, "turns"]
    (single,) = samples(client, 2)
    assert "turns" not in single


def test_text_of_an_attacker_is_text(client):
    (sample,) = samples(client, 3)
    first, second, third = sample["turns"]
    assert first["messages"][0]["calls"][0]["name"] == first["messages"][0]["content"] == HOSTILE
    assert [message["role"] for message in second["messages"]] == ["tool", HOSTILE]
    assert third["messages"][0]["content"] == HOSTILE


def write(run, trajectory):
    run.write_rollouts(1, [GroupRow(group_of_episodes(1, trajectory), "kept")], 0)


def test_messages_without_tokens_and_tokens_without_messages_are_turns(run, client):
    whole = episode(SUM)
    last_words = {"role": "user", "content": "Well done."}
    write(run, whole.replace(messages=(*SUM, last_words)))
    (sample,) = samples(client)
    assert sample["turns"][-1] == {
        **{"author": "environment", "tokens": 0, "seconds": None, "reward": None},
        **{"first": len(sample["pieces"]), "last": len(sample["pieces"])},
        "messages": [{"role": "user", "name": "", "content": "Well done.", "reasoning": "", "calls": []}],
    }
    write(run, whole.replace(messages=()))
    assert [len(turn["messages"]) for turn in samples(client)[0]["turns"]] == [0, 0, 0]
    write(run, whole.replace(turns=()))  # the messages of the policy alone have tokens
    (sample,) = samples(client)
    assert [(turn["author"], turn["tokens"]) for turn in sample["turns"]] == [
        ("policy", len(whole.token_ids)), ("environment", 0), ("policy", 0),
    ]  # fmt: skip


def test_tokens_outside_the_recorded_turns_are_the_policys(run, client):
    whole = episode(SUM)
    _, middle, last = whole.turns
    write(
        run, whole.replace(turns=(Turn(0, middle.start - 2, "policy"), Turn(middle.start, middle.end, "environment")))
    )
    turns = samples(client)[0]["turns"]
    assert [(turn["author"], turn["tokens"]) for turn in turns] == [
        ("policy", middle.start - 2), ("policy", 2), ("environment", 2), ("policy", last.end - last.start),
    ]  # fmt: skip
    assert [[message["role"] for message in turn["messages"]] for turn in turns] == [
        ["assistant"], [], ["tool"], ["assistant"],
    ]  # fmt: skip


def test_an_episode_that_forked_is_all_its_trajectories_in_their_order(run, client):
    parts = write_forked(run)
    (sample,) = samples(client)
    ids = [token for part in parts for token in part.token_ids.tolist()]
    assert sample["ids"] == ids
    assert texts(sample) == [text for part in (MISTAKEN, SUM[:1], SUM) for text in turn_texts(part)]
    assert [(begun["turn"], begun["tokens"]) for begun in sample["trajectories"]] == [
        (place, len(part.token_ids)) for place, part in zip((0, 5, 6), parts, strict=True)
    ]
    prompts = [begun["prompt"] for begun in sample["trajectories"]]
    assert prompts[1:] == ["".join(turn_texts(said)) for said in (MISTAKEN, SUM[:1])]
    assert [turn["messages"][0]["role"] for turn in sample["turns"]] == [
        *("assistant", "tool", "assistant", "tool", "assistant"), "assistant", *("assistant", "tool", "assistant"),
    ]  # fmt: skip
    pieces, seen = len(sample["pieces"]), sample["turns"][4]["last"]
    assert len(sample["logp"]) == len(sample["ratio"]) == pieces
    assert sample["ratio"][:seen] == [None] * seen
    assert set(sample["ratio"][seen:]) == {1}
    (row,) = client.get("/api/samples?run=a&step=1").json()["rows"]
    assert row["length"] == len(ids)
    (listed,) = client.get("/api/groups?run=a&step=1").json()["groups"]
    assert listed["tokens"] == len(ids)
    assert client.get("/api/ledger?run=a").json()["bars"][0]["tokens"] == {"kept": len(ids)}


def turn_texts(messages):
    return ["".join(map(text_of, part)) for _, part in groupby(messages, lambda each: each["role"] == "assistant")]


def test_what_was_said_before_a_fork_is_found_and_downloaded(run, client):
    write_forked(run)
    (hit,) = client.get("/api/search?run=a&q=parentheses&step=1").json()["hits"]
    assert (hit["where"], hit["count"]) == ("messages", 4)
    assert client.get("/api/samples?run=a&step=1&q=parentheses").json()["matched"] == 1
    (row,) = (json.loads(line) for line in client.get("/api/rows.jsonl?run=a&step=1").text.splitlines())
    assert json.loads(row["messages"]) == [*MISTAKEN, *SUM[:1], *SUM]
    assert "forked" not in row


def test_damaged_forks_are_shown_as_far_as_they_go(run, client):
    write_forked(run)
    table = pq.read_table(run.rollout(1))
    place, kind = table.column_names.index("forked"), table.schema.field("forked").type
    damaged = [
        None, {}, {"messages": "{", "prompt_ids": [None, -5, 2**31 - 1], "logps": [0.5]},
        {"token_ids": [5, None], "turns": [None, {"start": 7}], "logps": [None, None, None]},
    ]  # fmt: skip
    pq.write_table(table.set_column(place, "forked", pa.array([damaged], kind)), run.rollout(1))
    (sample,) = samples(client)
    assert [sample["trajectories"][0][name] for name in ("turn", "tokens")] == [0, 2]
    assert sum(turn["tokens"] for turn in sample["turns"]) == len(sample["ids"])
    assert len(sample["logp"]) == len(sample["pieces"])
    assert client.get("/api/samples?run=a&step=1&q=84").json()["matched"] == 1


@pytest.mark.parametrize("turns", [[(5, 2)], [(-3, 10**9), (0, 4)], [(10**9, 10**9)], [(3, 3), (3, 3)]])
def test_turns_that_make_no_sense_still_cover_the_tokens_once(run, client, turns):
    write(run, episode(SUM).replace(turns=tuple(Turn(*turn, "environment") for turn in turns)))
    (sample,) = samples(client)
    assert "".join(texts(sample)) == "".join(text for text, _ in sample["pieces"])
    assert sum(turn["tokens"] for turn in sample["turns"]) == len(sample["ids"])


@pytest.mark.parametrize(
    "messages",
    [
        "{", "[" * 100_000, "null", '{"role": "user"}', "[1, null, []]", '[{"role": 5, "content": {"a": [1]}}]',
        '[{"role": "assistant", "tool_calls": 7}, {"role": "assistant", "tool_calls": [1, {"function": 2}, {}]}]',
        '[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]',
        '[{"role": "user", "content": [{"type": "image_url"}]}, {"role": "tool", "tool_call_id": [1], "content": NaN}]',
    ],
)  # fmt: skip
def test_damaged_messages_are_shown_as_far_as_they_go(run, client, messages):
    table = pq.read_table(run.rollout(1))
    place = table.column_names.index("messages")
    pq.write_table(table.set_column(place, "messages", pa.array([messages] * len(table))), run.rollout(1))
    for draw in (1, 2, 3):
        for sample in samples(client, draw):
            for turn in sample.get("turns", []):
                assert all(isinstance(message["content"], str) for message in turn["messages"])
    assert client.get("/api/samples?run=a&step=1&q=user").status_code == 200


def test_a_very_long_message_is_cut(run, client):
    write(run, episode(SUM).replace(messages=({"role": "assistant", "content": "x" * (LONGEST_TEXT + 1234)},)))
    content = samples(client)[0]["turns"][0]["messages"][0]["content"]
    assert content == "x" * LONGEST_TEXT + "… (1,234 more characters)"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"tools": ("calculator",)}, [(1, 0), (1, 1)]),
        ({"tools": ("python", "b")}, [(1, 1), (3, 0)]),
        ({"tools": ("nothing",)}, []),
        ({"tool_errors": True}, [(1, 1), (3, 0)]),
        ({"min_turns": 2}, [(1, 0), (1, 1), (3, 0)]),
        ({"max_turns": 1}, [(2, 0)]),
        ({"min_turns": 2, "max_turns": 2, "tools": ("calculator",)}, [(1, 0)]),
        ({"sort": "turns", "down": True}, [(1, 1), (1, 0), (3, 0), (2, 0)]),
        ({"words": "Parentheses first"}, [(1, 1)]),
    ],
)
def test_episodes_are_filtered(run, wanted, expected):
    rows = samples_of(run.rollout(1), SampleFilter(**wanted), 0, 100)["rows"]
    assert [(row["draw"], row["sample"]) for row in rows] == expected


def test_what_can_be_filtered_on(client):
    answer = client.get("/api/samples?run=a&step=1&tool=python&tool_errors=true&min_turns=3").json()
    assert [(row["turns"], row["tool_calls"], row["tool_errors"]) for row in answer["rows"]] == [(3, 3, 1)]
    hostile = HOSTILE[:100]
    assert answer["tools"] == {"calculator": 2, "python": 1, "search": 1, hostile: 1, "b": 1}
    assert (answer["turns"], answer["tool_errors"]) == ([1, 3], 2)
    assert client.get("/api/samples", params={"run": "a", "step": 1, "tool": hostile}).json()["matched"] == 1


def test_only_the_most_used_tools_are_offered(run, client):
    calls = [call(f"tool {n:02d}", {}) for n in range(60)]
    many = [{"role": "assistant", "content": "", "tool_calls": calls}]
    often = [{"role": "assistant", "content": "", "tool_calls": calls[50:51]}]
    write_two = group_of_episodes(1, episode(many), episode(often))
    run.write_rollouts(1, [GroupRow(write_two, "kept")], 0)
    tools = client.get("/api/samples?run=a&step=1").json()["tools"]
    assert (len(tools), next(iter(tools)), tools["tool 50"]) == (30, "tool 50", 2)


def test_search_finds_what_a_tool_said(run, client):
    whole = episode(MISTAKEN)
    write(run, whole.replace(text="Answer: 15"))
    (hit,) = client.get("/api/search?run=a&q=parentheses&step=1").json()["hits"]
    assert (hit["where"], hit["count"], "Parentheses first." in hit["text"]) == ("messages", 4, True)


def test_search_finds_quotes_and_lines_in_messages(run, client):
    """They are stored as JSON, which writes them otherwise."""
    answer = [{"role": "assistant", "content": "?"}, result("weather", '{"degrees": 21}\nC:\\temp')]
    run.write_rollouts(1, [GroupRow(group_of_episodes(1, episode(answer).replace(text="no more")), "kept")], 0)
    for words in ('"degrees": 21', "}\nC:", "c:\\temp"):
        hits = client.get("/api/search", params={"run": "a", "q": words, "step": 1}).json()["hits"]
        assert [(hit["where"], hit["count"]) for hit in hits] == [("messages", 1)]
        assert client.get("/api/samples", params={"run": "a", "step": 1, "q": words}).json()["matched"] == 1


def test_messages_are_downloaded(client):
    rows = [json.loads(line) for line in client.get("/api/rows.jsonl?run=a&step=1").text.splitlines()]
    assert [json.loads(row["messages"]) if row["messages"] else None for row in rows] == [
        SUM, MISTAKEN, None, json.loads(json.dumps(ATTACK)),
    ]  # fmt: skip
    assert [row["policy_turns"] for row in rows] == [2, 3, None, 2]


def test_a_log_of_an_older_version_opens(run, client):
    table = pq.read_table(run.rollout(1))
    newer = SCHEMA.names[SCHEMA.names.index("messages") :]
    pq.write_table(table.drop_columns(newer), run.rollout(1))
    assert all("turns" not in sample for draw in (1, 2, 3) for sample in samples(client, draw))
    answer = client.get("/api/samples?run=a&step=1&min_turns=1&sort=turns").json()
    assert (answer["matched"], answer["tools"], answer["tool_errors"], answer["turns"]) == (4, {}, 0, [1, 1])
    assert client.get("/api/samples?run=a&step=1&tool=python").json()["matched"] == 0
    assert client.get("/api/rows.csv?run=a&step=1").status_code == 200
