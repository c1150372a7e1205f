"""What a sampler saves is what it loads: every array of every sample, whatever it holds."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import make_prompt

from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.errors import UserError
from dapo_rl.rollout.acceptance_rate import Acceptance
from dapo_rl.rollout.batch_builder import PausedBatch, SampledBatch
from dapo_rl.rollout.dynamic_sampling import Grading, Observed
from dapo_rl.rollout.in_flight import InFlightGroup, Unread
from dapo_rl.rollout.sampler_state import FILE, SamplerState
from dapo_rl.rollout.saved_episodes import Restarted, SavedFlight
from dapo_rl.types import Group, RewardPart, Trajectory, Verdict

LONGEST, VOCABULARY = 12, 100


@st.composite
def columns(draw):
    """Ids, log-probabilities, versions and a mask."""
    kinds = (
        (st.integers(0, VOCABULARY - 1), np.int32),
        (st.floats(-50, 0, width=32), np.float32),
        (st.integers(0, 2**20), np.int32),
        (st.booleans(), np.bool_),
    )
    length = draw(st.integers(1, LONGEST))
    return [np.array(draw(st.lists(values, min_size=length, max_size=length)), kind) for values, kind in kinds]


@st.composite
def samples(draw):
    ids, logps, versions, mask = draw(columns())
    text = draw(st.text(st.characters(exclude_categories=[]), max_size=6))
    return Trajectory(ids, logps, text, draw(st.sampled_from(["stop", "length"])), versions, mask)


def request(draw, prompt, version=0):
    return Request(f"draw-{draw}", prompt.token_ids, 3, SamplingParams(max_new_tokens=LONGEST), seed=draw)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    carried=st.lists(st.tuples(samples(), samples(), samples()), max_size=3),
    arrived=samples(),
    begun=columns(),
    graded=st.booleans(),
    order=st.permutations([*range(3), 11, 12, 13]),
    judged=st.booleans(),
)
def test_everything_comes_back_as_it_was(carried, arrived, begun, graded, order, judged):
    verdicts = (
        Verdict(1.0, True, "correct", "2"),
        Verdict(
            -0.9,
            False,
            "wrong",
            parts=(RewardPart("math", -1.0), RewardPart("½", 0.1 + 0.2, 0.25)),
            extra={"text": "a", "number": 0.1, "count": 3, "flag": True, "nothing": None},
            metrics={"m": (0.1 + 0.2, 3)},
        ),
        Verdict(0.0, False, "error", None, "x"),
    )
    groups = tuple(Group(n, make_prompt(f"p{n}"), whole, verdicts) for n, whole in enumerate(carried))
    prompt = make_prompt("p9")
    left = request(9, prompt).left(
        [Trajectory(begun[0], begun[1], versions=begun[2], mask=begun[3]), Trajectory.nothing(2)]
    )
    flight = InFlightGroup(9, prompt, 4, request(9, prompt), [None, arrived, None], turns={left.id: left})
    rewards = {"math": Observed(-1.0, 1.0, 1.0), "½": Observed(0.1, 0.3, 0.25)}
    kept, dropped, rejected = (Group(n, make_prompt(f"p{n}"), (arrived,) * 3, verdicts) for n in (11, 12, 13))
    by_draw = {group.draw: group for group in (*groups, kept, dropped, rejected)}
    whole = InFlightGroup(14, make_prompt("p14"), 3, request(14, prompt), [arrived] * 3)
    sampled = [by_draw[draw] for draw in order if draw in by_draw]
    counts = {"drawn": 6, "tokens_finished": -5, "tokens_cancelled": 9, "tokens_restarted": 7}
    seconds = {"generate_seconds": 0.1, "verify_seconds": 0.2, "earlier_seconds": 0.3}
    filling = SampledBatch([kept], [(dropped, "surplus")], sampled, **counts, **seconds, notes=["½"])
    unread = Unread(whole, 2, verdicts if judged else None)
    interrupted = PausedBatch(filling, ((rejected, "all_wrong"),), (unread,))
    grading = Grading(correct=1.0, wrong=-1.0, graded=graded, rewards=rewards)
    more = {"interrupted": interrupted if order[0] else None, "order": ("b", "a"), "restarted": Restarted(4, 3)}
    state = SamplerState(15, Acceptance(), grading, groups, (SavedFlight(flight),), **more)
    with TemporaryDirectory() as directory:
        state.write(Path(directory))
        again = SamplerState.read(Path(directory), make_prompt, request, 3, LONGEST, VOCABULARY)
    assert again == state
    for group in again.carried:
        assert [type(value) for value in group.verdicts[1].extra.values()] == [str, float, int, bool, type(None)]


def test_a_group_that_an_older_version_dropped_for_its_age_is_surplus(tmp_path):
    sample = Trajectory(np.array([1]), np.array([-0.5]), "a", "stop", np.array([0]))
    dropped = Group(0, make_prompt("p0"), (sample,) * 3, (Verdict(1.0, True, "correct"),) * 3)
    filling = SampledBatch(dropped=[(dropped, "surplus")], sampled=[dropped], drawn=1)
    SamplerState(1, Acceptance(), Grading(), (), (), PausedBatch(filling)).write(tmp_path)
    saved = json.loads((tmp_path / FILE).read_text())
    saved["interrupted"]["dropped"][0]["fate"] = "stale"
    (tmp_path / FILE).write_text(json.dumps(saved))
    again = SamplerState.read(tmp_path, make_prompt, request, 3, LONGEST, VOCABULARY)
    assert again.interrupted.batch.dropped == [(dropped, "surplus")]


@pytest.mark.parametrize("next_draw", [0, 1])
def test_a_sampler_with_nothing_left_comes_back(tmp_path, next_draw):
    state = SamplerState(next_draw, Acceptance(), Grading(), (), (), None)
    state.write(tmp_path)
    assert SamplerState.read(tmp_path, make_prompt, request, 3, LONGEST, VOCABULARY) == state


def one_group():
    """A state with a group of three samples of one, two and three tokens."""
    samples = tuple(Trajectory(np.arange(n), -0.5, "ab", "stop") for n in (1, 2, 3))
    group = Group(0, make_prompt("p0"), samples, (Verdict(1.0, True, "correct"),) * 3)
    return SamplerState(1, Acceptance(), Grading(), (group,), (), None)


def test_samples_as_long_as_allowed_are_read_and_longer_ones_refused(tmp_path):
    state = one_group()
    state.write(tmp_path)
    assert SamplerState.read(tmp_path, make_prompt, request, 3, 3, 3) == state
    for longest, vocabulary in ((2, 3), (3, 2)):
        with pytest.raises(UserError, match="trajectories"):
            SamplerState.read(tmp_path, make_prompt, request, 3, longest, vocabulary)


def test_a_group_in_flight_has_something_left_to_generate(tmp_path):
    sample = one_group().carried[0].samples[0]
    whole = InFlightGroup(0, make_prompt("p0"), 0, request(0, make_prompt("p0")), [sample] * 3)
    SamplerState(1, Acceptance(), Grading(), (), (SavedFlight(whole),), None).write(tmp_path)
    with pytest.raises(UserError, match=f"{FILE}.*flights"):
        SamplerState.read(tmp_path, make_prompt, request, 3, LONGEST, VOCABULARY)


def interrupted_state():
    """A state with an entry of every kind. Of the group in flight, sample 0 has ended, 1 is begun and 2 is new."""
    sample = Trajectory(np.array([1, 2]), -0.5, "a", "stop")
    right = Verdict(1.0, True, "correct")
    carried, kept, dropped, rejected = (
        Group(draw, make_prompt(f"p{draw}"), (sample,) * 3, (right,) * 3) for draw in range(4)
    )
    prompt = make_prompt("p4")
    left = request(4, prompt).left([sample.replace(index=1), Trajectory.nothing(2)])
    flight = InFlightGroup(4, prompt, 0, request(4, prompt), [sample, None, None], turns={left.id: left})
    whole = InFlightGroup(5, make_prompt("p5"), 0, request(5, prompt), [sample] * 3)
    filling = SampledBatch([kept], [(dropped, "surplus")], [carried, kept, dropped, rejected], drawn=6)
    paused = PausedBatch(filling, ((rejected, "all_wrong"),), (Unread(whole, 2, (right,) * 3),))
    return SamplerState(6, Acceptance(), Grading(), (carried,), (SavedFlight(flight),), paused)


def ended(*there):
    """Verdicts of the samples of a group in flight, where there are some."""
    verdict = {"score": 1.0, "correct": True, "status": "correct", "answer": None, "detail": ""}
    return [verdict if is_there else None for is_there in there]


FLIGHT, FILLING = ("flights", 0), ("interrupted",)


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("next_draw",), 5, "next_draw"),  # that of an entry
        ((*FLIGHT, "draw"), 0, "next_draw"),  # twice the same
        ((*FLIGHT, "arrived"), [1], "flights"),  # twice the same
        ((*FLIGHT, "new"), [], "flights"),
        ((*FLIGHT, "new"), [2, 3], "flights"),
        ((*FLIGHT, "finish_reasons"), [], "flights"),
        ((*FLIGHT, "finish_reasons"), ["stop", "stop"], "flights"),
        (("carried", 0, "finish_reasons"), ["stop"] * 2, "carried"),
        (("carried", 0, "verdicts"), ended(1, 1), "carried"),
        (("acceptance", "overall"), [2.0, 1.0], "acceptance"),
        (("acceptance", "overall"), [0.0, 0.0], "acceptance"),
        (("acceptance", "sources"), {"math": [2.0, 1.0]}, "acceptance"),
        ((*FILLING, "sampled"), [0, 1, 1], "interrupted.sampled"),
        ((*FILLING, "sampled"), [0, 5], "interrupted.sampled"),  # without a verdict
        ((*FILLING, "rejected", 0, "fate"), "kept", "interrupted.rejected"),
        ((*FILLING, "dropped", 0, "fate"), "kept", "interrupted.dropped"),
        ((*FILLING, "unread", 0, "verdicts"), ended(1, 1), "interrupted"),
        ((*FILLING, "unread", 0, "arrived"), [0, 1], "interrupted"),
        ((*FILLING, "kept", 0, "verdicts"), ended(1, 1), "interrupted"),
        ((*FILLING, "dropped", 0, "finish_reasons"), [], "interrupted"),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(tmp_path, place, value, named):
    state = interrupted_state()
    state.write(tmp_path)
    assert SamplerState.read(tmp_path, make_prompt, request, 3, LONGEST, VOCABULARY) == state
    saved = json.loads((tmp_path / FILE).read_text())
    *above, key = place
    inner = saved
    for part in above:
        inner = inner[part]
    assert inner[key] != value
    inner[key] = value
    (tmp_path / FILE).write_text(json.dumps(saved))
    with pytest.raises(UserError, match=rf"{FILE}.*\b{named}\b"):
        SamplerState.read(tmp_path, make_prompt, request, 3, LONGEST, VOCABULARY)
