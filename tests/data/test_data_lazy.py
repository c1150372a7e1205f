"""Streams: the same prompts as a list in its order, read no further than needed, and resumable at any draw."""

from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.config import DataSettings, SourceSettings
from dapo_rl.data import LazyStream, PromptStream, build_prompts, held_out_prompts, load_rows, training_prompts
from dapo_rl.data.lazy import AHEAD
from dapo_rl.data.sources import SHORT
from dapo_rl.errors import UserError

light = settings(max_examples=40, deadline=None)
SETTINGS = DataSettings(max_prompt_tokens=12)
GOOD = {"prompt": "1+1", "answer": "2"}
LONG = {"prompt": "a prompt of more than twelve tokens", "answer": "2"}
BAD = {"question": "", "answer": "3"}
kinds = st.lists(st.sampled_from([GOOD, LONG, BAD, "no mapping"]), max_size=30).map(lambda rows: [*rows, GOOD])


class Stream:
    """Rows without a length, which can be read again, as a `datasets.IterableDataset` can."""

    def __init__(self, rows):
        self.rows = rows
        self.read = 0

    def __iter__(self):
        for row in self.rows:
            self.read += 1
            yield row


def numbered(rows):
    return [row | {"prompt": f"{n}={row['prompt']}"} if row is GOOD else row for n, row in enumerate(rows)]


def stream_of(source, tokenizer, **changes):
    found = training_prompts(source, tokenizer, SETTINGS.model_copy(update=changes))
    assert isinstance(found.stream, LazyStream)
    return found.stream


def contents(prompt):
    fields = {name: getattr(prompt, name) for name in ("id", "text", "answer", "data_source", "messages", "columns")}
    return fields | {"token_ids": prompt.token_ids.tolist()}


def ids(stream, number):
    return [prompt.id for prompt in islice(stream, number)]


@light
@given(kinds, st.integers(1, 3))
def test_a_stream_has_the_prompts_of_the_list_in_its_order(plain_tokenizer, rows, epochs):
    rows = numbered(rows)
    listed = build_prompts(load_rows(rows), plain_tokenizer, SETTINGS)
    stream = stream_of(Stream(rows), plain_tokenizer)
    wanted = [contents(prompt) for prompt in listed.prompts]
    assert [contents(prompt) for prompt in islice(stream, len(wanted) * epochs)] == wanted * epochs
    stream.draw()  # uses what is left of the last epoch
    assert stream.epoch == epochs
    counts = stream.counts()
    assert counts["train_prompts"] == len(wanted) * epochs + 1
    first = next(n for n, row in enumerate(rows) if row not in (LONG, BAD, "no mapping"))
    assert counts["too_long"] == listed.too_long * epochs + rows[:first].count(LONG)
    assert counts["bad_rows"] == len(listed.bad) * epochs + first - rows[:first].count(LONG)


@light
@given(kinds, st.lists(st.one_of(st.just("draw"), st.integers(0, 5)), max_size=60), st.integers(0, 40))
def test_resuming_at_any_point_gives_the_same_sequence(plain_tokenizer, rows, history, more):
    rows = numbered(rows)
    stream, drawn = stream_of(Stream(rows), plain_tokenizer), []
    for action in history:
        if action == "draw":
            drawn.append(stream.draw())
        else:
            stream.push_front(drawn[len(drawn) - action :])
    unfinished = {prompt.id: prompt for prompt in drawn[-3:]}
    resumed = stream_of(Stream(rows), plain_tokenizer)
    ids(resumed, 2)
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        stream.save(Path(first), unfinished)
        resumed.load(Path(first))
        resumed.save(Path(second), unfinished)
        assert (Path(first) / "stream.json").read_text() == (Path(second) / "stream.json").read_text()
    assert {name: contents(resumed.find(name)) for name in unfinished} == {
        name: contents(prompt) for name, prompt in unfinished.items()
    }
    assert [contents(prompt) for prompt in islice(resumed, more)] == [
        contents(prompt) for prompt in islice(stream, more)
    ]
    assert resumed.counts() == stream.counts()
    assert resumed.epoch == stream.epoch


