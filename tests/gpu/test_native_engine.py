"""The native engine on a GPU, against transformers' generate and against itself."""

import warnings
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from support import ids, small_model, tokenizer, train_sample, weights_of

from dapo_rl.engines.hf import HFEngine
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.models.load import pad_id
from dapo_rl.models.response_logps import response_logps

pytestmark = pytest.mark.gpu


def sample(engine, requests):
    for request in requests:
        engine.submit(request)
    samples = {}
    while engine.pending:
        samples |= {(c.request_id, c.index): c.sample for c in engine.poll()}
    return samples


def requests(count=6, **changes):
    return [
        Request(f"r{i}", tuple(range(5, 8 + i)), 4, SamplingParams(max_new_tokens=20 + i, **changes), seed=i)
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def model():
    return small_model(head_dim=16).cuda()


@pytest.mark.parametrize("max_batch", [256, 7, 1])
def test_tokens_equal_generates(model, max_batch):
    expected = sample(HFEngine(model, tokenizer(), 256), requests())
    actual = sample(NativeEngine(model, tokenizer(), max_batch=max_batch), requests())
    assert actual.keys() == expected.keys()
    same = [ids(actual[key]) == ids(expected[key]) for key in expected]
    assert sum(same) >= len(same) - 1  # a number on the boundary of two tokens may fall to either
    for key in expected:
        if ids(actual[key]) == ids(expected[key]):
            torch.testing.assert_close(
                torch.tensor(actual[key].logps), torch.tensor(expected[key].logps), atol=1e-4, rtol=0
            )
            assert actual[key].finish_reason == expected[key].finish_reason


@pytest.mark.parametrize(
    "changes", [{"temperature": 0.0}, {"top_p": 0.8, "temperature": 0.7}, {"top_k": 5, "min_p": 0.1}]
)
def test_every_way_of_drawing_equals_generates(model, changes):
    expected = sample(HFEngine(model, tokenizer(), 256), requests(**changes))
    actual = sample(NativeEngine(model, tokenizer()), requests(**changes))
    same = [ids(actual[key]) == ids(expected[key]) for key in expected]
    assert sum(same) >= len(same) - 1


def test_kept_ids_are_generates_and_log_probabilities_the_trainers(model):
    """In graphs and in the first step, beside rows that record nothing, and after an interruption."""
    keeping = requests(top_k=5, top_p=0.9, keep_mask=True)
    expected = sample(HFEngine(model, tokenizer(), 256), keeping)
    engine = NativeEngine(model, tokenizer(), most_kept=5)
    other = Request("plain", (5, 6, 7), 3, SamplingParams(30, top_p=0.8), seed=1)
    actual = {}
    for request in [*keeping, other]:
        engine.submit(request)
    for _ in range(3):
        actual |= {(c.request_id, c.index): c.sample for c in engine.poll(timeout_s=0.01)}
        engine.receive(0, weights_of(model))
    actual |= sample(engine, [])
    same = [key for key in expected if ids(actual[key]) == ids(expected[key])]
    assert len(same) >= len(expected) - 1
    prompts = {request.id: request.prompt_ids for request in keeping}
    for key in same:
        assert (actual[key]["kept_ids"] == expected[key]["kept_ids"]).mean() > 0.99
        with torch.no_grad():
            stats = response_logps(model, [actual[key].replace(prompt_ids=prompts[key[0]])], 1.0, 0)
        torch.testing.assert_close(stats.logps[0].cpu(), torch.tensor(actual[key].logps), atol=1e-3, rtol=0)
    assert all("kept_ids" not in actual["plain", i].columns for i in range(3))


def test_log_probabilities_in_bfloat16_are_near_the_trainers(model):
    samples = sample(NativeEngine(model, tokenizer(), dtype=torch.bfloat16), requests())
    rows = {r.id: r for r in requests()}
    train = [
        train_sample(rows[rid].prompt_ids, s.token_ids, s.logps, 1.0, 0, True, True) for (rid, _), s in samples.items()
    ]
    with torch.no_grad():
        stats = response_logps(model, train, 1.0, pad_id(tokenizer()))
    ours = torch.cat([torch.tensor(t.logps) for t in train])
    theirs = torch.cat([stats.logps[i, : len(t.token_ids)].cpu() for i, t in enumerate(train)])
    assert (ours - theirs).abs().mean() < 0.05


def test_new_weights_change_what_is_sampled_through_the_same_graphs(model):
    engine = NativeEngine(model, tokenizer(), dtype=torch.bfloat16)
    before = sample(engine, requests(temperature=0.0))
    other = small_model(seed=1, head_dim=16).cuda()
    engine.receive(1, weights_of(other))
    after = sample(engine, requests(temperature=0.0))
    fresh = sample(NativeEngine(other, tokenizer(), dtype=torch.bfloat16), requests(temperature=0.0))
    assert {k: ids(s) for k, s in after.items()} == {k: ids(s) for k, s in fresh.items()}
    assert {k: ids(s) for k, s in after.items()} != {k: ids(s) for k, s in before.items()}


def test_the_host_waits_only_for_the_tokens_of_finished_samples(model):
    """After a first round, whose kernels are compiled. Those are read beside the steps that the device still has."""
    engine = NativeEngine(model, tokenizer(), max_batch=9)
    sample(engine, requests())
    torch.cuda.set_sync_debug_mode("warn")  # which warns that it may overlook some
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sample(engine, requests())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = {Path(each.filename).name for each in caught if "synchronizing" in str(each.message)}
    assert places == {"output_processor.py"}


def test_a_cancelled_request_leaves_the_others_alone(model):
    engine = NativeEngine(model, tokenizer())
    expected = sample(engine, requests())
    for request in requests():
        engine.submit(request)
    samples = {(c.request_id, c.index): c.sample for c in engine.poll()}
    engine.cancel(["r3"])
    while engine.pending:
        samples |= {(c.request_id, c.index): c.sample for c in engine.poll()}
    for key, s in samples.items():
        assert ids(s) == ids(expected[key])
    assert {key[0] for key in samples} >= {"r0", "r1", "r2", "r4", "r5"}


def test_samples_in_flight_go_on_after_new_weights_and_in_another_engine(model):
    expected = sample(NativeEngine(model, tokenizer()), requests())
    engine = NativeEngine(model, tokenizer(), max_batch=9)
    for request in requests():
        engine.submit(request)
    samples = {(c.request_id, c.index): c.sample for _ in range(2) for c in engine.poll()}
    engine.receive(1, weights_of(model))
    unfinished = engine.take_unfinished()
    assert any(request.partial for request in unfinished)
    rest = sample(engine, unfinished)
    other = NativeEngine(model, tokenizer(), max_batch=9)
    other.receive(1, weights_of(model))
    assert sample(other, unfinished) == rest
    samples |= rest
    assert samples.keys() == expected.keys()
    same = [ids(samples[key]) == ids(expected[key]) for key in expected]
    assert sum(same) >= len(same) - 1  # a number on the boundary of two tokens may fall to either
