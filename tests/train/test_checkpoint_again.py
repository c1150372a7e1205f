"""A step that is saved again shares the files of parts that have not changed, and never endangers the first."""

import os
import shutil

import pytest
import torch
from checkpoint_parts import policy_of
from support import small_model
from test_checkpoint import Killed, Note, calls, flip_a_bit, names

from dapo_rl.errors import UserError
from dapo_rl.train.checkpoint import Checkpoints

LARGE = ("model/model.safetensors", "optimizer.pt")


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=1)


def save(checkpoints, step, policy, **state):
    checkpoints.start(step, [policy, Note(state)], unchanged=[policy])
    checkpoints.wait()
    return checkpoints._checkpoint(step)


def restored(checkpoints):
    """The weights and the note of the newest checkpoint."""
    model, note = small_model(seed=9), Note()
    checkpoints.restore([policy_of(model), note])
    return model.state_dict(), note.state


def inodes(path):
    return {name: (path / name).stat().st_ino for name in LARGE}


def test_large_files_are_linked_and_small_ones_are_new(checkpoints, monkeypatch):
    policy = policy_of(model := small_model(seed=1))
    before = inodes(save(checkpoints, 0, policy, which="first").path)
    with monkeypatch.context() as patch:
        patch.setattr(policy, "save", None)  # it need not copy anything
        path = save(checkpoints, 0, policy, which="second").path
    assert inodes(path) == before
    assert names(checkpoints) == ["step-0"]
    weights, note = restored(checkpoints)
    assert note == {"which": "second"}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    save(checkpoints, 1, policy, which="third")
    assert inodes(checkpoints.latest().path) != before, "another step has other weights"


def test_a_restored_checkpoint_is_linked_and_one_that_is_merely_there_is_not(tmp_path):
    directory, policy = tmp_path / "c", policy_of(small_model(seed=1))
    before = inodes(save(Checkpoints(directory, 1), 4, policy, which="first").path)
    resumed, note = Checkpoints(directory, 1), Note()
    resumed.restore([policy, note])
    assert inodes(save(resumed, 4, policy, which="second").path) == before
    other = policy_of(small_model(seed=2))
    path = save(Checkpoints(directory, 1), 4, other, which="third").path
    assert inodes(path) != before
    weights, note = restored(Checkpoints(directory, 1))
    assert note == {"which": "third"}
    assert torch.equal(weights["lm_head.weight"], other.model.state_dict()["lm_head.weight"])


def test_a_file_system_without_links_gets_copies(checkpoints, monkeypatch):
    policy = policy_of(small_model(seed=1))
    before = inodes(save(checkpoints, 0, policy, which="first").path)

    def refuse(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = save(checkpoints, 0, policy, which="second").path
    assert not set(inodes(path).values()) & set(before.values())
    assert restored(checkpoints)[1] == {"which": "second"}


def test_damage_to_a_linked_file_is_found(checkpoints):
    policy = policy_of(small_model(seed=1))
    flip_a_bit(save(checkpoints, 0, policy, which="first").path / "optimizer.pt")
    save(checkpoints, 0, policy, which="second")
    with pytest.raises(UserError, match=r"every checkpoint is damaged: .*the checksum of optimizer.pt is wrong"):
        restored(checkpoints)


def test_at_every_moment_of_the_second_save_there_is_a_whole_checkpoint(tmp_path, monkeypatch):
    policy, seen = policy_of(small_model(seed=1)), set()
    for moment in range(1, 200):
        directory = tmp_path / f"c{moment}"
        checkpoints = Checkpoints(directory, 1)
        save(checkpoints, 1, policy, which="old")

        def die(count, moment=moment):
            if count == moment:
                raise Killed

        with monkeypatch.context() as patch:
            calls(patch, die)
            try:
                save(checkpoints, 1, policy, which="new")
                done = True
            except Killed:
                done = False
        damaged, note = [], Note()
        resumed = Checkpoints(directory, 1)
        assert resumed.restore([policy, note], damaged.append) is not None
        assert damaged == []
        seen.add(note.state["which"])
        save(resumed, 1, policy, which="newest")
        assert (names(resumed), restored(resumed)[1]) == (["step-1"], {"which": "newest"})
        shutil.rmtree(directory)
        if done:
            break
    assert done
    assert moment > 10
    assert seen == {"old", "new"}
