"""The right name for one that is misspelt."""

from pathlib import Path

import pytest

from dapo_rl.base.suggest import did_you_mean, nearest, nearest_path


@pytest.mark.parametrize(
    ("name", "cutoff", "meant"),
    [
        ("maht", 0.6, "math"),
        ("math", 0.6, "math"),
        ("exac", 0.6, "exact"),
        ("zzz", 0.6, None),
        ("", 0.6, None),
        ("mzzh", 0.6, None),  # half of its letters are those of `math`
        ("mzzh", 0.5, "math"),
    ],
)
def test_the_nearest_name(name, cutoff, meant):
    assert nearest(name, {"math": 1, "exact": 2, "gym": 3}, cutoff) == meant


@pytest.mark.parametrize(
    ("close", "otherwise", "hint"),
    [
        ("math", "", "; did you mean math?"),
        ("math", "there is none", "; did you mean math?"),
        (Path("a/b.yaml"), "", "; did you mean a/b.yaml?"),
        (None, "there is none", "; there is none"),
        (None, "", ""),
    ],
)
def test_the_end_of_a_message(close, otherwise, hint):
    assert did_you_mean(close, otherwise) == hint


def test_the_nearest_path_is_one_that_could_be_meant(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "modle.txt").touch()
    assert nearest_path(tmp_path / "modle", Path.is_dir) == tmp_path / "model"
    assert nearest_path(tmp_path / "modle", Path.is_file) == tmp_path / "modle.txt"
    assert nearest_path(tmp_path / "other", Path.is_dir) is None
    monkeypatch.chdir(tmp_path)
    assert str(nearest_path(Path("modle"), Path.is_dir)) == "model"


@pytest.mark.parametrize("parent", ["missing", "file", "nul\0l"])
def test_a_directory_that_cannot_be_listed_has_no_nearest_path(tmp_path, parent):
    (tmp_path / "file").touch()
    assert nearest_path(tmp_path / parent / "model", Path.is_dir) is None
