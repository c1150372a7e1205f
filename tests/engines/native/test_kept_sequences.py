"""Turns of an episode: what the cache keeps between them saves work, and changes no token and no log-probability."""

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ids, small_model, tokenizer, weights_of

from dapo_rl.engines.hf import HFEngine
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.native.kept_sequences import KeptSequence, KeptSequences
from dapo_rl.engines.native.kv_cache import CacheLayout
from dapo_rl.engines.native.page_table import Pages
from dapo_rl.engines.protocol import Request, SamplingParams

TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
"""Two layers, keys and values, two heads of eight numbers in float32."""
LONGEST = 240
PAGED = {"page_tokens": 8}
WHOLE = {}


def engine_for(model=None, **options):
    return NativeEngine(model or small_model(), tokenizer(), **({"longest": LONGEST} | options))


def first_turn(name, prompt=range(5, 35), count=3, seed=7, turn=12, continues=True, **params):
    return Request(name, tuple(prompt), count, SamplingParams(max_new_tokens=turn, **params), seed, continues=continues)


def next_turn(request, sample, observed=(9, 10, 11), turn=12):
    """The request for the turn after an observation; as if the sample had ended by itself."""
    partial = sample.replace(finish_reason=None, text="")
    partial = partial.then_observed(observed) if len(observed) else partial
    params = replace(request.params, max_new_tokens=len(partial.token_ids) + turn)
    name = f"{request.id.split('.')[0]}.{sample.index}.{len(sample.token_ids)}"
    return replace(request, id=name, params=params, partial=(partial,), new=())


class Talk:
    """Episodes of several turns on an engine. The observations, and when they come, depend on the seed alone."""

    def __init__(self, engine, requests, turns=4, seed=0):
        self.engine, self.turns, self.rng = engine, turns, random.Random(seed)
        self.requests = {}
        self.count = {}
        self.waiting = []
        self.ended = {}
        for request in requests:
            self.submit(request)

    def submit(self, request):
        self.requests[request.id] = request
        self.engine.submit(request)

    def take(self, completions):
        for done in completions:
            key = done.request_id.split(".")[0], done.index
            self.count[key] = self.count.get(key, 0) + 1
            if self.count[key] == self.turns:
                self.ended[key] = done.sample
            else:
                observed = random.Random(f"{key}{self.count[key]}")
                tokens = [observed.randrange(5, 14) for _ in range(observed.randint(0 if key[1] else 1, 9))]
                self.waiting.append(next_turn(self.requests[done.request_id], done.sample, tokens))

    def run(self):
        while self.engine.pending or self.waiting:
            self.take(self.engine.poll())
            while self.waiting and (not self.engine.pending or self.rng.random() < 0.5):
                self.submit(self.waiting.pop(self.rng.randrange(len(self.waiting))))
        return self.ended


def groups(n=4, **options):
    rng = random.Random(n)
    return [
        first_turn(f"r{i}", [rng.randrange(5, 14) for _ in range(rng.choice([1, 7, 8, 9, 25, 40]))], 3, i, **options)
        for i in range(n)
    ]


def assert_same(samples, expected):
    assert samples.keys() == expected.keys()
    for key, sample in samples.items():
        assert ids(sample) == ids(expected[key])
        assert sample.mask.tolist() == expected[key].mask.tolist()
        assert sample.logps == pytest.approx(expected[key].logps, abs=1e-4)


def stopping(**options):
    """Turns that end by themselves, or by their limit."""
    return groups(**options, stop=("1", "2", "3"), turn=20)


