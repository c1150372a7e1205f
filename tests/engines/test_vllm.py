"""The vLLM engine's bookkeeping, over a stand-in for vLLM that speaks its 0.24 interface."""

import os
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support import ids, small_model, tokenizer

from dapo_rl.config import SamplingSettings
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.errors import UserError


class OneWeight:
    def buckets(self, nbytes):
        yield [("model.norm.weight", torch.ones(1))]


class StandInParams(SimpleNamespace):
    pass


@dataclass
class StandInEngine:
    """Gives every request the token 5, one a step, to its limit; a request with stop tokens ends with one of them."""

    running: dict[str, list[Any]] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    resets: int = 0

    def add_request(self, request_id, prompt, params):
        assert prompt["type"] == "token"
        self.running[request_id] = [params, []]

    def step(self):
        done = []
        for name, (params, tokens) in list(self.running.items()):
            tokens.append(5)
            if len(tokens) < params.max_tokens:
                continue
            if params.stop_token_ids:
                tokens[-1] = params.stop_token_ids[0]
            logprobs = SimpleNamespace(logprobs=[-0.5 - i for i in range(len(tokens))])
            reason = "stop" if params.stop_token_ids else "length"
            output = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason)
            done.append(SimpleNamespace(request_id=name, finished=True, outputs=[output], num_cached_tokens=3))
            del self.running[name]
        return done

    def abort_request(self, request_ids):
        for name in request_ids:
            del self.running[name]

    def apply_model(self, function):
        function(SimpleNamespace(load_weights=lambda weights: self.loaded.extend(name for name, _ in weights)))

    def reset_prefix_cache(self):
        self.resets += 1

    @property
    def output_processor(self):
        def state(name):
            tokens = self.running[name][1]
            logprobs = SimpleNamespace(logprobs=[-0.5 - i for i in range(len(tokens))])
            return SimpleNamespace(
                detokenizer=SimpleNamespace(num_output_tokens=lambda: len(tokens), output_token_ids=tokens),
                logprobs_processor=SimpleNamespace(logprobs=logprobs),
            )

        return SimpleNamespace(
            external_req_ids={name: [name] for name in self.running},
            request_states={name: state(name) for name in self.running},
        )


@pytest.fixture
def engine(monkeypatch):
    made, calls = {}, []

    def llm(**arguments):
        made.update(arguments)
        if "max_num_batched_token" in arguments:
            raise TypeError("EngineArgs.__init__() got an unexpected keyword argument 'max_num_batched_token'")
        sleep = lambda level: calls.append(f"sleep {level}")  # noqa: E731
        return SimpleNamespace(
            llm_engine=StandInEngine(), sleep=sleep, wake_up=lambda: calls.append("wake up"), calls=calls
        )

    vllm, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.LLM, vllm.SamplingParams = llm, StandInParams
    params.RequestOutputKind = SimpleNamespace(FINAL_ONLY=2)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROCESSING_METHOD"):
        monkeypatch.setenv(name, "")

    def build(settings=None, **options):
        from dapo_rl.engines.vllm import VLLMEngine

        settings = settings or SamplingSettings(max_batch=7)
        return VLLMEngine(small_model(), tokenizer(), settings, torch.bfloat16, **options), made

    return build


def request(name, count=2, tokens=3, **params):
    return Request(name, (4, 5, 6), count, SamplingParams(max_new_tokens=tokens, **params), seed=1)


def drain(engine):
    done = []
    while engine.pending:
        done += engine.poll()
    return done


def test_samples_come_back_by_request_and_index_with_their_log_probabilities(engine):
    ours, arguments = engine()
    assert arguments["dtype"] == "bfloat16"
    assert arguments["max_num_seqs"] == 7
    ours.submit(request("a", tokens=3, ignore_eos=True))
    ours.submit(request("b", count=1, tokens=2))
    assert ours.pending == 3
    done = {(c.request_id, c.index): c.sample for c in drain(ours)}
    assert set(done) == {("a", 0), ("a", 1), ("b", 0)}
    assert ids(done["a", 0]) == (5, 5, 5)
    assert done["a", 0].logps.tolist() == [-0.5, -1.5, -2.5]
    assert done["a", 0].finish_reason == "length"
    stopped = done["b", 0]
    assert stopped.finish_reason == "stop"
    assert ids(stopped) == (5, tokenizer().eos_token_id)
    assert stopped.text == tokenizer().decode([5])
    assert ours.poll() == []


def test_every_sample_has_a_limit_of_its_own(engine):
    ours, _ = engine()
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    ours.submit(Request("a", (4, 5, 6), 3, params, seed=1, limits=(2, 9, 4)))
    assert {c.index: len(c.sample.token_ids) for c in drain(ours)} == {0: 2, 1: 9, 2: 4}


def test_every_sample_has_a_seed_of_its_own_unless_told_otherwise(engine):
    for seeded in (True, False):
        ours, _ = engine(seeded=seeded)
        ours.submit(request("a", count=3))
        seeds = {params.seed for params, _ in ours._engine.running.values()}
        assert len(seeds) == (3 if seeded else 1)
        assert (None in seeds) is not seeded


