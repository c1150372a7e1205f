"""The JSON files of a checkpoint with any content, and a manifest that vouches for them: the run goes on, or one line
says what is wrong."""

import copy
import io
import json
import random
import shutil
from contextlib import redirect_stdout
from types import MappingProxyType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from support import SMALL

from dapo_rl import Config, DAPOTrainer
from dapo_rl.base.saved import parse_state, refuse
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.data.stream import SavedStream
from dapo_rl.errors import DivergedError, UserError
from dapo_rl.rewards.trainer_state import SavedRewards
from dapo_rl.rollout.acceptance_rate import Acceptance
from dapo_rl.rollout.sampler_state import SavedSampler
from dapo_rl.rollout.trajectory_file import FILE as TRAJECTORIES
from dapo_rl.runs.directory import LogLength, RunDirectory, SavedLog
from dapo_rl.train.checkpoint import MANIFEST, _write_manifest
from dapo_rl.train.random_state import SavedRandom
from dapo_rl.train.trainer_state import SavedProgress

pytestmark = pytest.mark.slow

QUICK = [*SMALL[:4], "data.train.size=200", "data.eval=null", "eval.every=null", "train.epochs_per_step=1"]
WRONG = [
    None,
    True,
    -1,
    0,
    10**9,
    10**30,
    1.5,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0",
    "\ud800",
    [],
    [[]],
    {},
]


SCHEMAS = {
    "progress": SavedProgress,
    "stream": SavedStream,
    "rewards": SavedRewards,
    "random": SavedRandom,
    "log": SavedLog,
}


def config(*overrides):
    return Config.load(DEFAULT_RECIPE, [*QUICK, *overrides])


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that was stopped in the second step, and its state by file, with samples in flight."""
    path = tmp_path_factory.mktemp("state") / "run"
    trainer = DAPOTrainer(config=config("train.steps=2"), run_dir=path)
    judged_after, observe = set(), Acceptance.observe

    def observe_and_note(*arguments):
        judged_after.add(trainer._run.progress.step)
        observe(*arguments)

    trainer.stop_requested = lambda: 1 in judged_after and trainer._run.sampler._episodes.generating
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()):
        patch.setattr(Acceptance, "observe", observe_and_note)
        trainer.train()
    checkpoint = path / "checkpoints" / "step-1"
    state = {name: json.loads((checkpoint / f"{name}.json").read_text()) for name in [*SCHEMAS, "sampler"]}
    assert {file.name for file in checkpoint.glob("*.json")} == {f"{name}.json" for name in state} | {MANIFEST}
    assert state["sampler"]["flights"], "something to continue with"
    assert state["sampler"]["interrupted"]["sampled"]
    return path, state


def places(value, path=()):
    """Every value in the files, of long lists the ends."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for key in sorted({0, len(value) - 1}) if value else ():
            yield from places(value[key], (*path, key))


def changed(state, path, value, remove=False):
    """A copy with another value at a place. It shares what is not on the path."""
    key, *more = path
    state = copy.copy(state)
    if more:
        state[key] = changed(state[key], more, value, remove)
    elif remove:
        del state[key]
    else:
        state[key] = value
    return state


def resume(begun, copy_at, state, tokens=None):
    """Another step from a state; the line that says what is wrong, if something is."""
    shutil.rmtree(copy_at, ignore_errors=True)
    shutil.copytree(begun, copy_at)
    checkpoint = copy_at / "checkpoints" / "step-1"
    for name, value in state.items():
        (checkpoint / f"{name}.json").write_text(json.dumps(value))
    if isinstance(tokens, bytes):
        (checkpoint / TRAJECTORIES).write_bytes(tokens)
    elif tokens is not None:
        pq.write_table(tokens, checkpoint / TRAJECTORIES)
    (checkpoint / MANIFEST).unlink()
    _write_manifest(checkpoint, 1)
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            DAPOTrainer(config=config("train.steps=2"), run_dir=copy_at).train(resume=True)
    except (UserError, DivergedError) as error:
        line = str(error)
    else:
        return None
    assert "\n" not in line
    assert len(line) < 1000
    return line


def refusal(state, sound=MappingProxyType({})):
    """The line that says what is wrong; files are not read that are those of a sound state."""
    try:
        for name in state:
            if state[name] is sound.get(name):
                continue
            if name == "sampler":
                refuse(parse_state(SavedSampler, state[name]).misfits(group_size=4))
            else:
                parse_state(SCHEMAS[name], state[name])
    except ValueError as error:
        line = str(error)
    else:
        return None
    assert "\n" not in line
    assert len(line) < 400
    return line


def test_the_state_of_a_run_is_sound(begun):
    assert refusal(begun[1]) is None


def test_every_value_that_is_lost_or_wrong_is_sound_or_one_line(begun):
    """Of each value in turn; what is let pass is resumed from in the test below."""
    _, state = begun
    refused = 0
    for path in places(state):
        for value in WRONG:
            refused += refusal(changed(state, path, value), state) is not None
    assert refused > 1000


@fuzz(400)
@given(data=st.data())
def test_any_state_is_sound_or_one_line(begun, data):
    _, state = begun
    anything = st.recursive(
        st.sampled_from(WRONG) | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    )
    path = data.draw(st.sampled_from(list(places(state))))
    refusal(changed(state, path, data.draw(anything)), state)


