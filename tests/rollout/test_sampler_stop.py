"""A stop in the middle of a fill: nothing sampled is lost or counted twice, and the continued fill is the undisturbed
one."""

import copy
import json
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import Prompts, ScriptedEngine, TextVerifier, make_prompt, make_sample, small_model, tokenizer, weights_of

from dapo_rl.config import SamplingSettings
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.errors import StopRequested
from dapo_rl.rollout import episodes, pending_steps
from dapo_rl.rollout.episodes import poll_engine
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.train.ledger import Ledger
from dapo_rl.types import Batch, Verdict

KINDS = [["right"] * 4, ["wrong"] * 4, ["right", "wrong", "wrong", "wrong"], ["right", "crash"] * 2]


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch):
    """The number of checks must not depend on the speed of the machine."""
    monkeypatch.setattr(episodes, "STOP_LOOK_S", 60)
    monkeypatch.setattr(pending_steps, "ANSWER_LOOK_S", 0.0)
    monkeypatch.setattr(episodes, "GRACE_S", 0.0)


class LateVerifier(TextVerifier):
    """Its verdicts come at every other `release` after a group was submitted."""

    def __init__(self):
        self.asked: list[str] = []
        self._open = []

    def submit(self, prompt, samples):
        self.asked.append(prompt.id)
        self._open.append((Future(), self(prompt, samples)))
        return self._open[-1][0]

    def release(self):
        for ticket, given_verdicts in self._open[::2]:
            if ticket.set_running_or_notify_cancel():
                ticket.set_result(given_verdicts)
        self._open = self._open[1::2]


class StopAt:
    """Requests a stop at the n-th check; with None, it only counts."""

    def __init__(self, n=None, verifier=None):
        self.n, self.verifier, self.checks = n, verifier, 0

    def __call__(self):
        if self.checks == self.n:
            raise StopRequested
        self.checks += 1
        if isinstance(self.verifier, LateVerifier):
            self.verifier.release()


def sampler_for(engine, prompts, verifier, stop=(), **changes):
    params = SamplingParams(max_new_tokens=60, stop=stop)
    return Sampler(
        prompts, engine, verifier, params, SamplingSettings(group_size=4, **changes), cap=1000, seed=0, vocabulary=400
    )


def saved(sampler):
    with TemporaryDirectory() as directory:
        sampler.save(Path(directory))
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def moved(sampler, new):
    """A sampler of another process, with the state of this one."""
    with TemporaryDirectory() as directory:
        sampler.save(Path(directory))
        new.load(Path(directory))
    assert saved(new) == saved(sampler)
    return new


def result(fill):
    tokens = (fill.tokens_generated, fill.tokens_cancelled, fill.in_flight, fill.carried_over)
    return (fill.kept, fill.dropped, fill.sampled, *tokens, fill.notes)


def columns_of(sampler, ledger):
    """Tokens by outcome, with the step that was interrupted."""
    if sampler.so_far is not None:
        ledger = ledger.with_interrupted(sampler.so_far)
    return Counter(ledger.columns(sampler.carried_tokens, sampler.in_flight_tokens))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5).filter(lambda kinds: KINDS[2] in kinds),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    policy=st.sampled_from(["carry", "requeue", "drop"]),
    width=st.sampled_from([4, 12, 10**6]),
    late=st.booleans(),
    staleness=st.sampled_from([0, 1, 99]),
    ahead=st.sampled_from([0.0, 2.0]),
    stops=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1, exclude_max=True), st.booleans()), max_size=4),
)
@example(  # stopped while all verdicts are read, after one of a group that is dropped
    kinds=[KINDS[0], KINDS[2], KINDS[0]],
    lengths=[1, 19, 1, 1, 1, 38],
    policy="carry",
    width=10**6,
    late=True,
    staleness=1,
    ahead=0.0,
    stops=[(0, 0.25, False)],
)
@example(  # stopped when a group of this step is complete that is not part of the batch
    kinds=[["right", "wrong", "wrong", "wrong"]],
    lengths=[1, 3, 1],
    policy="carry",
    width=12,
    late=False,
    staleness=1,
    ahead=0.0,
    stops=[(1, 0.75, False)],
)
@example(  # stopped in a step that has more groups than a batch: all pass after many that did not
    kinds=[*[KINDS[0]] * 60, *[KINDS[2]] * 40],
    lengths=[1, 19, 60],
    policy="carry",
    width=10**6,
    late=False,
    staleness=1,
    ahead=0.0,
    stops=[(1, 0.9, True)],
)
def test_the_continued_fill_is_the_undisturbed_one(kinds, lengths, policy, width, late, staleness, ahead, stops):
    def script(request):
        n = int(request.id.removeprefix("draw-"))
        return [
            make_sample(lengths[(5 * n + 3 * i) % len(lengths)], text=text)
            for i, text in enumerate(kinds[n % len(kinds)])
        ]

    def start(prompts, verifier, version=0):
        engine = ScriptedEngine(script, width)
        engine.receive(version)
        chosen = {"surplus": policy, "skip_solved_epochs": 1, "max_staleness": staleness, "ahead": ahead}
        return sampler_for(engine, prompts, verifier, **chosen), engine

    verifier, prompts = LateVerifier() if late else TextVerifier(), Prompts()
    sampler, engine = start(prompts, verifier)
    expected, checks = [], []
    for version in range(4):
        counting = StopAt(None, verifier)
        expected.append(result(sampler.fill(5, counting)))
        checks.append(counting.checks)
        engine.receive(version + 1)
    final, drawn, resting, tokens = saved(sampler), prompts.drawn, prompts.resting, engine.tokens

    verifier, prompts = LateVerifier() if late else TextVerifier(), Prompts()
    ledger, trained, generated = Ledger(), 0, 0
    sampler, engine = start(prompts, verifier)
    for version in range(4):
        for _, where, in_a_new_process in [stop for stop in stops if stop[0] == version]:
            try:
                fill = sampler.fill(5, StopAt(int(where * checks[version]), verifier))
                break  # verdicts that came with the last stop need no more checks
            except StopRequested:
                assert engine.take_unfinished() == []
                columns = columns_of(sampler, ledger)
                assert columns.pop("total") == columns.total() + trained == generated + engine.tokens
                if in_a_new_process:
                    generated += engine.tokens
                    new, engine = start(prompts, verifier, version)
                    sampler = moved(sampler, new)
        else:
            fill = sampler.fill(5, StopAt(None, verifier))
        assert result(fill) == expected[version]
        ledger.add(fill, Batch(()))
        trained += sum(group.tokens for group in fill.kept)
        engine.receive(version + 1)
    assert (saved(sampler), prompts.drawn, prompts.resting) == (final, drawn, resting)
    assert generated + engine.tokens == tokens
    columns = columns_of(sampler, ledger)
    assert columns.pop("total") == columns.total() + trained == tokens


