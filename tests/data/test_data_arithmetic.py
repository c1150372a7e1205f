import hashlib
import re
from collections import Counter

import pytest

from dapo_rl.config import SourceSettings
from dapo_rl.data import load_rows
from dapo_rl.data.arithmetic import Problem, draw_problems, problems
from dapo_rl.errors import UserError

D = range(1, 10)


def terms_of(row):
    return len(re.findall(r"\d", row["prompt"]))


def test_a_problem_reads_and_adds_up_from_left_to_right():
    problem = Problem((3, 8, 4, 7), ("+", "-", "+"))
    assert problem.text == "3+8-4+7=?\n"
    assert problem.answer == "14"
    assert Problem((1, 9), ("-",)).answer == "-8"


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_answer_is_what_python_says(split):
    rows = problems(300, seed=5, split=split)
    for row in rows:
        assert re.fullmatch(r"[1-9]([+-][1-9]){1,4}=\?\n", row["prompt"])
        assert row["answer"] == str(eval(row["prompt"].removesuffix("=?\n")))
        assert row["data_source"] == "arithmetic"
    assert len({row["prompt"] for row in rows}) == 300


def test_the_hash_of_the_text_splits_train_from_heldout_whatever_the_seed():
    for seed in (0, 1, 2):
        for split, heldout in (("train", False), ("heldout", True)):
            for row in problems(200, seed=seed, split=split):
                assert (hashlib.sha256(row["prompt"].encode()).digest()[0] < 32) is heldout


def test_both_splits_together_are_all_problems_once_and_an_eighth_is_held_out():
    everything = {f"{a}{op}{b}{oq}{c}=?\n" for a in D for op in "+-" for b in D for oq in "+-" for c in D}
    heldout = {t for t in everything if hashlib.sha256(t.encode()).digest()[0] < 32}
    assert 0.10 < len(heldout) / len(everything) < 0.15
    train = problems(len(everything) - len(heldout), split="train", min_terms=3, max_terms=3)
    held = problems(len(heldout), split="heldout", min_terms=3, max_terms=3)
    assert {row["prompt"] for row in held} == heldout
    assert {row["prompt"] for row in train} == everything - heldout
    with pytest.raises(UserError, match=rf"there are {len(heldout)} heldout problems of 3 to 3 terms"):
        problems(len(heldout) + 1, split="heldout", min_terms=3, max_terms=3)


def test_the_number_of_terms_is_uniform_until_the_short_ones_are_used_up():
    counts = Counter(terms_of(row) for row in problems(400, seed=1))
    assert set(counts) == {2, 3, 4, 5}
    assert all(70 <= count <= 130 for count in counts.values()), counts
    many = Counter(terms_of(row) for row in problems(4096))
    assert many[2] < 162 < 1100 < min(many[3], many[4], many[5])


def test_a_longer_list_begins_with_the_shorter_and_seeds_differ():
    long = draw_problems(600, seed=3)
    assert long[:50] == draw_problems(50, seed=3)
    assert long[:50] != draw_problems(50, seed=4)


def test_the_problems_of_a_seed_never_change():
    assert [row["prompt"] for row in problems(5)] == [
        "4-8-2=?\n",
        "9-3-4=?\n",
        "5+9+1=?\n",
        "4+6-6-7=?\n",
        "8-1+8-3-8=?\n",
    ]


def test_the_source_takes_its_parameters():
    rows = load_rows("arithmetic")
    assert (len(rows.good), rows.bad) == (4096, [])
    assert rows.good[17].where == "arithmetic:row 17"
    short = SourceSettings(source="arithmetic", size=20, seed=9, split="heldout", min_terms=6)
    columns = [row.columns for row in load_rows(short).good]
    assert columns == problems(20, seed=9, split="heldout", min_terms=6, max_terms=6)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"szie": 3}, r"data\.eval\.szie: arithmetic has no such parameter; did you mean size\?"),
        ({"size": "many"}, r"data\.eval\.size: expected a whole number of at least 1, got 'many'"),
        ({"size": True}, r"data\.eval\.size: expected a whole number"),
        ({"size": 0}, r"data\.eval\.size: expected a whole number of at least 1, got 0"),
        ({"split": "test"}, r"data\.eval: arithmetic: split 'test' is not one of train, heldout"),
        ({"min_terms": 1}, r"min_terms 1, max_terms 5: expected 2 to 12"),
        ({"min_terms": 4, "max_terms": 3}, r"min_terms 4, max_terms 3"),
        ({"max_terms": 13}, r"max_terms 13: expected 2 to 12"),
        ({"max_terms": 2}, r"data\.eval: arithmetic: there are 147 train problems of 2 to 2 terms, not 4096"),
    ],
)
def test_wrong_parameters_are_one_line(parameters, message):
    with pytest.raises(UserError, match=message) as caught:
        load_rows(SourceSettings(source="arithmetic", **parameters), key="data.eval")
    assert "\n" not in str(caught.value)
