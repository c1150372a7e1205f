"""A checkpoint that cannot be written: one line for a disk, a traceback for a bug of ours."""

import pickle

import pytest
import torch
from checkpoint_parts import policy_of
from safetensors import SafetensorError
from support import small_model

from dapo_rl.errors import UnsavedError, UserError
from dapo_rl.train.checkpoint import Checkpoints
from dapo_rl.train.trainer_state import Progress


def save(path, **progress):
    Checkpoints(path / "c", 1).save(1, [policy_of(small_model()), Progress(**progress)])


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
        SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
        Exception("File too large (os error 27)"),  # tokenizers
    ],
    ids=repr,
)
def test_a_disk_that_takes_no_more_is_one_line(tmp_path, monkeypatch, error):
    def fail(*_arguments):
        raise error

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(UserError, match=r"step-1: the checkpoint cannot be written: "):
        save(tmp_path)


@pytest.mark.parametrize("wrap", [UserError, RuntimeError])
def test_what_a_part_makes_of_an_error_of_the_disk_is_still_one(tmp_path, monkeypatch, wrap):
    """The adapter's files are written with a UserError of their own."""

    def fail(*_arguments):
        raise wrap("the adapter cannot be saved") from OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(torch, "save", fail)
    kind, said = (UserError, "step-1: .*: Disk quota exceeded$") if wrap is UserError else (wrap, "cannot be saved")
    with pytest.raises(kind, match=said):
        save(tmp_path)


def test_an_error_of_the_disk_keeps_its_reason_on_the_way_from_a_rank():
    error = pickle.loads(pickle.dumps(UnsavedError.of("a:", "No space left on device", "free some space")))
    assert (str(error), error.reason, error.remedy) == (
        "a: cannot be written: No space left on device",
        "No space left on device",
        "free some space",
    )


def test_a_state_that_cannot_be_written_is_a_bug_of_ours(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path, metrics={"tensor": torch.ones(3)})
    assert list((tmp_path / "c").iterdir()) == []
