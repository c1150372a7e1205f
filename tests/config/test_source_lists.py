"""`data.train` and `data.eval` as lists of sources: what is accepted, how it is recorded, and what is refused."""

import pytest

from dapo_rl.config import Config, SourceSettings, entries_of, labels_of, source_name, weights_of
from dapo_rl.errors import UserError


def train_of(text):
    return Config.load(None, [f"data.train={text}"]).data.train


def test_entries_are_names_or_mappings():
    found = train_of("[a.parquet, {source: arithmetic, size: 3, weight: 2}]")
    assert found[0] == "a.parquet"
    assert (found[1].source, found[1].weight, found[1].model_extra) == ("arithmetic", 2.0, {"size": 3})
    assert source_name(found) == "a.parquet, arithmetic"
    assert weights_of(found) == (1.0, 2.0)
    assert [entry.source for entry in entries_of(found)] == ["a.parquet", "arithmetic"]


def test_a_list_without_weights_has_none():
    assert weights_of(train_of("[a.parquet, b.parquet]")) is None
    assert weights_of(train_of("{source: a.parquet, weight: 2}")) is None  # a single source has every draw


def test_a_list_of_one_is_the_source():
    assert train_of("[a.parquet]") == "a.parquet"
    assert isinstance(train_of("[{source: a.parquet, weight: 2}]"), SourceSettings)


def test_a_source_is_a_list_of_one_entry_and_none_of_no_entry():
    given = train_of("{source: a.parquet, weight: 2}")
    assert entries_of("a.parquet") == (SourceSettings(source="a.parquet"),)
    assert entries_of(given) == (given,)
    assert (entries_of(None), source_name(None), source_name("a.parquet")) == ((), "none", "a.parquet")


def test_what_is_recorded_gives_the_same_settings():
    config = Config.load(None, ["data.train=[a.parquet, {source: arithmetic, size: 3, weight: 2}]"])
    assert config.resolved()["data"]["train"] == ["a.parquet", {"source": "arithmetic", "weight": 2.0, "size": 3}]
    assert Config.build(config.resolved()).data == config.data


def test_labels_are_different():
    same = train_of("[{source: org/x, split: train}, {source: org/x, split: test}, b.jsonl]")
    assert labels_of(same) == ["org/x", "org/x#2", "b.jsonl"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.train=[]", "data.train: the list is empty; an entry is a source or {source: FILE, weight: 2}"),
        ("data.train=[a.jsonl, 3]", "data.train: cannot read 3; an entry is a source or"),
        ("data.train=[a.jsonl, [b.jsonl]]", "data.train: cannot read ['b.jsonl']; an entry is"),
        ("data.train=[a.jsonl, {sorce: b.jsonl}]", "names no source; did you mean source?"),
        ("data.train={size: 3, weight: 1}", "data.train: {'size': 3, 'weight': 1} names no source; an entry"),
        ("data.train=[a.jsonl, {source: b, weight: 0}]", "data.train: the weight of b, 0, is not a number above 0"),
        ("data.train={source: b, weight: many}", "data.train: the weight of b, 'many', is not a number above 0"),
        ("data.train=[a, {source: b, weight: true}]", "data.train: the weight of b, True, is not a number above 0"),
        ("data.train=[a, {source: b, weight: .inf}]", "data.train: the weight of b, inf, is not a number above 0"),
        ("data.train=[a.jsonl, a.jsonl]", "data.train: a.jsonl appears twice; keep one, with a weight"),
        ("data.train=[a, {source: a, weight: 2}]", "data.train: a appears twice; keep one, with a weight"),
        ("data.eval=[a, {source: b, weight: 2}]", "data.eval: b has a weight, but an evaluation uses every prompt"),
    ],
)
def test_mistakes(word, message):
    with pytest.raises(UserError) as error:
        Config.load(None, [word])
    assert message in str(error.value)


def test_a_parameter_cannot_be_added_to_a_list():
    with pytest.raises(
        UserError, match=r"^data.train.size: data.train is a list; give the whole list, data.train=\[…\]"
    ):
        Config.load(None, ["data.train=[a, b]", "data.train.size=3"])
