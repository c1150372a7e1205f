import errno
import json
import math
import os
import re
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_rl.config import Config
from dapo_rl.errors import UnsavedError, UserError
from dapo_rl.runs.directory import GroupRow, RunDirectory, atomic_write
from dapo_rl.runs.rollouts import SCHEMA
from dapo_rl.types import Group, Prompt, RewardPart, Trajectory, Turn, Verdict


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "deep" / "run", Config())


def group(draw=7, answers=("4", None), **prompt):
    prompt = Prompt(**{"id": "p1", "text": "2+2=", "token_ids": (1, 2), "answer": "4", "data_source": "sums", **prompt})
    samples = (
        Trajectory((5, 6, 2), (-0.5, -0.25, -0.125), "4", "stop", (3, 3, 4)),
        Trajectory((9,), (-2.0,), "\ud83d oops", "length", 4),
    )
    verdicts = (Verdict(1.0, True, "correct", answers[0]), Verdict(-1.0, False, "unparseable", answers[1]))
    return Group(draw, prompt, samples, verdicts)


def trained(judged):
    """Of the second sample, which the engine cut off, the update saw nothing."""
    first, second = judged.samples
    seen = {"train_logps": [-0.5, -0.75, -1], "entropies": [1, 2, 0], "clipped": [0, 2, 1]}
    samples = (
        first.replace(advantages=0.7, scalars={"reward": 1.0, "length_penalty": 0.0}, **seen),
        second.replace(advantages=-0.7, loss_mask=False, scalars={"reward": -1.5, "length_penalty": -0.5}),
    )
    return replace(judged, samples=samples)


def test_the_written_config_loads_back_to_the_same_run(tmp_path):
    config = Config.build({"preset": "grpo", "train.lr": 1e-6, "data.train": {"source": "arithmetic", "digits": 2}})
    run = RunDirectory.create(tmp_path / "r", config)
    again = RunDirectory.open(tmp_path / "r").read_config()
    assert again.resolved() == config.resolved()
    assert "max_length: 1024" in run.config_path.read_text()  # a default that follows from another key


@pytest.mark.parametrize("holds", ["metrics", "checkpoint"])
def test_a_directory_with_a_run_is_refused_and_left_alone(run, holds):
    if holds == "metrics":
        run.append_metrics(1, {"acc/mean": 0.5})
    else:
        (run.checkpoints_path / "step-3").mkdir(parents=True)
    before = run.config_path.read_text()
    with pytest.raises(UserError, match=r"already contains a run.*--resume.*--run") as error:
        RunDirectory.create(run.path, Config(seed=9))
    assert "\n" not in str(error.value)
    assert run.config_path.read_text() == before


def test_a_run_that_never_began_can_be_created_again(run):
    run.checkpoints_path.mkdir()
    assert RunDirectory.create(run.path, Config(seed=9)).read_config().seed == 9


