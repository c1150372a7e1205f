import errno
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from dapo_rl.base.files import atomic_write, directory_beside, remove_directory, remove_leftovers


def content(directory):
    return {p.relative_to(directory).as_posix(): p.read_text() for p in directory.rglob("*") if p.is_file()}


def test_a_directory_takes_the_place_of_another(tmp_path):
    for text in ("one", "two"):
        with directory_beside(tmp_path / "model") as draft:
            (draft / "deep").mkdir()
            (draft / "deep" / "file").write_text(text)
    assert content(tmp_path) == {"model/deep/file": "two"}


def test_an_error_leaves_the_one_before(tmp_path):
    with directory_beside(tmp_path / "model") as draft:
        (draft / "file").write_text("one")
    with pytest.raises(FileNotFoundError), directory_beside(tmp_path / "model") as draft:
        (draft / "missing" / "file").write_text("two")
    assert content(tmp_path) == {"model/file": "one"}


def test_a_draft_of_a_crash_is_not_mixed_in(tmp_path):
    (tmp_path / ".model.part").mkdir()
    (tmp_path / ".model.part" / "stale").touch()
    with directory_beside(tmp_path / "model") as draft:
        (draft / "file").write_text("one")
    assert content(tmp_path) == {"model/file": "one"}


def test_removal_and_leftovers(tmp_path):
    for name in ("kept", ".a.part", ".b.gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    for name in (".lock", ".c.tmp", "d.tmp"):
        (tmp_path / name).write_text("x")
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "d.tmp", "kept"]
    remove_directory(tmp_path / "kept")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "d.tmp"]
    remove_leftovers(tmp_path / "not there")


@pytest.fixture
def small_disk():
    """A file system of 3 MB."""
    disk = tempfile.mkdtemp()  # and not pytest's, which removes directories of old sessions with what is in them
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk], capture_output=True, check=False)
    if mounted.returncode:
        Path(disk).rmdir()
        pytest.skip("mounting is not allowed here")
    yield Path(disk)
    subprocess.run(["umount", "-l", disk], check=True)  # torch has not closed its file
    Path(disk).rmdir()


@pytest.mark.slow
def test_a_full_disk_is_said_to_be_full(small_disk):
    """torch speaks of an unexpected position."""
    with pytest.raises(OSError, match="No space left on device") as caught, directory_beside(small_disk / "a") as draft:
        torch.save(torch.zeros(1 << 20), draft / "weights.pt")
    assert caught.value.errno == errno.ENOSPC
    assert str(small_disk / "a") in str(caught.value)
    assert not list(small_disk.iterdir())


def test_an_error_on_a_disk_with_room_stays_what_it_is(tmp_path):
    with pytest.raises(ValueError, match="mine"), directory_beside(tmp_path / "a"):
        raise ValueError("mine")


@pytest.mark.parametrize("name", [".", "/", "..", "", "d"])
def test_a_directory_is_not_replaced_by_a_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        atomic_write(Path(name), "text")
    assert caught.value.filename == str(Path(name))
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
