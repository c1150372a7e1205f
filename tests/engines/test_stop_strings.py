"""Stop strings are found where decoding the whole response after every token finds them, at a linear cost."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import small_model, tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dapo_rl.engines.hf import HFEngine
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.engines.stopping import StopSearch, StopStrings
from dapo_rl.types import Trajectory

SPECIAL = ["<s>", "</s>"]


@cache
def like_llama() -> Any:
    """SentencePiece's decoding: words begin with a space, other characters are bytes, the first space is lost."""
    words = ["\u2581", "\u2581a", "a", "b", "\u2581b", ".", "\u2581ab", "\n"]
    vocabulary = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@cache
def like_bert() -> Any:
    """Words are joined with spaces, which are removed again before punctuation."""
    vocabulary = [*SPECIAL, "a", "b", "##a", "##b", ".", "!", "'", "n't", "'s"]
    inner = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocabulary)}, unk_token="a"))
    inner.decoder = decoders.WordPiece(cleanup=False)
    inner.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=True
    )


def decoding_everything(tokenizer: Any, ids: list[int], strings: tuple[str, ...]) -> int | None:
    """The definition."""
    texts = ((end, tokenizer.decode(ids[:end], skip_special_tokens=True)) for end in range(1, len(ids) + 1))
    return next((end for end, text in texts if any(string in text for string in strings)), None)


def in_portions(tokenizer: Any, ids: list[int], strings: tuple[str, ...], portions: list[int], skipped: int) -> Any:
    search = StopSearch(StopStrings(tokenizer, strings))
    search.skip(np.array(ids[:skipped], np.int32))
    for portion in [*portions, len(ids)]:
        end = search.find(np.array(ids[search.count : search.count + portion], np.int32))
        if end is not None:
            return end
    assert search.count == len(ids)
    return None


def check(tokenizer: Any, data: st.DataObject, tokens: st.SearchStrategy[int]) -> None:
    """The stop strings are pieces of the text, so that most are found, and a few others."""
    ids = data.draw(st.lists(tokens, min_size=1, max_size=60))
    text = tokenizer.decode(ids, skip_special_tokens=True)
    pieces = st.builds(lambda at, n: text[at : at + n], st.integers(0, len(text)), st.integers(1, 12))
    strings = data.draw(st.lists(pieces | st.text("ab .!\n", min_size=1, max_size=4), min_size=1, max_size=3))
    strings = tuple(string for string in strings if string) or ("a",)
    expected = decoding_everything(tokenizer, ids, strings)
    portions = data.draw(st.lists(st.integers(0, 9), max_size=20))
    # What is skipped, such as an earlier turn, contains no stop string.
    skipped = data.draw(st.integers(0, len(ids) if expected is None else expected - 1))
    assert in_portions(tokenizer, ids, strings, portions, skipped) == expected


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bytes(data):
    """Each token is a byte; characters span up to four of them. The model has more ids than the tokenizer."""
    some = [tokenizer()(text, add_special_tokens=False).input_ids for text in ("a", "é", "€", "😀", "Answer:", "\n")]
    often = st.sampled_from([token for ids in some for token in ids])
    check(tokenizer(), data, often | st.integers(0, len(tokenizer()) + 40))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_words_that_begin_with_a_space(data):
    known = like_llama()
    check(known, data, st.sampled_from([0, 1, *range(258, len(known)), len(known) + 3]))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_words_and_whole_characters_in_bytes(data):
    """The bytes of several characters in succession, from which a window must not cut the first half of one."""
    known = like_llama()
    character = st.sampled_from(["é", "€", "😀", "\u2581a", "b", ".", "<s>"])
    pieces = data.draw(st.lists(character, min_size=1, max_size=30))
    tokens = [[p] if len(p.encode()) < 2 or p[0] in "\u2581<" else [f"<0x{b:02X}>" for b in p.encode()] for p in pieces]
    ids = [known.convert_tokens_to_ids(token) for piece in tokens for token in piece]
    text = known.decode(ids, skip_special_tokens=True)
    at = data.draw(st.integers(0, max(0, len(text) - 1)))
    strings = (text[at : at + data.draw(st.integers(1, 6))] or "b",)
    portions = data.draw(st.lists(st.integers(0, 9), max_size=20))
    assert in_portions(known, ids, strings, portions, 0) == decoding_everything(known, ids, strings)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_spaces_that_are_cleaned_up(data):
    check(like_bert(), data, st.integers(0, len(like_bert()) - 1))


def test_many_tokens_without_text_inside_a_stop_string():
    known = tokenizer()
    a, b = known("ab", add_special_tokens=False).input_ids
    ids = [a, *[known.pad_token_id] * 50, len(known) + 7, b, a]
    assert in_portions(known, ids, ("ab",), [3, 20], 0) == 53


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.decoded = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def decode(self, ids: Any, **named: Any) -> str:
        self.decoded += len(ids)
        return str(self._inner.decode(ids, **named))