def test_paths_that_cannot_be_a_run_directory_are_user_errors(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below"):
        with pytest.raises(UserError, match=f"{re.escape(str(path))}: is not a directory"):
            RunDirectory.create(path, Config())
    with pytest.raises(UserError, match=r"cannot be written: .+; name another"):
        RunDirectory.create(tmp_path / ("n" * 300), Config())


def test_open_where_there_is_no_run(tmp_path):
    with pytest.raises(UserError, match="no run here"):
        RunDirectory.open(tmp_path)


def test_metrics_are_json_lines_with_the_step_first(run):
    run.append_metrics(1, {"acc/mean": 0.5, "sampling/kept": 16, "bad": math.nan, "worse": math.inf, "none": None})
    run.append_metrics(2, {"acc/mean": np.float32(0.25)})
    lines = run.metrics_path.read_text().splitlines()
    assert lines == [
        '{"step": 1, "acc/mean": 0.5, "sampling/kept": 16, "bad": null, "worse": null, "none": null}',
        '{"step": 2, "acc/mean": 0.25}',
    ]
    assert run.read_metrics() == [json.loads(line) for line in lines]


@given(st.dictionaries(st.text(), st.floats() | st.integers(-(2**53), 2**53) | st.none(), max_size=4))
def test_every_line_is_strict_json(tmp_path_factory, metrics):
    run = RunDirectory(tmp_path_factory.mktemp("m"))
    metrics.pop("step", None)
    run.append_metrics(3, metrics)

    def refuse(constant):
        raise AssertionError(constant)

    line = json.loads(run.metrics_path.read_text(), parse_constant=refuse)
    known = {k: v for k, v in metrics.items() if v is not None and math.isfinite(v)}
    assert {k: v for k, v in line.items() if v is not None} == {"step": 3, **known}


@given(cut=st.integers(1, 40))
def test_a_torn_last_line_is_left_out(tmp_path_factory, cut):
    run = RunDirectory(tmp_path_factory.mktemp("m"))
    run.append_metrics(1, {"a": 1.0})
    whole = run.metrics_path.read_bytes()
    run.append_metrics(2, {"näme": 2.0, "b": 3.0})
    content = run.metrics_path.read_bytes()
    torn = content[: max(len(whole), len(content) - 1 - cut)]
    run.metrics_path.write_bytes(torn)
    assert [row["step"] for row in run.read_metrics()] == [1]
    run.truncate_metrics(1)
    assert run.metrics_path.read_bytes() == whole


def test_a_broken_line_in_the_middle_is_named(run):
    run.metrics_path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a line of metrics"):
        run.read_metrics()


def test_no_metrics_yet(run):
    assert run.read_metrics() == []
    run.truncate_metrics(0)
    assert not run.metrics_path.exists()
    run.metrics_path.touch()
    assert run.read_metrics() == []


def test_truncating_forgets_later_steps_only(run):
    for step in (1, 2, 3, 12):
        run.append_metrics(step, {"acc/mean": step / 100})
        run.write_rollouts(step, [GroupRow(group(), "all_wrong")])
    run.truncate_metrics(2)
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    assert sorted(p.name for p in run.rollouts_path.iterdir()) == ["step-000001.parquet", "step-000002.parquet"]
    run.append_metrics(3, {"acc/mean": 1.0})
    assert [row["acc/mean"] for row in run.read_metrics()] == [0.01, 0.02, 1.0]


def test_rollouts_have_a_row_for_each_sample(run):
    kept = GroupRow(trained(group()), "kept")
    dropped = GroupRow(group(draw=8, answer=None), "surplus")
    run.write_rollouts(123, [kept, dropped])
    table = pq.read_table(run.path / "rollouts" / "step-000123.parquet")
    assert str(table.schema.field("token_ids").type.value_type) == "int32"
    assert str(table.schema.field("logps").type.value_type) == "float"
    first, second, third, _ = table.to_pylist()
    expected = {
        "step": 123,
        "draw": 7,
        "sample": 0,
        "prompt_id": "p1",
        "data_source": "sums",
        "prompt": "2+2=",
        "response": "4",
        "token_ids": [5, 6, 2],
        "mask": [True, True, True],
        "logps": [-0.5, -0.25, -0.125],
        "finish_reason": "stop",
        "version_first": 3,
        "version_last": 4,
        "answer": "4",
        "truth": "4",
        "score": 1.0,
        "correct": True,
        "status": "correct",
        "reward": 1.0,
        "length_penalty": 0.0,
        "advantage": float(np.float32(0.7)),
        "fate": "kept",
        "train_logps": [-0.5, -0.75, -1],
        "entropies": [1, 2, 0],
        "clipped": [0, 2, 1],
        "values": None,
        "advantages": None,
        **dict.fromkeys(("messages", "turns", "policy_turns", "tools", "tool_calls", "tool_errors")),
        **dict.fromkeys(("env_wait_s", "env_reward", "forks", "prompt_ids", "forked")),
    }
    assert list(first.items()) == list(expected.items())
    assert (second["sample"], second["response"], second["answer"]) == (1, "? oops", None)
    assert (second["reward"], second["length_penalty"]) == (-1.5, -0.5)
    assert second["advantage"] == float(np.float32(-0.7))
    assert second["train_logps"] is second["entropies"] is second["clipped"] is None
    assert (third["draw"], third["truth"], third["score"], third["fate"]) == (8, None, 1.0, "surplus")
    assert third["reward"] is third["length_penalty"] is third["advantage"] is None
    assert not [name for name in os.listdir(run.rollouts_path) if name.endswith(".tmp")]


def test_rollouts_have_what_a_critic_gave_to_each_token(run):
    """The second token comes from an environment; the second sample was cut off, and not trained on."""
    done = trained(group())
    credited = done.samples[0].replace(
        values=[0.25, 9.0, 0.5], advantages=[0.5, 0.0, -0.25], mask=np.array([True, False, True])
    )
    kept = replace(done, samples=(credited, done.samples[1]))
    run.write_rollouts(1, [GroupRow(kept, "kept"), GroupRow(group(draw=8), "surplus")])
    first, second, *dropped = pq.read_table(run.rollout(1)).to_pylist()
    assert first["values"] == pytest.approx([0.25, math.nan, 0.5], nan_ok=True)
    assert first["advantages"] == pytest.approx([0.5, math.nan, -0.25], nan_ok=True)
    assert first["advantage"] == pytest.approx(0.25 / 2)  # of the tokens that the policy wrote
    for row in (second, *dropped):
        assert row["values"] is row["advantages"] is None


def test_columns_that_the_package_does_not_know_are_written_with_their_types(run):
    judged = group()
    first = judged.samples[0].replace(surprise=np.float32([0.5, 0.25, 0]), experts=np.int16([[1, 2], [3, 4], [5, 6]]))
    run.write_rollouts(1, [GroupRow(replace(judged, samples=(first, judged.samples[1])), "kept")])
    table = pq.read_table(run.rollout(1))
    assert table.column_names == [*SCHEMA.names, "experts", "surprise"]
    assert table["surprise"].to_pylist() == [[0.5, 0.25, 0], None]
    assert table["experts"].to_pylist() == [[[1, 2], [3, 4], [5, 6]], None]
    assert table.schema.field("experts").type.value_type.value_type == "int16"


def test_an_episode_is_a_row_with_its_messages_turns_and_tools(run):
    call = {"id": "c", "type": "function", "function": {"name": "add\ud800", "arguments": {"a": 1}}}
    said = (
        {"role": "assistant", "content": "", "tool_calls": [call, call | {"function": {"name": "größer"}}]},
        {"role": "tool", "name": "add", "tool_call_id": "c", "content": '2\n"¾\ud800'},
        {"role": "assistant", "content": "2"},
    )
    turns = (Turn(0, 1, "policy", 0.5, 0.25), Turn(1, 2, "environment", 1.5), Turn(2, 3, "policy"))
    counts = {"tool_calls": 2.0, "tool_errors": 1.0, "turns": 2.0, "env_wait_s": 1.5, "forks": 0.0, "env_reward": 0.25}
    judged = group()
    first = judged.samples[0].replace(messages=said, turns=turns, scalars=counts)
    run.write_rollouts(1, [GroupRow(replace(judged, samples=(first, judged.samples[1])), "kept")])
    row, single = pq.read_table(run.rollout(1)).to_pylist()
    assert json.loads(row["messages"]) == json.loads(json.dumps(said).replace("\\ud800", "?"))
    assert row["turns"] == [
        {"start": 0, "end": 1, "author": "policy", "seconds": 0.5, "reward": 0.25},
        {"start": 1, "end": 2, "author": "environment", "seconds": 1.5, "reward": 0.0},
        {"start": 2, "end": 3, "author": "policy", "seconds": 0.0, "reward": 0.0},
    ]
    others = {"policy_turns": 2, "tools": ["add?", "größer"], "prompt_ids": [1, 2], "forked": [], **counts}
    del others["turns"]
    assert {name: row[name] for name in others} == others
    assert all(single[name] is None for name in ("messages", "turns", *others))


def test_an_episode_that_forked_has_all_its_trajectories(run, monkeypatch):
    """The second one. A group of single turns is in another row group, which has none of the forks' columns."""
    monkeypatch.setattr("dapo_rl.runs.rollouts.ROW_GROUP_TOKENS", 5)

    def fork(ids, name, **columns):
        said = {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": "{}"}}]}
        mask = [place < 1 for place in range(len(ids))]
        turns = (Turn(0, 1, "policy", 0.5, 0.25), Turn(1, len(ids), "environment"))
        begun = Trajectory(ids, [-0.5] * len(ids), f"{name}\ud800", "stop", 2, mask=mask, index=1, **columns)
        return begun.replace(turns=turns, messages=(said,), prompt_ids=[8, *ids])

    judged = trained(group())
    experts = np.int16([[1, 2], [3, 4]])
    forks = (fork([3, 4], "a", advantages=[0.5, 9], values=[0.75, 9], experts=experts), fork([7, 8, 9], "b"))
    last = judged.samples[1].replace(scalars=judged.samples[1].scalars | {"forks": 2.0, "turns": 3.0})
    kept = replace(judged, samples=(judged.samples[0], last), forks=forks)
    run.write_rollouts(1, [GroupRow(kept, "kept"), GroupRow(group(draw=8), "surplus")])
    assert pq.ParquetFile(run.rollout(1)).num_row_groups == 2
    single, row, *others = pq.read_table(run.rollout(1)).to_pylist()
    assert [each["forked"] for each in (single, *others)] == [None] * 3
    assert (row["response"], row["token_ids"], row["prompt_ids"]) == ("? oops", [9], [1, 2])
    assert (row["forks"], row["policy_turns"], row["tools"], row["turns"]) == (2, 3, ["a", "b"], [])
    first, second = row["forked"]
    assert json.loads(first.pop("messages"))[0]["tool_calls"][0]["function"]["name"] == "a"
    assert [first.pop(name) for name in ("values", "advantages")] == [
        pytest.approx([each, math.nan], nan_ok=True) for each in (0.75, 0.5)
    ]
    assert first == {
        **{"response": "a?", "token_ids": [3, 4], "mask": [True, False], "logps": [-0.5, -0.5]},
        **{"version_first": 2, "version_last": 2, "advantage": 0.5, "prompt_ids": [8, 3, 4]},
        **dict.fromkeys(("train_logps", "entropies", "clipped")),
        "turns": [
            {"start": 0, "end": 1, "author": "policy", "seconds": 0.5, "reward": 0.25},
            {"start": 1, "end": 2, "author": "environment", "seconds": 0.0, "reward": 0.0},
        ],
        "experts": [[1, 2], [3, 4]],
    }
    assert (second["token_ids"], second["advantage"], second["experts"]) == ([7, 8, 9], None, None)


def test_what_the_update_saw_must_match_the_samples(run):
    short = replace(trained(group()), samples=trained(group()).samples[:1])  # with two verdicts
    with pytest.raises(ValueError, match="zip"):
        run.write_rollouts(1, [GroupRow(short, "kept")])
    assert list(run.rollouts_path.iterdir()) == []


def test_a_step_without_groups_has_an_empty_table(run):
    run.write_rollouts(1, [])
    assert pq.read_table(run.rollout(1)).num_rows == 0


def test_the_summary_is_valid_json(run):
    run.write_summary({"steps": 2, "accuracy_after": math.nan, "tokens": {"total": 5}, "paths": {"model": run.path}})
    text = run.summary_path.read_text()
    assert json.loads(text) == {
        "steps": 2,
        "accuracy_after": None,
        "tokens": {"total": 5},
        "paths": {"model": str(run.path)},
    }
    assert text.startswith('{\n  "steps": 2,\n')


def test_atomic_write_replaces_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "f"
    atomic_write(file, "grün")
    assert file.read_bytes() == "grün".encode()

    def crash(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(file, b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("f", "grün".encode())]


def test_what_reward_functions_say_of_a_sample_is_in_columns_of_its_own(run):
    judged = group()
    both = (RewardPart("math", 1.0), RewardPart("length", 0.25, 0.5))
    first = replace(judged.verdicts[0], parts=both, extra={"n": 3, "x": 1, "word": "a\ud800", "ok": True, "any": 1})
    second = replace(judged.verdicts[1], parts=both[:1], extra={"n": None, "x": 0.5, "any": "b", "none": None})
    run.write_rollouts(1, [GroupRow(replace(judged, verdicts=(first, second)), "all_wrong")], None)
    run.write_rollouts(2, [GroupRow(group(), "all_wrong")], None)
    one, two = (pq.read_table(path) for path in sorted((run.path / "rollouts").glob("*.parquet")))
    added = {name: one[name].to_pylist() for name in one.column_names if name not in two.column_names}
    assert added == {
        "reward/length": [0.25, None],
        "reward/math": [1.0, 1.0],
        "extra/any": ["1", "b"],
        "extra/n": [3, None],
        "extra/none": [None, None],
        "extra/ok": [True, None],
        "extra/word": ["a?", None],
        "extra/x": [1.0, 0.5],
    }
    assert two.schema == SCHEMA


def test_a_step_that_was_saved_before_it_was_logged_is_logged_once(run):
    """The checkpoint of step 3 was written before its line, and the process ended after it."""
    for step in (1, 2, 3, 4):
        run.append_metrics(step, {"acc/mean": step / 10})
        run.write_rollouts(step, [GroupRow(group(), "all_wrong")])
    run.truncate_metrics(3, logged=2)
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    assert run.rollout_steps() == [1, 2, 3]
    run.append_metrics(3, {"acc/mean": 0.3})
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]


def test_what_a_checkpoint_counts_on_is_on_disk(run, monkeypatch):
    """The log and the entry of it in the directory."""
    synced = []
    fsync = os.fsync

    def record(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    run.append_metrics(1, {"acc/mean": 0.5})
    monkeypatch.setattr(os, "fsync", record)
    run.metrics_length()
    assert synced == [str(run.metrics_path), str(run.path)]


def refuse_writes(monkeypatch, after=0):
    """Writes of files fail with a full disk, after this many bytes."""
    write = os.write

    def fail(descriptor, data):
        if after:
            write(descriptor, bytes(data)[:after])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)


@pytest.mark.parametrize("after", [0, 5])
def test_a_line_that_cannot_be_written_is_written_with_the_next(run, monkeypatch, after):
    run.append_metrics(1, {"acc/mean": 0.1})
    with monkeypatch.context() as patch:
        refuse_writes(patch, after)
        for step in (2, 3):
            with pytest.raises(
                UnsavedError, match=r"metrics\.jsonl: cannot be written: No space left on device$"
            ) as said:
                run.append_metrics(step, {"acc/mean": step / 10})
            assert said.value.remedy == "free some space"
        assert [row["step"] for row in run.read_metrics()] == [1]
        with pytest.raises(UnsavedError):  # a checkpoint must not count lines that are not there
            run.metrics_length()
    assert run.metrics_length()["lines"] == 3
    run.append_metrics(4, {"acc/mean": 0.4})
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4]


def test_lines_of_forgotten_steps_are_not_written_later(run, monkeypatch):
    run.append_metrics(1, {"acc/mean": 0.1})
    with monkeypatch.context() as patch:
        refuse_writes(patch)
        for step in (2, 3):
            with pytest.raises(UnsavedError):
                run.append_metrics(step, {"acc/mean": step / 10})
    run.truncate_metrics(2)
    run.append_metrics(3, {"acc/mean": 0.9})
    assert [(row["step"], row["acc/mean"]) for row in run.read_metrics()] == [(1, 0.1), (2, 0.2), (3, 0.9)]


def test_a_group_that_was_not_judged_has_no_verdict(run):
    run.write_rollouts(1, [GroupRow(replace(group(), verdicts=()), "unfinished")])
    rows = pq.read_table(run.rollout(1)).to_pylist()
    assert [row["response"] for row in rows] == ["4", "? oops"]
    assert {row[name] for row in rows for name in ("answer", "score", "correct", "status")} == {None}
    assert {row["fate"] for row in rows} == {"unfinished"}
