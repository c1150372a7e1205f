"""The native engine: it samples what transformers' generate samples, whatever the batch, the memory and the order."""

import random
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ids, small_model, tokenizer, train_sample, weights_of

from dapo_rl.engines.hf import HFEngine
from dapo_rl.engines.native import prefill
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.errors import UserError
from dapo_rl.models.response_logps import response_logps

SMALL = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def make(architecture, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**(SMALL | changes))
    return getattr(transformers, f"{architecture}ForCausalLM")(config).eval()


class Text:
    """Ids as words, for models of any vocabulary."""

    eos_token_id = pad_token_id = 2

    def decode(self, ids, skip_special_tokens=True):
        return "".join(f"t{i} " for i in ids)


def request(name, prompt=(5, 6, 7, 8), count=3, seed=7, **params):
    return Request(name, tuple(prompt), count, SamplingParams(**({"max_new_tokens": 12} | params)), seed)


def run(engine, *requests):
    for r in requests:
        engine.submit(r)
    samples = {}
    while engine.pending:
        finished = engine.poll()
        assert finished
        samples |= {(c.request_id, c.index): c.sample for c in finished}
    return samples


def tokens(samples):
    return {key: ids(sample) for key, sample in samples.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["Llama", "Qwen2", "Qwen3", "Gemma", "Phi", "Mistral", "Phi3", "GPTNeoX", "Olmo2"]
)
def test_every_architecture_samples_what_generate_samples(architecture):
    """Greedy tokens are generate's, and log-probabilities the trainer's."""
    model = make(architecture)
    prompts = [(5, 6, 7, 8), (9, 10, 11, 12, 13, 14, 15), (3,)]
    requests = [request(f"r{i}", prompt, 1, temperature=0) for i, prompt in enumerate(prompts)]
    samples = run(NativeEngine(model, Text()), *requests)
    for r in requests:
        prompt = torch.tensor(r.prompt_ids[None]).long()
        plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
        ours = samples[r.id, 0].token_ids
        assert list(ours) == plain[0, len(r.prompt_ids) :].tolist()
        again = response_logps(model, [train_sample(r.prompt_ids, ours, 0.0, 0.0, 0)], 1.0, 0)
        torch.testing.assert_close(again.logps[0], torch.tensor(samples[r.id, 0].logps), atol=1e-4, rtol=0)


def test_log_probabilities_are_the_trainers_at_the_temperature_before_truncation():
    model = small_model()
    r = request("a", temperature=0.6, top_p=0.9, top_k=40, min_p=0.01)
    for sample in run(NativeEngine(model, tokenizer()), r).values():
        again = response_logps(model, [train_sample(r.prompt_ids, sample.token_ids, 0.0, 0.0, 0)], 0.6, 0)
        torch.testing.assert_close(again.logps[0], torch.tensor(sample.logps), atol=1e-4, rtol=0)


MIXED = [
    request("plain", range(5, 9), 4, seed=1),
    request("longer", range(5, 20), 3, seed=2, max_new_tokens=30),
    request("sharp", range(9, 12), 4, seed=3, temperature=0.5, max_new_tokens=7),
    request("cut", range(5, 14), 2, seed=4, top_p=0.7, top_k=9, max_new_tokens=25),
    request("greedy", range(5, 7), 1, temperature=0, max_new_tokens=18),
    request("floor", range(5, 8), 2, seed=6, min_p=0.2, max_new_tokens=40),
    request("one", range(5, 11), 5, seed=7, max_new_tokens=1),
]


@pytest.fixture(scope="module")
def model():
    return small_model()


@cache
def mixed_by_generate():
    return run(HFEngine(small_model(), tokenizer(), 64), *MIXED)


@pytest.fixture(scope="module")
def by_generate():
    return mixed_by_generate()


@pytest.mark.slow
@pytest.mark.parametrize("max_batch", [1, 2, 5, 100])
def test_any_mix_of_requests_gives_what_generate_gives(model, by_generate, max_batch):
    samples = run(NativeEngine(model, tokenizer(), max_batch=max_batch), *MIXED)
    assert tokens(samples) == tokens(by_generate)
    for key, sample in samples.items():
        assert sample.finish_reason == by_generate[key].finish_reason
        assert sample.text == by_generate[key].text
        torch.testing.assert_close(torch.tensor(sample.logps), torch.tensor(by_generate[key].logps), atol=1e-4, rtol=0)


@pytest.mark.slow
@given(seed=st.integers(0, 2**20), max_batch=st.integers(1, 9), slots=st.integers(1, 6))
@settings(max_examples=12, deadline=None)
def test_order_batch_and_memory_change_nothing(seed, max_batch, slots):
    """Requests in any order, some submitted while others run, in a cache of any size."""
    engine = NativeEngine(
        small_model(), tokenizer(), max_batch=max_batch, kv_memory_bytes=slots * 64 * 2 * 2 * 2 * 8 * 4
    )
    rng = random.Random(seed)
    waiting = rng.sample(MIXED, len(MIXED))
    samples = {}
    while waiting or engine.pending:
        for _ in range(rng.randint(0, 3)):
            if waiting:
                engine.submit(waiting.pop())
        samples |= {(c.request_id, c.index): c.sample for c in engine.poll()}
    assert tokens(samples) == tokens(mixed_by_generate())


