"""Records over arrays: what they are made of, and when they are equal."""

import numpy as np
import pytest
from support import train_sample

from dapo_rl.types import Trajectory


def test_sequences_and_single_values_become_arrays_of_one_length():
    sample = Trajectory([5, 6, 7], (-0.5, -0.25, -0.125), "text", "stop", versions=3)
    assert [a.dtype for a in (sample.token_ids, sample.logps, sample.versions, sample.mask)] == [
        np.int32, np.float32, np.int32, np.bool_,
    ]  # fmt: skip
    assert sample.versions.tolist() == [3, 3, 3]
    assert sample.mask.tolist() == [True] * 3
    trained = train_sample([1], sample.token_ids, sample.logps, 0.5, 0, returns=[1, 2, 3])
    assert trained["advantages"].tolist() == [0.5] * 3
    assert trained["returns"].dtype == np.float32
    assert trained.token_ids is sample.token_ids, "an array of the right type is not copied"


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"logps": [-1.0]}, r"Trajectory.logps has the shape \[1\], not \[2\]"),
        ({"versions": [1, 2, 3]}, r"Trajectory.versions has the shape \[3\], not \[2\]"),
        ({"mask": [[True, True]]}, r"Trajectory.mask has the shape \[1, 2\], not \[2\]"),
        ({"kept_ids": [1, 2]}, r"Trajectory.kept_ids has the shape \[2\], not \[2, K\]"),
        ({"kept_ids": [[1, 2]]}, r"Trajectory.kept_ids has the shape \[1, 2\], not \[2, K\]"),
        ({"token_ids": 5}, r"Trajectory.token_ids has the shape \[\], not \[None\]"),
        ({"token_ids": [5.5, 6]}, r"Trajectory.token_ids has numbers that are not whole"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays, said):
    with pytest.raises(ValueError, match=said):
        Trajectory(**{"token_ids": [5, 6], "logps": [0, 0], "text": "", "finish_reason": "stop"} | arrays)


def test_records_are_equal_where_all_their_arrays_are():
    def sample(**changes):
        return Trajectory(**{"token_ids": [5, 6], "logps": [0, -1], "text": "t", "finish_reason": "stop"} | changes)

    assert sample() == sample()
    for change in ({"token_ids": [5, 7]}, {"logps": [0, -2]}, {"text": "u"}, {"versions": 1}, {"mask": [True, False]}):
        assert sample(**change) != sample()
    assert sample(messages=({"role": "user", "content": "a"},)) != sample()
    assert sample() != "a sample"


def test_tokens_that_count_in_the_loss():
    masked = train_sample([1], [5, 6, 7], 0.0, 1.0, 0, mask=[True, False, True])
    assert masked.trained_tokens == 2
    assert train_sample([1], [5, 6, 7], 0.0, 1.0, 0, in_loss=False).trained_tokens == 0


@pytest.mark.parametrize("versions", [[], [4], [2, 2, 5], [5, 2]])
def test_tokens_of_the_environment_have_the_last_version_and_no_log_probability(versions):
    tokens = len(versions)
    kept = {"kept_ids": np.zeros((tokens, 3), np.int32)}
    turn = Trajectory(np.arange(tokens), [-0.5] * tokens, versions=versions, values=np.ones(tokens, np.float32), **kept)
    after = turn.then_observed([40, 41])
    last = versions[-1] if versions else 0
    assert after.token_ids.tolist() == [*range(tokens), 40, 41]
    assert after.versions.tolist() == [*versions, last, last]
    assert after.logps.tolist() == [-0.5] * tokens + [0, 0]
    assert after["values"].tolist() == [1] * tokens + [0, 0]
    assert after["kept_ids"].tolist() == [[0, 0, 0]] * tokens + [[-1, -1, -1]] * 2
    assert after.mask.tolist() == [True] * tokens + [False] * 2
    assert turn.versions.tolist() == versions, "the turn itself is as it was"


def test_messages_stay_with_a_trajectory():
    said = ({"role": "assistant", "content": "a"}, {"role": "user", "content": "b"})
    sample = Trajectory([5, 6], messages=said)
    assert sample.then([7], [0.0], 1).replace(index=3).until(1).messages == said
    assert sample.replace(messages=said[:1]).messages == said[:1]
    assert Trajectory.nothing(0).messages == ()


@pytest.mark.parametrize(("reason", "by_a_limit"), [(None, False), ("stop", False), ("length", True), ("turns", True)])
def test_the_limits_on_tokens_and_on_turns_truncate(reason, by_a_limit):
    assert Trajectory([5], finish_reason=reason).truncated == by_a_limit
