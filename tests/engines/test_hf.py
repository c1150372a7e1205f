"""The hf engine: log-probabilities are the trainer's, samples do not depend on their neighbours, and it says the truth
about why a response ended."""

import pytest
import torch
from support import ids, small_model, tokenizer, train_sample, weights_of

from dapo_rl.engines.hf import HFEngine
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.models.response_logps import ResponseLogps, response_logps

PARAMS = SamplingParams(max_new_tokens=12)


def request(name, text, count=3, seed=7, params=PARAMS):
    return Request(name, tuple(tokenizer()(text).input_ids), count, params, seed)


def run(engine, *requests):
    for r in requests:
        engine.submit(r)
    samples = {}
    while engine.pending:
        for completion in engine.poll():
            samples[completion.request_id, completion.index] = completion.sample
    return samples


def test_log_probabilities_equal_the_trainers():
    model = small_model()
    for params in (PARAMS, SamplingParams(12, temperature=0.6, top_p=0.9, top_k=40)):
        requests = [request("a", "1+1=?\n", params=params), request("b", "12345+6-7=?\n", params=params)]
        samples = run(HFEngine(model, tokenizer(), 64), *requests)
        for r in requests:
            for i in range(r.count):
                sample = samples[r.id, i]
                again = response_logps(
                    model,
                    [train_sample(r.prompt_ids, sample.token_ids, sample.logps, 0.0, 0)],
                    params.temperature,
                    tokenizer().pad_token_id,
                )
                torch.testing.assert_close(again.logps[0], torch.tensor(sample.logps), atol=1e-4, rtol=1e-4)


def test_in_bfloat16_they_equal_the_trainers_in_bfloat16():
    model = small_model(initializer_range=0.1)
    r = request("a", "1+1=?\n", count=1, params=SamplingParams(max_new_tokens=6))
    sample = run(HFEngine(model, tokenizer(), 64, torch.bfloat16), r)["a", 0]
    for dtype, close in ((torch.bfloat16, 0.01), (torch.float32, 0.05)):
        trainers = ResponseLogps(model, temperature=1.0, pad_id=0, dtype=dtype)
        with torch.no_grad(), trainers.compute([train_sample(r.prompt_ids, sample.token_ids, 0.0, 0.0, 0)]) as stats:
            difference = (stats.logps[0] - torch.tensor(sample.logps)).abs().max()
        assert difference < close
    assert difference > 1e-4, "it was computed in float32"


def test_samples_do_not_depend_on_the_batch_they_were_in():
    model = small_model()
    alone = run(HFEngine(model, tokenizer(), 64), request("a", "1+1=?\n"))
    crowd = [request(f"x{i}", "9-8+7=?\n" * (i % 3 + 1), count=2, seed=i) for i in range(5)]
    crowded = run(HFEngine(model, tokenizer(), 4), *crowd[:2], request("a", "1+1=?\n"), *crowd[2:])
    for i in range(3):
        assert ids(crowded["a", i]) == ids(alone["a", i])
    assert len({ids(alone["a", i]) for i in range(3)}) == 3, "the samples of a group differ"


def test_the_seed_decides():
    model = small_model()
    first = run(HFEngine(model, tokenizer(), 64), request("a", "1+1=?\n", seed=1))
    second = run(HFEngine(model, tokenizer(), 64), request("a", "1+1=?\n", seed=2))
    assert ids(first["a", 0]) != ids(second["a", 0])


def test_greedy_equals_generate():
    model = small_model()
    text = "3+4=?\n"
    sample = run(HFEngine(model, tokenizer(), 4), request("a", text, 1, params=SamplingParams(12, temperature=0)))[
        "a", 0
    ]
    ids = tokenizer()(text, return_tensors="pt").input_ids
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert list(sample.token_ids) == plain[0, ids.shape[1] :].tolist()


def biased_towards(token, amount):
    """A model whose every position gives a token this much more."""
    model = small_model()

    def add(_module, _inputs, logits):
        bias = torch.zeros(logits.shape[-1])
        bias[token] = amount
        return logits + bias

    model.lm_head.register_forward_hook(add)
    return model


