"""`sampling.keep_mask`: what it needs, and what it cannot be combined with, in one line each."""

import pytest

from dapo_rl import Config, UserError
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.lab.check import conformance
from dapo_rl.memory.check import memory_report
from dapo_rl.memory.report import GIB, Memory

KEEPS = {"sampling.keep_mask": True}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sampling.top_p": 0.9}, r"needs a limit to the tokens that are kept; add sampling\.top_k, for example "),
        ({"sampling.min_p": 0.1}, r"needs a limit to the tokens that are kept; add sampling\.top_k, for example "),
        ({}, r"needs a limit to the tokens that are kept; add sampling\.top_k, for example sampling\.top_k=256$"),
        ({"sampling.top_k": 1025}, r"records at most 1024 tokens per position, and sampling\.top_k is 1025; use 1024"),
        ({"sampling.top_k": 8, "engine": "vllm"}, r"engine=vllm does not return the tokens .*; set engine=native$"),
    ],
)
def test_what_does_not_go_together_is_one_line(settings, said):
    with pytest.raises(UserError, match=rf"^sampling\.keep_mask: {said}"):
        Config.build(KEEPS | settings)


def test_a_served_teacher_knows_no_kept_tokens():
    settings = {"sampling.top_k": 8, "teacher.name": "http://localhost:8000/v1", "algo.advantage": "distill",
                "sampling.dynamic": False}  # fmt: skip
    Config.build(settings)
    with pytest.raises(UserError, match=r"^teacher\.name: a server gives log-probabilities of the full distribution"):
        Config.build(KEEPS | settings)
    Config.build(KEEPS | settings | {"teacher.name": "tiny"})


@pytest.mark.parametrize("top_k", [1, 1024])
def test_engines_are_told(top_k):
    settings = Config.build(KEEPS | {"sampling.top_k": top_k, "sampling.top_p": 0.9}).sampling
    params = SamplingParams.of(settings)
    assert (params.keep_mask, params.most_kept, settings.most_kept) == (True, top_k, top_k)
    off = SamplingParams.of(Config.build({"sampling.top_k": top_k}).sampling)
    assert (off.keep_mask, off.most_kept) == (False, 0)


def test_an_engine_of_ones_own_may_return_them():
    Config.build(KEEPS | {"sampling.top_k": 8, "engine": "mine.py:Engine"})


def test_the_memory_of_kept_ids_is_counted():
    """Of four sequences and the padding row's, and of the tokens of a micro-batch: 4 · 8 bytes each."""
    parts = []
    for keeps in (False, True):
        settings = {"sampling.top_k": 8, "sampling.keep_mask": keeps, "sampling.max_batch": 4, "model.dtype": "float32"}
        config = Config.build({**settings, "sampling.max_new_tokens": 100, "data.max_prompt_tokens": 28})
        report = memory_report(config, Memory("a GPU", "cuda", 24 * GIB, here=False))
        parts.append({part.name: part.bytes for part in report.parts})
    assert parts[1]["KV cache"] - parts[0]["KV cache"] == (4 + 1) * 128 * 32
    assert parts[1]["activations"] - parts[0]["activations"] == 16_384 * 32  # train.token_budget


def test_a_check_of_the_recipe_recommends_it():
    found = {}
    for keeps in (False, True):
        config = Config.build({"sampling.top_k": 8, "sampling.keep_mask": keeps})
        (found[keeps],) = [row.meaning for row in conformance(config).rows if row.component == "Truncated sampling"]
    assert "set sampling.keep_mask=true" in found[False]
    assert "biased" not in found[True]
