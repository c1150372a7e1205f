"""Samples that have begun: they go on under new weights, survive a restart to the bit, and can be set aside."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import small_model, tokenizer

from dapo_rl.models.forward import response_logps
from dapo_rl.rollout.engine import Request, SamplingParams, set_aside, tokens_in_flight
from dapo_rl.rollout.native import engine as native
from dapo_rl.rollout.native.engine import NativeEngine
from dapo_rl.types import TrainSample


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
    return {key: sample.token_ids for key, sample in samples.items()}


def weights_of(model):
    return dict(model.named_parameters())


@settings(max_examples=15, deadline=None)
@given(polls=st.integers(0, 12), width=st.sampled_from([2, 5, 64]), prefill=st.sampled_from([8, 4096]))
def test_the_same_weights_again_change_no_token(polls, width, prefill):
    model = small_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(native.PREFILL_TOKENS, "cpu", prefill)
        engine = engine_for(model, max_batch=width)
        plain = finish(engine, start(engine, mixed(), 0))
        engine = engine_for(model, max_batch=width)
        samples = start(engine, mixed(), polls)
        before = engine.pending
        engine.load_weights(1, weights_of(model))
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
    written = tokens_in_flight(engine) // 3
    engine.load_weights(1, weights_of(new))
    samples = finish(engine)
    assert len(samples) == 3
    for sample in samples.values():
        assert sample.versions == (0, 1)
        whole = [TrainSample((5, 6, 7, 8), sample.token_ids, (), 0.0, 0)]
        before, after = (response_logps(model, whole, 1.0, 0).logps[0].tolist() for model in (reference, new))
        assert sample.logps[:written] == pytest.approx(before[:written], abs=1e-4)
        assert sample.logps[written:] == pytest.approx(after[written:], abs=1e-4)
        assert 0 < written < len(sample.token_ids)


@settings(max_examples=15, deadline=None)
@given(polls=st.integers(0, 12), width=st.sampled_from([2, 5, 64]))
def test_an_engine_that_takes_over_the_state_goes_on_to_the_bit(polls, width):
    old, new = small_model(), small_model(seed=5)
    engine = engine_for(old, max_batch=width)
    start(engine, mixed(), polls)
    engine.load_weights(1, weights_of(new))
    state = json.loads(json.dumps(engine.state()))
    expected = finish(engine)
    resumed = engine_for(new, max_batch=width)
    resumed.restore(state)
    resumed.load_weights(1, weights_of(new))
    assert finish(resumed) == expected
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), new.parameters(), strict=True))


def test_begun_samples_that_wait_for_slots_are_not_forgotten_when_weights_change_again():
    """An engine with fewer slots takes over: some of what had begun goes on, and the rest waits."""
    model = small_model()
    work = [request("first", count=1, max_new_tokens=5), request("second", count=1, max_new_tokens=8)]
    work.append(request("long", count=6))
    engine = engine_for(model)
    plain = finish(engine, start(engine, work, 0))
    engine = engine_for(model)
    samples = start(engine, work, 1)
    narrow = engine_for(model, max_batch=3)
    narrow.restore(engine.state())
    samples |= {(c.request_id, c.index): c.sample for c in narrow.poll()}
    assert set(samples) == {("first", 0), ("second", 0)}
    narrow.load_weights(1, weights_of(model))
    assert narrow.pending == 6
    assert token_ids(finish(narrow, samples)) == token_ids(plain)


def test_what_is_set_aside_goes_on_afterwards():
    model = small_model()
    engine = engine_for(model)
    plain = finish(engine, start(engine, mixed(), 0))
    samples = start(engine, mixed(), 3)
    before = engine.pending
    with set_aside(engine):
        assert engine.pending == 0
        evaluated = finish(engine, start(engine, [request("eval", prompt=range(5, 40), max_new_tokens=40)], 0))
        assert set(evaluated) == {("eval", 0), ("eval", 1), ("eval", 2)}
    assert engine.pending == before
    assert token_ids(finish(engine, samples)) == token_ids(plain)


def test_waiting_requests_and_lost_tokens_are_told_apart_after_new_weights():
    model = small_model()
    engine = engine_for(model, max_batch=4)
    start(engine, [request("a", count=2, max_new_tokens=3), request("b", count=3), request("c", count=2)], 1)
    assert engine.waiting == {"c"}
    in_flight = tokens_in_flight(engine)
    engine.load_weights(1, weights_of(model))
    assert engine.waiting == {"c"}
    assert engine.pending == 5
    assert tokens_in_flight(engine) == in_flight > 0
    assert engine.cancel("b") == in_flight
    assert engine.cancel("c") == 0
    assert engine.pending == 0
    assert engine.poll() == []
