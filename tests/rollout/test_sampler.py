"""Dynamic sampling: what is kept, in which order, what is counted, and what happens at the cap and beyond the batch."""

import json
import random
import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Prompts, ScriptedEngine, TextVerifier, make_prompt, make_sample

from dapo_rl.config import SamplingSettings
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.errors import CapReachedError, UserError
from dapo_rl.rollout import sampler as sampler_module
from dapo_rl.rollout.acceptance_rate import Acceptance
from dapo_rl.rollout.pending_steps import PendingSteps
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.types import Verdict

RIGHT, WRONG, MIXED, CRASH = ["right"] * 4, ["wrong"] * 4, ["right", "wrong", "wrong", "wrong"], ["right", "crash"] * 2


def by_number(kinds, length=lambda n, i: 3):
    """The n-th request gets the n-th kind of group, again and again; its i-th sample has `length(n, i)` tokens."""

    def script(request):
        n = int(request.id.removeprefix("draw-"))
        return [make_sample(length(n, i), text=text) for i, text in enumerate(kinds[n % len(kinds)])]

    return script


def sampler_for(script, prompts=None, *, width=10**6, max_error_share=1.0, keep=None, verifier=None, **changes):
    return sampler_with(
        ScriptedEngine(script, width), prompts, max_error_share=max_error_share, keep=keep, verifier=verifier, **changes
    )


def sampler_with(engine, prompts=None, *, max_error_share=1.0, keep=None, verifier=None, **changes):
    given_settings = SamplingSettings(group_size=4, **changes)
    sampler = Sampler(
        prompts or Prompts(),
        engine,
        verifier or TextVerifier(),
        SamplingParams(max_new_tokens=100),
        given_settings,
        cap=given_settings.cap or 1000,
        seed=0,
        max_error_share=max_error_share,
        keep=keep,
    )
    return sampler, engine


def draws(groups):
    return [group.draw for group in groups]


def test_only_groups_that_are_partly_right_are_kept_and_every_drop_has_its_reason():
    sampler, _ = sampler_for(by_number([RIGHT, MIXED, WRONG, CRASH]), surplus="drop")
    fill = sampler.fill(3)
    assert draws(fill.kept) == [1, 5, 9]
    reasons = {group.draw: outcome for group, outcome in fill.dropped}
    assert {n: reasons[n] for n in range(9) if n in reasons} == {
        0: "all_correct", 2: "all_wrong", 3: "verifier_error",
        4: "all_correct", 6: "all_wrong", 7: "verifier_error", 8: "all_correct",
    }  # fmt: skip
    assert sum(fill.outcomes().values()) == len(fill.sampled)


def test_without_dynamic_sampling_everything_but_verifier_errors_is_kept():
    sampler, _ = sampler_for(by_number([RIGHT, MIXED, WRONG, CRASH]), dynamic=False)
    fill = sampler.fill(3)
    assert draws(fill.kept) == [0, 1, 2]
    fill = sampler.fill(3)
    assert draws(fill.kept) == [4, 5, 6]
    assert [(g.draw, outcome) for g, outcome in fill.dropped] == [(3, "verifier_error")]


def test_the_filter_sees_correctness_and_not_length():
    """All wrong, with lengths so different that shaped rewards would differ: still dropped."""
    lengths = iter(range(1, 10_000))

    def script(request):
        n = int(request.id.removeprefix("draw-"))
        return [make_sample(next(lengths) % 90 + 1, text=t) for t in (WRONG if n % 2 == 0 else MIXED)]

    sampler, _ = sampler_for(script, surplus="drop")
    fill = sampler.fill(2)
    assert all(any(v.correct for v in group.verdicts) for group in fill.kept)
    assert {outcome for g, outcome in fill.dropped if g.draw % 2 == 0} == {"all_wrong"}


def test_groups_are_admitted_in_the_order_drawn_not_in_the_order_finished():
    """Lengths fall with the draw: the last drawn finish first, and admission must not prefer them."""
    sampler, _ = sampler_for(by_number([MIXED], length=lambda n, i: 90 - n % 80), surplus="drop")
    assert draws(sampler.fill(5).kept) == [0, 1, 2, 3, 4]