def test_truncated_means_that_the_engine_stopped_it():
    """A response as long as the limit whose last token is EOS is whole; one without EOS is not."""
    eos = tokenizer().eos_token_id
    at_once = HFEngine(biased_towards(eos, 1e4), tokenizer(), 4)
    sample = run(at_once, request("a", "1=?\n", 1, params=SamplingParams(1)))["a", 0]
    assert ids(sample) == (eos,)
    assert sample.finish_reason == "stop"
    assert not sample.truncated
    assert sample.text == ""

    never = HFEngine(biased_towards(eos, -1e4), tokenizer(), 4)
    sample = run(never, request("a", "1=?\n", 1, params=SamplingParams(5)))["a", 0]
    assert len(sample.token_ids) == 5
    assert sample.finish_reason == "length"
    assert sample.truncated


def test_a_stop_string_ends_a_response():
    model = small_model()
    free = run(HFEngine(model, tokenizer(), 64), request("a", "1+1=?\n", 8))
    letters = [c for sample in free.values() for c in sample.text[:-1] if c.isascii() and c.isprintable()]
    stop = letters[0]
    stopped = run(HFEngine(model, tokenizer(), 64), request("a", "1+1=?\n", 8, params=SamplingParams(12, stop=(stop,))))
    for key, sample in free.items():
        if stop in sample.text:
            assert stopped[key].finish_reason == "stop"
            assert stopped[key].text == sample.text[: sample.text.index(stop) + len(stop)]
        else:
            assert stopped[key] == sample


def test_the_models_own_generation_settings_do_not_change_the_policy():
    model = small_model()
    plain = run(HFEngine(model, tokenizer(), 64), request("a", "1+1=?\n"))
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.min_new_tokens = 12
    model.generation_config.temperature = 0.1
    while_sampling = []
    model.register_forward_hook(lambda *_: while_sampling.append(model.generation_config.repetition_penalty))
    assert run(HFEngine(model, tokenizer(), 64), request("a", "1+1=?\n")) == plain
    assert set(while_sampling) == {5.0}, "a checkpoint that is written meanwhile has the model's own settings"


def test_weights_are_taken_over_and_the_version_is_written_into_samples():
    model, other = small_model(0), small_model(1)
    engine = HFEngine(model, tokenizer(), 64)
    engine.receive(4, weights_of(other))
    sample = run(engine, request("a", "1+1=?\n"))["a", 0]
    assert set(sample.versions) == {4}
    assert ids(sample) == ids(run(HFEngine(other, tokenizer(), 64), request("a", "1+1=?\n"))["a", 0])


def test_a_cancelled_request_is_forgotten():
    engine = HFEngine(small_model(), tokenizer(), 64)
    engine.submit(request("a", "1+1=?\n"))
    engine.submit(request("b", "1+2=?\n"))
    assert engine.pending == 6
    assert engine.cancel(["a"]) == 0
    assert {c.request_id for c in engine.poll()} == {"b"}
    assert engine.pending == 0
    assert engine.poll() == []


@pytest.mark.parametrize("max_batch", [1, 4, 6, 100])
def test_any_batch_size_gives_every_sample_once(max_batch):
    samples = run(
        HFEngine(small_model(), tokenizer(), max_batch),
        request("a", "1+1=?\n", 3),
        request("b", "1+2=?\n", 5, params=SamplingParams(4)),
        request("c", "1+3=?\n", 2),
    )
    assert sorted(samples) == [(n, i) for n, count in (("a", 3), ("b", 5), ("c", 2)) for i in range(count)]
    assert all(len(samples["b", i].token_ids) <= 4 for i in range(5))


@pytest.mark.parametrize(
    ("max_batch", "polls"),
    [(1, ["a", "b", "c"]), (5, ["a", "b", "c"]), (6, ["ab", "c"]), (8, ["ab", "c"]), (9, ["abc"])],
)
def test_one_call_generates_as_many_requests_as_fit_into_a_batch(max_batch, polls):
    """The others can still be cancelled, and their samples get the next weights."""
    engine = HFEngine(small_model(), tokenizer(), max_batch)
    for name in "abc":
        engine.submit(request(name, "1+1=?\n", 3, params=SamplingParams(2)))
    found = []
    while engine.pending:
        found.append("".join(sorted({completion.request_id for completion in engine.poll()})))
    assert found == polls