def let_pass(state):
    """The changes that have the right shape and contradict nothing."""
    for path in places(state):
        for value in [*WRONG, "remove"][: None if len(path) > 1 else -1]:  # no file is missing
            change = changed(state, path, value, remove=value == "remove")
            if change != state and refusal(change, state) is None:
                yield path, value, change


def test_what_is_let_pass_is_gone_on_from_or_one_line(begun, tmp_path):
    path, state = begun
    passed = list(let_pass(state))
    tried = len(passed) if fuzz(1).max_examples > 1 else 3  # FUZZ=2 goes through all of them
    for where, value, change in random.Random(1).sample(passed, min(tried, len(passed))):
        try:
            resume(path, tmp_path / "run", change)
        except Exception as error:
            raise AssertionError(f"{where} = {value!r}") from error


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("sampler",), [], "input should be a valid dictionary"),
        (("progress",), [], "input should be a valid dictionary"),
        (("progress", "step"), "1", "step: input should be a valid integer"),
        (("progress", "step"), 7, "step is inconsistent"),
        (("progress", "evaluations"), [[0, 1.5]], "evaluations is inconsistent"),
        (("log", "bytes"), -1, "bytes: input should be greater than or equal to 0"),
        (("sampler", "acceptance", "overall"), [1, 0], "acceptance is inconsistent"),
        (("sampler", "flights", 0, "new"), [10**9], "flights is inconsistent"),
        (("sampler", "flights", 0, "draw"), 10**9, "next_draw is inconsistent"),
        (("sampler", "flights", 0, "prompt"), "nobody", "there is no prompt 'nobody'"),
        (("sampler", "interrupted", "sampled"), [0, 0], "interrupted.sampled is inconsistent"),
        (
            ("sampler", "interrupted", "finished_tokens"),
            1.5,
            "interrupted.finished_tokens: ",
        ),
        (("random", "torch"), "00", "torch: "),
        (("random", "numpy", 2), 10**9, "numpy.2: input should be less than or equal to 624"),
        (("stream", "front"), ["nobody"], "front: there is no prompt 'nobody'"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_it(begun, tmp_path, path, value, said):
    line = resume(begun[0], tmp_path / "run", changed(begun[1], path, value))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-1"
    assert line.startswith(f"{checkpoint / path[0]}.json: is not a valid state of this run: {said}")
    assert line.endswith(f"; remove {checkpoint} to resume from the previous checkpoint")


def test_what_is_not_json_is_one_line_that_names_the_file(tmp_path):
    """Of each part by itself: what it reads is what it validates."""
    trainer = DAPOTrainer(config=config("train.steps=2"), run_dir=tmp_path / "run")
    _, *parts = (*trainer._run.parts, LogLength(RunDirectory(tmp_path)))
    for part, name in zip(parts, ("stream", "sampler", "progress", "rewards", "random", "log"), strict=True):
        path = tmp_path / f"{name}.json"
        for content in (b"", b"nonsense", b"[" * 100_000, b"\xff"):
            path.write_bytes(content)
            with pytest.raises(UserError, match=f"{name}.json: is not a valid state of this run: ") as error:
                part.load(tmp_path)
            assert "\n" not in str(error.value)
        path.unlink()
        if name == "rewards":  # older versions do not write it
            part.load(tmp_path)
            continue
        with pytest.raises(
            UserError, match=f"{name}.json: is not a valid state of this run: it cannot be read: No such"
        ):
            part.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("tokens/token_ids", lambda row: [token + 10**6 for token in row], "it has tokens outside the vocabulary"),
        ("tokens/token_ids", lambda row: [-token - 1 for token in row], "it has tokens outside the vocabulary"),
        ("tokens/token_ids", lambda row: row[1:], "Trajectory.logps has the shape"),
        ("tokens/token_ids", lambda row: row * 1000, "Trajectory.logps has the shape"),
        ("tokens/logps", lambda row: [float("nan")] * len(row), "it has invalid log-probabilities or versions"),
        ("tokens/logps", lambda row: row[:-1], "Trajectory.logps has the shape"),
        ("tokens/logps", lambda row: None, "it has the wrong columns"),
        ("tokens/versions", lambda row: [version - 5 for version in row], "it has invalid log-probabilities"),
        ("tokens/mask", lambda row: [None] * len(row), "tokens/mask is not a column of numbers"),
        ("text", lambda row: None, "it has a trajectory without index, text, turns or tokens"),
        ("text", lambda row: b"\xff", "'utf-8' codec can't decode"),
    ],
)
def test_tokens_that_cannot_be_are_one_line(begun, tmp_path, name, change, said):
    path, state = begun
    table = pq.read_table(path / "checkpoints" / "step-1" / TRAJECTORIES)
    field = table.schema.field(name)
    changed_column = pa.array([change(row) for row in table.column(name).to_pylist()], field.type)
    table = table.set_column(table.schema.get_field_index(name), field, changed_column)
    line = resume(path, tmp_path / "run", state, table)
    assert f"is not a valid state of this run: {said}" in line


def test_a_file_of_tokens_that_is_none_is_one_line(begun, tmp_path):
    path, state = begun
    for content in (b"", b"nonsense", b"\xff" * 100):
        line = resume(path, tmp_path / "run", state, content)
        assert f"{TRAJECTORIES}: is not a valid state of this run: " in line
