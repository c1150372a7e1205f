"""`dapo bench episodes`, on work small enough for a test."""

import importlib.util
import json
from statistics import median

import forked
import pytest
from brief import look_briefly_at_the_machine
from support import DAPO

from dapo_rl.lab.bench.episodes import Steady, steady_state
from dapo_rl.lab.bench.workload import ToolWork, Workload

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


def work_of(tokens, turns):
    sizes = {"prompts": 5, "group": 1, "tokens": tokens, "prompt_tokens": 8, "repeats": 1, "warmup": 0}
    machine = {"dtype": "float32", "engine": "native", "device": "cpu"}
    tools = ToolWork(turns=turns, observation_tokens=4, median_s=0.05, longest_s=0.2, at_a_time=2)
    return Workload("episodes", "tiny", **sizes, **machine, tools=tools)


def test_the_steady_state_has_neither_beginning_nor_end():
    work = work_of(tokens=14, turns=2)
    ends = [1.0, 1.0, 2.0, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 9.0]
    # More than a fifth of 10 turns have ended at 2.0 s; then come 2.5, 3.0, 4.0 and 6.0, of 7 tokens each.
    assert steady_state(ends, last_opened=6.0, work=work) == Steady(seconds=4.0, tokens=28)
    assert steady_state(ends, last_opened=5.0, work=work) == Steady(seconds=3.0, tokens=21)
    # Too few to measure: an episode that was opened late by chance.
    assert steady_state(ends, last_opened=3.0, work=work) is None
    assert steady_state(ends, last_opened=2.0, work=work) is None


@pytest.mark.slow
def test_a_stream_of_episodes_has_a_steady_state():
    result = report("--episodes", "24", "--at-a-time", "6", "--repeats", "1", "sampling.max_batch=4")
    steady = result["steady"]
    assert steady["seconds"] < result["seconds"]
    assert steady["tokens"] % 4 == 0
    assert 0 < steady["tokens"] < 0.8 * 24 * 12
    assert steady["repeats"] == [{"seconds": steady["seconds"], "tokens": steady["tokens"]}]
    assert steady["tokens_per_second"] == pytest.approx(steady["tokens"] / steady["seconds"])
    one_turn = result["one_turn"]["tokens_per_second"]
    assert steady["share_of_one_turn"] == pytest.approx(steady["tokens_per_second"] / one_turn)


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
    # Of each episode, the second turn keeps the first one, and the third both and an observation.
    assert result["prefix_hits"] >= 6 * (8 + 3 + 8 + 4 + 4 + 3)
    assert result["tools"]["at_a_time"] == (2 if "--at-a-time" in words else 6)
    assert (result["steady"] is not None) == ("--at-a-time" in words)
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
