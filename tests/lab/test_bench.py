"""`dapo bench` as a user meets it, on work small enough for a test."""

import importlib.util
import json
import subprocess
from statistics import median

import forked
import pytest
from brief import look_briefly_at_the_machine
from support import DAPO

from dapo_rl.lab.bench.workload import draw_lengths

pytestmark = pytest.mark.slow

TINY_WORK = ["--model", "tiny", "--prompts", "2", "--group", "2", "--tokens", "4", "--prompt-tokens", "8"]
QUICK = [*TINY_WORK, "--repeats", "2", "--dtype", "float32", "--device", "cpu"]


def bench(*words):
    return forked.run([DAPO, "bench", *words], timeout=300, preexec_fn=look_briefly_at_the_machine)


def report(*words):
    result = bench(*words, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def mistake(*words):
    result = bench(*words)
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("dapo: ")
    assert result.stdout == ""
    return lines[0]


def check_numbers(numbers, tokens=16, repeats=2):
    assert len(numbers["repeats"]) == repeats
    assert min(numbers["repeats"]) <= numbers["seconds"] <= max(numbers["repeats"])
    assert numbers["tokens_per_second"] == pytest.approx(tokens / numbers["seconds"])
    assert 10**7 < numbers["peak_memory_bytes"] < 10**11


def check_report(report, kind):
    check_numbers(report)
    assert report["bench"] == kind
    assert (report["prompts"], report["group"], report["tokens"], report["prompt_tokens"]) == (2, 2, 4, 8)
    assert (report["dtype"], report["device"], report["parameters"]) == ("float32", "cpu", 886_528)
    assert report["machine"]["threads"] >= 1
    limit = report["limit"]
    assert limit["bandwidth_bytes_per_s"] > 10**8
    assert limit["matmul_flops_per_s"] > 10**8
    assert 0 < limit["floor_seconds"] < report["seconds"]
    assert limit["share"] == pytest.approx(limit["floor_seconds"] / report["seconds"])


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_rollout_beside_generate(engine):
    result = report("rollout", *QUICK, "--engine", engine, "--against", "generate")
    check_report(result, "rollout")
    peer = result["against"]
    check_numbers(peer)
    assert {tried["variant"] for tried in peer["variants"]} == {"dynamic-cache", "static-cache"}
    assert peer["seconds"] == min(tried["seconds"] for tried in peer["variants"])
    assert result["ratio"] == pytest.approx(peer["seconds"] / result["seconds"])


def test_rollout_of_drawn_lengths():
    sizes = [word for word in QUICK if word not in ("--tokens", "4")]
    result = report("rollout", *sizes, "--lengths", "lognormal:20", "--cap", "64", "--seed", "3", "--against", "hf")
    drawn = [length for row in draw_lengths("lognormal:20", 64, 2, 2, 3) for length in row]
    assert result["lengths"] == {
        "distribution": "lognormal:20",
        "cap": 64,
        "median": median(drawn),
        "mean": sum(drawn) / 4,
        "longest": max(drawn),
        "tokens": sum(drawn),
    }
    assert result["seed"] == 3
    peer = result["against"]
    for numbers, share in ((result, result["limit"]["share"]), (peer, peer["share"])):
        check_numbers(numbers, sum(drawn))
        assert share == pytest.approx(result["limit"]["floor_seconds"] / numbers["seconds"])


def test_update():
    check_report(report("update", *QUICK), "update")


def test_step_and_its_parts():
    result = report("step", *QUICK, "--engine", "hf", "train.lr=1e-5")
    check_report(result, "step")
    parts = result["parts"]
    assert parts["gen"] + parts["verify"] + parts["update"] <= max(result["repeats"]) * 1.05
    assert result["settings"] == ["train.lr=1e-5"]


def test_a_sweep_is_a_row_for_each_size():
    result = report("rollout", *QUICK, "--sweep", "prompts=1,2")
    assert result["sweep"] == "prompts"
    assert [row["prompts"] for row in result["results"]] == [1, 2]
    for row, tokens in zip(result["results"], (8, 16), strict=True):
        check_numbers(row, tokens)


def test_without_json_it_is_a_table():
    """And its processes start from nothing, as those of a user do."""
    result = subprocess.run([DAPO, "bench", "rollout", *QUICK], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "2 prompts × 2 samples × 4 tokens" in result.stdout
    assert "tokens/s" in result.stdout


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")
def test_step_beside_trl():
    result = report("step", *QUICK, "--against", "trl", "--peer-variant", "whole")
    peer = result["against"]
    check_numbers(peer)
    assert peer["tokens_per_step"] == 16
    assert peer["start_seconds"] > 0
    assert result["ratio"] == pytest.approx(peer["seconds"] / result["seconds"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rollout", "--model", "smollm2-135"], "did you mean smollm2-135m?"),
        (["rollout", "--model", "./nowhere/at-all"], "no directory ./nowhere/at-all"),
        (["rollout", "--prompts", "0"], "--prompts: 0 is below 1"),
        (["step", "--group", "1"], "--group: 1 is below 2"),
        (["update", "--prompt-tokens", "1"], "--prompt-tokens: 1 is below 2"),
        (["rollout", "--dtype", "float8"], "--dtype: 'float8' is not one of auto, float32, bfloat16"),
        (["rollout", "--engine", "nativ"], "did you mean native?"),
        (["rollout", "--engine", "hf", "--against", "hf"], "--against: hf is the engine itself"),
        (["step", "--against", "vllm"], "is not a peer of `bench step`; peers are: trl"),
        (["rollout", "--against", "generate", "--peer-variant", "paged"], "generate has no variant 'paged'"),
        (["rollout", "--sweep", "lr=1,2"], "NAME one of prompts, group, tokens, prompt_tokens"),
        (["step", "train.lr=abc"], "train.lr"),
        (["rollout", *QUICK, "--tokens", "1000"], "the model's context of 512"),
        (["rollout", "engine=hf"], "engine: use --engine"),
        (["step", "sampling.max_new_tokens=4"], "sampling.max_new_tokens: use --tokens"),
        (["update", "train.steps=4"], "train.steps: the benchmark sets it"),
        (["rollout", "--peer-variant", "default"], "--peer-variant: there is no peer"),
        (["rollout", "--timeout", "0"], "--timeout: 0 is not above 0"),
    ],
)
def test_mistakes_are_one_line(words, expected):
    assert expected in mistake(*words)


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("trl", ["step", "--against", "trl"]),
        ("vllm", ["rollout", "--against", "vllm"]),
        ("vllm", ["rollout", "--engine", "vllm"]),
    ],
)
def test_a_peer_that_is_not_installed_is_one_line(package, words):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    assert f"{package} is not installed; pip install {package}" in mistake(*words)
