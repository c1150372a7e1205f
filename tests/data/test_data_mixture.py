"""Lists of sources: every prompt once per epoch, or draws in proportion to weights; resumable at any draw."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.config import DataSettings, SourceSettings
from dapo_rl.data import MixedStream, PromptStream, held_out_prompts, load_rows, once_each, stream_of, training_prompts
from dapo_rl.data.sources import as_sources
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

light = settings(max_examples=60, deadline=None)
SETTINGS = DataSettings()


@pytest.fixture
def file_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name, count, **columns):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt": f"{name} {n}", "answer": str(n)} | columns for n in range(count)]
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return name

    return write


def prompts_of(origin, count):
    return [Prompt(id=f"{origin}:{n}", text=f"{origin} {n}", token_ids=(n,), origin=origin) for n in range(count)]


def mixture(sizes, weights, seed=0):
    names = [f"s{at}" for at in range(len(sizes))]
    streams = {name: PromptStream(prompts_of(name, size), seed, name) for name, size in zip(names, sizes, strict=True)}
    return MixedStream(streams, dict(zip(names, weights, strict=True)), sum(sizes))


def ids(stream, count):
    return [prompt.id for prompt in islice(stream, count)]


def test_a_list_has_every_prompt_once_per_epoch_shuffled_together(file_of, plain_tokenizer):
    found = training_prompts((file_of("a.jsonl", 5), file_of("b/c.jsonl", 20)), plain_tokenizer, SETTINGS)
    stream = stream_of(found, 3)
    first, second = ids(stream, 25), ids(stream, 25)
    assert Counter(first) == Counter(second) == Counter(p.id for p in found.prompts)
    assert first != second
    at = [n for n, name in enumerate(first) if name.startswith("a.jsonl:")]
    assert max(at) - min(at) > 5  # not one file after the other
    assert found.prompts[0].id == "a.jsonl:1"
    assert {(p.origin, p.data_source) for p in found.prompts} == {("a.jsonl",) * 2, ("b/c.jsonl",) * 2}


def test_a_data_source_in_the_rows_stays(file_of, plain_tokenizer):
    found = training_prompts((file_of("a.jsonl", 1, data_source="gsm8k"), "arithmetic"), plain_tokenizer, SETTINGS)
    assert (found.prompts[0].data_source, found.prompts[0].origin) == ("gsm8k", "a.jsonl")
    assert found.prompts[-1].id.startswith("arithmetic:")


@light
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 20)), min_size=2, max_size=5), st.integers(1, 200))
def test_draws_follow_the_weights_at_every_point(sources, draws):
    sizes, weights = zip(*sources, strict=True)
    stream = mixture(sizes, weights)
    counts = Counter()
    for drawn in range(1, draws + 1):
        counts[stream.draw().origin] += 1
        for at, weight in enumerate(weights):
            share = drawn * weight / sum(weights)
            assert abs(counts[f"s{at}"] - share) <= len(weights) - 1


def test_weights_by_hand():
    origins = [prompt.origin for prompt in islice(mixture([5, 5], [2, 1]), 6)]
    assert Counter(origins) == {"s0": 4, "s1": 2}
    assert Counter(origins[:3]) == {"s0": 2, "s1": 1}


def test_each_source_is_passed_in_its_own_epochs():
    stream = mixture([3, 10], [1, 1])
    drawn = ids(stream, 26)
    own = [name for name in drawn if name.startswith("s0:")]
    assert [Counter(own[at : at + 3]) for at in (0, 3, 6, 9)] == [Counter(f"s0:{n}" for n in range(3))] * 4
    assert (stream.epochs_drawn, stream.epoch) == (2.0, 2)


def test_sources_of_the_same_size_have_different_orders():
    stream = mixture([40, 40], [1, 1])
    drawn = ids(stream, 80)
    orders = [[name.partition(":")[2] for name in drawn if name.startswith(origin)] for origin in ("s0", "s1")]
    assert orders[0] != orders[1]


@light
@given(st.integers(0, 40), st.integers(0, 3), st.integers(0, 2**40))
def test_a_mixture_resumes_exactly(before, requeued, seed):
    stream = mixture([4, 7, 3], [1, 2.5, 0.5], seed)
    drawn = [stream.draw() for _ in range(before)]
    requeued = min(requeued, before)
    stream.push_front(drawn[:requeued])
    with TemporaryDirectory() as directory:
        stream.save(Path(directory), [prompt.id for prompt in drawn[-2:]])
        wanted = ids(stream, 30)
        assert wanted[:requeued] == [prompt.id for prompt in drawn[:requeued]]
        resumed = mixture([4, 7, 3], [1, 2.5, 0.5], seed)
        ids(resumed, 11)  # a used one is overwritten
        resumed.load(Path(directory))
    assert ids(resumed, 30) == wanted
    assert [resumed.find(prompt.id).text for prompt in drawn] == [prompt.text for prompt in drawn]


def test_a_prompt_rests_in_its_source():
    for seed in range(5):
        stream = mixture([3, 3], [1, 1], seed)
        first = stream.draw()
        stream.skip(first, 1)
        later = ids(stream, 20)
        own = [name for name in later if name.startswith(first.origin)]
        assert first.id not in own[:4]  # the rest of this pass, and the next
        assert first.id in own[4:7]


class Rows:
    """Rows without a length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return ({"prompt": f"p{n}", "answer": str(n)} for n in range(self.count))


