"""Held-out prompts that are training prompts: an error for files, a note for some of them."""

import json
import os

import pytest

from dapo_rl.config import DataSettings, SourceSettings
from dapo_rl.data import build_prompts, held_out_prompts, load_rows, training_prompts
from dapo_rl.data.overlap import check_apart, shared_prompts
from dapo_rl.errors import UserError


def write(path, *numbers):
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=?", "answer": str(n + 1)}) + "\n" for n in numbers))
    return str(path)


def shared(train, held_out, tokenizer):
    sets = [build_prompts(load_rows(source), tokenizer, DataSettings()) for source in (train, held_out)]
    return shared_prompts(*sets, (train, held_out))


def test_a_link_to_the_training_file_is_the_training_file(tmp_path):
    train = write(tmp_path / "train.jsonl", 1, 2)
    os.symlink(train, tmp_path / "held-out.jsonl")
    with pytest.raises(UserError, match=r"^data\.eval: .*held-out\.jsonl is data\.train: the run would be"):
        check_apart(train, tmp_path / "held-out.jsonl")
    check_apart(train, write(tmp_path / "other.jsonl", 1))
    check_apart(train, None)
    check_apart("in memory", "in memory")  # what a run's settings record of two objects


def test_splits_of_a_hub_data_set_are_apart():
    check_apart("org/data", SourceSettings(source="org/data", split="test"))
    with pytest.raises(UserError, match=r"^data\.eval: org/data is data\.train"):
        check_apart("org/data", SourceSettings(source="org/data", split="train"))


def test_one_of_several_training_files(tmp_path):
    a, b = write(tmp_path / "a.jsonl", 1), write(tmp_path / "b.jsonl", 2)
    with pytest.raises(UserError, match=r"b\.jsonl is data\.train"):
        check_apart((a, b), b)
    with pytest.raises(UserError, match=r"b\.jsonl is data\.train"):
        check_apart(b, (a, SourceSettings(source=b)))


def test_a_list_of_names_as_a_program_passes_it(tmp_path):
    a, b = write(tmp_path / "a.jsonl", 1), write(tmp_path / "b.jsonl", 2)
    with pytest.raises(UserError, match=r"b\.jsonl is data\.train"):
        check_apart([a, b], b)
    with pytest.raises(UserError, match=r"a\.jsonl is data\.train"):
        check_apart(a, [b, a])
    check_apart([{"prompt": "1"}, {"prompt": "2"}], b)  # rows


def test_a_file_of_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"^data\.eval: ~/a\.jsonl is data\.train"):
        check_apart(write(tmp_path / "a.jsonl", 1), "~/a.jsonl")


def test_a_copy_of_training_prompts_is_an_error(tmp_path, plain_tokenizer):
    train = write(tmp_path / "train.jsonl", 1, 2, 3)
    with pytest.raises(UserError, match=r"^data\.eval: 2 of 2 prompts are training prompts too; give other prompts"):
        shared(train, write(tmp_path / "copy.jsonl", 3, 1), plain_tokenizer)


def test_some_training_prompts_are_a_note(tmp_path, plain_tokenizer):
    train, held_out = write(tmp_path / "train.jsonl", 1, 2, 3), write(tmp_path / "held-out.jsonl", 3, 4)
    note = "data.eval: 1 of 2 prompts are training prompts too; their accuracy includes what was memorized"
    assert shared(train, held_out, plain_tokenizer) == note
    assert shared(train, write(tmp_path / "other.jsonl", 4), plain_tokenizer) is None


def test_the_same_rows_in_memory_are_a_note(plain_tokenizer):
    rows = [{"prompt": "1+1=?", "answer": "2"}]
    assert shared(rows, rows, plain_tokenizer).startswith("data.eval: 1 of 1 prompts are training prompts too; their")


def test_a_stream_is_not_read_for_this(plain_tokenizer):
    class Endless:
        def __iter__(self):
            return iter([{"prompt": "1+1=?"}])

    train = training_prompts(Endless(), plain_tokenizer, DataSettings())
    held_out = held_out_prompts([{"prompt": "1+1=?"}], plain_tokenizer, DataSettings(), False, None)
    assert shared_prompts(train, held_out, (Endless(), [])) is None
    assert shared_prompts(train, None, (Endless(), None)) is None