class FirstTokenVerifier:
    def __call__(self, prompt, samples):
        right = [int(sample.token_ids[0]) % 2 == 0 for sample in samples]
        return [Verdict(float(r), r, "correct" if r else "wrong") for r in right]


def outcomes(fill):
    return [*((group.draw, "kept") for group in fill.kept), *((group.draw, outcome) for group, outcome in fill.dropped)]


def all_samples(fill):
    groups = {group.draw: group for group in (*fill.kept, *fill.sampled, *(group for group, _ in fill.dropped))}
    return {(draw, i): sample for draw, group in groups.items() for i, sample in enumerate(group.samples)}


@pytest.mark.slow
@pytest.mark.parametrize(("where", "width"), [(0.3, 5), (0.6, 64), (0.9, 5), (0.9, 64)])
def test_samples_in_flight_continue_with_the_same_tokens(where, width):
    """The second fill is stopped, after samples of the first one have been carried over with older weights."""
    model, newer = small_model(), small_model(seed=5)

    def start(prompts):
        engine = NativeEngine(copy.deepcopy(model), tokenizer(), max_batch=width)
        return sampler_for(engine, prompts, FirstTokenVerifier(), stop=("0", "3", "5", "7")), engine

    sampler, engine = start(Prompts())
    sampler.fill(4)
    engine.receive(1, weights_of(newer))
    counting = StopAt()
    undisturbed = sampler.fill(4, counting)

    prompts = Prompts()
    sampler, engine = start(prompts)
    sampler.fill(4)
    engine.receive(1, weights_of(newer))
    with pytest.raises(StopRequested):
        sampler.fill(4, StopAt(int(where * counting.checks)))
    assert engine.pending == 0
    finished = {
        (flight.draw, i)
        for flight in sampler._episodes.unfinished
        for i, s in enumerate(flight.samples)
        if s is not None
    }
    finished |= {(group.draw, i) for group in (*sampler.carried, *sampler.so_far.sampled) for i in range(4)}
    begun = {
        (flight.draw, begun.index): begun
        for flight in sampler._episodes.unfinished
        for begun in flight.turns[flight.request.id].partial
    }
    assert begun
    assert finished

    new, engine = start(prompts)
    engine.receive(1, weights_of(newer))
    continued = moved(sampler, new).fill(4)
    assert outcomes(continued) == outcomes(undisturbed)
    assert continued.tokens_generated == undisturbed.tokens_generated
    assert continued.earlier_seconds > undisturbed.earlier_seconds == 0
    expected, actual = all_samples(undisturbed), all_samples(continued)
    assert actual.keys() == expected.keys()
    for place, sample in actual.items():
        assert np.array_equal(sample.token_ids, expected[place].token_ids)
        assert np.array_equal(sample.versions, expected[place].versions)
        np.testing.assert_allclose(sample.logps, expected[place].logps, rtol=0, atol=1e-4)
        if place in finished:
            assert np.array_equal(sample.logps, expected[place].logps)
        elif place in begun:
            had = len(begun[place].logps)
            assert np.array_equal(sample.logps[:had], expected[place].logps[:had])