@pytest.mark.parametrize("portion", [1, 8, 1000])
def test_each_token_is_decoded_a_fixed_number_of_times(portion):
    ids = np.full(4000, tokenizer()("a", add_special_tokens=False).input_ids[0], np.int32)
    known = Counting(tokenizer())
    search = StopSearch(StopStrings(known, ("\n\n", "Problem:")))
    for start in range(0, len(ids), portion):
        assert search.find(ids[start : start + portion]) is None
    assert known.decoded <= len(ids) * (len("Problem:") + 8)


@pytest.mark.slow
@pytest.mark.parametrize("make", [NativeEngine, lambda model, known: HFEngine(model, known, 64)], ids=["native", "hf"])
def test_an_engine_looks_at_each_token_a_fixed_number_of_times(make, monkeypatch):
    copied = []
    then = Trajectory.then

    def counting(self, ids, *rest, **more):
        copied.append(len(ids))
        return then(self, ids, *rest, **more)

    monkeypatch.setattr(Trajectory, "then", counting)
    known, length, stop = Counting(tokenizer()), 400, "never in the text"
    engine = make(small_model(max_position_embeddings=512), known)
    engine.submit(Request("r", (5, 6, 7), 2, SamplingParams(length, stop=(stop,), ignore_eos=True), seed=3))
    samples = []
    while len(samples) < 2:
        samples += engine.poll()
    assert [len(done.sample.token_ids) for done in samples] == [length, length]
    assert sum(copied) == 2 * length
    assert known.decoded <= 2 * length * (len(stop) + 8 + 2)


def test_a_resumed_sample_ends_at_a_stop_string_that_begins_before_it_was_set_aside():
    model, known = small_model(), tokenizer()

    def resumed(stop: tuple[str, ...]) -> Any:
        engine = NativeEngine(model, known)
        half = Trajectory(known("xyz12", add_special_tokens=False).input_ids, -1.0)
        params = SamplingParams(30, stop=stop, ignore_eos=True)
        engine.submit(Request("r", (5, 6, 7), 1, params, seed=3, partial=(half,), new=()))
        (done,) = engine.poll()
        return done.sample

    whole = resumed(())
    assert len(whole.token_ids) == 30
    stop = known.decode(whole.token_ids[3:7])
    assert stop.startswith("12")
    cut = resumed((stop,))
    assert cut.token_ids.tolist() == whole.token_ids[:7].tolist()
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize("make", [NativeEngine, lambda model, known: HFEngine(model, known, 64)], ids=["native", "hf"])
def test_a_stop_string_that_ends_with_the_last_token_allowed_is_whole(make):
    model, known = small_model(), tokenizer()

    def response(limit: int, *stop: str) -> Any:
        engine = make(model, known)
        engine.submit(Request("r", (5, 6, 7), 1, SamplingParams(limit, stop=stop, ignore_eos=True), seed=3))
        (done,) = engine.poll()
        return done.sample

    whole = response(12)
    stop = known.decode(whole.token_ids[2:5])
    end = decoding_everything(known, whole.token_ids.tolist(), (stop,))
    for limit, reason in ((end - 1, "length"), (end, "stop"), (end + 1, "stop")):
        sample = response(limit, stop)
        assert (len(sample.token_ids), sample.finish_reason) == (min(limit, end), reason)


@pytest.mark.slow
@pytest.mark.parametrize("make", [NativeEngine, lambda model, known: HFEngine(model, known, 64)], ids=["native", "hf"])
@pytest.mark.parametrize("trail", ["", "bc"], ids=["at the turn's start", "before it"])
def test_a_stop_string_is_searched_from_the_first_token_of_the_turn(make, trail):
    """The policy's earlier turn and the environment's answer contain it, even as the last thing before the turn."""
    model, known, stop = small_model(), tokenizer(), "<end>"
    earlier = known(f"a{stop}", add_special_tokens=False).input_ids
    answer = known(f"x{stop}{trail}", add_special_tokens=False).input_ids
    tokens = [*earlier, *answer]
    mask = [True] * len(earlier) + [False] * len(answer)
    begun = Trajectory(tokens, -1.0, mask=mask)

    def next_turn(*stops: str, begun: Trajectory = begun) -> Any:
        engine = make(model, known)
        params = SamplingParams(len(tokens) + 12, stop=stops, ignore_eos=True)
        engine.submit(Request("r", (5, 6, 7), 1, params, seed=3, partial=(begun,), new=()))
        (done,) = engine.poll()
        return done.sample

    whole = next_turn()
    assert next_turn(stop).token_ids.tolist() == whole.token_ids.tolist()
    assert next_turn(stop).finish_reason == "length"
    # A stop string across the boundary is none; one in the turn ends it, also after the turn was interrupted.
    written = known.decode(whole.token_ids[len(tokens) :])
    across = known.decode(tokens[-1:]) + written[:1]
    inside = written[2:5]
    end = len(tokens) + decoding_everything(known, whole.token_ids[len(tokens) :].tolist(), (inside,))
    assert next_turn(across).token_ids.tolist() == whole.token_ids.tolist() or across in written
    assert next_turn(inside).token_ids.tolist() == whole.token_ids[:end].tolist()
    part = len(tokens) + 3
    interrupted = Trajectory(whole.token_ids[:part], whole.logps[:part], mask=whole.mask[:part])
    assert next_turn(inside, begun=interrupted).token_ids.tolist() == whole.token_ids[:end].tolist()