def test_admitted_lengths_are_unbiased_where_first_finished_would_be_short():
    def length(n, i=0):
        return [5, 80][n % 2]

    sampler, _ = sampler_for(by_number([MIXED], length), surplus="drop")
    kept = sampler.fill(40).kept
    mean = sum(len(g.samples[0].token_ids) for g in kept) / len(kept)
    assert mean == pytest.approx((5 + 80) / 2)
    # What would have been: of the groups in flight, the 40 that finish first.
    in_flight = sorted(length(n) for n in range(54))
    assert sum(in_flight[:40]) / 40 < 35


def test_where_length_decides_correctness_the_admitted_lengths_are_those_of_all_good_groups():
    """Long responses are right. First-finished admission would train on short groups, and teach to be short."""

    def lengths(n):
        rng = random.Random(n)
        return [min(1 + int(rng.expovariate(1 / 40)), 400) for _ in range(4)]

    def script(request):
        n = int(request.id.removeprefix("draw-"))
        return [make_sample(length, text="right" if length > 25 else "wrong") for length in lengths(n)]

    def is_mixed(n):
        return len({length > 25 for length in lengths(n)}) == 2

    def mean_length(draws):
        return sum(sum(lengths(n)) / 4 for n in draws) / len(draws)

    sampler, engine = sampler_for(script, width=200)
    kept = []
    for version in range(12):
        kept += draws(sampler.fill(10).kept)
        engine.receive(version + 1)
    everything = [n for n in range(kept[-1] + 1) if is_mixed(n)]
    assert kept == everything, "of all good groups, in order, not one was passed over"
    # What would have been: of 20 groups in flight, the 10 good ones that finish first, again and again.
    first_finished = []
    for start in range(0, 240, 20):
        good = [n for n in range(start, start + 20) if is_mixed(n)]
        first_finished += sorted(good, key=lambda n: max(lengths(n)))[:10]
    assert mean_length(first_finished) < 0.9 * mean_length(everything)


def test_a_verifier_that_crashed_is_no_wrong_answer():
    """`right, crash, right, crash` would pass the filter if a crash counted as wrong."""
    sampler, _ = sampler_for(by_number([CRASH, MIXED]), surplus="drop")
    fill = sampler.fill(2)
    assert draws(fill.kept) == [1, 3]
    assert fill.outcomes()["verifier_error"] >= 2
    assert fill.outcomes()["all_wrong"] == 0


def test_a_verifier_that_fails_too_often_stops_the_run():
    sampler, _ = sampler_for(by_number([CRASH, CRASH, MIXED]), max_error_share=0.5, prompts_per_step=2)
    with pytest.raises(UserError, match=r"reward.verifier: failed on .* the first failure: ValueError: it crashed"):
        sampler.fill(2)


def test_a_failed_environment_is_no_reason_of_the_verifier():
    def script(request):
        return [make_sample().replace(scalars={"env_failed": 1.0}), *[make_sample()] * 3]

    def verifier(prompt, samples):
        own, other = (
            Verdict(0.0, False, "timeout", detail="timeout: of it"),
            Verdict(0.0, False, "error", detail="oops"),
        )
        return [own, *[other] * 3]

    sampler, _ = sampler_for(script, verifier=verifier, max_error_share=0.5, prompts_per_step=2)
    with pytest.raises(UserError, match=r"reward.verifier: failed on .* the first failure: oops$"):
        sampler.fill(2)


@pytest.mark.parametrize("on_cap", ["error", "partial", "fill"])
def test_a_verifier_that_always_fails_is_named_at_once_and_not_the_cap(on_cap):
    sampler, engine = sampler_for(by_number([CRASH]), max_error_share=0.5, on_cap=on_cap, prompts_per_step=4)
    with pytest.raises(UserError, match=r"reward.verifier: failed on \d+ of \d+ groups"):
        sampler.fill(4)
    assert engine.tokens <= 12 * 4 * 3


def test_scores_can_be_the_metric():
    sampler, _ = sampler_for(by_number([RIGHT, MIXED]), metric="score", surplus="drop")
    fill = sampler.fill(2)
    assert draws(fill.kept) == [1, 3]
    assert fill.outcomes()["no_spread"] >= 2


def test_a_filter_of_the_users_own():
    sampler, _ = sampler_for(by_number([MIXED]), keep=lambda group: group.draw % 3 == 0, surplus="drop")
    fill = sampler.fill(2)
    assert draws(fill.kept) == [0, 3]
    assert fill.outcomes()["filtered"] >= 2

    sampler, _ = sampler_for(by_number([MIXED]), keep=lambda group: group.missing)
    with pytest.raises(UserError, match=r"sampling.filter: AttributeError"):
        sampler.fill(1)


