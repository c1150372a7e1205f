"""vLLM itself behind the Engine protocol."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from support import ids, weights_of

from dapo_rl.config import SamplingSettings
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.engines.vllm import VLLMEngine
from dapo_rl.lab.bench.model_shapes import open_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def parts():
    model, tokenizer = open_model("smollm2-135m", torch.bfloat16, "cuda", seed=0)
    settings = SamplingSettings(max_batch=16)
    engine = VLLMEngine(
        model, tokenizer, settings, torch.bfloat16, gpu_memory_utilization=0.2, max_model_len=256, enforce_eager=True
    )
    return model, engine


def sample(engine, name, count=4, tokens=16, prompt=tuple(range(10, 30)), **params):
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, **params)
    engine.submit(Request(name, prompt, count, params, seed=7))
    done = {}
    while engine.pending:
        done |= {c.index: c.sample for c in engine.poll()}
    return [done[i] for i in range(count)]


def recomputed(model, prompt, tokens):
    ids = torch.tensor([[*prompt, *tokens]], device="cuda")
    with torch.no_grad():
        logps = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logps.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).tolist()


def test_log_probabilities_are_the_models(parts):
    model, engine = parts
    for one in sample(engine, "a"):
        assert len(one.token_ids) == 16
        expected = recomputed(model, range(10, 30), one.token_ids)
        assert sum(abs(a - b) for a, b in zip(one.logps, expected, strict=True)) / 16 < 0.1


def test_a_seed_gives_the_same_samples_again_and_samples_differ(parts):
    _, engine = parts
    # A random model with tied embeddings repeats its last token, unless it is hot; vLLM goes up to 2.
    first, again = sample(engine, "b", temperature=2.0), sample(engine, "c", temperature=2.0)
    assert [ids(s) for s in first] == [ids(s) for s in again]
    assert len({ids(s) for s in first}) == 4


def test_new_weights_are_sampled_from(parts):
    model, engine = parts
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(-1)
    engine.receive(1, weights_of(model))
    one = sample(engine, "d", count=1)[0]
    assert set(one.versions) == {1}
    expected = recomputed(model, range(10, 30), one.token_ids)
    assert sum(abs(a - b) for a, b in zip(one.logps, expected, strict=True)) / 16 < 0.1


def test_begun_samples_continue_under_new_weights(parts):
    """What was written keeps its log-probabilities and version; what follows has those of the new weights."""
    model, engine = parts
    before = [p.detach().clone() for p in model.parameters()]
    engine.submit(Request("go", tuple(range(10, 30)), 3, SamplingParams(max_new_tokens=40, ignore_eos=True), seed=5))
    for _ in range(12):
        engine._engine.step()
    (unfinished,) = engine.take_unfinished()
    assert engine.pending == 0
    assert [begun.index for begun in unfinished.partial] == [0, 1, 2]
    written = len(unfinished.partial[0].token_ids)
    assert 4 < written < 20
    engine.submit(unfinished)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(-1)
    engine.receive(9, weights_of(model))
    done = {c.index: c.sample for c in _drain(engine)}
    with torch.no_grad():
        after = {i: recomputed(model, range(10, 30), s.token_ids) for i, s in done.items()}
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    for i, one in done.items():
        assert len(one.token_ids) == 40
        assert set(one.versions[:written]) == {unfinished.partial[i].versions[0]}
        assert set(one.versions[written:]) == {9}
        earlier = recomputed(model, range(10, 30), one.token_ids)
        expected = [*earlier[:written], *after[i][written:]]
        assert sum(abs(a - b) for a, b in zip(one.logps, expected, strict=True)) / 40 < 0.1
    engine.receive(10, weights_of(model))


def _drain(engine):
    done = []
    while engine.pending:
        done += engine.poll()
    return done


def test_cancelling_leaves_nothing_behind(parts):
    _, engine = parts
    engine.submit(Request("long", (5, 6, 7), 2, SamplingParams(max_new_tokens=200, ignore_eos=True), seed=1))
    engine.submit(Request("short", (5, 6, 7), 1, SamplingParams(max_new_tokens=8, ignore_eos=True), seed=1))
    assert [c.request_id for c in engine.poll()] == ["short"]
    assert 0 < engine.cancel(["long"]) < 400
    assert engine.pending == 0
    assert engine.poll() == []
