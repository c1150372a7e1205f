"""Lengths drawn from a distribution: what is drawn, what the engines sample, and the floor under it."""

from math import exp, log, sqrt
from statistics import mean, median

import pytest
from support import ids, small_model, tokenizer
from typer.testing import CliRunner

from dapo_rl.engines.hf import HFEngine
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.errors import UserError
from dapo_rl.lab.bench.bench_cli import app
from dapo_rl.lab.bench.compare import OURS, run_contender
from dapo_rl.lab.bench.contender import ContenderJob
from dapo_rl.lab.bench.roofline import Limit, Size, rollout_floor, update_floor
from dapo_rl.lab.bench.update import _samples
from dapo_rl.lab.bench.workload import SIGMA, Workload, draw_lengths, fixed_length, longest_length


def work(**changes):
    settings = {
        "kind": "rollout",
        "model": "tiny",
        "prompts": 2,
        "group": 2,
        "tokens": 4,
        "prompt_tokens": 5,
        "dtype": "float32",
        "engine": "native",
        "device": "cpu",
        "repeats": 1,
        "warmup": 0,
    }
    return Workload(**(settings | changes))


def drawn(spec, cap, samples=20_000, seed=0):
    return [length for row in draw_lengths(spec, cap, samples // 8, 8, seed) for length in row]


def test_the_default_spread_has_a_mean_of_1637_for_a_median_of_1000():
    assert sqrt(2 * log(1.637)) == SIGMA
    assert pytest.approx(0.993, abs=5e-4) == SIGMA
    lengths = drawn("lognormal:1000", 10**9)
    assert median(lengths) == pytest.approx(1000, rel=0.02)
    assert mean(lengths) == pytest.approx(1637, rel=0.02)
    narrow = drawn("lognormal:1000:0.5", 10**9)
    assert median(narrow) == pytest.approx(1000, rel=0.02)
    assert mean(narrow) == pytest.approx(1000 * exp(0.125), rel=0.02)


def test_the_cap_truncates_and_leaves_the_others():
    free, capped = drawn("lognormal:1000", 10**9), drawn("lognormal:1000", 8192)
    assert capped == [min(length, 8192) for length in free]
    # P(X > 8192) = 1 − Φ(ln 8.192 / σ) = 1 − Φ(2.117) = 0.0171
    assert sum(length == 8192 for length in capped) / len(capped) == pytest.approx(0.0171, rel=0.15)
    assert drawn("fixed:256", 100, samples=8) == [100] * 8


def test_uniform_lengths_include_both_ends():
    lengths = drawn("uniform:3:6", 6)
    shares = {length: lengths.count(length) / len(lengths) for length in set(lengths)}
    assert shares == pytest.approx(dict.fromkeys((3, 4, 5, 6), 0.25), abs=0.02)


def test_the_seed_gives_the_lengths_and_no_length_is_below_one():
    assert draw_lengths("lognormal:20", 64, 2, 3, 0) == ((34, 24, 27), (10, 22, 18))
    assert draw_lengths("lognormal:20", 64, 2, 3, 1) != draw_lengths("lognormal:20", 64, 2, 3, 0)
    assert min(drawn("lognormal:1:3", 100)) == 1
    assert max(drawn("lognormal:1:300", 100)) == 100


def test_a_distribution_says_whether_it_is_one_length_and_where_it_ends():
    assert (fixed_length("fixed:256"), longest_length("fixed:256")) == (256, 256)
    assert (fixed_length("uniform:3:6"), longest_length("uniform:3:6")) == (None, 6)
    assert (fixed_length("lognormal:1000"), longest_length("lognormal:1000")) == (None, None)


@pytest.mark.parametrize(
    "spec",
    ["", "lognormal", "normal:3", "fixed:0", "fixed:2.5", "uniform:3", "fixed:nan", "lognormal:5:-1", "uniform:0:4"],
)
def test_what_is_no_distribution_is_named(spec):
    with pytest.raises(UserError, match=r"^--lengths: .* is not fixed:N, lognormal:MEDIAN\[:SIGMA\] or uniform:LOW"):
        draw_lengths(spec, 10, 1, 1, 0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rollout", "--lengths", "lognormal:20"], "--cap: lognormal lengths have no upper bound"),
        (["rollout", "--lengths", "uniform:9:3"], "the highest length is below the lowest"),
        (["rollout", "--lengths", "uniform:2:3", "--cap", "0"], "--cap: 0 is below 1"),
        (["rollout", "--cap", "9"], "--cap: there is no --lengths"),
        (["rollout", "--lengths", "fixed:4", "--tokens", "4"], "--tokens: --lengths sets the lengths"),
        (["rollout", "--lengths", "uniform:2:3", "--sweep", "tokens=1,2"], "--sweep: --lengths sets the tokens"),
        (["step", "--lengths", "uniform:2:3"], "--lengths: `bench step` has samples of one length"),
    ],
)
def test_mistakes(words, expected):
    with pytest.raises(UserError) as error:
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def engines():
    model = small_model()
    return {
        "native": NativeEngine(model, tokenizer(), max_batch=3),
        "hf": HFEngine(model, tokenizer(), max_batch=8),
    }


def run(engine, *requests):
    for request in requests:
        engine.submit(request)
    samples = {}
    while finished := engine.poll():
        samples |= {(done.request_id, done.index): done.sample for done in finished}
    return samples


@pytest.mark.parametrize("name", ["native", "hf"])
def test_each_sample_has_its_own_limit_and_its_tokens_are_those_without_one(name):
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    plain = {f"r{i}": Request(f"r{i}", (5, 6, 7 + i), 4, params, seed=i) for i in range(2)}
    limits = {"r0": (3, 12, 1, 7), "r1": (2, 2, 9, 5)}
    limited = [Request(r.id, r.prompt_ids, 4, params, r.seed, limits=limits[r.id]) for r in plain.values()]
    whole, cut = run(engines()[name], *plain.values()), run(engines()[name], *limited)
    assert {len(sample.token_ids) for sample in whole.values()} == {12}
    for (request, index), sample in cut.items():
        length = limits[request][index]
        assert ids(sample) == ids(whole[request, index])[:length]
        assert sample.logps.tolist() == pytest.approx(whole[request, index].logps[:length].tolist(), abs=1e-5)
        assert sample.finish_reason == "length"
    assert len(cut) == 8


def test_limits_survive_an_interruption():
    """Unfinished samples return to the queue and continue to their own limits."""
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    request = Request("r", (5, 6, 7), 4, params, seed=0, limits=(3, 12, 1, 7))
    first, second = engines()["native"], engines()["native"]
    first.submit(request)
    done = first.poll()
    assert 0 < len(done) < 4
    samples = {("r", one.index): one.sample for one in done} | run(second, *first.take_unfinished())
    assert {index: len(sample.token_ids) for (_, index), sample in samples.items()} == {0: 3, 1: 12, 2: 1, 3: 7}


def test_limits_are_as_many_as_the_samples_and_within_the_common_one():
    params = SamplingParams(max_new_tokens=4)
    for limits in ((1, 2, 3), (1, 5), (0, 1)):
        with pytest.raises(ValueError, match="are not 2 limits of 1 to 4"):
            Request("r", (5,), 2, params, seed=0, limits=limits)


# Lengths (1, 3) of the first prompt and (2, 1) of the second, in place of drawn ones.
LENGTHS = ((1, 3), (2, 1))


@pytest.fixture
def chosen(monkeypatch):
    monkeypatch.setattr("dapo_rl.lab.bench.workload.draw_lengths", lambda *_: LENGTHS)
    return work(lengths="uniform:1:4")


def test_the_floor_of_a_rollout_counts_the_samples_that_still_run(chosen):
    size = Size(body=10, head=4, attention_width=0, kv_width=3, parameters=14)
    weights, width = 14 * 4, 3 * 4
    # The prefill yields the first token of all four. At the second, one sample of each prompt runs: it reads both
    # prompts of 5, and one token of each sample. At the third only the sample of three tokens runs.
    steps = [weights + (2 * 5 + 2 * 1) * width, weights + (1 * 5 + 1 * 2) * width]
    slow_memory = Limit(bandwidth_bytes_per_s=1.0, matmul_flops_per_s=1e12)
    assert rollout_floor(chosen, size, slow_memory) == weights + sum(steps) == 56 + 200 + 140
    slow_multiplier = Limit(bandwidth_bytes_per_s=1e12, matmul_flops_per_s=1.0)
    prefill = 2 * 10 * (2 * 5) + 2 * 4 * 2
    assert rollout_floor(chosen, size, slow_multiplier) == prefill + 2 * 14 * 2 + 2 * 14 * 1


def test_the_floor_of_an_update_counts_the_real_tokens(chosen):
    size = Size(body=10, head=4, attention_width=2, kv_width=0, parameters=14)
    prompt, response = 2 * 5, 1 + 3 + 2 + 1
    attention = prompt * 2.5 + 1 * (5 + 0.5) + 3 * (5 + 1.5) + 2 * (5 + 1) + 1 * (5 + 0.5)
    forward = 2 * 10 * (prompt + response) + 2 * 4 * response + 4 * 2 * attention
    assert update_floor(chosen, size, Limit(1.0, 1.0)) == 3 * forward


def test_an_update_trains_on_samples_of_these_lengths(chosen):
    samples = _samples(chosen, tokenizer(), small_model())
    assert [(sample.group, len(sample.token_ids)) for sample in samples] == [(0, 1), (0, 3), (1, 2), (1, 1)]
    assert chosen.response_tokens == 7


def test_drawn_lengths_set_the_cap_of_a_run():
    again = work(lengths="lognormal:20", tokens=64, prompts=2, group=3)
    assert again.group_lengths == ((34, 24, 27), (10, 22, 18))
    assert again.config().sampling.max_new_tokens == 64


@pytest.mark.slow
def test_a_contender_that_runs_out_of_time_leaves_its_stack():
    result = run_contender(ContenderJob("dapo", OURS["rollout"], (work(tokens=400, repeats=10**6),)), timeout=10)
    assert result["error"] == "took longer than 10 s"
    assert "most recent call first" in result["log"]