def test_at_the_cap_the_run_stops_by_default():
    sampler, _ = sampler_for(by_number([RIGHT, WRONG, WRONG, MIXED]), cap=8)
    with pytest.raises(CapReachedError, match=r"8 groups drawn, 2 of 3 kept \(2 all right, 4 all wrong\)"):
        sampler.fill(3)


def test_at_the_cap_the_run_trains_on_fewer_groups_and_says_so():
    sampler, _ = sampler_for(by_number([RIGHT, WRONG, WRONG, MIXED]), cap=8, on_cap="partial")
    fill = sampler.fill(3)
    assert draws(fill.kept) == [3, 7]
    assert "training on 2 groups" in fill.notes[0]


def test_at_the_cap_the_run_fills_up_with_uninformative_groups_and_says_so():
    sampler, _ = sampler_for(by_number([RIGHT, WRONG, CRASH, MIXED]), cap=8, on_cap="fill")
    fill = sampler.fill(3)
    assert draws(fill.kept) == [0, 3, 7]
    assert fill.filled_up == {0}
    assert "filled up with 1 uninformative group" in fill.notes[0]
    assert 0 not in draws(g for g, _ in fill.dropped)


def test_nothing_at_all_to_train_on_is_an_error_under_every_policy():
    for on_cap in ("error", "partial"):
        sampler, _ = sampler_for(by_number([WRONG]), cap=8, on_cap=on_cap)
        with pytest.raises(CapReachedError, match="0 of 3 kept"):
            sampler.fill(3)
    sampler, _ = sampler_for(by_number([WRONG]), dynamic_batch=True, cap=7)
    with pytest.raises(CapReachedError, match="7 groups drawn, 0 of 3 kept"):
        sampler.fill(3)


def test_dynamic_batch_draws_n_and_trains_on_what_passes():
    sampler, _ = sampler_for(by_number([RIGHT, MIXED, WRONG, MIXED]), dynamic_batch=True)
    fill = sampler.fill(6)
    assert len(fill.sampled) == 6
    assert draws(fill.kept) == [1, 3, 5]


def surplus_of(policy, **changes):
    """A first step at full acceptance leaves some of what the first guess of the rate has started."""
    prompts = Prompts()
    sampler, engine = sampler_for(by_number([MIXED]), prompts, surplus=policy, **changes)
    return sampler, engine, prompts, sampler.fill(6)


def test_surplus_is_carried_into_the_next_step():
    sampler, engine, _, first = surplus_of("carry")
    assert draws(first.kept) == [0, 1, 2, 3, 4, 5]
    assert first.carried_over == 2
    assert first.outcomes()["surplus"] == 0
    engine.receive(1)
    second = sampler.fill(6)
    assert draws(second.kept) == [6, 7, 8, 9, 10, 11]
    assert 6 not in draws(second.sampled)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_first_step_has_no_group_that_is_due_and_takes_no_more_than_its_batch(n):
    sampler, _ = sampler_for(by_number([MIXED]), ahead=2.0)
    fill = sampler.fill(n)
    assert draws(fill.kept) == list(range(n))
    assert fill.carried_over, "there were more"


def test_surplus_can_be_dropped():
    sampler, _, _, first = surplus_of("drop")
    assert [(g.draw, outcome) for g, outcome in first.dropped] == [(6, "surplus"), (7, "surplus")]
    assert draws(sampler.fill(1).kept) == [8]


def test_surplus_prompts_can_be_sampled_again_first():
    sampler, _, _, first = surplus_of("requeue")
    assert first.outcomes()["surplus"] == 2
    second = sampler.fill(2)
    assert [g.prompt.id for g in second.kept] == ["p6", "p7"]
    assert draws(second.kept) == [8, 9], "a draw of its own, so other random numbers"


def test_dynamic_batch_draws_again_where_nothing_passes():
    sampler, _ = sampler_for(by_number([RIGHT, WRONG, WRONG, WRONG, MIXED]), dynamic_batch=True)
    fill = sampler.fill(3)
    assert len(fill.sampled) == 6
    assert draws(fill.kept) == [4]


def test_requests_that_never_ran_go_back_to_the_stream():
    prompts = Prompts()
    sampler, engine = sampler_for(by_number([MIXED]), prompts, width=4)
    fill = sampler.fill(2)
    assert [g.prompt.id for g in fill.kept] == ["p0", "p1"]
    assert len(fill.sampled) == 2
    assert engine.take_unfinished() == []
    assert [g.prompt.id for g in sampler.fill(2).kept] == ["p2", "p3"]


