import contextlib
import json
import random
import re
import shutil
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from checkpoint_parts import policy_of
from support import small_model
from test_policy import samples_for
from transformers import AutoModelForCausalLM

from dapo_rl.base import files
from dapo_rl.base.saved import read_state, write_state
from dapo_rl.errors import StopRequested, UserError
from dapo_rl.models.save import WEIGHTS
from dapo_rl.train.checkpoint import MANIFEST, Checkpoints, _own_checksum
from dapo_rl.train.ledger import Ledger
from dapo_rl.train.random_state import RandomState, seed_everything, unless_stopped
from dapo_rl.train.trainer_state import Progress


@dataclass
class Note:
    """A part with any content."""

    state: dict = field(default_factory=dict)

    def save(self, directory):
        write_state(directory / "note.json", self.state)

    def load(self, directory):
        self.state = read_state(directory / "note.json")


def save(checkpoints, step, model=None, **state):
    return checkpoints.save(step, [policy_of(model or small_model()), Note(state)])


def load(checkpoints, model=None):
    """The newest sound checkpoint, and what the note in it says."""
    note = Note()
    return checkpoints.restore([policy_of(model or small_model()), note]), note.state


def names(checkpoints):
    return sorted(path.name for path in checkpoints._directory.iterdir())


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def test_what_was_saved_comes_back(checkpoints):
    """Weights, and moments that make the next update the same; every part gets its own."""
    model, other = small_model(seed=1), small_model(seed=2)
    samples = samples_for(model)
    policy = policy_of(model)
    policy.update(samples, lr=1e-2)
    checkpoints.save(3, [policy, Note({"list": [1.5, None]})])
    resumed, note = policy_of(other), Note()
    assert checkpoints.restore([resumed, note]).step == 3
    assert note.state == {"list": [1.5, None]}
    for update in (0, 1):
        for (name, a), (_, b) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
            assert torch.equal(a, b), (update, name)
        for each in (policy, resumed):
            each.update(samples, lr=1e-2)


def test_progress_comes_back(checkpoints):
    progress = Progress(
        4, 12.5, [(0, 0.25), (4, float("nan"))], Ledger({"total": 7}), {"acc/mean": float("nan"), "n": 3}
    )
    checkpoints.save(4, [progress])
    resumed = Progress()
    checkpoints.restore([resumed])
    assert repr(resumed.evaluations) == "[(0, 0.25), (4, nan)]"
    assert (resumed.step, resumed.wall_seconds, resumed.ledger.state()) == (4, 12.5, {"total": 7})
    assert repr(resumed.metrics) == "{'acc/mean': nan, 'n': 3}", "a summary has the same numbers, to the letter"


@pytest.mark.parametrize("tied", [True, False])
def test_float32_weights_keep_every_bit_under_a_config_that_says_bfloat16(checkpoints, tied):
    """Numbers that bfloat16 does not have, subnormal ones and negative zero among them."""
    model = small_model(tie_word_embeddings=tied)
    model.config.dtype = torch.bfloat16
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-7)
            parameter.view(-1)[:3] = torch.tensor([1e-42, -0.0, 1 / 3])
    path = save(checkpoints, 1, model).path
    assert not (path / WEIGHTS).exists(), "the weights are there once"
    again = small_model(seed=5, tie_word_embeddings=tied)
    load(checkpoints, again)
    loaded = AutoModelForCausalLM.from_pretrained(path / "model")
    for other in (again, loaded):
        assert (other.lm_head.weight.data_ptr() == other.model.embed_tokens.weight.data_ptr()) == tied
        for (name, a), (_, b) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
            assert b.dtype == torch.float32, name
            assert torch.equal(a.view(torch.int32), b.view(torch.int32)), name


def test_a_model_that_saves_other_weights_than_it_has_is_stored_once_more(checkpoints, monkeypatch):
    model = small_model(seed=1)
    save_pretrained = model.save_pretrained

    def round_and_save(path, state_dict):
        save_pretrained(path, state_dict={name: tensor.bfloat16().float() for name, tensor in state_dict.items()})

    monkeypatch.setattr(model, "save_pretrained", round_and_save)
    assert (save(checkpoints, 1, model).path / WEIGHTS).exists()
    other = small_model(seed=2)
    load(checkpoints, other)
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("keep", [1, 4])
def test_until_there_are_as_many_as_stay_none_goes(tmp_path, keep):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep)
    for step in range(1, 7):
        checkpoints.save(step, [Note()])
        assert names(checkpoints) == [f"step-{n}" for n in range(max(1, step - keep + 1), step + 1)]


