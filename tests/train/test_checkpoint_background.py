"""A checkpoint is written while the run continues: what it holds, and what happens if it cannot be written."""

import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoint_parts import policy_of
from support import small_model
from test_policy import samples_for

from dapo_rl.base.hashing import CancelledError, HashingFile
from dapo_rl.errors import UnsavedError, UserError
from dapo_rl.models import save
from dapo_rl.models.save import HostCopy
from dapo_rl.train import checkpoint as checkpoint_module
from dapo_rl.train.checkpoint import MANIFEST, Checkpoints


class Gate:
    """A part whose file is written when the gate is opened."""

    def __init__(self):
        self.open, self.writing = threading.Event(), 0

    def save(self, directory):
        def write(is_cancelled):
            self.writing += 1
            while not self.open.wait(0.001):
                if is_cancelled():
                    raise CancelledError
            (directory / "gate").write_text("open")
            return {}

        return write

    def load(self, directory):
        pass


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def steps(checkpoints):
    return [checkpoint.step for checkpoint in checkpoints.all()]


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_holds_the_state_of_the_moment_it_was_started(tmp_path, tied):
    """The weights and moments change while it is written; its files are those of a save that nothing disturbs."""
    model, gate = small_model(seed=1, tie_word_embeddings=tied), Gate()
    policy, samples = policy_of(model), samples_for(model)
    background, waiting = (Checkpoints(tmp_path / name, keep=3) for name in ("background", "waiting"))
    for step in (1, 2, 3):  # the second and third reuse the memory of the first
        policy.update(samples, lr=1e-2)
        waiting.save(step, [policy])
        gate.open.clear()
        background.start(step, [gate, policy])
        policy.update(samples, lr=1e-2)
        gate.open.set()
        background.wait()
        for name in ("model/model.safetensors", "optimizer.pt"):
            one, other = (c.all()[-1].path / name for c in (background, waiting))
            assert one.read_bytes() == other.read_bytes(), (step, name)
        assert background.all()[-1].damage() is None


def test_hashes_are_those_of_the_files(checkpoints):
    model = small_model()
    policy = policy_of(model)
    policy.update(samples_for(model), lr=1e-2)
    path = checkpoints.save(1, [policy]).path
    files = json.loads((path / MANIFEST).read_text())["files"]
    assert "optimizer.pt" in files
    for name, entry in files.items():
        assert entry["sha256"] == hashlib.sha256((path / name).read_bytes()).hexdigest(), name


def test_large_files_are_not_read_again(checkpoints, monkeypatch):
    read = []
    checksum = checkpoint_module.file_sha256
    monkeypatch.setattr(checkpoint_module, "file_sha256", lambda path: read.append(path.name) or checksum(path))
    checkpoints.save(1, [policy_of(small_model())])
    assert "config.json" in read
    assert "optimizer.pt" not in read


def test_a_checkpoint_has_its_name_when_it_is_complete(checkpoints):
    gate = Gate()
    checkpoints.start(1, [gate])
    assert steps(checkpoints) == []
    checkpoints.check()
    gate.open.set()
    checkpoints.wait()
    assert steps(checkpoints) == [1]
    assert checkpoints.all()[0].damage() is None


def test_one_is_written_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "LONG_WAIT", 0.05)
    notes = []
    checkpoints = Checkpoints(tmp_path / "c", 2, notes.append)
    first, second = Gate(), Gate()
    second.open.set()
    checkpoints.start(1, [first])
    threading.Timer(0.2, first.open.set).start()
    checkpoints.start(2, [second])
    assert steps(checkpoints)[:1] == [1], "the first was complete before the second began"
    checkpoints.wait()
    assert steps(checkpoints) == [1, 2]
    assert notes == ["waited 0 s for the previous checkpoint; a larger checkpoint.every avoids this"]


class Failing:
    def __init__(self, error):
        self.error = error

    def save(self, directory):
        def write(is_cancelled):
            raise self.error

        return write

    def load(self, directory):
        pass


FULL = OSError(errno.ENOSPC, "No space left on device")
SAID = r"step-2: the checkpoint cannot be written: No space left on device"


def failed(checkpoints, error=FULL):
    checkpoints.save(1, [])
    checkpoints.start(2, [Failing(error)])
    while checkpoints._writing.is_alive():
        time.sleep(0.001)


@pytest.mark.parametrize("notice", [Checkpoints.check, Checkpoints.wait, lambda c: c.start(3, [])])
def test_a_full_disk_is_noticed_at_the_next_occasion_and_told_once(tmp_path, notice):
    notes = []
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, notes.append)
    failed(checkpoints)
    assert notes == []
    notice(checkpoints)
    (note,) = notes
    assert re.search(f"{SAID}; the run continues, and the next checkpoint is tried; free some space$", note)
    checkpoints.wait()  # for the third, if that is what noticed it
    assert steps(checkpoints) in ([1], [1, 3])
    assert checkpoints.restore([]).step in (1, 3)
    checkpoints.save(4, [])
    assert steps(checkpoints)[-1] == 4
    assert notes[1:] == ["checkpoints: can be written again"]
    assert checkpoints.failure is None


