"""Engines return the tokens that truncation kept, whatever interrupts a sample, and the trainer agrees with them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import ids, small_model, tokenizer, weights_of

from dapo_rl.config import SamplingSettings
from dapo_rl.engines.build import build_engine
from dapo_rl.engines.hf import HFEngine
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.native.kv_cache import CacheLayout, KVBudget
from dapo_rl.engines.protocol import EngineInputs, Request, SamplingParams
from dapo_rl.errors import UserError
from dapo_rl.models.response_logps import response_logps
from dapo_rl.train.mismatch import newest_mismatch
from dapo_rl.types import Batch, Group, Prompt

KEEPING = SamplingParams(14, temperature=0.8, top_k=6, top_p=0.9, keep_mask=True)
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4


def request(name, params=KEEPING, prompt=range(5, 12), count=3, seed=3):
    return Request(name, tuple(prompt), count, params, seed)


def native(model=None, **how):
    return NativeEngine(model or small_model(), tokenizer(), **({"longest": 128, "most_kept": 6} | how))


def run(engine, *requests):
    for r in requests:
        engine.submit(r)
    samples = {}
    while engine.pending:
        samples |= {(done.request_id, done.index): done.sample for done in engine.poll()}
    return samples


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, sample in ours.items():
        assert ids(sample) == ids(theirs[key])
        np.testing.assert_array_equal(sample["kept_ids"], theirs[key]["kept_ids"])
        np.testing.assert_allclose(sample.logps, theirs[key].logps, atol=1e-5)


def check_columns(sample, width=6):
    kept = sample["kept_ids"]
    assert kept.shape == (len(sample.token_ids), width)
    assert kept.dtype == np.int32
    assert (kept == sample.token_ids[:, None]).any(1)[sample.mask].all()
    assert (kept[~sample.mask] == -1).all()


def recomputed(model, samples, prompt, temperature=0.8):
    batch = [sample.replace(prompt_ids=prompt) for sample in samples]
    with torch.no_grad():
        stats = response_logps(model, batch, temperature, 0)
    return [row[: len(sample.token_ids)].numpy() for row, sample in zip(stats.logps, samples, strict=True)]


def test_native_is_hf_and_the_trainer():
    model = small_model()
    requests = [request("a"), request("b", prompt=range(5, 9), seed=4)]
    samples = run(native(model), *requests)
    same(samples, run(HFEngine(model, tokenizer(), 64), *requests))
    for r in requests:
        of_request = [samples[r.id, i] for i in range(3)]
        for sample, logps in zip(of_request, recomputed(model, of_request, r.prompt_ids), strict=True):
            check_columns(sample)
            np.testing.assert_allclose(logps, sample.logps, atol=1e-5)
    sizes = np.concatenate([(sample["kept_ids"] >= 0).sum(1) for sample in samples.values()])
    assert len({*sizes}) > 2, "top-p decides too"


def test_without_the_record_the_trainer_knows_another_policy():
    """The mass that is cut is in its log-probabilities, and not in the distribution that sampled."""
    model, r = small_model(), request("a", count=8)
    with_mask = run(native(model), r)
    without = run(native(model), replace(r, params=replace(KEEPING, keep_mask=False)))
    assert [ids(sample) for sample in with_mask.values()] == [ids(sample) for sample in without.values()]
    for key, sample in with_mask.items():
        assert "kept_ids" not in without[key].columns
        cut = sample.logps - without[key].logps
        assert (cut > -1e-5).all()
        assert cut.max() > 0.05

    # The estimate of the KL divergence that a run logs: that of the truncated from the full distribution, or 0.
    def mismatch(samples):
        scores = lambda batch: recomputed(model, batch, r.prompt_ids)  # noqa: E731
        return newest_mismatch(Batch((Group(0, Prompt("p", "", r.prompt_ids), samples, ()),)), scores)

    assert abs(mismatch(tuple(with_mask.values()))) < 1e-9
    forgotten = tuple(sample.replace(kept_ids=None) for sample in with_mask.values())
    assert mismatch(forgotten) > 0.01


@pytest.mark.parametrize("polls", [1, 3, 9])
def test_interrupted_samples_continue_here_and_elsewhere(polls):
    """With the weights again, on another engine, and where memory runs out."""
    model = small_model()
    expected = run(native(model), request("a"), request("b", seed=9))
    engine, others = native(model), (native(model), HFEngine(model, tokenizer(), 64))
    for other in others:
        engine.submit(request("a"))
        engine.submit(request("b", seed=9))
        done = []
        for _ in range(polls):
            done += engine.poll(timeout_s=0)
            engine._scheduler.admit()
            engine._step()
            engine.receive(engine.version, weights_of(model))
        done += engine.poll(timeout_s=0)
        left = engine.take_unfinished()
        assert any(r.tokens for r in left)
        samples = {(c.request_id, c.index): c.sample for c in [*done, *engine.poll(timeout_s=0)]}
        same(samples | run(other, *left), expected)


def test_scarce_pages_change_nothing():
    model = small_model()
    requests = [request(f"r{i}", replace(KEEPING, max_new_tokens=40), seed=i) for i in range(4)]
    expected = run(native(model), *requests)
    scarce = native(model, longest=64, page_tokens=8, max_batch=9, kv_memory_bytes=36 * 8 * TOKEN_BYTES)
    same(run(scarce, *requests), expected)
    assert scarce.preempted > 0


def test_rows_that_record_nothing_run_beside_others():
    """An evaluation on the same engine, truncated or not."""
    model = small_model()
    plain = request("plain", SamplingParams(9), seed=1)
    cut = request("cut", SamplingParams(20, top_p=0.7), seed=2)
    samples = run(native(model), plain, request("a"), cut)
    alone = run(native(model, most_kept=0), plain, cut)
    for key, sample in alone.items():
        assert ids(samples[key]) == ids(sample)
        np.testing.assert_allclose(samples[key].logps, sample.logps, atol=1e-5)
        assert "kept_ids" not in samples[key].columns
    same({key: samples[key] for key in samples if key[0] == "a"}, run(native(model), request("a")))


@pytest.mark.parametrize("make", [native, lambda model: HFEngine(model, tokenizer(), 64)], ids=["native", "hf"])
def test_an_observation_keeps_nothing_and_the_next_turn_goes_on(make):
    model = small_model()
    engine, r = make(model), replace(request("a", count=2), continues=True)
    turns = run(engine, r)
    for sample in turns.values():
        partial = sample.replace(finish_reason=None, text="").then_observed([7, 8, 9])
        longer = replace(KEEPING, max_new_tokens=len(partial.token_ids) + 10)
        again = replace(r, id=f"a.{sample.index}", params=longer, partial=(partial,), new=())
        (whole,) = run(engine, again).values()
        check_columns(whole)
        assert whole.mask.tolist()[len(sample.token_ids) : len(partial.token_ids)] == [False] * 3
        (logps,) = recomputed(model, [whole], r.prompt_ids)
        np.testing.assert_allclose(logps, whole.logps, atol=1e-5)


def test_the_width_is_that_of_the_setting():
    settings = SamplingSettings(top_k=6, keep_mask=True, max_new_tokens=14)
    engine = build_engine("native", EngineInputs(small_model(), tokenizer(), settings, torch.float32, longest=64))
    for sample in run(engine, request("a", SamplingParams.of(settings))).values():
        check_columns(sample)
    with pytest.raises(UserError, match=r"a request keeps 7 tokens, and the engine was built for 6"):
        engine.submit(request("b", replace(KEEPING, top_k=7)))


def test_kept_ids_are_in_the_memory_of_the_cache():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    # 64 sequences of 960 tokens, with as many bytes for kept ids as for keys and values.
    assert KVBudget(2**21, 16, 64, cpu, 16).layout(900) == CacheLayout(960, 64, 64, whole=True)
    for device in (cpu, cuda):
        for nbytes in (400_000, 2**19, 2**20, 2**22, 2**26):
            for kept in (4, 64, 1024):
                budget = KVBudget(nbytes, 256, 64, device, kept)
                if not budget.slots(960):
                    continue
                layout, spare = budget.layout(900, 64), device.type == "cuda"
                assert layout.slots >= 1
                assert layout.pages - 1 >= 15 or device.type == "cpu"
                used = layout.pages - (not spare)  # a CPU's first page is not counted
                assert used * 64 * 256 + (layout.slots + spare) * 960 * kept <= nbytes
                assert used * 64 >= 960, "the longest sequence fits"


def test_what_a_sequence_takes_is_said_with_its_kept_ids():
    budget = KVBudget(2**20, 2**10, 8, torch.device("cpu"), kept_bytes=2**15)
    with pytest.raises(UserError, match=r"one sequence of 64 tokens takes 0\.002 GiB, but only 0\.00098 are allowed"):
        budget.check(50)
