"""`sampling.metric: auto`: right-or-wrong scores are compared by correctness, graded ones by their spread."""

import json

import pytest
from support import Prompts, ScriptedEngine, make_sample

from dapo_rl.base.saved import parse_state
from dapo_rl.config import SamplingSettings
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.errors import CapReachedError
from dapo_rl.rollout.dynamic_sampling import Grading, drops_alike
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.rollout.sampler_state import SavedSampler
from dapo_rl.types import RewardPart, Verdict


def judge(prompt, samples):
    """The text is the score; a word after it says whether the sample is correct or the verifier failed."""
    verdicts = []
    for sample in samples:
        score, _, word = sample.text.partition(" ")
        correct = word == "yes" if word in ("yes", "no") else float(score) > 0.5
        status = "error" if word == "crash" else "correct" if correct else "wrong"
        verdicts.append(Verdict(float(score), correct, status))
    return verdicts


def sampler_for(*groups, verifier=judge, decoupled=False, **changes):
    """The n-th request gets the n-th of these groups of scores, again and again."""

    def script(request):
        n = int(request.id.removeprefix("draw-"))
        return [make_sample(3, text=text) for text in groups[n % len(groups)].split(",")]

    settings = SamplingSettings(group_size=2, surplus="drop", **changes)
    return Sampler(
        Prompts(),
        ScriptedEngine(script),
        verifier,
        SamplingParams(max_new_tokens=100),
        settings,
        cap=settings.cap or 50,
        seed=0,
        decoupled=decoupled,
    )


def outcome(fill):
    return {g.draw: "kept" for g in fill.kept} | {g.draw: outcome for g, outcome in fill.dropped}


@pytest.mark.parametrize("scores", [("1", "-1"), ("1", "0"), ("3 yes", "2 no"), ("0 yes", "1 no"), ("1 yes", "1 no")])
def test_right_or_wrong_scores_are_compared_by_correctness(scores):
    right, wrong = scores
    groups = [f"{right},{right}", f"{right},{wrong}", f"{wrong},{wrong}", "9 crash,8 crash"]
    auto, by_correctness = (sampler_for(*groups, metric=metric).fill(3) for metric in ("auto", "correct"))
    assert outcome(auto) == outcome(by_correctness)
    assert set(outcome(auto).values()) >= {"kept", "all_correct", "all_wrong", "verifier_error"}
    assert auto.notes == []


@pytest.mark.parametrize(
    ("groups", "kept"),
    [
        (["0.1,0.3"], [0, 1]),  # all wrong, and only two values
        (["0.6,0.9"], [0, 1]),  # all right
        (["0,0", "0.2,0.2", "0.2,0", "1,1"], [2, 6]),
        (["1,0", "1,0.5", "0,0.4"], [0, 1]),
    ],
)
def test_graded_scores_are_compared_by_their_spread(groups, kept):
    auto, by_score = (sampler_for(*groups, metric=metric).fill(2) for metric in ("auto", "score"))
    assert [g.draw for g in auto.kept] == [g.draw for g in by_score.kept] == kept
    (note,) = auto.notes
    assert note.startswith("the scores are graded (")
    assert by_score.notes == []


def test_the_note_names_two_scores_and_comes_once():
    sampler = sampler_for("1,0", "0.25,0")
    assert [note[:60] for note in sampler.fill(2).notes] == [
        "the scores are graded (0 and 0.25 are both wrong): from now "
    ]
    assert sampler.fill(2).notes == []


def test_explicit_settings_win():
    with pytest.raises(CapReachedError) as caught:
        sampler_for("0.1,0.3", "0.2,0.2", metric="correct", cap=4).fill(2)
    assert str(caught.value).startswith(
        "sampling.cap: 4 groups drawn, 0 of 2 kept (4 all wrong); sampling.metric=score keeps 2 of these, whose "
        "scores differ; raise sampling.cap, "
    )
    partial = sampler_for("0.1,0.3", "1,0", metric="correct", cap=4, on_cap="partial").fill(4)
    assert [g.draw for g in partial.kept] == [1, 3]
    assert "sampling.metric=score keeps 2 of these" in partial.notes[0]
    with pytest.raises(CapReachedError, match=r"\(4 all wrong\); raise sampling\.cap"):
        sampler_for("0,0", metric="correct", cap=4).fill(2)


def test_without_the_filter_there_is_nothing_to_say():
    assert sampler_for("0.1,0.3", dynamic=False).fill(2).notes == []


def test_what_was_recognised_is_saved(tmp_path):
    before = sampler_for("1,0", "0.25,0", "0,0")
    before.fill(2)
    before.save(tmp_path)
    assert json.loads((tmp_path / "sampler.json").read_text())["grading"] == {
        "correct": 1.0,
        "wrong": 0.0,
        "graded": True,
        "rewards": {},
    }
    after = sampler_for("0,0", "1,0")  # on its own it would call the first of these all wrong
    after.load(tmp_path)
    fill = after.fill(1)
    assert fill.notes == []
    assert set(outcome(fill).values()) == {"kept", "no_spread"}


