"""Pages: shared prompts, samples that give way, and prompts in portions leave every token and log-probability alone."""

import random
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import ids, small_model, tokenizer, weights_of

from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.native.kv_cache import CacheLayout, KVBudget
from dapo_rl.engines.native.page_table import Pages
from dapo_rl.engines.protocol import Request, SamplingParams

TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
"""Two layers, keys and values, two heads of eight numbers in float32."""


def request(name, prompt=(5, 6, 7, 8), count=3, seed=7, **params):
    return Request(name, tuple(prompt), count, SamplingParams(**({"max_new_tokens": 24} | params)), seed)


def mixed(seed=0):
    """Groups with prompts of 1 to 50 tokens and responses of up to 40."""
    rng = random.Random(seed)
    return [
        request(
            f"r{i}",
            prompt=[rng.randrange(5, 14) for _ in range(rng.choice([1, 7, 8, 9, 16, 25, 50]))],
            count=rng.randint(1, 5),
            seed=i,
            max_new_tokens=rng.randint(1, 40),
            ignore_eos=rng.random() < 0.5,
        )
        for i in range(6)
    ]


def run(engine, requests):
    for r in requests:
        engine.submit(r)
    samples = {}
    while engine.pending:
        samples |= {(c.request_id, c.index): c.sample for c in engine.poll()}
    return samples


def assert_same(samples, expected):
    assert samples.keys() == expected.keys()
    for key, sample in samples.items():
        assert (ids(sample), sample.finish_reason, sample.text) == (
            ids(expected[key]),
            expected[key].finish_reason,
            expected[key].text,
        )
        assert sample.logps == pytest.approx(expected[key].logps, abs=1e-4)


@pytest.fixture(scope="module")
def model():
    return small_model()


@cache
def undisturbed(seed):
    """The work of a seed, and its samples from an engine that has room for everything."""
    work = mixed(seed)
    return work, run(NativeEngine(small_model(), tokenizer(), max_batch=64, longest=longest_of(work)), work)


def longest_of(work):
    return max(r.longest for r in work)


