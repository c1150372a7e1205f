"""What is encoded comes back: trajectories with all their columns, and verdicts."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dapo_rl.codec import TURN, Shipment, from_arrow, from_bytes, to_arrow, to_bytes, verdict_of, verdict_row
from dapo_rl.config import RewardSettings
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.rollout.trajectory_file import read_trajectories, write_trajectories
from dapo_rl.runs.rollouts import GroupRow, write_table
from dapo_rl.types import Group, Prompt, RewardPart, Trajectory, Turn, Verdict

TEXTS = st.text(st.characters(exclude_categories=[]), max_size=3)
CALLS = st.fixed_dictionaries({"name": TEXTS, "arguments": TEXTS}).map(
    lambda function: {"id": "call_0", "type": "function", "function": function}
)
MESSAGES = st.one_of(
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": st.none() | TEXTS}, optional={"tool_calls": st.lists(CALLS)}
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "name": TEXTS, "tool_call_id": TEXTS, "content": TEXTS}),
)


@st.composite
def trajectories(draw):
    count = draw(st.integers(0, 6))
    column = lambda values: np.array(draw(st.lists(values, min_size=count, max_size=count)))  # noqa: E731
    more = {}
    if draw(st.booleans()):
        more["teacher_logps"] = column(st.floats(-9, 0, width=32)).astype(np.float32)
    if draw(st.booleans()):
        more["routing"] = np.arange(count * 6, dtype=np.int16).reshape(count, 3, 2)
    if draw(st.booleans()):
        more["kept_ids"] = np.arange(-1, count * 3 - 1, dtype=np.int32).reshape(count, 3)
    return Trajectory(
        column(st.integers(0, 99)).astype(np.int32),
        column(st.integers(-9, 0)),
        draw(TEXTS),
        draw(st.sampled_from([None, "stop", "length", "turns"])),
        column(st.integers(0, 2)).astype(np.int32),
        column(st.booleans()),
        index=draw(st.integers(0, 9)),
        turns=draw(st.sampled_from([(), (Turn(0, count, "policy", 0.5), Turn(count, count, "environment", 2, -0.5))])),
        prompt_ids=draw(st.lists(st.integers(0, 9), max_size=2)),
        scalars=draw(st.dictionaries(st.sampled_from(["reward", "group"]), st.floats(-1, 1))),
        messages=tuple(draw(st.lists(MESSAGES, max_size=3))),
        **more,
    )


@given(st.lists(trajectories(), max_size=4))
@example([Trajectory([1], text="\ud83d\ude00", messages=({"role": "user", "content": "\ud83d\ude00"},))])
def test_trajectories_come_back_from_bytes_a_batch_and_a_pickle(given_):
    assert from_bytes(to_bytes(given_)) == given_
    assert from_arrow(to_arrow(given_)) == given_
    assert pickle.loads(pickle.dumps(Shipment(given_))) == given_


@given(st.lists(trajectories(), min_size=1, max_size=4))
def test_trajectories_come_back_from_a_parquet_file(given_):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_batches([to_arrow(given_)]), sink)
    assert from_arrow(pq.read_table(pa.BufferReader(sink.getvalue()))) == given_


@given(st.lists(trajectories()))
def test_samples_come_back_from_an_actor_with_memory_of_their_own(samples):
    received = pickle.loads(pickle.dumps(Shipment(samples)))
    assert received == samples
    assert all(array.flags.owndata for sample in received for array in sample.columns.values())


def test_trajectories_without_messages_and_rewards_of_turns_are_those_of_older_versions():
    given_ = [Trajectory([1, 2], turns=(Turn(0, 1, "policy", 0.5), Turn(1, 2, "environment"))), Trajectory([3])]
    table = pa.Table.from_batches([to_arrow(given_)])
    assert table.column("messages").null_count == 2
    old = pa.list_(pa.struct([(name, TURN.field(name).type) for name in ("start", "end", "author", "seconds")]))
    rows = table["turns"].to_pylist()
    for turn in rows[0]:
        del turn["reward"]
    table = table.set_column(table.column_names.index("turns"), "turns", pa.array(rows, old))
    assert from_arrow(table.drop_columns(["messages"])) == given_


@pytest.mark.parametrize("text", ["{", '"a"', "[1]", "{}", "[" * 100_000])
def test_messages_that_are_not_a_conversation_are_refused(text):
    table = pa.Table.from_batches([to_arrow([Trajectory([1])])])
    with pytest.raises(ValueError, match=r"messages that are not a list of objects|nested too deeply|Expecting"):
        from_arrow(table.set_column(table.column_names.index("messages"), "messages", pa.array([text.encode()])))


def test_columns_that_disagree_are_refused():
    flat, nested = Trajectory([1], extra=np.ones((1, 2))), Trajectory([1], extra=np.ones((1, 3)))
    with pytest.raises(ValueError, match="extra: trajectories disagree on its type or shape"):
        to_arrow([flat, nested])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.drop_columns(["text"]), "no column text"),
        (lambda t: t.drop_columns(["tokens/token_ids"]), "without index, text, turns or tokens"),
        (lambda t: t.set_column(0, "index", pa.array([None, 1], pa.int32())), "without index, text, turns or tokens"),
        (lambda t: t.set_column(5, "tokens/token_ids", pa.array([[1], [None]])), "not a column of numbers"),
        (lambda t: t.set_column(5, "tokens/token_ids", pa.array(["a", "b"])), "not a column of lists"),
        (lambda t: t.set_column(5, "tokens/token_ids", pa.array([[1.5], [2.0]])), "numbers that are not whole"),
        (lambda t: t.set_column(5, "tokens/token_ids", pa.array([[1, 2, 3], [4]])), "has the shape"),
    ],
)
def test_a_table_that_is_not_one_of_trajectories_is_refused(change, said):
    table = pa.Table.from_batches([to_arrow([Trajectory([1, 2]), Trajectory([3])])])
    with pytest.raises(ValueError, match=said):
        from_arrow(change(table))


def test_verdicts_come_back():
    plain = Verdict(1.0, True, "correct", "2")
    full = Verdict(
        -0.9,
        False,
        "wrong",
        parts=(RewardPart("math", -1.0), RewardPart("½", 0.1 + 0.2, 0.25)),
        extra={"text": "a", "number": 0.1, "flag": True, "nothing": None},
        metrics={"m": (0.1 + 0.2, 3)},
    )
    assert [verdict_of(verdict_row(verdict)) for verdict in (plain, full)] == [plain, full]
    assert set(verdict_row(plain)) == {"score", "correct", "status", "answer", "detail"}


class Columns:
    """A verifier that reads columns which the package does not know."""

    def __call__(self, prompt, samples):
        return [Verdict(float(s["teacher_logps"].sum() + s["routing"].sum()), True, "correct") for s in samples]


def test_a_column_that_nobody_knows_reaches_a_worker_a_checkpoint_and_the_rollout_log(tmp_path):
    """One line where it is made, one where it is used."""
    tokens = {"teacher_logps": np.float32([-0.5, -0.25]), "routing": np.arange(12, dtype=np.int16).reshape(2, 3, 2)}
    sample = Trajectory([1, 2], -1.0, "a", "stop", **tokens)
    prompt = Prompt("p", "?", [5])
    with VerifierPool(Columns(), RewardSettings(workers=1)) as pool:
        (verdict,) = pool(prompt, [sample])
    assert verdict.score == 66 - 0.75
    write_trajectories(tmp_path, [sample])
    assert read_trajectories(tmp_path, 9, 9) == [sample]
    write_table(tmp_path / "step.parquet", 1, [GroupRow(Group(0, prompt, (sample,), (verdict,)), "kept")])
    (row,) = pq.read_table(tmp_path / "step.parquet").to_pylist()
    assert row["teacher_logps"] == [-0.5, -0.25]
    assert row["routing"] == tokens["routing"].tolist()


def test_kept_ids_reach_a_checkpoint_and_not_the_rollout_log(tmp_path):
    """With a limit of 256 ids they would be a hundred times as long as all the rest."""
    sample = Trajectory([1, 2], -1.0, "a", "stop", kept_ids=[[1, 5, -1], [2, -1, -1]])
    write_trajectories(tmp_path, [sample, Trajectory.nothing(1)])
    assert read_trajectories(tmp_path, 9, 9) == [sample, Trajectory.nothing(1)]
    group = Group(0, Prompt("p", "?", [5]), (sample,), (Verdict(1.0, True, "correct"),))
    write_table(tmp_path / "step.parquet", 1, [GroupRow(group, "kept")])
    assert "kept_ids" not in pq.read_schema(tmp_path / "step.parquet").names