def endless():
    return ({"prompt": f"{n}+1", "answer": str(n + 1)} for n in count())


def test_an_endless_stream_is_read_as_far_as_needed(plain_tokenizer):
    source = Stream({"prompt": str(n)} for n in count())
    found = training_prompts(source, plain_tokenizer, SETTINGS)
    assert source.read == len(found.prompts) == AHEAD
    assert ids(found.stream, 200) == [str(n) for n in range(200)]
    assert source.read == 200
    assert ids(stream_of(endless(), plain_tokenizer), 3000) == [str(n) for n in range(3000)]


def test_an_endless_iterator_is_resumed_with_a_new_one(plain_tokenizer, tmp_path):
    stream, notes = stream_of(endless(), plain_tokenizer), []
    drawn = list(islice(stream, 1500))
    stream.push_front([drawn[7]])
    stream.save(tmp_path, ["1204"])
    resumed = stream_of(endless(), plain_tokenizer)
    resumed.note = notes.append
    resumed.load(tmp_path)
    assert notes == ["data.train: reading the stream again, up to row 1,500"]
    assert resumed.find("1204").text == "1204+1"
    assert ids(resumed, 3) == ["7", "1500", "1501"] == ids(stream, 3)
    with pytest.raises(ValueError, match="there is no prompt"):
        resumed.find("3")
    with pytest.raises(UserError, match=r"an iterator cannot be read again; resume in a new trainer"):
        resumed.load(tmp_path)


def test_an_iterator_that_ends_soon_is_a_list(plain_tokenizer):
    rows = [{"prompt": str(n)} for n in range(SHORT + 1)]
    found = training_prompts(iter(rows[:SHORT]), plain_tokenizer, SETTINGS)
    assert found.stream is None
    assert len(found.prompts) == SHORT
    stream = stream_of(iter(rows), plain_tokenizer)
    assert ids(stream, SHORT + 1) == [str(n) for n in range(SHORT + 1)]
    with pytest.raises(UserError, match=r"^data\.train: the iterator ended after 1001 rows; give a list, or an object"):
        stream.draw()


def test_what_has_a_length_is_no_stream(plain_tokenizer):
    for source in ([GOOD] * 3, (GOOD,) * 3, SourceSettings(source="arithmetic", size=5)):
        assert training_prompts(source, plain_tokenizer, SETTINGS).stream is None


def test_other_rows_are_one_line(plain_tokenizer, tmp_path):
    rows = numbered([GOOD] * 6)
    stream = stream_of(Stream(rows), plain_tokenizer)
    ids(stream, 4)
    stream.save(tmp_path)
    stream_of(Stream(rows[:4]), plain_tokenizer).load(tmp_path)  # what comes later may change
    for others, message in (
        (rows[:3], r"data\.train ends after 3 rows, and the run has used 4; resume with the same data"),
        ([rows[0], GOOD, *rows[2:]], r"data\.train has different rows than the checkpoint was written with; resume"),
        ([rows[0] | {"more": 1}, *rows[1:]], r"data\.train has different rows than the checkpoint"),
    ):
        with pytest.raises(UserError, match=message):
            stream_of(Stream(others), plain_tokenizer).load(tmp_path)
    listed = build_prompts(load_rows(rows), plain_tokenizer, SETTINGS).prompts
    with pytest.raises(UserError, match=r"a known length, but the checkpoint was written with a stream"):
        PromptStream(listed).load(tmp_path)
    PromptStream(listed).save(tmp_path)
    with pytest.raises(UserError, match=r"is a stream, but the checkpoint was written with data of known length"):
        stream.load(tmp_path)


def test_rows_that_are_dropped_are_noted_once_and_counted(plain_tokenizer):
    stream, notes = stream_of(Stream([BAD, LONG, BAD, LONG, GOOD]), plain_tokenizer), []
    stream.note = notes.append
    ids(stream, 2)
    assert notes == [
        "data.train: skipped row 0: 'question' is empty; summary.json counts all of them",
        "data.train: a prompt over data.max_prompt_tokens 12 dropped; summary.json counts all of them",
    ]
    assert stream.counts() == {"train_prompts": 2, "too_long": 4, "bad_rows": 4}