def test_alone_and_in_a_crowd_are_the_same(model):
    alone = run(NativeEngine(model, tokenizer()), request("a"))
    crowd = [request(f"x{i}", range(5, 8 + i % 7), 8, seed=i) for i in range(12)]
    crowded = run(NativeEngine(model, tokenizer(), max_batch=40), *crowd[:6], request("a"), *crowd[6:])
    assert {key: ids(crowded[key]) for key in alone} == tokens(alone)
    assert len({ids(sample) for sample in alone.values()}) == 3, "the samples of a group differ"


def test_a_prompt_is_computed_once_for_its_group(model, monkeypatch):
    rows = []
    plain = prefill.next_logits
    monkeypatch.setattr(prefill, "next_logits", lambda m, ids, *rest: rows.append(len(ids)) or plain(m, ids, *rest))
    run(
        NativeEngine(model, tokenizer(), max_batch=3), request("a", range(5, 15), count=8), request("b", range(5, 9), 8)
    )
    assert sorted(rows) == [4, 10]


def test_a_finished_samples_slot_is_taken_in_the_same_step(model):
    """With samples of 2 and of 12 tokens and room for four, no step runs fewer than four while any wait."""
    engine = NativeEngine(model, tokenizer(), max_batch=4)
    for i in range(6):
        engine.submit(request(f"r{i}", count=2, seed=i, max_new_tokens=2 if i % 2 else 12, ignore_eos=True))
    while engine.pending > 4:
        engine.poll()
        with torch.inference_mode():
            engine._scheduler.admit()
        assert len(engine._batch.rows) == 4


def test_memory_bounds_the_batch_and_the_rest_waits(model):
    """Two layers, two heads of eight, keys and values in float32: 256 bytes a token, 16 KiB for 64 tokens."""
    engine = NativeEngine(model, tokenizer(), kv_memory_bytes=5 * 16 * 1024)
    for i in range(4):
        engine.submit(request(f"r{i}", count=4, seed=i))
    seen = set()
    while engine.pending:
        engine.poll()
        seen.add(len(engine._batch.rows))
        held = sum(t.numel() * 4 for t in [*engine._batch.cache.keys.values(), *engine._batch.cache.values.values()])
        assert held <= 5 * 16 * 1024
    assert max(seen) <= 5


def test_a_request_that_memory_never_holds_is_refused(model):
    engine = NativeEngine(model, tokenizer(), kv_memory_bytes=10_000)
    with pytest.raises(UserError, match=r"sampling.kv_memory_gib: one sequence of 64 tokens"):
        engine.submit(request("a"))
    for bytes_ in (0, 10_000):
        with pytest.raises(UserError, match=r"sampling.kv_memory_gib: one sequence of 64 tokens"):
            NativeEngine(model, tokenizer(), kv_memory_bytes=bytes_, longest=50)


@pytest.mark.slow
def test_the_cache_grows_for_a_longer_request_while_others_run(model):
    short, long = request("s", count=4, seed=1), request("l", range(5, 30), 2, seed=2, max_new_tokens=90)
    engine = NativeEngine(model, tokenizer(), max_batch=8)
    engine.submit(short)
    samples = {(c.request_id, c.index): c.sample for c in engine.poll()}
    samples |= run(engine, long)
    assert tokens(samples) == tokens(run(HFEngine(model, tokenizer(), 64), short, long))


def test_a_cancelled_request_is_forgotten_and_its_tokens_are_counted(model):
    engine = NativeEngine(model, tokenizer(), max_batch=4)
    a, b, c = (request(name, count=3, seed=i, ignore_eos=True) for i, name in enumerate("abc"))
    short = request("short", count=1, max_new_tokens=5, ignore_eos=True)
    for r in (short, a, b, c):
        engine.submit(r)
    samples = {(x.request_id, x.index): x.sample for x in engine.poll()}
    assert set(samples) == {("short", 0)}
    assert engine.cancel(["a"]) == 15, "three samples were five tokens long"
    assert engine.cancel(["c"]) == 0, "it had not begun"
    assert engine.pending == 3
    assert tokens(run(engine)) == tokens(run(HFEngine(model, tokenizer(), 64), b))
    assert engine.cancel(["b"]) == 0


def test_what_had_ended_and_was_not_taken_counts_as_cancelled(model):
    engine = NativeEngine(model, tokenizer(), max_batch=4)
    engine.submit(request("a", count=2, max_new_tokens=5, ignore_eos=True))
    with torch.inference_mode():
        engine._scheduler.admit()
        while not engine._batch.finished:
            engine._step()
    assert engine.cancel(["a"]) == 10
    assert engine.poll() == []


def test_a_group_cancelled_while_half_of_it_waits(model):
    engine = NativeEngine(model, tokenizer(), max_batch=2)
    engine.submit(request("a", count=5))
    engine.poll()
    engine.cancel(["a"])
    assert engine.pending == 0
    assert engine.poll() == []
    b = request("b", range(5, 9), 3)
    assert tokens(run(engine, b)) == tokens(run(HFEngine(model, tokenizer(), 64), b))