@pytest.mark.parametrize(("wanted", "told"), [(None, "as it was"), (True, "1"), (False, "0")])
def test_the_model_runner_is_vllms_choice_unless_told_otherwise(engine, monkeypatch, wanted, told):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "as it was")
    _, arguments = engine(**({} if wanted is None else {"model_runner_v2": wanted}))
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == told
    assert "model_runner_v2" not in arguments


ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@pytest.mark.parametrize("set_by_user", [False, True])
def test_vllm_is_quiet_and_starts_fast_unless_the_environment_says_otherwise(engine, monkeypatch, set_by_user):
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "the user's")
        if not set_by_user:
            monkeypatch.delenv(name)
    engine()
    assert {name: os.environ[name] for name in ENVIRONMENT} == (
        dict.fromkeys(ENVIRONMENT, "the user's") if set_by_user else ENVIRONMENT
    )


def test_cancelling_frees_the_request_and_counts_what_is_lost(engine):
    ours, _ = engine()
    ours.submit(request("long", count=2, tokens=9))
    ours.submit(request("short", count=1, tokens=2))
    assert [c.request_id for c in ours.poll()] == ["short"]
    assert ours.cancel(["long"]) == 4
    assert ours.pending == 0
    assert ours.cancel(["long"]) == 0


def test_new_weights_reach_the_model_and_forget_cached_prefixes(engine):
    ours, _ = engine()
    ours.submit(request("a", count=1))
    ours._engine.step()
    ours.receive(3, OneWeight())
    assert ours._engine.loaded == ["model.norm.weight"]
    assert ours._engine.resets == 1
    assert drain(ours)[0].sample.versions.tolist() == [0, 3, 3]


def test_unfinished_samples_leave_with_their_tokens_and_continue(engine):
    ours, _ = engine()
    ours.submit(request("a", count=2, tokens=5, ignore_eos=True))
    ours._engine.step()
    ours._engine.step()
    ours.submit(request("b", count=1))
    first, second = ours.take_unfinished()
    assert ours.pending == 0
    assert not ours._engine.running
    assert (second.id, second.untouched) == ("b", True)
    assert [(begun.index, ids(begun), begun.logps.tolist()) for begun in first.partial] == [
        (0, (5, 5), [-0.5, -1.5]),
        (1, (5, 5), [-0.5, -1.5]),
    ]
    other, _ = engine()
    other.submit(first)
    params, _ = other._engine.running["1:a:0"]
    assert params.max_tokens == 3
    done = drain(other)
    assert [ids(c.sample) for c in done] == [(5,) * 5] * 2
    assert done[0].sample.logps.tolist() == [-0.5, -1.5, -0.5, -1.5, -2.5]


def test_log_probabilities_are_those_that_the_trainer_recomputes(engine):
    assert engine(SamplingSettings(top_p=0.9))[1]["logprobs_mode"] == "raw_logprobs"
    assert engine(SamplingSettings(temperature=0.7))[1]["logprobs_mode"] == "processed_logprobs"
    with pytest.raises(UserError, match="only at temperature 1"):
        engine(SamplingSettings(temperature=0.7, top_p=0.9))


def test_without_vllm_it_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    from dapo_rl.engines.vllm import VLLMEngine

    with pytest.raises(UserError, match="pip install vllm"):
        VLLMEngine(small_model(), tokenizer(), SamplingSettings(), torch.float32)


def test_options_go_to_vllm_and_a_wrong_one_is_one_line(engine):
    _, arguments = engine(enforce_eager=True, gpu_memory_utilization=0.7)
    assert arguments["enforce_eager"] is True
    assert arguments["gpu_memory_utilization"] == 0.7
    with pytest.raises(UserError, match=r"^engine_options: vLLM refuses max_num_batched_token: .*unexpected keyword"):
        engine(max_num_batched_token=8192)


def test_it_rests_until_the_next_weights(engine):
    ours, arguments = engine(releases_memory=True)
    assert arguments["enable_sleep_mode"] is True
    ours.submit(request("a", tokens=3, ignore_eos=True))
    ours._engine.step()
    ours.release_memory()
    ours.release_memory()
    assert ours._llm.calls == ["sleep 2"]
    ours.submit(request("b", count=1, tokens=2, ignore_eos=True))
    assert ours.poll(0.01) == []
    assert ours.pending == 3
    ours.receive(1, OneWeight())
    assert ours._llm.calls == ["sleep 2", "wake up"]
    assert ours._engine.loaded == ["model.norm.weight"]
    done = {(c.request_id, c.index): c.sample for c in drain(ours)}
    assert {key: len(sample.token_ids) for key, sample in done.items()} == {("a", 0): 3, ("a", 1): 3, ("b", 0): 2}
    assert done["a", 0].versions.tolist() == [0, 1, 1]
    ours.release_memory()
    ours.submit(request("c"))
    assert [left.id for left in ours.take_unfinished()] == ["c"]