def test_another_cause_is_told_again(tmp_path):
    notes = []
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, notes.append)
    for step, error in enumerate([FULL, FULL, OSError(errno.EIO, "Input/output error"), FULL], start=1):
        checkpoints.start(step, [Failing(error)])
    checkpoints.wait()
    assert [note.split(": ")[2].split(";")[0] for note in notes] == [FULL.strerror, "Input/output error", FULL.strerror]
    with pytest.raises(UnsavedError, match="step-5: "):
        checkpoints.save(5, [Failing(FULL)])


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(tmp_path, monkeypatch):
    notes = []
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, notes.append)
    checkpoints.save(1, [])

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint_module, "remove_directory", refuse)
    checkpoints.save(2, [])
    assert notes == [f"an old checkpoint cannot be removed: Permission denied: {tmp_path}/checkpoints/step-1"]
    assert steps(checkpoints) == [1, 2]


def test_a_bug_of_ours_in_the_thread_is_raised_as_it_is(checkpoints):
    failed(checkpoints, ZeroDivisionError("mine"))
    with pytest.raises(ZeroDivisionError, match="mine"):
        checkpoints.check()


def test_the_end_of_a_run_waits(checkpoints):
    gate = Gate()
    with checkpoints:
        checkpoints.start(1, [gate])
        threading.Timer(0.1, gate.open.set).start()
    assert steps(checkpoints) == [1]
    with checkpoints:
        checkpoints.start(2, [Failing(FULL)])
    assert re.search(SAID, str(checkpoints.failure))


def end_with(error, checkpoints, step, part, after=lambda: None):
    with checkpoints:
        checkpoints.start(step, [part])
        after()
        raise error


def test_an_error_of_the_run_still_saves_what_was_started(checkpoints):
    gate = Gate()
    with pytest.raises(KeyError):
        end_with(KeyError, checkpoints, 1, gate, threading.Timer(0.1, gate.open.set).start)
    assert steps(checkpoints) == [1]
    with pytest.raises(KeyError):
        end_with(KeyError, checkpoints, 2, Failing(FULL))
    assert steps(checkpoints) == [1]


def test_ctrl_c_abandons_it(checkpoints):
    checkpoints.save(1, [])
    with pytest.raises(KeyboardInterrupt):
        end_with(KeyboardInterrupt, checkpoints, 2, Gate())
    assert [path.name for path in checkpoints._directory.iterdir()] == ["step-1"]


def test_ctrl_c_in_the_middle_of_a_file_is_no_failure_to_write_it(tmp_path, monkeypatch):
    """The end of torch.save then complains that the file was cut off."""
    write, notes, in_the_middle = HashingFile.write, [], threading.Event()

    def wait_in_the_middle(file, data):
        while file._file.tell() > 10_000 and not file._is_cancelled():
            in_the_middle.set()
            time.sleep(0.001)
        return write(file, data)

    monkeypatch.setattr(HashingFile, "write", wait_in_the_middle)
    model = small_model()
    policy = policy_of(model)
    policy.update(samples_for(model), lr=1e-2)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2, note=notes.append)
    with pytest.raises(KeyboardInterrupt):
        end_with(KeyboardInterrupt, checkpoints, 2, policy, lambda: in_the_middle.wait(60))
    assert (notes, checkpoints.failure) == ([], None)
    assert list(checkpoints._directory.iterdir()) == []


@pytest.mark.parametrize("error", [CancelledError(), FULL], ids=repr)
def test_a_file_that_is_cancelled_or_meets_a_full_disk_ends_at_once(checkpoints, monkeypatch, error):
    """Through torch.save, which writes from C++."""
    write = HashingFile.write

    def fail_later(file, data):
        if file._file.tell() > 10_000:
            raise error
        return write(file, data)

    monkeypatch.setattr(HashingFile, "write", fail_later)
    model = small_model()
    policy = policy_of(model)
    policy.update(samples_for(model), lr=1e-2)
    with pytest.raises((CancelledError, UserError)) as caught:
        checkpoints.save(2, [policy])
    assert "\n" not in str(caught.value)
    assert list(checkpoints._directory.iterdir()) == []