def test_a_stop_string_ends_a_response_where_generate_ends_it(model):
    free = run(NativeEngine(model, tokenizer()), request("a", count=8, seed=3))
    text = max((s.text for s in free.values()), key=len)
    stop = (text[2:4],)
    r = request("a", count=8, seed=3, stop=stop)
    samples, by_hf = run(NativeEngine(model, tokenizer()), r), run(HFEngine(model, tokenizer(), 64), r)
    assert {k: (ids(s), s.finish_reason, s.text) for k, s in samples.items()} == {
        k: (ids(s), s.finish_reason, s.text) for k, s in by_hf.items()
    }
    assert any(s.finish_reason == "stop" and stop[0] in s.text for s in samples.values())


@pytest.mark.parametrize("engine_of", [NativeEngine, HFEngine])
def test_an_end_of_sequence_token_that_is_ignored_does_not_end_a_response_at_its_limit(engine_of):
    """Every token is one that ends a sequence, so the token at the limit is, too."""
    model = small_model()
    model.generation_config.eos_token_id = list(range(model.config.vocab_size))
    words = tokenizer()
    ignored, heeded = (request(name, max_new_tokens=4, ignore_eos=name == "ignored") for name in ("ignored", "heeded"))
    samples = run(engine_of(model, words, max_batch=64), ignored, heeded)
    for index in range(3):
        cut, ended = samples["ignored", index], samples["heeded", index]
        assert (len(cut.token_ids), cut.finish_reason) == (4, "length")
        assert cut.text == words.decode(cut.token_ids, skip_special_tokens=True)
        assert (len(ended.token_ids), ended.finish_reason, ended.text) == (1, "stop", "")


def test_new_weights_are_taken_over_and_versions_written_down(model):
    other = small_model(seed=5)
    engine = NativeEngine(small_model(), tokenizer())
    engine.submit(request("a", count=1, ignore_eos=True, max_new_tokens=5))
    engine.submit(request("b", count=1, ignore_eos=True, max_new_tokens=9))
    first = engine.poll()[0].sample
    engine.receive(3, weights_of(other))
    second = engine.poll()[0].sample
    assert set(first.versions) == {0}
    assert (second.versions[0], second.versions[-1]) == (0, 3)
    assert (np.diff(second.versions) >= 0).all()
    assert tokens(run(engine, request("c"))) == tokens(run(NativeEngine(other, tokenizer()), request("c")))


def test_in_bfloat16_it_keeps_a_copy_and_follows_new_weights():
    model, other = small_model(), small_model(seed=5)
    engine = NativeEngine(model, tokenizer(), dtype=torch.bfloat16)
    assert next(model.parameters()).dtype == torch.float32
    before = run(engine, request("a", count=8))
    engine.receive(1, weights_of(other))
    after = run(engine, request("a", count=8))
    fresh = run(NativeEngine(other, tokenizer(), dtype=torch.bfloat16), request("a", count=8))
    assert tokens(after) == tokens(fresh) != tokens(before)


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        ("Mamba", {"state_size": 4}, "MambaForCausalLM"),
        ("Gemma2", {}, "attention with softcap"),
        ("Mistral", {"sliding_window": 32}, "a sliding window of 32 tokens in a context of 100"),
        ("Bloom", {"n_head": 4}, "BloomForCausalLM"),
        (
            "Llama",
            {
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                "max_position_embeddings": 64,
            },
            "dynamic positions",
        ),
        (
            "Phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 64,
                },
                "original_max_position_embeddings": 64,
            },
            "longrope positions",
        ),
        ("RecurrentGemma", {}, "RecurrentGemmaForCausalLM"),
    ],
)
def test_an_architecture_that_it_does_not_run_is_refused_by_name(architecture, changes, said):
    model = make(architecture, **changes)
    with pytest.raises(UserError, match=f"engine=native: {architecture}ForCausalLM .*use engine=hf") as error:
        NativeEngine(model, Text(), longest=100)
    assert said in str(error.value)


def test_attention_in_chunks_shorter_than_the_context_is_refused():
    config = transformers.Llama4TextConfig(
        **SMALL, attention_chunk_size=16, num_local_experts=2, intermediate_size_mlp=48, layer_types=None
    )
    model = transformers.Llama4ForCausalLM(config).eval()
    with pytest.raises(UserError, match="attention in chunks of 16 tokens"):
        NativeEngine(model, Text(), longest=17)


def test_a_window_that_is_never_left_is_no_reason_to_refuse():
    NativeEngine(make("Mistral", sliding_window=128), Text(), longest=100)


def test_the_module_is_as_it_was_outside_the_engine(model):
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before = model(ids).logits
        name = model.config._attn_implementation
        run(NativeEngine(model, tokenizer()), request("a"))
        torch.testing.assert_close(model(ids).logits, before, atol=0, rtol=0)
    assert model.config._attn_implementation == name
    assert all(parameter.requires_grad for parameter in model.parameters())
