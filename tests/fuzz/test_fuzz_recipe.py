"""Recipes and overrides of any content: settings, or one line that says what is wrong."""

from functools import reduce

import pytest
import yaml
from fuzzing import fuzz
from hypothesis import example, given
from hypothesis import strategies as st

from dapo_rl.config import Config, known_keys
from dapo_rl.errors import UserError
from dapo_rl.recipes import packaged_recipe, recipe_names

RECIPES = [packaged_recipe(name).read_text() for name in recipe_names()]
KEYS = list(known_keys())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "recipe.yaml"


def load(recipe, overrides=()):
    """Settings that load back to the same run, or one line."""
    try:
        config = Config.load(recipe, overrides)
    except UserError as error:
        line = str(error)
    else:
        line = None
    if line is not None:
        assert len(line.split()) > 2
        return None
    assert Config.build(config.resolved()).resolved() == config.resolved()
    # What is in the run directory is this text.
    text = yaml.safe_dump(config.resolved(), allow_unicode=True)
    text.encode()
    assert Config.build(yaml.safe_load(text)).resolved() == config.resolved()
    return config


def load_text(path, text):
    path.write_bytes(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)
    return load(path)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(max_size=20)
    | st.dates()
    | st.datetimes()
    | st.binary(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(KEYS) | st.sampled_from(sorted({key.split(".")[0] for key in KEYS})) | st.text(max_size=10)
yaml_words = st.sampled_from(
    [
        *("[", "]", "{", "}", ": ", "- ", "\n", "\n  ", "\t", "#", "&a ", "*a", "<<: ", "? ", "|\n", ">\n", "%", "@"),
        *("---\n", "...\n", "!!int ", "!!float ", "!!timestamp ", "!!binary ", "!!set ", "!!omap ", "!!pairs ", "!x "),
        *("0x", "0b", "0o", ":59" * 30, ".inf", ".nan", "1e400", "9" * 5000, "2020-13-45", "~", "''", '"\\ud800"', "="),
        *("seed", "train", "lr", "data", "preset", "grpo", "model", "name", "\x00", "\ufeff", "\x85", "é", "😀"),
    ]
)


@pytest.mark.slow
@fuzz(150)
@given(st.text(max_size=60) | st.binary(max_size=60) | st.lists(yaml_words, max_size=14).map("".join))
@example("&a\nmodel: *a\n")
@example("train: &a {lr: *a}\n")
@example("seed: 2020-13-45\n")
@example("seed: 0x" + "f" * 6000)
@example("seed: -0x" + "f" * 6000)
@example("[" * 1200)
@example("train:\n  lr: 1\ntrain:\n  lr: 2\n")
@example('data: {system_prompt: "\\ud800"}')
@example("data: {train: {source: x, when: 2020-01-01, bytes: !!binary /w==}}")
@example("".join(f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 12)))
@example("a0: &a0 {k: v}\n" + "".join(f"a{i}: &a{i} {{p: *a{i - 1}, q: *a{i - 1}}}\n" for i in range(1, 40)))
def test_any_text_is_settings_or_one_line(path, text):
    load_text(path, text)


@pytest.mark.slow
@fuzz(150)
@given(st.dictionaries(names | st.integers() | st.booleans() | st.none(), values, max_size=5))
def test_any_structure_is_settings_or_one_line(path, structure):
    load_text(path, yaml.safe_dump(structure, allow_unicode=True))


@pytest.mark.slow
@fuzz(150)
@given(st.data())
def test_a_recipe_with_changes_is_settings_or_one_line(path, data):
    text = data.draw(st.sampled_from(RECIPES))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        end = min(len(text), at + data.draw(st.integers(0, 12)))
        text = text[:at] + data.draw(yaml_words | st.text(max_size=3)) + text[end:]
    load_text(path, text)


@fuzz(250)
@given(
    st.lists(
        st.builds(
            lambda key, value: f"{key}={value}",
            names | st.sampled_from(KEYS) | st.builds("{}.{}".format, names, names),
            st.text(max_size=15)
            | st.lists(yaml_words, max_size=4).map("".join)
            | st.integers().map(str)
            | st.integers(10**17, 10**19).map(str)
            | st.floats().map(str),
        ),
        max_size=3,
    )
)
@example(["sampling.prompts_per_step=1000000000000000", "train.mini_batches=7"])
@example(["seed=" + "9" * 5000])
@example(["train.lr=true"])
@example(["..=1"])
@example(["data.train.size.x=3"])
def test_any_overrides_are_settings_or_one_line(overrides):
    load(None, overrides)


@fuzz(60)
@given(st.sampled_from(KEYS), st.booleans())
def test_a_switch_is_never_taken_for_a_number(key, value):
    config = load(None, [f"{key}={str(value).lower()}"])
    if config is not None:
        assert isinstance(reduce(getattr, key.split("."), config), bool | str)
