"""Verifiers of the run's own process beside those of workers."""

import pickle

from support import make_prompt

from dapo_rl.config import RewardSettings
from dapo_rl.envs import AtHand
from dapo_rl.rewards import build_verifier
from dapo_rl.rewards.served import AsScore, MixedVerifier, Served
from dapo_rl.rewards.validation import failure
from dapo_rl.types import RewardPart, Trajectory, Verdict


class Opinion(Served):
    def __init__(self, name):
        self.name, self.compared = name, []

    def submit(self, prompt, samples):
        return AtHand([Verdict(0.5, True, "correct") for _ in samples])

    def compare(self, verdict, rule):
        self.compared.append((rule.correct, rule.status))


def rule(prompt, samples):
    answers = {"right": Verdict(1.0, True, "correct"), "wrong": Verdict(-1.0, False, "wrong")}
    return [answers.get(sample.text, failure("it broke", -1.0)) for sample in samples]


def test_an_opinion_is_compared_with_its_rule_where_the_rule_applies():
    judge, other = Opinion("judge"), Opinion("other")
    verifiers = [build_verifier(RewardSettings(verifier="math")), judge, other]
    names, limits = ["math", "judge", "other"], [None] * 3
    mixed = MixedVerifier(verifiers, [1.0, 1.0, 1.0], names, limits, RewardSettings(), {"judge": rule})
    samples = [Trajectory.of_text(text) for text in ("right", "wrong", "odd")]
    verdicts = mixed(make_prompt("p", answer="2"), samples)
    assert judge.compared == [(True, "correct"), (False, "wrong")]
    assert other.compared == []
    assert [[part.name for part in verdict.parts] for verdict in verdicts] == [names] * 3


def test_what_a_served_verifier_logs_comes_before_what_workers_log():
    mixed = MixedVerifier([rule, Opinion("judge")], None, ["rule", "judge"], [None] * 2, RewardSettings(), {})
    own, served = ({"a": 1, "b": 1}, {"b": 2, "c": 2})
    local = Verdict(1.0, True, "correct", parts=(RewardPart("rule", 1.0),), extra=own)
    (verdict,) = mixed.joined([local], {"judge": [Verdict(0.5, False, "wrong", extra=served)]}, 1)
    assert (verdict.score, verdict.correct, verdict.extra) == (1.5, True, {"a": 1, "b": 2, "c": 2})


def test_the_rules_of_judges_can_be_sent_to_another_process():
    sent = pickle.loads(pickle.dumps(AsScore(rule)))
    right, wrong = sent(make_prompt("p"), [Trajectory.of_text("right"), Trajectory.of_text("wrong")])
    assert (right.score, wrong.score, sent.needs_answer) == (1.0, 0.0, False)