@pytest.mark.slow
@settings(max_examples=16, deadline=None)
@given(
    seed=st.integers(0, 3),
    page=st.sampled_from([1, 4, 8, 16]),
    pages=st.integers(0, 60),
    prefill=st.sampled_from([3, 16, 4096]),
    width=st.sampled_from([1, 4, 64]),
)
@example(seed=3, page=1, pages=4, prefill=16, width=4)  # a sample of one token returns to a prompt that is there
def test_pages_preemption_and_portions_change_nothing(seed, page, pages, prefill, width):
    """From a pool that holds one sequence alone to one that holds them all."""
    work, expected = undisturbed(seed)
    longest = longest_of(work)
    room = -(-longest // 64) * 64 // page + pages
    engine = NativeEngine(
        small_model(),
        tokenizer(),
        max_batch=width,
        longest=longest,
        page_tokens=page,
        prefill_tokens=prefill,
        kv_memory_bytes=room * page * TOKEN_BYTES,
    )
    assert_same(run(engine, work), expected)
    assert engine.cache_figures()["most_used"] <= engine.cache_figures()["pages"]
    assert engine._batch.pages.used == 0, "every page is free again"


def test_pages_that_run_out_are_taken_from_the_youngest(model):
    """Ten pages of 8: three samples of 4 + 40 tokens need 6 each, so the last one gives way, and comes back."""
    work = [request("old", count=2, max_new_tokens=40, ignore_eos=True), request("young", count=1, max_new_tokens=40)]
    expected = run(NativeEngine(model, tokenizer(), longest=44), work)
    engine = NativeEngine(model, tokenizer(), longest=44, page_tokens=8, kv_memory_bytes=10 * 8 * TOKEN_BYTES)
    order = []
    for r in work:
        engine.submit(r)
    samples = {}
    while engine.pending:
        for c in engine.poll():
            order.append((c.request_id, c.index))
            samples[c.request_id, c.index] = c.sample
    assert engine.preempted >= 1
    assert order[0] == ("old", 0)
    assert_same(samples, expected)
    assert engine.cache_figures()["most_used"] == 10


def test_full_load_uses_nearly_all_pages(model):
    work = [request(f"r{i}", count=4, seed=i, max_new_tokens=40, ignore_eos=True) for i in range(16)]
    engine = NativeEngine(model, tokenizer(), longest=44, page_tokens=4, kv_memory_bytes=120 * 4 * TOKEN_BYTES)
    run(engine, work)
    assert engine.cache_figures()["used_at_full_load"] >= 0.9 * engine.cache_figures()["pages"]


def test_full_load_is_when_samples_wait(model):
    engine = NativeEngine(model, tokenizer(), longest=44, page_tokens=4)
    run(engine, [request("a", count=4, max_new_tokens=40, ignore_eos=True)])
    assert engine.cache_figures()["used_at_full_load"] is None


def test_a_group_shares_the_pages_of_its_prompt(model):
    """A prompt of 50 tokens has 6 full pages of 8; each of 5 samples adds one for the rest and one as it grows."""
    engine = NativeEngine(model, tokenizer(), longest=60, page_tokens=8)
    work = request("a", prompt=range(5, 55), count=5, max_new_tokens=10, ignore_eos=True)
    samples = run(engine, [work])
    assert engine.cache_figures()["most_used"] == 6 + 5 * 2
    assert_same(samples, run(NativeEngine(model, tokenizer(), longest=60), [work]))


def test_samples_that_return_share_their_prompt_again(model):
    engine = NativeEngine(model, tokenizer(), longest=90, page_tokens=8)
    work = [
        request("short", prompt=range(5, 9), count=1, max_new_tokens=3, ignore_eos=True),
        request("a", prompt=range(5, 55), count=5, max_new_tokens=30, ignore_eos=True),
    ]
    for r in work:
        engine.submit(r)
    samples = {(c.request_id, c.index): c.sample for c in engine.poll()}
    engine.receive(1, weights_of(model))
    assert engine._batch.pages.used == 0
    samples |= run(engine, [])
    assert engine.cache_figures()["most_used"] == 6 + 5 * 4
    assert_same(samples, run(NativeEngine(model, tokenizer(), longest=90), work))


def test_a_long_prompt_is_computed_between_decode_steps(model):
    """While a prompt of 50 tokens is computed in portions of 10, the samples before it go on."""
    engine = NativeEngine(model, tokenizer(), longest=90, page_tokens=8, prefill_tokens=10)
    engine.submit(request("running", count=2, max_new_tokens=40, ignore_eos=True))
    engine.poll(timeout_s=0)
    with torch.inference_mode():
        engine._scheduler.admit()
        engine.submit(request("long", prompt=range(5, 55), count=2, max_new_tokens=5))
        done = []
        for _ in range(5):
            engine._scheduler.admit()
            done.append(engine._scheduler.filling.done if engine._scheduler.filling is not None else None)
            engine._step()
            engine._batch.collect()
    assert done == [10, 20, 30, 40, None]
    assert [row.written for row in engine._batch.rows[:2]] == [6, 6]


def test_prompts_beyond_one_pass_wait_for_the_next(model):
    """Of four prompts of 8 tokens, a pass of 10 begins with two, of which the second is cut."""
    work = [request(f"r{i}", prompt=range(5 + i, 13 + i), count=1, seed=i, max_new_tokens=9) for i in range(4)]
    expected = run(NativeEngine(model, tokenizer(), longest=90), work)
    engine = NativeEngine(model, tokenizer(), longest=90, page_tokens=8, prefill_tokens=10)
    for each in work:
        engine.submit(each)
    with torch.inference_mode():
        engine._scheduler.admit()
    assert [row.request.id for row in engine._batch.rows] == ["r0"]
    assert (engine._scheduler.filling.request.id, engine._scheduler.filling.done) == ("r1", 2)
    assert engine.pending == 4
    samples = {}
    for _ in range(100):
        samples |= {(c.request_id, c.index): c.sample for c in engine.poll(timeout_s=0.05)}
    assert_same(samples, expected)


def test_cancelling_and_new_weights_in_the_middle_of_a_prompt(model):
    long = request("long", prompt=range(5, 55), count=3, max_new_tokens=5, ignore_eos=True)
    expected = run(NativeEngine(model, tokenizer(), longest=90), [long])
    engine = NativeEngine(model, tokenizer(), longest=90, page_tokens=8, prefill_tokens=10)
    engine.submit(request("running", count=2, max_new_tokens=40, ignore_eos=True))
    with torch.inference_mode():
        engine._scheduler.admit()
        engine.submit(long)
        engine._scheduler.admit()
    assert engine._scheduler.filling is not None
    assert engine.pending == 5
    engine.receive(1, weights_of(model))
    assert engine.pending == 5
    assert engine._batch.pages.used == 0
    with torch.inference_mode():
        engine._scheduler.admit()
    assert engine.cancel(["running"]) == 2
    assert_same(run(engine, []), expected)
    engine.submit(request("running", count=1, max_new_tokens=40, ignore_eos=True))
    with torch.inference_mode():
        engine._scheduler.admit()
        engine.submit(long)
        engine._scheduler.admit()
    assert engine._scheduler.filling is not None
    assert engine.cancel(["long"]) == 0
    assert engine.pending == 1
    assert engine.cancel(["running"]) == 1
    assert (engine.pending, engine._batch.pages.used) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), columns=st.integers(1, 6))