def test_a_checkpoint_without_it_can_be_read():
    state = {"next_draw": 3, "acceptance": {"overall": [3.0, 4.0], "sources": {}}, "carried": [], "flights": []}
    assert Grading(**parse_state(SavedSampler, state).grading.model_dump()) == Grading()


# Several rewards.

LENGTH = 0.2
"""Weight of the second reward."""


def judge_both(weight):
    """The text is the score of the first reward and, after a slash, that of the second, which may not apply."""

    def verifier(prompt, samples):
        verdicts = []
        for sample in samples:
            first, _, second = sample.text.partition("/")
            parts = [RewardPart("math", float(first))] if first else []
            parts += [RewardPart("length", float(second), weight)] if second else []
            score = sum(part.weight * part.score for part in parts)
            correct = parts[0].score > 0.5
            verdicts.append(Verdict(score, correct, "correct" if correct else "wrong", parts=tuple(parts)))
        return verdicts

    return verifier


def outcomes(*groups, weight=LENGTH, n=2, **changes):
    sampler = sampler_for(*groups, verifier=judge_both(weight), **changes)
    fill = sampler.fill(n)
    return outcome(fill), fill.notes


ALL_RIGHT, MIXED, ALL_WRONG = "1/0.1,1/0.9", "1/0.5,-1/0.5", "-1/0.1,-1/0.2"


def test_a_minor_reward_does_not_keep_a_group():
    found, notes = outcomes(ALL_RIGHT, MIXED, ALL_WRONG)
    assert found[0] == "all_correct"
    assert found[1] == found[4] == "kept"
    assert found[2] == "all_wrong"
    assert notes == [
        "length adds at most half as much as math: groups are kept if math differs; sampling.metric=score compares the "
        "sums of all rewards",
    ]


def test_with_rewards_apart_any_of_them_keeps_a_group():
    """Also the minor one, and two that cancel in the sum. One that has no weight does not count."""
    groups = (ALL_RIGHT, "1/0,0/1", "1/0.5,1/0.5", "-1/2,-1/2", "1,1/0.5")
    found, notes = outcomes(*groups, decoupled=True, n=4, weight=1.0)
    assert [found[n] for n in range(5)] == ["kept", "kept", "all_correct", "all_wrong", "all_correct"]
    assert notes == []
    assert outcomes(*groups, n=2, weight=1.0)[0][1] == "no_spread", "summed, they are equal"
    found, _ = outcomes(ALL_RIGHT, MIXED, decoupled=True, weight=0.0)
    assert (found[0], found[1]) == ("all_correct", "kept")
    found, _ = outcomes("1/0,0/1", "-1/0.1,-1/0.2", decoupled=True, metric="correct")
    assert (found[0], found[1]) == ("kept", "all_wrong"), "an explicit metric wins"


def test_sums_decide_between_rewards_of_one_size():
    found, notes = outcomes("1/0,1/1", "0/1,0/1", "0/1,1/0", "1/1,0/1", weight=1.0)
    assert [found[n] for n in (0, 1, 2, 3)] == ["kept", "all_wrong", "no_spread", "kept"]
    assert notes == []


def test_the_larger_reward_counts_wherever_it_stands():
    found, notes = outcomes("1/5,1/5", "1/5,0/5", "1/5,1/80", weight=0.1)  # contributes up to 7.5
    assert [found[n] for n in (0, 1, 2)] == ["all_correct", "kept", "kept"]
    assert "math adds at most half as much as length: groups are kept if length differs" in notes[-1]


def test_a_group_to_which_only_a_minor_reward_applies_is_kept_by_it():
    found, _ = outcomes("1/,-1/", "/0.1,/0.9", "/0.4,/0.4", MIXED, n=3)
    assert [found[n] for n in (0, 1, 2, 3)] == ["kept", "kept", "all_wrong", "kept"]


def test_a_reward_of_weight_0_does_not_count():
    found, _ = outcomes("1/0,1/1", MIXED, weight=0.0, n=1)
    assert [found[n] for n in (0, 1)] == ["all_correct", "kept"]


@pytest.mark.parametrize(("metric", "first"), [("correct", "all_correct"), ("score", "kept")])
def test_explicit_settings_win_with_several_rewards(metric, first):
    found, notes = outcomes(ALL_RIGHT, MIXED, MIXED, metric=metric)
    assert (found[0], found[1], notes) == (first, "kept", [])


@pytest.mark.parametrize(
    ("changes", "drops"),
    [
        ({"metric": "correct"}, True),
        ({"metric": "auto"}, False),
        ({"metric": "score"}, False),
        ({"metric": "correct", "dynamic": False}, False),
        ({"metric": "correct", "on_cap": "fill"}, False),
        ({"metric": "correct", "on_cap": "partial"}, True),
    ],
)
def test_only_correctness_drops_groups_whatever_their_rewards(changes, drops):
    """Groups that may fill up a batch need their rewards."""
    found = drops_alike(SamplingSettings(**changes))
    assert (found is not None) == drops
    if found is not None:
        right, wrong = Verdict(1.0, True, "correct"), Verdict(1.0, False, "wrong")
        assert [found([right, right]), found([wrong, wrong]), found([right, wrong])] == [True, True, False]