@settings(max_examples=80, deadline=None)
@given(
    kinds=st.lists(st.sampled_from([RIGHT, WRONG, MIXED, CRASH]), min_size=1, max_size=7).filter(lambda k: MIXED in k),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    policy=st.sampled_from(["carry", "requeue", "drop"]),
    width=st.sampled_from([4, 12, 10**6]),
    n=st.integers(1, 6),
    staleness=st.integers(0, 2),
)
def test_groups_come_in_draw_order_and_tokens_add_up(kinds, lengths, policy, width, n, staleness):
    sampler, engine = sampler_for(
        by_number(kinds, lambda n, i: lengths[(n + 3 * i) % len(lengths)]),
        surplus=policy,
        width=width,
        max_staleness=staleness,
    )
    generated = settled = cancelled = 0
    seen = []
    for version in range(5):
        fill = sampler.fill(n)
        assert len(fill.kept) == n or (len(fill.kept) > n and policy == "carry" and staleness)
        seen += draws(fill.kept)
        generated += fill.tokens_generated
        cancelled += fill.tokens_cancelled
        settled += sum(g.tokens for g in fill.kept) + sum(g.tokens for g, _ in fill.dropped)
        # Of groups in flight the tokens of finished samples count as generated; they wait with their group.
        assert generated == settled + cancelled + sampler.carried_tokens
        assert engine.tokens == generated + sampler.in_flight_tokens
        assert policy == "carry" or not fill.in_flight + fill.carried_over
        engine.receive(version + 1)
    assert seen == sorted(set(seen))


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 5),
    policy=st.sampled_from(["carry", "requeue", "drop"]),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    width=st.sampled_from([4, 12, 10**6]),
)
def test_a_restored_sampler_continues_as_the_first_would_have(steps, policy, lengths, width):
    script = by_number([MIXED, RIGHT, MIXED, WRONG], lambda n, i: lengths[(n + 3 * i) % len(lengths)])
    prompts = Prompts()
    sampler, engine = sampler_for(script, prompts, surplus=policy, width=width)
    for version in range(steps):
        sampler.fill(3)
        engine.receive(version + 1)
    resumed, its_engine = sampler_for(script, prompts, surplus=policy, width=width)
    with TemporaryDirectory() as directory:
        sampler.save(Path(directory))
        resumed.load(Path(directory))
    its_engine.receive(engine.version)
    drawn_so_far = (list(prompts._front), prompts._next)
    expected = [sampler.fill(3) for _ in range(3)]
    prompts._front, prompts._next = drawn_so_far
    again = [resumed.fill(3) for _ in range(3)]
    assert [(fill.kept, fill.dropped, fill.tokens_generated) for fill in again] == [
        (fill.kept, fill.dropped, fill.tokens_generated) for fill in expected
    ]


def test_groups_in_flight_go_on_under_the_next_weights():
    """The last draws are long: the batch is full without them, and the next one begins with them."""
    sampler, engine = sampler_for(by_number([MIXED], length=lambda n, i: 90 if n in (6, 7) else 3))
    first = sampler.fill(6)
    assert (first.in_flight, first.carried_over, first.tokens_cancelled) == (2, 0, 0)
    engine.receive(1)
    second = sampler.fill(6)
    assert draws(second.kept) == [6, 7, 8, 9, 10, 11]


def test_a_prompt_that_is_drawn_again_gets_other_random_numbers():
    seeds = {}

    def script(request):
        seeds[request.id] = request.seed
        return [make_sample(text=text) for text in MIXED]

    prompts = Prompts()
    prompts.push_front([make_prompt("p0"), make_prompt("p1")])
    sampler, _ = sampler_for(script, prompts)
    sampler.fill(4)
    assert prompts.drawn[:4] == ["p0", "p1", "p0", "p1"]
    assert len({seeds[f"draw-{n}"] for n in range(4)}) == 4


def test_a_slow_group_is_waited_for_and_never_dropped_for_its_age():
    """Its samples are 30 times as long as those of the groups drawn after it, which wait behind it."""
    sampler, engine = sampler_for(by_number([MIXED], length=lambda n, i: 90 if n == 6 else 3))
    assert sampler.fill(6).in_flight == 1
    engine.receive(1)
    second = sampler.fill(6)
    assert draws(second.kept) == [6, 7, 8, 9, 10, 11]
    assert (second.dropped, second.tokens_cancelled) == ([], 0)


