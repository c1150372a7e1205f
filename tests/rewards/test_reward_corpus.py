"""Every hostile and odd response gets its verdict, in this process and through the pool, and none of them does harm."""

from collections import Counter

import pytest
from hostile_responses import CODE, MARKER, RESPONSES

from dapo_rl.config import RewardSettings
from dapo_rl.rewards import MathVerifier, VerifierPool
from dapo_rl.types import Prompt, Trajectory

SETTINGS = RewardSettings(boxed=True, workers=2)


def task(truth, response, marker):
    return Prompt("p", "?", (1,), answer=truth), [Trajectory((), (), response.replace(MARKER, str(marker)), "stop")]


@pytest.mark.parametrize("through", [pytest.param("pool", marks=pytest.mark.slow), "call"])
def test_each_response_gets_its_verdict(through, tmp_path):
    marker = tmp_path / "ran"
    verifier = MathVerifier(SETTINGS)
    tasks = [task(truth, response, marker) for truth, response, _ in RESPONSES]
    if through == "pool":
        with VerifierPool(verifier, SETTINGS) as pool:
            verdicts = [ticket.result()[0] for ticket in [pool.submit(*one) for one in tasks]]
    else:
        verdicts = [verifier(*one)[0] for one in tasks]
    others = [
        f"{response[:80]!r} for {truth[:40]!r}: {verdict.status} and not {status}; {verdict.detail}"
        for (truth, response, status), verdict in zip(RESPONSES, verdicts, strict=True)
        if verdict.status != status
    ]
    assert others == []
    assert [verdict.score for verdict in verdicts] == [1 if v.correct else -1 for v in verdicts]
    assert not marker.exists()


def test_the_code_does_what_it_says_where_it_is_run(tmp_path):
    marker = tmp_path / "ran"
    for _, response, _ in CODE[:1]:
        eval(response.removeprefix("Answer: ").replace(MARKER, str(marker)))
        assert marker.exists()


def test_the_responses_are_many_and_each_is_there_once():
    assert len(RESPONSES) == len({(truth, response) for truth, response, _ in RESPONSES}) >= 400
    counts = Counter(status for _, _, status in RESPONSES)
    assert min(counts[status] for status in ("correct", "wrong", "unparseable")) >= 30
