"""The words of the command line, as settings."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from dapo_rl.data import load_rows
from dapo_rl.errors import UserError
from dapo_rl.evals.protocols import fingerprint, make_plan
from dapo_rl.evals.run import _home, _params


def test_the_papers_protocol():
    plan = make_plan("aime.parquet", protocol="aime2024")
    config = plan.config
    assert (config.eval.temperature, config.eval.top_p, plan.k) == (1.0, 0.7, 32)
    assert config.sampling.max_new_tokens == 20480
    assert config.reward.verifier == "math"


def test_an_option_wins_over_the_protocol():
    plan = make_plan("aime.parquet", {"--k": 4, "--top-p": None}, ["sampling.max_new_tokens=64"], "aime2024")
    assert (plan.k, plan.config.eval.top_p, plan.config.sampling.max_new_tokens) == (4, 0.7, 64)


def test_what_nobody_named():
    plan = make_plan("arithmetic")
    assert plan.k is None
    assert plan.config.data.eval.model_dump() == {"source": "arithmetic", "split": "heldout", "size": 512}
    assert make_plan("reasoning_gym:chain_sum").config.reward.verifier == "gym"
    assert make_plan("reasoning_gym:chain_sum", {"--verifier": "math"}).config.reward.verifier == "math"


def test_parameters_of_the_source():
    plan = make_plan("reasoning_gym:chain_sum", words=["data.eval.size=20", "data.eval.max_terms=2"])
    assert plan.config.data.eval.model_dump() == {"source": "reasoning_gym:chain_sum", "size": 20, "max_terms": 2}
    assert make_plan("arithmetic", words=["data.eval.split=train"]).config.data.eval.split == "train"


def test_a_section_sets_what_its_keys_set():
    plan = make_plan("arithmetic", words=["eval={samples: 4, temperature: 0.5}", "sampling={max_new_tokens: 7}"])
    assert (plan.k, plan.config.eval.temperature) == (4, 0.5)
    assert {"eval.samples", "sampling.max_new_tokens"} <= plan.given


def test_two_tokens_are_a_limit_too():
    assert make_plan("arithmetic", {"--max-new-tokens": 2}).config.sampling.max_new_tokens == 2


@pytest.mark.parametrize(("context", "limit"), [(None, 1024), (4096, 1024), (1124, 1024), (1123, 1023), (101, 1)])
def test_a_limit_that_nobody_named_is_lowered_to_the_context(context, limit):
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=context))
    assert _params(make_plan("arithmetic"), model, longest=100).max_new_tokens == limit
    named = _params(make_plan("arithmetic", {"--max-new-tokens": 1}), model, longest=100)
    assert named.max_new_tokens == 1


@pytest.mark.parametrize(("context", "limit"), [(100, None), (1123, 1024)])
def test_a_limit_beyond_the_context_is_refused(context, limit):
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=context))
    with pytest.raises(UserError, match=rf"after a prompt of 100 tokens exceeds the model's context of {context}"):
        _params(make_plan("arithmetic", {"--max-new-tokens": limit} if limit else {}), model, longest=100)


@pytest.mark.parametrize(
    ("model", "begins"),
    [
        ("tiny", "tiny"),
        ("Qwen/Qwen2.5-0.5B", "Qwen-Qwen2.5-0.5B"),
        ("../runs/a b/", "runs-a-b"),
        ("m" * 60, "m" * 48),
        ("…", "data"),
    ],
)
def test_the_responses_of_a_model_are_in_a_directory_with_its_name(model, begins):
    home = _home(Path("out"), model)
    assert home.parent == Path("out")
    name, _, digest = home.name.rpartition("-")
    assert (name, len(digest)) == (begins, 8)
    assert home != _home(Path("out"), f"{model}/")


@pytest.mark.parametrize(
    ("data", "options", "words", "protocol", "message"),
    [
        (None, {}, [], None, "--data: name a .jsonl or .parquet file"),
        (None, {}, ["env.agent=a.py:solve"], None, "--data: an agent needs rows to work on; name a .jsonl"),
        ("arithmetic", {}, [], "aime24", "did you mean aime2024?"),
        ("arithmetic", {"--k": 2}, ["eval.samples=3"], None, "eval.samples: given twice; --k is the same setting"),
        ("arithmetic", {}, ["data.eval=x.jsonl"], None, "data.eval: given twice; --data is the same setting"),
        ("arithmetic", {}, ["seed=1", "seed=2"], None, "seed: given twice"),
        ("arithmetic", {}, ["train.lr=1"], None, "train.lr: has no effect on an evaluation"),
        ("arithmetic", {}, ["sampling.temperature=1"], None, "sampling.temperature: has no effect"),
        ("arithmetic", {}, ["sampling={temperature: 1}"], None, "sampling.temperature: has no effect"),
        ("arithmetic", {}, ["engine=vllm", "engine_options.seed=1"], None, "engine_options.seed: has no effect"),
        ("arithmetic", {"--k": 2}, ["eval={samples: 3}"], None, "eval.samples: given twice; --k is the same setting"),
        ("arithmetic", {}, ["model.name=tiny"], None, "name models as arguments"),
        ("arithmetic", {}, ["eval.tmperature=1"], None, "did you mean eval.temperature?"),
        ("arithmetic", {"--k": 0}, [], None, "eval.samples: input should be greater than or equal to 1, got 0"),
        ("arithmetic", {"--engine": "nativ"}, [], None, "did you mean native?"),
        ("arithmetic", {"--temperature": 0.0, "--k": 4}, [], None, "4 samples at temperature 0 are identical"),
    ],
)
def test_mistakes(data, options, words, protocol, message):
    with pytest.raises(UserError) as caught:
        make_plan(data, options, words, protocol)
    assert message in str(caught.value)


def test_a_fingerprint_sees_a_changed_answer():
    rows = [{"prompt": "1+1=?", "answer": "2", "object": object()}]
    before = fingerprint(load_rows(rows))
    assert before == fingerprint(load_rows([{**rows[0], "object": object()}]))
    assert before != fingerprint(load_rows([{**rows[0], "answer": "3"}]))
