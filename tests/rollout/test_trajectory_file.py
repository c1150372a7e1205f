"""Checkpoints that earlier versions wrote still open: `samples.safetensors`."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from dapo_rl.rollout.trajectory_file import EARLIER_FILE, read_trajectories, trajectory_file, write_trajectories
from dapo_rl.types import Trajectory

TEXTS = ["4", "\ud83d ½"]


def earlier():
    texts = [text.encode("utf-8", "surrogatepass") for text in TEXTS]
    return {
        "lengths": np.array([3, 1], np.int64),
        "token_ids": np.array([5, 6, 2, 9], np.int32),
        "logps": np.array([-0.5, -0.25, -1, 0], np.float32),
        "versions": np.array([3, 3, 4, 4], np.int32),
        "mask": np.array([True, False, True, True]),
        "text_lengths": np.array([len(text) for text in texts], np.int64),
        "texts": np.frombuffer(b"".join(texts), np.uint8),
    }


def test_the_samples_of_an_earlier_checkpoint_are_read(tmp_path):
    save_file(earlier(), tmp_path / EARLIER_FILE)
    assert trajectory_file(tmp_path).name == EARLIER_FILE
    assert read_trajectories(tmp_path, 3, 10) == [
        Trajectory([5, 6, 2], [-0.5, -0.25, -1], TEXTS[0], versions=[3, 3, 4], mask=[True, False, True]),
        Trajectory([9], [0.0], TEXTS[1], versions=4),
    ]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("token_ids", lambda a: a + 10**6, "it has tokens outside the vocabulary"),
        ("token_ids", lambda a: -a - 1, "it has tokens outside the vocabulary"),
        ("token_ids", lambda a: a[1:], "lengths are inconsistent"),
        ("token_ids", lambda a: a.astype(np.int64), "it has the wrong columns"),
        ("token_ids", lambda a: a[None], "its columns are not one-dimensional"),
        ("logps", lambda a: a * np.float32("nan"), "it has invalid log-probabilities or versions"),
        ("logps", lambda a: a[:-1], "lengths are inconsistent"),
        ("versions", lambda a: a - 5, "it has invalid log-probabilities or versions"),
        ("mask", lambda a: a[:0], "lengths are inconsistent"),
        ("lengths", lambda a: a * 0, "lengths are inconsistent"),
        ("lengths", lambda a: np.array([4, 0]), "lengths are inconsistent"),
        ("lengths", lambda a: a[::-1] * 2, "lengths are inconsistent"),
        ("text_lengths", lambda a: a - 1, "lengths are inconsistent"),
        ("text_lengths", lambda a: a + 2**62, "lengths are inconsistent"),
        ("texts", lambda a: np.append(a, np.uint8(65)), "lengths are inconsistent"),
    ],
)
def test_an_earlier_file_that_cannot_be_is_refused(tmp_path, name, change, said):
    arrays = earlier()
    arrays[name] = np.ascontiguousarray(change(arrays[name]))
    save_file(arrays, tmp_path / EARLIER_FILE)
    with pytest.raises(ValueError, match=said):
        read_trajectories(tmp_path, 3, 10)


def test_a_new_file_comes_before_an_earlier_one(tmp_path):
    save_file(earlier(), tmp_path / EARLIER_FILE)
    write_trajectories(tmp_path, [Trajectory([1], -1.0)])
    assert read_trajectories(tmp_path, 3, 10) == [Trajectory([1], -1.0)]