class SlowVerifier(TextVerifier):
    """Verdicts come when they are asked for; `order` is the order in which groups were asked about."""

    def __init__(self):
        self.asked, self.submitted = [], []

    def submit(self, prompt, samples):
        self.submitted.append(prompt.id)
        outer = self

        class Ticket:
            def result(self):
                outer.asked.append((prompt.id, len(outer.submitted)))
                return outer(prompt, samples)

            def done(self):
                return False

        return Ticket()


def test_verdicts_are_looked_at_in_order_and_while_later_groups_are_sampled():
    verifier = SlowVerifier()
    sampler, _ = sampler_for(by_number([MIXED], length=lambda n, i: 3 + n), verifier=verifier, prompts_per_step=8)
    plain, _ = sampler_for(by_number([MIXED], length=lambda n, i: 3 + n), prompts_per_step=8)
    assert sampler.fill(8).kept == plain.fill(8).kept
    assert [name for name, _ in verifier.asked] == sorted((n for n, _ in verifier.asked), key=lambda n: int(n[1:]))
    ahead = [submitted - 1 - i for i, (_, submitted) in enumerate(verifier.asked)]
    assert max(ahead) >= 3, "nothing was sampled while verdicts were out"


class LateVerifier(TextVerifier):
    """The verdict on one prompt takes `polls` polls of the engine; `waited` says where somebody waited for it."""

    def __init__(self, slow, polls):
        self.slow, self.polls, self.engine, self.waited = slow, polls, None, []

    def submit(self, prompt, samples):
        outer, due = self, self.engine.polls + (self.polls if prompt.id == self.slow else 0)

        class Ticket:
            def done(self):
                return outer.engine.polls >= due

            def result(self):
                if not self.done():
                    outer.waited.append(prompt.id)
                return outer(prompt, samples)

        return Ticket()


class CountingEngine(ScriptedEngine):
    polls = 0

    def poll(self, timeout_s=None):
        self.polls += 1
        return super().poll(timeout_s)


@pytest.mark.parametrize("waits", [True, False])
def test_a_late_verdict_holds_up_the_engine_only_where_runs_must_be_reproducible(waits):
    script = by_number([MIXED], length=lambda n, i: 3 + n)
    verifier = LateVerifier("p0", polls=20)
    chosen = SamplingSettings(group_size=4, wait_for_verdicts=waits)
    engine = verifier.engine = CountingEngine(script, width=8)
    params = SamplingParams(max_new_tokens=100)
    sampler = Sampler(Prompts(), engine, verifier, params, chosen, cap=1000, seed=0)
    fill = sampler.fill(40)
    assert draws(fill.kept) == list(range(40))
    assert verifier.waited == (["p0"] if waits else [])


def test_a_user_is_told_once_that_the_engine_waits(monkeypatch):
    class Sluggish(TextVerifier):
        def submit(self, prompt, samples):
            verdicts = self(prompt, samples)
            return SimpleNamespace(done=lambda: True, result=lambda: time.sleep(0.02) or verdicts)

    monkeypatch.setattr(sampler_module, "LONG_WAIT_S", 0.05)
    sampler, _ = sampler_for(by_number([MIXED]), verifier=Sluggish())
    (note,) = sampler.fill(8).notes
    assert re.match(r"the engine waited \d s for verdicts and worked for 0 s; raise reward.workers, or ", note)
    assert sampler.fill(8).notes == []
    free, _ = sampler_for(by_number([MIXED]), verifier=Sluggish(), wait_for_verdicts=False)
    assert free.fill(8).notes == []


def test_long_responses_leave_verdicts_more_time():
    def judging(longest):
        return PendingSteps(longest, waits=True).polls_to_wait

    assert [judging(n) for n in (48, 1024, 2048, 20480)] == [4, 4, 8, 80]


def test_an_engine_that_loses_a_request_is_found_out():
    class Forgetful(ScriptedEngine):
        def take_unfinished(self):
            return super().take_unfinished()[1:]

    script = by_number([MIXED], length=lambda n, i: 90 if n in (6, 7) else 3)
    chosen = SamplingSettings(group_size=4)
    params = SamplingParams(max_new_tokens=100)
    sampler = Sampler(Prompts(), Forgetful(script), TextVerifier(), params, chosen, cap=1000, seed=0)
    with pytest.raises(RuntimeError, match="the engine did not return the requests it was given: draw-6"):
        sampler.fill(6)


