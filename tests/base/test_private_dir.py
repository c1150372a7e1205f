"""Temporary directories that only their user can enter, and that do not stay behind."""

import os
import stat
import time

import pytest

from dapo_rl.base.temporary_directory import YOUNG_S, PrivateDirectory

OLD = time.time() - 10 * YOUNG_S


@pytest.fixture
def make(tmp_path):
    made = []

    def make():
        made.append(PrivateDirectory("own-", tmp_path))
        return made[-1]

    yield make
    for directory in made:
        directory.close()


def age(path):
    os.utime(path, (OLD, OLD))


def test_no_other_user_can_enter_it(make):
    directory = make()
    shared = directory.path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.close()
    assert not directory.path.exists()


def test_the_next_one_removes_what_was_left_and_nothing_else(make, tmp_path):
    for name in ("own-left", "own-young", "other"):
        (tmp_path / name / "inner").mkdir(parents=True)
    (tmp_path / "own-file").write_text("not a directory")
    (tmp_path / "own-link").symlink_to(tmp_path / "other")
    in_use, kept = make(), make()
    kept.close(keep=True)
    for path in tmp_path.iterdir():
        if path.name != "own-young":
            age(path)
    new = make()
    names = {"own-young", "other", "own-file", "own-link", in_use.path.name, new.path.name}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "other" / "inner").exists()
