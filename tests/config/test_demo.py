"""Without a recipe: the demo, unless the command line names another model or other data."""

import pytest

from dapo_rl.config import Config
from dapo_rl.demo import DEFAULT_RECIPE, chosen_settings, start_from
from dapo_rl.errors import UserError

NO_DEMO = [
    ["model.name=DIR", "data.train=gsm8k-train.jsonl"],
    ["data.train=rows.jsonl", "model.name=DIR"],
    ["data.train=first.jsonl", "train.steps=3", "model.name=DIR"],
]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.steps=3", "seed=1"],
        ["preset=grpo"],
        ["model.name=tiny", "model.dtype=bfloat16"],
        ["data.train.size=200", "data.eval.size=16"],
        ["data.train=arithmetic"],
        ["data.eval=null", "eval.every=null"],
        ["reward.verifier=rewards.py:score"],
    ],
)
def test_overrides_that_leave_the_model_and_the_data_alone_change_the_demo(overrides):
    start = start_from(None, overrides)
    assert not start.custom
    assert start.load() == Config.load(DEFAULT_RECIPE, overrides)


@pytest.mark.parametrize("overrides", NO_DEMO)
def test_another_model_gets_the_presets_defaults(overrides):
    start = start_from(None, overrides)
    assert start.custom
    assert start.load() == Config.load(None, overrides)


@pytest.mark.parametrize(
    "overrides", [["model.name=DIR"], ["model={name: DIR}"], ["model.name=DIR", "data.eval=a.jsonl"]]
)
def test_another_model_needs_data(overrides):
    start = start_from(None, overrides)
    with pytest.raises(UserError, match=r"^model.name=DIR: data.train is not set; name what to train on"):
        start.load()
    assert start.load(needs_data=False).data.train == "arithmetic"


@pytest.mark.parametrize("text", ["model: {name: org/model}\n", "train: {lr: 1.0e-5}\n", "", "data: {eval: a.jsonl}\n"])
def test_a_recipe_never_falls_back_to_the_demos_data(tmp_path, text):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    with pytest.raises(UserError, match=r"mine.yaml: data.train is not set; name what to train on"):
        start_from(recipe, []).load()
    assert start_from(recipe, ["data.train=arithmetic"]).load().data.train == "arithmetic"


def test_no_value_of_the_demo_is_left_in_a_run_of_your_own():
    config = start_from(None, ["model.name=DIR", "data.train=gsm8k-train.jsonl"]).load()
    default = Config.load()
    assert (config.data.max_prompt_tokens, config.sampling.max_new_tokens) == (1024, 1024)
    assert config.train == default.train
    assert (config.train.lr, config.train.lr_schedule) == (1e-6, "constant")
    assert (config.data.eval, config.eval.every) == (None, None)
    assert config.overlong_cache_length == 204
    assert config.data.train == "gsm8k-train.jsonl"


@pytest.mark.parametrize(
    "word", ["data.train=rows.jsonl", "data.train.source=rows.jsonl", "data={train: {source: rows.jsonl}}"]
)
def test_the_embedded_model_on_other_data_fits_its_context(word):
    start = start_from(None, [word, "seed=3"])
    config = start.load()
    assert start.custom
    assert (config.model.name, config.seed, config.train.lr) == ("tiny", 3, 1e-6)
    assert config.sampling.max_new_tokens == 256
    train = config.data.train
    assert train == "rows.jsonl" or (train.source, train.model_extra) == ("rows.jsonl", {})
    assert start_from(None, [word, "sampling.max_new_tokens=99"]).load().sampling.max_new_tokens == 99


def test_another_model_on_the_demos_data():
    train = start_from(None, ["model.name=DIR", "data.train.size=200"]).load().data.train
    assert (train.source, train.model_extra) == ("arithmetic", {"size": 200})


def test_a_recipe_is_a_recipe_whatever_the_overrides(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("train: {lr: 3.0e-5}\ndata: {train: a.jsonl}\n")
    start = start_from(recipe, ["model.name=DIR"])
    assert not start.custom
    assert start.load() == Config.load(recipe, ["model.name=DIR"])


def test_a_held_out_set_of_your_own_is_kept():
    config = start_from(None, ["model.name=DIR", "data.train=a.jsonl", "data.eval=b.jsonl", "eval.every=7"]).load()
    assert (config.data.eval, config.eval.every) == ("b.jsonl", 7)


def test_mistakes_are_found_as_with_a_recipe():
    for words, line in (
        (["model.name=DIR", "train.lrr=3"], "train.lrr: no such setting; did you mean train.lr?"),
        (["=3"], "an override is written key=value"),
        (["model=gpt2"], "model: is a section, not a value; for example model.name=gpt2"),
        (["data=3"], "data: is a section"),
    ):
        with pytest.raises(UserError, match=line.replace("?", r"\?")):
            start_from(None, words).load()


def test_one_line_says_what_was_chosen_and_how_to_change_it():
    config = start_from(None, ["model.name=DIR", "data.train={source: rows.jsonl}", "train.steps=7"]).load()
    assert chosen_settings(config) == (
        "DIR on rows.jsonl with the defaults of preset=dapo, not the demo's: data.eval=none "
        "sampling.prompts_per_step=16 sampling.group_size=16 sampling.max_new_tokens=1024 train.lr=1e-06 "
        "train.steps=7; change any with key=value (`dapo train --help` lists them all)"
    )
