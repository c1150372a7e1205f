"""`sampling.keep_mask`: what it needs, and what it cannot be combined with, in one line each."""

import pytest

from dapo_rl import Config, UserError
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.lab.check import conformance

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


def test_a_check_of_the_recipe_recommends_it():
    found = {}
    for keeps in (False, True):
        config = Config.build({"sampling.top_k": 8, "sampling.keep_mask": keeps})
        (found[keeps],) = [row.meaning for row in conformance(config).rows if row.component == "Truncated sampling"]
    assert "set sampling.keep_mask=true" in found[False]
    assert "biased" not in found[True]