def test_copies_are_made_in_the_same_memory():
    copies = HostCopy()
    weight = torch.arange(6.0).view(2, 3)
    values = {"w": weight, "tied": weight, "view": weight.t(), "steps": [torch.tensor(1.0), 3], "empty": torch.empty(0)}
    first = copies.take(values)
    addresses = {name: first[name].data_ptr() for name in ("w", "tied", "view")}
    assert addresses["w"] == addresses["tied"] != weight.data_ptr()
    weight += 1
    assert first["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    second = copies.take(values)
    assert {name: second[name].data_ptr() for name in addresses} == addresses
    assert second["w"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert second["view"].tolist() == [[1, 4], [2, 5], [3, 6]]
    assert second["steps"][1] == 3


def test_a_temporary_tensor_is_not_taken_for_another():
    """`take_more` frees each tensor before the next, which may then have its address."""
    copies = HostCopy()
    base = torch.ones(1000)
    kept = copies.take({"base": base})
    more = copies.take_more((str(i), base if i == 2 else base + i) for i in range(5))
    assert {name: float(tensor[0]) for name, tensor in more.items()} == {"0": 1, "1": 2, "2": 1, "3": 4, "4": 5}
    assert more["2"].data_ptr() == kept["base"].data_ptr()


@pytest.mark.parametrize("save_dtype", [None, torch.bfloat16])
def test_without_memory_for_copies_a_checkpoint_is_written_at_once(tmp_path, monkeypatch, save_dtype):
    """The files are the same, and complete when `save` returns."""
    model = small_model(seed=1)
    policy, samples = policy_of(model, save_dtype=save_dtype), samples_for(model)
    policy.update(samples, lr=1e-2)
    usual = Checkpoints(tmp_path / "usual", keep=1).save(1, [policy]).path
    assert policy.save_note is None
    # The copies of weights and moments, and the run's own weights, moments and gradients.
    parameters = sum(p.numel() for p in model.parameters())
    needed = int((12 + 16) * parameters / 0.75)
    monkeypatch.setattr(save, "host_memory", lambda: needed + 2)
    assert policy_of(model).save_note is None
    monkeypatch.setattr(save, "host_memory", lambda: needed - 2)
    monkeypatch.setattr(HostCopy, "take", lambda *_: pytest.fail("copied"))
    scarce = policy_of(model, save_dtype=save_dtype)
    scarce.load(usual)
    assert scarce.save_note == (
        "each checkpoint stops the run until it is written: a copy in host memory would take "
        f"{12 * parameters / 2**20:.1f} MiB of {needed / 2**20:.1f} MiB"
    )
    direct = tmp_path / "direct"
    direct.mkdir()
    rest = scarce.save(direct)
    names = {path.relative_to(usual).as_posix() for path in usual.rglob("*") if path.is_file()} - {MANIFEST}
    for name in names:
        if name.endswith(".pt"):  # pickles of equal values may differ
            torch.testing.assert_close(torch.load(direct / name), torch.load(usual / name), atol=0, rtol=0)
        else:
            assert (direct / name).read_bytes() == (usual / name).read_bytes(), name
    assert ("weights.pt" in names) is (save_dtype is not None)
    digests = rest(lambda: True)  # nothing is left to cancel
    assert digests["optimizer.pt"] == hashlib.sha256((direct / "optimizer.pt").read_bytes()).hexdigest()


def test_a_checkpoint_is_in_the_run_directory_for_good(tmp_path, monkeypatch):
    """After its name, the entry of checkpoints/ in the run directory is on disk too."""
    synced, renamed = [], []
    fsync, rename = os.fsync, Path.rename

    def record(descriptor):
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), len(renamed)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "rename", lambda *paths: renamed.append(paths) or rename(*paths))
    Checkpoints(tmp_path / "run" / "checkpoints", keep=1).save(1, [])
    assert (str(tmp_path / "run" / "checkpoints"), 1) in synced
    assert synced[-1] == (str(tmp_path / "run"), 1)


def test_what_is_left_of_an_old_checkpoint_does_not_stand_in_the_way(tmp_path, monkeypatch):
    """NFS keeps a file that somebody has open, and with it the directory, which has another name by then."""
    notes = []
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, notes.append)
    checkpoints.save(1, [])
    whole = shutil.rmtree

    def kept(path, **how):
        if path.name == ".step-1.gone":
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        whole(path, **how)

    monkeypatch.setattr(shutil, "rmtree", kept)
    for step in (2, 3):
        checkpoints.save(step, [])
    assert steps(checkpoints) == [3]
    said = f"an old checkpoint cannot be removed: Directory not empty: {tmp_path}/checkpoints/.step-1.gone"
    assert notes == [said]
    Checkpoints(tmp_path / "checkpoints", 9).save(1, [])
    resumed = Checkpoints(tmp_path / "checkpoints", 1, notes.append)
    resumed.restore([])
    resumed.remove_old()
    assert notes == [said, said]