@cache
def undisturbed():
    return Talk(engine_for(), stopping(n=3, continues=False), turns=3).run()


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    page=st.sampled_from([None, 1, 4, 8, 16]),
    pages=st.integers(0, 60),
    prefill=st.sampled_from([3, 16, 4096]),
    width=st.sampled_from([1, 4, 64]),
)
def test_what_is_kept_changes_no_token(seed, page, pages, prefill, width):
    """In caches that hold one sequence up to all, with observations that come in any order."""
    expected = undisturbed()
    room = (256 // page + pages) * page if page else 256 * (1 + pages % 5)
    engine = engine_for(page_tokens=page, prefill_tokens=prefill, max_batch=width, kv_memory_bytes=room * TOKEN_BYTES)
    assert_same(Talk(engine, stopping(n=3), turns=3, seed=seed).run(), expected)
    table = engine._batch.pages
    assert (table.used, table.free) == (0, table.usable)
    table.drop_kept()
    assert (table.kept, table.free) == (0, table.usable)


@pytest.mark.parametrize("layout", [PAGED, WHOLE], ids=["paged", "whole"])
def test_a_continued_sample_is_what_transformers_generates(layout):
    model = small_model()
    engine = engine_for(model, **layout)
    expected = Talk(HFEngine(model, tokenizer(), 64), stopping()).run()
    assert_same(Talk(engine, stopping()).run(), expected)
    assert engine.prefix_hits > 0


@pytest.mark.parametrize("layout", [PAGED, WHOLE], ids=["paged", "whole"])
@pytest.mark.parametrize(
    "ends", [{"turn": 200, "stop": ("1",)}, {"turn": 12, "ignore_eos": True}], ids=["stop", "limit"]
)
def test_only_what_is_new_is_computed(layout, ends, monkeypatch):
    """Whether a turn ends by itself or by its limit."""
    engine = engine_for(**layout)
    work = first_turn("a", count=1, **ends)
    (done,) = run(engine, work)
    known = 30 + len(done.sample.token_ids) - 1
    computed = count_computed(monkeypatch)
    (again,) = run(engine, next_turn(work, done.sample))
    assert computed == [3], "the last token of the turn, and all but the last of three observed ones"
    assert engine.prefix_hits == known
    assert not again.sample.mask[len(done.sample.token_ids) : len(done.sample.token_ids) + 3].any()


def test_nothing_is_kept_of_samples_that_no_turn_follows():
    engine = engine_for(**PAGED)
    run(engine, first_turn("once", continues=False, turn=200, stop=("1",)))
    assert engine._batch.pages.kept == 0
    assert engine.prefix_hits == 0


@pytest.mark.parametrize("layout", [PAGED, WHOLE], ids=["paged", "whole"])
def test_new_weights_drop_what_older_ones_computed(layout):
    new = small_model(seed=5)
    engine = engine_for(small_model(), **layout)
    work = first_turn("a", turn=200, stop=("1",))
    samples = {done.index: done.sample for done in run(engine, work)}
    assert engine._batch.pages.kept
    engine.receive(1, weights_of(new))
    assert engine._batch.pages.kept == 0
    fresh = engine_for(new, **layout)
    fresh.receive(1, weights_of(new))
    turns = [next_turn(work, sample) for sample in samples.values()]
    ours, theirs = run(engine, *turns), run(fresh, *turns)
    assert ours == theirs, "bit for bit"
    assert engine.prefix_hits == 0


@pytest.mark.parametrize("end", [NativeEngine.take_unfinished, NativeEngine.release_memory])
def test_the_queue_is_the_complete_state(end):
    engine = engine_for(**PAGED)
    run(engine, first_turn("a", turn=200, stop=("1",)))
    assert engine._batch.pages.kept
    end(engine)
    assert engine._batch.pages.kept == 0
    assert engine._batch.pages.free == engine._batch.pages.usable


def test_a_continuation_can_be_cancelled_at_any_time():
    engine = engine_for(**PAGED, prefill_tokens=2)
    work = first_turn("a", count=2, turn=200, stop=("1",))
    first, second = run(engine, work)
    kept = engine._batch.pages.kept
    engine.submit(next_turn(work, first.sample))
    engine.submit(first_turn("other", continues=False, turn=40, ignore_eos=True))
    with torch.inference_mode():
        engine._scheduler.admit()
    assert 0 < engine._batch.pages.kept < kept
    engine.cancel([next_turn(work, first.sample).id, "other"])
    assert engine.pending == engine._batch.pages.used == 0
    (again,) = run(engine, next_turn(work, first.sample))
    (expected,) = run(engine_for(), next_turn(work, first.sample))
    assert ids(again.sample) == ids(expected.sample)
    assert engine.prefix_hits == 30 + len(first.sample.token_ids) - 1
    run(engine, next_turn(work, second.sample))
    assert engine.prefix_hits > 30 + len(first.sample.token_ids) - 1


def test_kept_pages_go_before_any_sample_is_preempted():
    """Pages of which many are kept serve as many samples as if all were free."""
    most = 40 * 8 * TOKEN_BYTES
    work = [first_turn(f"w{i}", count=4, seed=i, turn=40, continues=False, ignore_eos=True) for i in range(4)]
    plain, engine = (engine_for(**PAGED, kv_memory_bytes=most) for _ in range(2))
    run(engine, *[first_turn(f"k{i}", range(5, 9 + i), 2, i, turn=150, stop=("1",)) for i in range(8)])
    assert engine._batch.pages.kept > 15
    before = engine.preempted
    assert run(engine, *work) == run(plain, *work)
    assert engine.preempted - before == plain.preempted > 0
    assert engine.cache_figures()["most_used"] <= engine.cache_figures()["pages"] == 40


def test_a_group_still_shares_its_prompt():
    """A prompt of 50 tokens has 6 full pages of 8, which five kept samples share too."""
    engine = engine_for(**PAGED)
    work = first_turn("a", range(5, 55), 5, turn=150, stop=("1", "2", "3"))
    samples = [done.sample for done in run(engine, work)]
    own = sum(-(-(50 + len(sample.token_ids) - 1) // 8) - 6 for sample in samples)
    assert engine._batch.pages.kept == 6 + own


def test_the_longest_kept_beginning_is_found():
    kept = KeptSequences()
    sequences = [KeptSequence(np.array(tokens, np.int32), []) for tokens in ([1], [1, 2], [1, 2, 3], [1, 2], [4, 5])]
    for each in sequences:
        kept.add(each)
    assert kept.find(np.array([1, 2, 3, 4])) is sequences[2]
    assert kept.find(np.array([1, 2, 3])) is sequences[3]
    kept.remove(sequences[3])
    assert kept.find(np.array([1, 2, 9])) is sequences[1]
    assert kept.find(np.array([1])) is None
    assert kept.find(np.array([4, 6, 5])) is None
    assert kept.oldest() is sequences[0]


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**20), whole=st.booleans())
def test_every_page_is_free_or_used_or_kept(seed, whole):
    """Any order of starting, sharing, growing, keeping, continuing, exchanging, ending and dropping. What is kept of a
    sequence includes all that it shares."""
    rng = random.Random(seed)
    slots, longest = 6, 24
    layout = CacheLayout(longest, slots, slots, whole=True) if whole else CacheLayout(4, 20, slots)
    pages = Pages(layout, longest, torch.device("cpu"))
    live: dict[int, list[int]] = {}
    tokens = iter(range(10**6))
    contents: dict[tuple[int, int], int] = {}
    """The token whose keys and values are at each place."""

    def write(slot, start):
        for token, page, offset in zip(
            live[slot][start:], *(x.tolist() for x in pages.places(slot, start, len(live[slot]))), strict=True
        ):
            contents[page, offset] = token

    def begin(context, shared, done, kept=None):
        slot = pages.start(shared, len(context), kept)
        if slot is not None:
            assert slot not in live
            live[slot] = context
            write(slot, done)

    for _ in range(80):
        action = rng.choice(["start", "share", "extend", "end", "keep", "keep", "continue", "continue", "swap", "drop"])
        slot = rng.choice(sorted(live)) if live else None
        if action == "continue":
            ended = [each for each in pages._kept if len(each.tokens) < longest]
            if ended:
                before = rng.choice(ended).tokens
                context = [*before.tolist(), *(next(tokens) for _ in range(rng.randint(1, longest - len(before))))]
                kept = pages.find(np.array(context, np.int32))
                begin(context, [], len(kept.tokens), kept)
        elif action == "drop":
            if rng.random() < 0.2:
                pages.drop_kept()
        elif action == "start" or slot is None:
            begin([next(tokens) for _ in range(rng.randint(1, longest))], [], 0)
        elif action == "share" and not whole:
            shared = pages.shared(slot, len(live[slot]))
            begin(list(live[slot]), shared, len(shared) * 4)
        elif action == "extend":
            more = [next(tokens) for _ in range(min(rng.randint(1, 6), longest - len(live[slot])))]
            if pages.lacking(slot, len(live[slot]) + len(more)) <= pages.free:
                pages.extend(slot, len(live[slot]) + len(more))
                start = len(live[slot])
                live[slot] = [*live[slot], *more]
                write(slot, start)
        elif action == "end":
            pages.end(slot)
            del live[slot]
        elif action == "keep":
            least = 4 * sum(pages._users[page] + pages._keepers[page] > 1 for page in pages._of_slot[slot])
            pages.keep(slot, np.array(live.pop(slot)[: rng.randint(max(least, 1), longest)], np.int32))
        elif action == "swap":
            other = rng.choice([s for s in range(slots) if s != slot])
            if whole:
                for offset in range(longest):
                    one, two = contents.pop((slot, offset), None), contents.pop((other, offset), None)
                    contents |= {} if two is None else {(slot, offset): two}
                    contents |= {} if one is None else {(other, offset): one}
            pages.swap(slot, other)
            came, live[other] = live.get(other), live.pop(slot)
            live |= {} if came is None else {slot: came}
        pages.write_table()
        for s, context in live.items():
            places = zip(*(x.tolist() for x in pages.places(s, 0, len(context))), strict=True)
            assert [contents[place] for place in places] == context
        for each in pages._kept:
            at = [(each.pages[0 if whole else n // 4], n if whole else n % 4) for n in range(len(each.tokens))]
            assert [contents[place] for place in at] == each.tokens.tolist()
        used = len(live) if whole else len({page for s in live for page in pages._of_slot[s]})
        assert (pages.used, pages.free) == (used, pages.usable - used)
        if not whole:
            assert len(pages._free) + pages.used + pages.kept == pages.usable
    for s in list(live):
        pages.end(s)
    assert pages.free == pages.usable
    assert {pages.start([], 1) for _ in range(slots)} == set(range(slots)), "no slot is lost, or given out twice"
    assert pages.start([], 1) is None


def run(engine, *requests):
    for request in requests:
        engine.submit(request)
    done = []
    while engine.pending:
        done += engine.poll()
    return sorted(done, key=lambda each: (each.request_id, each.index))


def count_computed(monkeypatch):
    """A list that gets the number of tokens of each pass that computes known ones."""
    from dapo_rl.engines.native import scheduler

    computed = []
    plain = scheduler.compute

    def counting(model, cache, pages, work, most, device):
        computed.append(min(sum(prefill.left for prefill in work), most))
        return plain(model, cache, pages, work, most, device)

    monkeypatch.setattr(scheduler, "compute", counting)
    return computed