def test_the_last_ones_stay(checkpoints):
    for step in (1, 2, 5, 10):
        save(checkpoints, step)
    assert names(checkpoints) == ["step-10", "step-5"]
    assert checkpoints.latest().step == 10


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "file", "said"),
    [
        (flip_a_bit, "model/model.safetensors", "the checksum of model/model.safetensors is wrong"),
        (flip_a_bit, "optimizer.pt", "the checksum of optimizer.pt is wrong"),
        (flip_a_bit, "note.json", "the checksum of note.json is wrong"),
        (flip_a_bit, MANIFEST, "manifest.json is damaged"),
        (cut, "optimizer.pt", r"optimizer.pt has \d+ bytes instead of \d+"),
        (cut, MANIFEST, "manifest.json is damaged"),
        (lambda path: path.unlink(), "note.json", "note.json is missing"),
        (lambda path: path.unlink(), "model/config.json", "model/config.json is missing"),
        (lambda path: path.unlink(), MANIFEST, "manifest.json is missing"),
        (lambda path: path.write_text("[]"), MANIFEST, "manifest.json is damaged"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_it_is_used(checkpoints, harm, file, said):
    save(checkpoints, 1)
    last = save(checkpoints, 2)
    harm(last.path / file)
    damaged = []
    assert checkpoints.restore([], damaged.append).step == 1
    (line,) = damaged
    assert line.startswith(f"{last.path}: ")
    assert re.search(said, line)
    assert checkpoints.latest().step == 1, "what a diverged run calls its last good one"


def test_a_changed_manifest_does_not_vouch_for_changed_files(checkpoints):
    path = save(checkpoints, 1).path
    (path / "note.json").write_text("{}")
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["files"]["note.json"]
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        checkpoints.restore([])


def test_when_all_are_damaged_they_are_all_named_and_stay(checkpoints):
    for step in (1, 2):
        flip_a_bit(save(checkpoints, step).path / "optimizer.pt")
    with pytest.raises(
        UserError, match=r"^every checkpoint is damaged: .*step-2: .*; .*step-1: .*optimizer.pt"
    ) as error:
        checkpoints.restore([])
    assert "\n" not in str(error.value)
    assert names(checkpoints) == ["step-1", "step-2"]


def test_no_checkpoint_is_no_error(checkpoints):
    assert checkpoints.restore([]) is None
    assert checkpoints.latest() is None


def test_damaged_ones_do_not_count_among_those_that_stay(tmp_path):
    checkpoints, keeper = (Checkpoints(tmp_path / "c", keep) for keep in (2, 9))
    for step in (1, 2, 3, 4):
        save(keeper, step)
    cut(tmp_path / "c" / "step-3" / "optimizer.pt")
    flip_a_bit(tmp_path / "c" / "step-4" / "optimizer.pt")
    assert checkpoints.restore([]).step == 2
    save(checkpoints, 6)
    assert names(checkpoints) == ["step-2", "step-6"]


def test_what_is_not_kept_any_more_goes_when_a_checkpoint_is_restored(tmp_path):
    for step in (1, 2, 3):
        save(Checkpoints(tmp_path / "c", 9), step)
    flip_a_bit(tmp_path / "c" / "step-3" / "optimizer.pt")
    checkpoints = Checkpoints(tmp_path / "c", 1)
    checkpoints.remove_old()
    assert names(checkpoints) == ["step-1", "step-2", "step-3"]  # which of them are intact is not known yet
    assert checkpoints.restore([]).step == 2
    checkpoints.remove_old()
    assert names(checkpoints) == ["step-2", "step-3"]


def test_a_step_that_is_there_already_is_replaced(checkpoints):
    save(checkpoints, 1, small_model(seed=1), which="first")
    save(checkpoints, 1, small_model(seed=2), which="second")
    assert names(checkpoints) == ["step-1"]
    assert load(checkpoints)[1] == {"which": "second"}


class Killed(BaseException):
    """As SIGKILL: nothing that handles errors may see it."""


def calls(monkeypatch, act):
    """Every change of names on the disk, counted; `act` decides what the n-th does."""
    count = [0]

    def counted(owner, name):
        real = getattr(owner, name)

        def call(*arguments, **named):
            count[0] += 1
            act(count[0])
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    counted(files.shutil, "rmtree")
    counted(files.Path, "rename")
    counted(files.os, "fsync")
    return count


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("again", [False, True])
def test_at_every_moment_there_is_a_whole_checkpoint(tmp_path, monkeypatch, keep, again):
    """A kill before any change on the disk leaves the one before or the new one, and the next save cleans up."""
    moments = 0
    for moment in range(1, 200):
        directory = tmp_path / f"c{moment}"
        checkpoints = Checkpoints(directory, keep)
        first, second = (1, 1) if again else (1, 2)
        save(checkpoints, first, which="old")

        def die(count, moment=moment):
            if count == moment:
                raise Killed

        with monkeypatch.context() as patch:
            calls(patch, die)
            try:
                save(checkpoints, second, which="new")
                done = True
            except Killed:
                done = False
        damaged, note = [], Note()
        assert Checkpoints(directory, keep).restore([note], damaged.append) is not None
        assert damaged == [], "what is half removed has no checkpoint's name"
        assert note.state["which"] == "new" or not done
        save(Checkpoints(directory, keep), 3, which="newest")
        assert not list(directory.glob(".*"))
        assert len(names(checkpoints)) <= keep
        moments += 1
        shutil.rmtree(directory)
        if done:
            break
    assert moments > 10


def test_a_disk_that_is_full_at_any_moment_leaves_the_one_before(tmp_path, monkeypatch):
    for moment in range(1, 200):
        directory = tmp_path / f"c{moment}"
        checkpoints = Checkpoints(directory, 1)
        save(checkpoints, 1, which="old")

        def fail(count, moment=moment):
            if count == moment:
                raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            count = calls(patch, fail)
            with contextlib.suppress(UserError, OSError):
                save(checkpoints, 1, which="new")
        assert checkpoints.restore([]) is not None
        if count[0] < moment:
            return
    pytest.fail("the save never came to its end")


def test_another_model_is_one_line(checkpoints):
    save(checkpoints, 1)
    for changes, said in (
        ({"hidden_size": 64}, r"has the shape \[\d+, 32\] instead of \[\d+, 64\]"),
        ({"num_hidden_layers": 3}, r"it has no model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"it has model\.layers\.1\."),
    ):
        with pytest.raises(UserError, match=f"step-1: belongs to a different model: .*{said}") as error:
            load(checkpoints, small_model(**changes))
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="is float32 instead of bfloat16"):
        load(checkpoints, small_model().bfloat16())


def test_a_checkpoint_of_another_layout_is_one_line(checkpoints):
    """Also where one of ours is before it: the run would lose steps without being asked."""
    save(checkpoints, 1)
    path = save(checkpoints, 2).path
    for written, version in ((None, "an older"), (1, "an older"), (3, "a newer")):
        manifest = json.loads((path / MANIFEST).read_text())
        manifest.pop("format", None)
        manifest |= {"format": written} if written else {}
        manifest["sha256"] = _own_checksum(manifest)
        (path / MANIFEST).write_text(json.dumps(manifest))
        for look in (lambda: checkpoints.restore([]), checkpoints.settings):
            with pytest.raises(UserError) as error:
                look()
            assert str(error.value) == (
                f"{path}: was written by {version} version of dapo-rl, in another layout; resume it with that version, "
                "or start a new run"
            )


def test_an_optimizer_of_something_else_is_one_line(checkpoints):
    path = save(checkpoints, 1).path
    for state, said in (
        ({"optimizer": {"param_groups": []}}, "loaded state dict has a different number of parameter groups"),
        ({"optimizer": policy_of(small_model()).optimizer.state_dict(), "lowered_budget": 0}, "lowered_budget is 0"),
    ):
        torch.save(state, path / "optimizer.pt")
        with pytest.raises(UserError) as error:
            policy_of(small_model()).load(path)
        assert str(error.value) == (
            f"{path}: its optimizer state cannot be loaded: {said}; "
            f"remove {path} to resume from the previous checkpoint"
        )
    (path / "optimizer.pt").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"step-1: cannot be read as a checkpoint: ") as error:
        policy_of(small_model()).load(path)
    assert "\n" not in str(error.value)


def test_random_numbers_go_on(tmp_path):
    def draw():
        return random.random(), random.gauss(), float(np.random.normal()), float(torch.rand(()))

    seed_everything(5)
    draw()
    RandomState().save(tmp_path)
    expected = [draw() for _ in range(3)]
    seed_everything(6)
    RandomState().load(tmp_path)
    assert [draw() for _ in range(3)] == expected
    seed_everything(5)
    first = draw()
    seed_everything(5)
    assert draw() == first


def test_what_is_stopped_and_repeated_draws_the_same_random_numbers():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_everything(3)
    expected = draw()
    seed_everything(3)
    with contextlib.suppress(StopRequested), unless_stopped():
        draw()
        raise StopRequested
    with unless_stopped():
        assert draw() == expected
    assert draw() != expected
