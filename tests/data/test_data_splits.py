"""A dictionary of splits: which are used, and that it is said."""

import pytest

from dapo_rl.data.sources import choose_splits
from dapo_rl.errors import UserError

TRAIN, TEST, OTHER = [{"prompt": "1"}], [{"prompt": "2"}], [{"prompt": "3"}]


def test_one_data_set_stays_as_it_is():
    assert choose_splits(TRAIN, TEST, True) == (TRAIN, TEST, None)
    assert choose_splits("gsm8k.jsonl", None, True) == ("gsm8k.jsonl", None, None)
    assert choose_splits(None, None, True) == (None, None, None)


def test_the_held_out_split_is_taken_if_the_run_evaluates():
    splits = {"train": TRAIN, "test": TEST, "extra": OTHER}
    assert choose_splits(splits, None, True) == (
        TRAIN,
        TEST,
        "train_dataset: training on the split train, evaluating on test; not used: extra",
    )
    assert choose_splits(splits, None, False)[1:] == (
        None,
        "train_dataset: training on the split train; not used: test, extra",
    )
    assert choose_splits({"train": TRAIN, "test": OTHER, "validation": TEST}, None, True)[1] == TEST
    assert choose_splits(splits, OTHER, True)[1] == OTHER


def test_what_cannot_be_chosen_is_refused():
    with pytest.raises(UserError, match="train_dataset: a dictionary of prompt, answer; give one data set"):
        choose_splits({"prompt": ["1"], "answer": ["2"]}, None, False)
    assert choose_splits(TRAIN, {"math": TEST}, True)[1] == TEST
    with pytest.raises(UserError, match="eval_dataset: math, code; a run evaluates on one data set"):
        choose_splits(TRAIN, {"math": TEST, "code": OTHER}, True)