def test_a_stream_without_a_usable_row_does_not_run_forever(plain_tokenizer):
    for rows, message in (
        ([], r"^data\.train: no rows$"),
        (
            [BAD, LONG],
            r"^data\.train: none of 2 rows gives a prompt: 1 prompt is over data\.max_prompt_tokens 12; 1 row",
        ),
        (("text" for _ in count()), r"none of 10000 rows gives a prompt: 10000 rows are bad: row 0: not a mapping"),
    ):
        with pytest.raises(UserError, match=message):
            training_prompts(Stream(rows), plain_tokenizer, SETTINGS)
    later = Stream([*[GOOD] * AHEAD, *["text"] * 10_000, GOOD])
    stream = stream_of(later, plain_tokenizer)
    ids(stream, AHEAD)
    with pytest.raises(
        UserError, match=r"10,000 rows in succession give no prompt; the last: skipped row 10063: not a"
    ):
        stream.draw()


def test_an_error_of_the_users_iterator_is_one_line(plain_tokenizer):
    def failing(at):
        for n in range(at):
            yield {"prompt": str(n)}
        raise KeyError("gone")

    class Failing:
        def __iter__(self):
            return failing(100)

    stream = stream_of(Failing(), plain_tokenizer)
    with pytest.raises(UserError, match=r"^data\.train: row 100 of the stream cannot be read: KeyError: 'gone'$"):
        ids(stream, 101)
    with pytest.raises(UserError, match=r"^data\.train: its rows cannot be read: KeyError: 'gone'$"):
        training_prompts(failing(5), plain_tokenizer, SETTINGS)


def test_held_out_prompts_are_the_first_of_a_stream(plain_tokenizer):
    source = Stream({"prompt": str(n)} for n in count())
    found = held_out_prompts(source, plain_tokenizer, SETTINGS, False, 100)
    assert (found.stream, source.read, found.report()) == (None, 100, None)
    assert [prompt.id for prompt in found.prompts] == [str(n) for n in range(100)]
    few = held_out_prompts(Stream([GOOD, BAD, GOOD]), plain_tokenizer, SETTINGS, False, 100)
    assert (len(few.prompts), few.counts()["bad_rows"]) == (2, 1)
    with pytest.raises(UserError, match=r"^data\.eval: a stream needs eval\.prompts"):
        held_out_prompts(endless(), plain_tokenizer, SETTINGS, False, None)
    assert len(held_out_prompts([GOOD] * 3, plain_tokenizer, SETTINGS, False, None).prompts) == 3


def test_a_prompt_is_checked_before_it_is_drawn(plain_tokenizer):
    def refuse(prompt):
        if prompt.id == "2":
            raise UserError("no")

    stream = stream_of(Stream(numbered([GOOD] * 5)), plain_tokenizer)
    stream.check = refuse
    assert ids(stream, 2) == ["0", "1"]
    with pytest.raises(UserError, match="no"):
        stream.draw()


def test_streaming_by_the_real_datasets_library(plain_tokenizer, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}+1", "answer": "{n + 1}"}}\n' for n in range(100)))
    source = SourceSettings(source="json", data_files=str(file), streaming=True, cache_dir=str(tmp_path / "cache"))
    stream = stream_of(source, plain_tokenizer)
    drawn = [stream.draw() for _ in range(130)]
    assert [(p.text, p.answer) for p in drawn[:100]] == [(f"{n}+1", str(n + 1)) for n in range(100)]
    assert drawn[100].text == "0+1"
    assert stream.epoch == 1
    same = datasets.load_dataset("json", data_files=str(file), split="train", streaming=True)
    resumed = stream_of(same, plain_tokenizer)
    stream.save(tmp_path, ["99"])
    resumed.load(tmp_path)
    assert ids(resumed, 80) == ids(stream, 80)


def test_the_report_says_that_it_is_a_stream(plain_tokenizer):
    found = training_prompts(Stream([GOOD, BAD]), plain_tokenizer, SETTINGS)
    assert found.report() == (
        "data.train: a stream without a length: its rows are read as needed, in their order, unshuffled"
    )
    assert replace(found, stream=None).report().startswith("data.train: 1 of 2 rows skipped")