def test_an_engine_that_stops_half_way_is_found_out():
    class Idle(ScriptedEngine):
        def poll(self, timeout_s=None):
            return []

    params = SamplingParams(max_new_tokens=100)
    engine = Idle(by_number([MIXED]))
    sampler = Sampler(Prompts(), engine, TextVerifier(), params, SamplingSettings(group_size=4), cap=9, seed=0)
    with pytest.raises(RuntimeError, match="the engine returned nothing with 3 unfinished requests"):
        sampler.fill(2)


def test_a_fill_knows_the_weights_it_sampled_with():
    sampler, engine = sampler_for(by_number([MIXED]))
    assert sampler.fill(2).version == 0
    engine.receive(7)
    assert sampler.fill(2).version == 7


def test_the_estimate_follows_a_policy_that_changes():
    """A mean over everything would still say that half of the groups pass."""
    estimate = Acceptance()
    for kept in [True] * 500 + [False] * 500:
        estimate.observe("sums", kept)
    assert estimate.rate("sums") < 0.1


def test_the_estimate_is_kept_for_each_source():
    acceptance = Acceptance()
    for _ in range(40):
        acceptance.observe("easy", False)
        acceptance.observe("fit", True)
    assert acceptance.rate("easy") < 0.15 < 0.9 < acceptance.rate("fit")
    assert 0.5 < acceptance.rate("new") < 0.7, "a little more than seen: too few are topped up, too many are wasted"
    assert Acceptance.model_validate(json.loads(json.dumps(acceptance.model_dump()))) == acceptance


def test_prompts_that_are_always_right_rest_where_that_is_asked_for():
    prompts = Prompts()
    sampler, _ = sampler_for(by_number([RIGHT, MIXED, WRONG]), prompts, surplus="drop", skip_solved_epochs=3)
    sampler.fill(2)
    assert prompts.resting[:2] == [("p0", 3), ("p3", 3)]
    prompts = Prompts()
    sampler_for(by_number([RIGHT, MIXED, WRONG]), prompts, surplus="drop")[0].fill(2)
    assert prompts.resting == []


def test_samples_that_finish_while_the_work_is_taken_back_are_neither_lost_nor_sampled_again():
    """An engine that runs ahead of its polls, as on a GPU, has finished samples when the batch is full."""

    class Ahead(ScriptedEngine):
        late = ()
        whole = 0

        def take_unfinished(self):
            self.late = super().poll()
            self.whole += len(self.late) >= 4
            return super().take_unfinished()

        def poll(self, timeout_s=None):
            late, self.late = self.late, ()
            return list(late) if late or timeout_s == 0 else super().poll(timeout_s)

    engine = Ahead(by_number([MIXED, WRONG], lambda n, i: [1, 9, 5, 9, 3, 9, 7, 9][n % 8]))
    sampler, _ = sampler_with(engine)
    steps = [sampler.fill(2) for _ in range(6)]
    assert [draw for fill in steps for draw in draws(fill.kept)] == list(range(0, 24, 2))
    assert engine.whole > 0
    assert sum(fill.tokens_generated for fill in steps) == engine.tokens - sampler.in_flight_tokens


@pytest.mark.parametrize("dynamic", [True, False])
def test_prompts_are_told_which_groups_have_a_signal_and_nothing_of_failures(dynamic):
    class Told(Prompts):
        def __init__(self):
            super().__init__()
            self.told = []

        def observe(self, *what):
            self.told.append((what[0].id, *what[1:]))

    scripted = by_number([RIGHT, MIXED, WRONG, CRASH, MIXED])

    def script(request):
        """The environment fails in the last kind of group."""
        failed = int(request.id.removeprefix("draw-")) % 5 == 4
        return [sample.replace(scalars={"env_failed": 1.0} if failed else {}) for sample in scripted(request)]

    prompts = Told()
    sampler, _ = sampler_for(script, prompts, dynamic=dynamic, surplus="drop")
    sampler.fill(3)
    sampler.fill(3)
    right = {"p0": len(RIGHT), "p1": sum(text == "right" for text in MIXED), "p2": 0}
    assert {f"p{n}" for n in (0, 1, 2)} <= {name for name, *_ in prompts.told}
    for name, correct, samples, signal in prompts.told:
        kind = f"p{int(name[1:]) % 5}"
        assert (correct, samples, signal) == (right[kind], len(MIXED), kind == "p1")