def lazy_mixture(file_of, tokenizer, monkeypatch):
    from dapo_rl.data import sources

    monkeypatch.setattr(sources, "_from_hub", lambda name, parameters, key: Rows(2000))
    listed = (SourceSettings(source="org/stream", weight=3), file_of("a.jsonl", 4))
    found = training_prompts(listed, tokenizer, SETTINGS)
    assert found.is_stream
    assert "a stream without a length" in found.report()
    return found, stream_of(found, 0)


def test_a_stream_is_mixed_by_weight_and_resumes(file_of, plain_tokenizer, monkeypatch):
    found, stream = lazy_mixture(file_of, plain_tokenizer, monkeypatch)
    drawn = [stream.draw() for _ in range(8)]
    assert [prompt.id for prompt in drawn if prompt.origin == "org/stream"] == [f"org/stream:{n}" for n in range(6)]
    assert (stream.epochs_drawn, stream.epoch) == (0.0, 0)  # no pass over the stream has ended
    assert found.counts() == {"train_prompts": 6 + 4, "too_long": 0, "bad_rows": 0}
    stream.push_front(drawn[2:4])
    with TemporaryDirectory() as directory:
        stream.save(Path(directory), [drawn[0].id, drawn[1].id])
        wanted = ids(stream, 20)
        resumed = lazy_mixture(file_of, plain_tokenizer, monkeypatch)[1]
        resumed.load(Path(directory))
    assert resumed.find(drawn[0].id).text == drawn[0].text
    assert ids(resumed, 20) == wanted


def test_a_stream_in_a_list_needs_weights(file_of, plain_tokenizer, monkeypatch):
    from dapo_rl.data import sources

    monkeypatch.setattr(sources, "_from_hub", lambda name, parameters, key: Rows(2000))
    with pytest.raises(UserError, match=r"org/stream is a stream without a length.*; give the entries weights"):
        training_prompts((file_of("a.jsonl", 1), "org/stream"), plain_tokenizer, SETTINGS)


def test_a_changed_source_is_named_on_resume(file_of, plain_tokenizer, tmp_path):
    listed = (file_of("a.jsonl", 3), SourceSettings(source=file_of("b.jsonl", 3), weight=2))
    stream_of(training_prompts(listed, plain_tokenizer, SETTINGS), 0).save(tmp_path)
    file_of("b.jsonl", 4)
    with pytest.raises(UserError, match=r"^data.train: b.jsonl has 4 prompts, the checkpoint was written with 3"):
        stream_of(training_prompts(listed, plain_tokenizer, SETTINGS), 0).load(tmp_path)
    with pytest.raises(UserError, match=r"^data.train has no weights, but the checkpoint was written with a list that"):
        PromptStream(prompts_of("", 3)).load(tmp_path)
    with pytest.raises(UserError, match=r"^data.train has different sources"):
        mixture([3, 3], [1, 1]).load(tmp_path)
    PromptStream(prompts_of("", 3)).save(tmp_path)
    with pytest.raises(UserError, match=r"^data.train is a list with weights, unlike in the checkpoint"):
        mixture([3, 3], [1, 1]).load(tmp_path)


def test_an_entry_without_a_prompt_is_an_error(file_of, plain_tokenizer):
    path = Path(file_of("b.jsonl", 2, prompt=""))
    path.write_text(path.read_text() + "broken\n")
    for listed in [("a.jsonl", "b.jsonl"), ("a.jsonl", SourceSettings(source="b.jsonl", weight=2))]:
        file_of("a.jsonl", 2)
        with pytest.raises(UserError, match=r"^data.train: b.jsonl: none of 3 rows gives a prompt: 3 rows are bad: b"):
            training_prompts(listed, plain_tokenizer, SETTINGS)


def test_bad_rows_are_reported_by_source_and_line(file_of, plain_tokenizer):
    for name in ("a.jsonl", "b.jsonl"):
        path = Path(file_of(name, 2))
        path.write_text(path.read_text() + "broken\n")
    found = training_prompts(("b.jsonl", "a.jsonl"), plain_tokenizer, SETTINGS)
    assert [bad.where for bad in found.bad] == ["b.jsonl:3", "a.jsonl:3"]


def test_held_out_lists_take_so_many_of_each_and_problems_once(file_of, plain_tokenizer):
    text = Path(file_of("aime.jsonl", 3)).read_text()
    Path("aime.jsonl").write_text(text * 4)
    found = held_out_prompts(("aime.jsonl", file_of("b.jsonl", 5)), plain_tokenizer, SETTINGS, True, None)
    assert [p.id for p in once_each(found.prompts)] == [
        *(f"aime.jsonl:{n}" for n in (1, 2, 3)),
        *(f"b.jsonl:{n}" for n in range(1, 6)),
    ]
    assert [p.id for p in once_each(found.prompts, 2)] == ["aime.jsonl:1", "aime.jsonl:2", "b.jsonl:1", "b.jsonl:2"]


def test_rows_in_memory_are_no_list_of_sources(file_of):
    rows = [{"prompt": "p", "source": "web"}, {"prompt": "q", "source": "web"}]
    assert as_sources(rows, "train_dataset") == rows
    assert len(load_rows(tuple(rows)).good) == 2
    assert as_sources([Path("a.jsonl"), {"source": "b.jsonl", "weight": 2}], "train_dataset") == (
        "a.jsonl",
        SourceSettings(source="b.jsonl", weight=2.0),
    )
    with pytest.raises(UserError, match=r"^train_dataset: a.jsonl appears twice"):
        as_sources(["a.jsonl", "a.jsonl"], "train_dataset")