def test_verdicts_that_do_not_come_in_time_are_computed_again(monkeypatch):
    monkeypatch.setattr(pending_steps, "ANSWER_LOOK_S", 0.01)
    verifier, stop = LateVerifier(), threading.Event()
    engine = ScriptedEngine(lambda request: [make_sample(3, text=text) for text in KINDS[2]])
    sampler = sampler_for(engine, Prompts(), verifier)

    def check():
        if stop.is_set():
            raise StopRequested

    timer = threading.Timer(0.1, stop.set)
    timer.start()
    with pytest.raises(StopRequested):
        sampler.fill(2, check)
    timer.join()
    asked, tickets = list(verifier.asked), [ticket for ticket, _ in verifier._open]
    assert len(asked) >= 2
    assert all(ticket.cancelled() for ticket in tickets)

    new = moved(sampler, sampler_for(ScriptedEngine(None), Prompts(), again := LateVerifier()))
    fill = new.fill(2, StopAt(None, again))
    assert again.asked == asked
    assert [group.draw for group in fill.kept] == [0, 1]
    assert fill.tokens_generated == 12 * len(asked)


@pytest.mark.parametrize("fails_at", [5, 7, 12])
def test_a_used_sampler_loads_as_a_new_one(tmp_path, fails_at):
    """A fill that failed, for example because an engine was lost, leaves groups in the engine, and groups with verdicts
    that are pending or were not read."""

    def script(request):
        n = int(request.id.removeprefix("draw-"))
        return [make_sample(1 + 7 * n % 20 + i, text=text) for i, text in enumerate(KINDS[(0, 2, 2, 1)[n % 4]])]

    def begun():
        prompts, verifier = Prompts(), LateVerifier()
        sampler = sampler_for(ScriptedEngine(script, 12), prompts, verifier)
        sampler.fill(3, StopAt(None, verifier))
        return sampler, prompts, verifier

    class Lost(StopAt):
        def __call__(self):
            if self.checks == self.n:
                raise ConnectionError
            self.checks += 1  # no verdict comes

    sampler, prompts, verifier = begun()
    sampler.save(tmp_path)
    stream = copy.deepcopy(prompts)
    with pytest.raises(ConnectionError):
        sampler.fill(5, Lost(fails_at, verifier))
    assert sampler._episodes.stepping > 0
    sampler.load(tmp_path)
    prompts._front, prompts._next = stream._front, stream._next
    assert sampler._episodes.stepping == 0
    same, _, its_verifier = begun()
    verifier._open.clear()
    again, expected = sampler.fill(5, StopAt(None, verifier)), same.fill(5, StopAt(None, its_verifier))
    assert result(again) == result(expected)
    assert saved(sampler) == saved(same)


def test_a_checkpoint_without_an_interrupted_step_loads(tmp_path):
    """Older versions do not write the key."""
    script = lambda request: [make_sample(3, text=text) for text in KINDS[2]]  # noqa: E731
    before = sampler_for(ScriptedEngine(script), Prompts(), TextVerifier())
    before.fill(2)
    before.save(tmp_path)
    state = json.loads((tmp_path / "sampler.json").read_text())
    assert state.pop("interrupted") is None
    (tmp_path / "sampler.json").write_text(json.dumps(state))
    after = sampler_for(ScriptedEngine(script), Prompts(), TextVerifier())
    after.load(tmp_path)
    assert (saved(after), after.so_far) == (saved(before), None)


def test_an_interrupted_step_names_the_prompts_that_a_stream_must_find_again():
    engine = ScriptedEngine(lambda request: [make_sample(3 + int(request.id[5:]), text=t) for t in KINDS[2]])
    sampler = sampler_for(engine, prompts := Prompts(), TextVerifier())
    with pytest.raises(StopRequested):
        sampler.fill(6, StopAt(3))
    assert {prompt.id for prompt in sampler.unfinished} == set(prompts.drawn)
    assert make_prompt("p0") in sampler.unfinished


class NeverDone:
    """An engine in the middle of long samples."""

    version = 0

    def __init__(self):
        self.timeouts = []

    def poll(self, timeout_s=None):
        self.timeouts.append(timeout_s)
        assert timeout_s is not None, "it would generate for minutes"
        threading.Event().wait(timeout_s)
        return []


def test_long_samples_do_not_delay_a_stop(monkeypatch):
    monkeypatch.setattr(episodes, "STOP_LOOK_S", 0.1)
    engine = NeverDone()
    with pytest.raises(StopRequested):
        poll_engine(engine, StopAt(3))
    assert engine.timeouts == [0.1] * 3
