"""`dapo bench episodes`, on work small enough for a test."""

import importlib.util
import json
from statistics import median

import forked
import pytest
from brief import look_briefly_at_the_machine
from support import DAPO

from dapo_rl.lab.bench.workload import ToolWork

TOOLS = ToolWork(turns=3, observation_tokens=4, median_s=0.05, longest_s=0.2, at_a_time=6)
QUICK = [
    *("--model", "tiny", "--episodes", "6", "--turns", "3", "--turn-tokens", "4", "--observation-tokens", "4"),
    *("--prompt-tokens", "8", "--latency", "0.05", "--longest-latency", "0.2", "--warmup", "0", "--device", "cpu"),
    *("--dtype", "float32"),
]


def bench(*words):
    return forked.run([DAPO, "bench", "episodes", *words], timeout=300, preexec_fn=look_briefly_at_the_machine)


def report(*words):
    result = bench(*QUICK, *words, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_latencies_are_lognormal_up_to_a_limit():
    work = ToolWork(turns=4, observation_tokens=32, median_s=0.5, longest_s=20, at_a_time=512)
    rows = work.latencies(seed=0, episodes=512)
    assert rows == work.latencies(seed=0, episodes=512) != work.latencies(seed=1, episodes=512)
    assert {len(row) for row in rows} == {3}
    every = [each for row in rows for each in row]
    assert median(every) == pytest.approx(0.5, rel=0.1)
    assert 10 < max(every) <= 20
    assert sum(every) / len(every) == pytest.approx(1.0, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--sync", "env.workers=3"), ("--at-a-time", "2")])
def test_episodes_beside_one_turn(words):
    result = report(*words)
    longest = max(map(sum, TOOLS.latencies(0, 6)))
    assert result["seconds"] > longest
    for numbers in (result, result["one_turn"]):
        assert numbers["tokens_per_second"] == pytest.approx(6 * 12 / numbers["seconds"])
    assert result["share_of_one_turn"] == pytest.approx(result["one_turn"]["seconds"] / result["seconds"])
    assert 0 < result["engine_share"] < 1
    assert result["tools"]["at_a_time"] == (2 if "--at-a-time" in words else 6)
    assert "against" not in result


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")
def test_episodes_beside_trl():
    result = report("--against", "trl")
    peer = result["against"]
    assert peer["waited"]
    assert peer["episodes"] == 6
    turns = list(zip(*TOOLS.latencies(0, 6), strict=True))
    assert peer["one_by_one"]["seconds"] > sum(map(sum, turns))
    assert peer["at_once"]["seconds"] > sum(map(max, turns))
    for name in ("one_by_one", "at_once"):
        theirs = peer[name]["tokens_per_second"]
        assert theirs == pytest.approx(6 * 12 / peer[name]["seconds"])
        assert peer[name]["ratio"] == pytest.approx(result["tokens_per_second"] / theirs)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")
def test_long_waits_of_trl_are_added():
    result = bench(*QUICK, "--against", "trl", "--trl-wait", "0")
    assert result.returncode == 0, result.stderr
    assert "6 episodes of 3 turns of 4 tokens" in result.stdout
    assert "the sum of their latencies" in " ".join(result.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--against", "verl"], "--against: 'verl' is not a peer of `bench episodes`; peers are: trl"),
        (["--turn-tokens", "200"], "the model's context of 512"),
        (["--device", "tpu"], "--device: 'tpu' is not one of auto, cpu, cuda"),
        (["env.max_turns=3"], "env.max_turns: use --turns"),
    ],
)
def test_mistakes_are_one_line(words, expected):
    result = bench(*words)
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("dapo: ")
    assert expected in line
