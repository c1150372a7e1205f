"""Samples that have begun: they go on under new weights, survive a restart to the bit, and can be set aside."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ids, small_model, tokenizer, train_sample, weights_of

from dapo_rl.engines.hf import HFEngine
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.errors import UserError
from dapo_rl.models.response_logps import response_logps
from dapo_rl.types import Trajectory


def request(name, prompt=(5, 6, 7, 8), count=3, seed=7, **params):
    params = {"max_new_tokens": 24, "ignore_eos": True} | params
    return Request(name, tuple(prompt), count, SamplingParams(**params), seed)


def mixed():
    """Prompts and limits of all lengths, so that something is finished, begun, and waiting at any time."""
    return [
        request(f"r{i}", prompt=range(5, 8 + i), count=1 + i % 4, seed=i, max_new_tokens=6 + 5 * (i % 5))
        for i in range(7)
    ]


def engine_for(model, **options):
    return NativeEngine(model, tokenizer(), **options)


def finish(engine, samples=None):
    samples = dict(samples or {})
    while engine.pending:
        samples |= {(c.request_id, c.index): c.sample for c in engine.poll()}
    return samples


def start(engine, requests, polls):
    for r in requests:
        engine.submit(r)
    samples = {}
    for _ in range(polls):
        samples |= {(c.request_id, c.index): c.sample for c in engine.poll()}
    return samples


def token_ids(samples):
    return {key: ids(sample) for key, sample in samples.items()}


@cache
def undisturbed(**options):
    """The samples of `mixed` from an engine that gets no weights meanwhile."""
    engine = engine_for(small_model(), **options)
    return finish(engine, start(engine, mixed(), 0))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(polls=st.integers(0, 12), width=st.sampled_from([2, 5, 64]), prefill=st.sampled_from([8, 4096]))
def test_the_same_weights_again_change_no_token(polls, width, prefill):
    model = small_model()
    plain = undisturbed(max_batch=width, prefill_tokens=prefill)
    engine = engine_for(model, max_batch=width, prefill_tokens=prefill)
    samples = start(engine, mixed(), polls)
    before = engine.pending
    engine.receive(1, weights_of(model))
    assert engine.pending == before
    samples = finish(engine, samples)
    assert token_ids(samples) == token_ids(plain)
    for key, sample in samples.items():
        assert sample.logps == pytest.approx(plain[key].logps, abs=1e-4)


def test_each_token_keeps_the_log_probability_of_the_weights_that_sampled_it():
    old, new = small_model(), small_model(seed=5)
    reference = small_model()  # the engine samples from `old` itself, whose weights it overwrites
    engine = engine_for(old)
    done = start(engine, [request("a", count=2, max_new_tokens=4), request("b", count=3)], 1)
    assert {key[0] for key in done} == {"a"}
    unfinished = engine.take_unfinished()
    assert [r.id for r in unfinished] == ["b"]
    written = unfinished[0].tokens // 3
    engine.submit(unfinished[0])
    engine.receive(1, weights_of(new))
    samples = finish(engine)
    assert len(samples) == 3
    for sample in samples.values():
        assert sample.versions.tolist() == [0] * written + [1] * (len(sample.token_ids) - written)
        assert sample.mask.all()
        whole = [train_sample((5, 6, 7, 8), sample.token_ids, 0.0, 0.0, 0)]
        before, after = (response_logps(model, whole, 1.0, 0).logps[0].tolist() for model in (reference, new))
        assert sample.logps[:written] == pytest.approx(before[:written], abs=1e-4)
        assert sample.logps[written:] == pytest.approx(after[written:], abs=1e-4)
        assert 0 < written < len(sample.token_ids)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(polls=st.integers(0, 12), width=st.sampled_from([2, 5, 64]))
def test_an_engine_that_gets_the_unfinished_work_continues_bit_for_bit(polls, width):
    old, new = small_model(), small_model(seed=5)
    engine = engine_for(old, max_batch=width)
    start(engine, mixed(), polls)
    engine.receive(1, weights_of(new))
    unfinished = engine.take_unfinished()
    assert engine.pending == 0
    for r in unfinished:
        engine.submit(r)
    expected = finish(engine)
    resumed = engine_for(new, max_batch=width)
    resumed.receive(1, weights_of(new))
    for r in unfinished:
        resumed.submit(r)
    assert finish(resumed) == expected
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), new.parameters(), strict=True))


def with_stop_strings():
    return [*mixed(), request("stop", count=4, stop=("1", "=?"), ignore_eos=False, max_new_tokens=20)]


@cache
def by_generate():
    hf = HFEngine(small_model(), tokenizer(), 64)
    return finish(hf, start(hf, with_stop_strings(), 0))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(polls=st.integers(0, 12))
def test_the_engines_continue_each_others_samples(polls):
    """Also with stop strings, which may begin in the tokens of one engine and end in those of the other."""
    model, plain = small_model(), by_generate()
    engine = engine_for(model)
    samples = start(engine, with_stop_strings(), polls)
    hf = HFEngine(model, tokenizer(), 64)
    for r in engine.take_unfinished():
        hf.submit(r)
    samples = finish(hf, samples)
    assert token_ids(samples) == token_ids(plain)
    for key, sample in samples.items():
        assert (sample.text, sample.finish_reason) == (plain[key].text, plain[key].finish_reason)
        assert sample.logps == pytest.approx(plain[key].logps, abs=1e-4)


@pytest.mark.parametrize("make", [engine_for, lambda model: HFEngine(model, tokenizer(), 64)])
def test_a_next_turn_begins_with_the_tokens_that_are_there(make):
    """Two tokens of the policy's and three of an environment's: the context is all five, the mask tells them apart."""
    model = small_model()
    turns = Trajectory(
        (20, 21, 30, 31, 32), (-0.5, -0.25, 0, 0, 0), versions=4, mask=(True, True, False, False, False), index=1
    )
    engine = make(model)
    engine.receive(6, weights_of(model))
    engine.submit(Request("a", (5, 6, 7), 2, SamplingParams(9, ignore_eos=True), 7, partial=(turns,), new=()))
    ((_, sample),) = finish(engine).items()
    assert ids(sample)[:5] == (20, 21, 30, 31, 32)
    assert sample.mask.tolist() == [True, True, False, False, False, True, True, True, True]
    assert sample.versions.tolist() == [4] * 5 + [6] * 4
    whole = [train_sample((5, 6, 7), sample.token_ids, 0.0, 0.0, 0)]
    expected = response_logps(model, whole, 1.0, 0).logps[0].tolist()
    assert sample.logps[:5].tolist() == [-0.5, -0.25, 0, 0, 0]
    assert sample.logps[5:] == pytest.approx(expected[5:], abs=1e-4)


def test_begun_samples_that_wait_for_slots_are_not_forgotten_when_weights_change_again():
    """An engine with fewer slots takes over: some of what had begun continues, and the rest waits."""
    model = small_model()
    work = [request("first", count=1, max_new_tokens=5), request("second", count=1, max_new_tokens=8)]
    work.append(request("long", count=6))
    engine = engine_for(model)
    plain = finish(engine, start(engine, work, 0))
    engine = engine_for(model)
    samples = start(engine, work, 1)
    narrow = engine_for(model, max_batch=3)
    for r in engine.take_unfinished():
        narrow.submit(r)
    samples |= {(c.request_id, c.index): c.sample for c in narrow.poll()}
    assert set(samples) == {("first", 0), ("second", 0)}
    narrow.receive(1, weights_of(model))
    assert narrow.pending == 6
    assert token_ids(finish(narrow, samples)) == token_ids(plain)


@pytest.mark.parametrize("set_aside", [False, True])
def test_a_turn_that_waits_goes_before_the_rest_of_a_group(set_aside):
    """As after a stop, when no prompt is half started: a run that is stopped goes on in the same order."""
    engine = engine_for(small_model(), max_batch=2)
    engine.submit(replace(request("group", count=4), limits=(3, 24, 24, 24)))
    order = [completion.index for completion in engine.poll()]
    assert order == [0]
    engine.submit(replace(request("turn", count=1, max_new_tokens=6), partial=(Trajectory((9, 9)),), new=()))
    if set_aside:
        for r in engine.take_unfinished():
            engine.submit(r)
    order = [(completion.request_id, completion.index) for completion in engine.poll()]
    assert order == [("turn", 0)]


def test_requests_that_never_began_and_lost_tokens_are_told_apart():
    model = small_model()
    engine = engine_for(model, max_batch=4)
    start(engine, [request("a", count=2, max_new_tokens=3), request("b", count=3), request("c", count=2)], 1)
    engine.receive(1, weights_of(model))
    assert engine.pending == 5
    unfinished = {r.id: r for r in engine.take_unfinished()}
    assert {name: r.untouched for name, r in unfinished.items()} == {"b": False, "c": True}
    assert unfinished["b"].tokens > 0
    for r in unfinished.values():
        engine.submit(r)
    assert engine.cancel(["b"]) == unfinished["b"].tokens
    assert engine.cancel(["c"]) == 0
    assert engine.pending == 0
    assert engine.poll() == []


def test_memory_is_taken_once_for_the_longest_context():
    engine = engine_for(small_model(), longest=100)
    made = []
    plain = engine._batch.make_room
    engine._batch.make_room = lambda longest: made.append(longest) or plain(longest)
    finish(engine, start(engine, [request("short", prompt=range(5, 8)), request("long", prompt=range(5, 70))], 0))
    assert made == [100]


@pytest.mark.parametrize("layout", [{}, {"page_tokens": 16}], ids=["whole", "paged"])
def test_a_begun_sample_can_be_longer_than_all_before_it(layout):
    """The memory is taken again for it, if no length was announced."""
    engine = engine_for(small_model(), **layout)
    finish(engine, start(engine, [request("short")], 0))
    begun = Trajectory(range(5, 75), -0.5, index=0)
    long = Request("long", (5, 6, 7), 1, SamplingParams(80, ignore_eos=True), 7, partial=(begun,), new=())
    hf = HFEngine(small_model(), tokenizer(), 64)
    sample, expected = (finish(each, start(each, [long], 0))["long", 0] for each in (engine, hf))
    assert ids(sample) == ids(expected)
    assert sample.logps == pytest.approx(expected.logps, abs=1e-4)


def test_a_longer_request_than_was_announced_is_refused():
    engine = engine_for(small_model(), longest=30)
    with pytest.raises(UserError, match="a request of up to 115 tokens is longer than the 30 that the memory"):
        engine.submit(request("long", prompt=range(5, 80), max_new_tokens=40))


def test_polling_ends_after_the_time_that_it_is_given():
    engine = engine_for(small_model())
    engine.submit(request("a", max_new_tokens=100))
    assert engine.poll(timeout_s=0) == []
    assert engine.pending == 3
    assert len(finish(engine)) == 3