def test_every_sequence_reads_what_was_written_for_it(seed, columns):
    """Any order of starting, sharing, growing, exchanging and ending: no page has two owners, and none is lost."""
    rng = random.Random(seed)
    pages = Pages(CacheLayout(4, 20, 6), 4 * columns, torch.device("cpu"))
    live: dict[int, int] = {}
    shared: dict[int, int] = {}
    for _ in range(60):
        action = rng.choice(["start", "share", "extend", "end", "swap"])
        slot = rng.choice(sorted(live)) if live else None
        if action == "start" or slot is None:
            tokens = rng.randint(1, 4 * columns)
            if (new := pages.start([], tokens)) is not None:
                live[new], shared[new] = tokens, 0
        elif action == "share":
            prefix = pages.shared(slot, live[slot])
            if (new := pages.start(prefix, live[slot])) is not None:
                live[new], shared[new] = live[slot], len(prefix)
        elif action == "extend":
            tokens = min(live[slot] + rng.randint(1, 6), 4 * columns)
            if pages.lacking(slot, tokens) <= pages.free:
                pages.extend(slot, tokens)
                live[slot] = tokens
        elif action == "end":
            pages.end(slot)
            del live[slot], shared[slot]
        else:
            other = rng.choice([s for s in range(6) if s != slot])
            pages.swap(slot, other)
            for of_slot in (live, shared):
                came = of_slot.pop(other, None)
                of_slot[other] = of_slot.pop(slot)
                if came is not None:
                    of_slot[slot] = came
        pages.write_table()
        owned = []
        for s, tokens in live.items():
            places, offsets = pages.places(s, 0, tokens)
            assert (offsets == np.arange(tokens) % 4).all()
            assert pages.table[s, : -(-tokens // 4)].tolist() == list(dict.fromkeys(places.tolist()))
            assert (places > 0).all()
            owned += list(dict.fromkeys(places.tolist()))[shared[s] :]
        own_by_one = [page for page in owned if owned.count(page) == 1]
        assert pages.used >= len(set(owned))
        assert len(own_by_one) == len(owned), "a page beyond the shared ones belongs to one sequence"
    for s in list(live):
        pages.end(s)
    assert pages.used == 0
    assert {pages.start([], 1) for _ in range(6)} == set(range(6)), "no slot is lost, and none is given out twice"
    assert pages.start([], 1) is None


@pytest.mark.parametrize("whole", [False, True])
def test_a_slot_that_a_sequence_leaves_can_be_used_again(whole):
    """Sequences are moved together: the slot that one leaves is free, and the one that it takes is not."""
    pages = Pages(CacheLayout(4, 4 if whole else 9, 4, whole=whole), 4, torch.device("cpu"))
    assert [pages.start([], 4) for _ in range(3)] == [0, 1, 2]
    pages.end(0)
    pages.swap(2, 0)
    assert [pages.start([], 4) for _ in range(2)] == [2, 3]
    assert pages.start([], 4) is None
    pages.swap(0, 2)  # both in use
    assert pages.start([], 4) is None
    for slot in range(4):
        pages.end(slot)
    assert sorted(pages.start([], 4) for _ in range(4)) == [0, 1, 2, 3]


def test_a_page_holds_a_whole_sequence_where_memory_allows_it():
    cpu = torch.device("cpu")
    assert KVBudget(2**20, 16, 64, cpu).layout(900) == CacheLayout(960, 64, 64, whole=True)
    assert KVBudget(2**20, 1024, 64, cpu).layout(900) == CacheLayout(64, 17, 16)
    assert KVBudget(2**20, 1024, 64, cpu).layout(50) == CacheLayout(64, 16, 16, whole=True)
    assert KVBudget(2**20, 1024, 4, torch.device("cuda")).layout(100) == CacheLayout(64, 9, 4)


def test_there_are_pages_for_all_that_the_table_takes():
    """One sequence at a time: of an unannounced length that is rounded up, and then of one within that."""
    engine = NativeEngine(small_model(), tokenizer(), max_batch=1, page_tokens=4)
    run(engine, [request("short", count=1, max_new_tokens=5)])
    engine.submit(request("long", count=1, max_new_tokens=40, ignore_eos=True))
    (done,) = engine.poll(timeout_s=5)
    assert len(done.sample.token_ids) == 40
