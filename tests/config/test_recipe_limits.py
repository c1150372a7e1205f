"""Recipes that are larger than they look, that are no files, and that say a thing twice."""

import os
import threading
import time

import pytest

from dapo_rl.config import Config
from dapo_rl.config.recipe import MOST_BYTES, read_recipe
from dapo_rl.errors import UserError


def error_of(recipe=None, *overrides):
    with pytest.raises(UserError) as caught:
        Config.load(recipe, overrides)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 1000
    return line


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def soon():
    """Minutes on the code that expands; a busy machine takes a few seconds for all of it."""
    begun = time.process_time()
    yield
    assert time.process_time() - begun < 20


def doubling(kind, levels=25):
    first = "a0: &a0 {x: 1, y: 2}\n"
    return first + "".join(f"a{i}: &a{i} {{{kind.format(i - 1)}}}\n" for i in range(1, levels))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(doubling("<<: [*a{0}, *a{0}]"), id="in a list"),
        pytest.param(doubling("<<: *a{0}, <<: *a{0}"), id="two in one mapping"),
        pytest.param("a: &a {" + ", ".join(f"k{i}: 1" for i in range(5000)) + "}\n"
                     + "b: {<<: [" + "*a, " * 20_000 + "*a]}\n", id="one many times"),
        pytest.param("a: &a [" + ", ".join(f"{{k{i}: 1}}" for i in range(2000)) + "]\n"
                     + "".join(f"b{i}: {{<<: *a}}\n" for i in range(2000)), id="many times a list"),
    ],
)  # fmt: skip
def test_merges_are_counted_before_they_are_made(written, soon, text):
    assert "merges expand to more than 10000 values" in error_of(written(text))


@pytest.mark.parametrize(
    "text", ["train: &a {<<: *a}\n", "train: &a {lr: {<<: *a}}\n", "train: &a {<<: [{lr: 1}, *a]}\n"]
)
def test_an_anchor_merged_into_itself_is_named(written, text):
    assert error_of(written(text)).endswith("recipe.yaml:1: not valid YAML: an anchor is merged into itself")


def test_merges_of_an_ordinary_size_work(written):
    text = "data: {train: &a {source: arithmetic, size: 5, ops: '+'}, eval: {<<: *a, size: 3}}\n"
    settings = read_recipe(written(text))
    assert settings["data"]["eval"] == {"source": "arithmetic", "size": 3, "ops": "+"}
    lists = "data: {train: &a {source: x, n: 1}, eval: &b {<<: [{n: 2}, *a], m: 3}, other: {<<: *b}}\n"
    assert read_recipe(written(lists))["data"]["other"] == {"source": "x", "n": 2, "m": 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1" + ":59" * 80_000, "recipe.yaml:1: not valid YAML: a number of 240001 characters"),
        ("seed: " + "9" * 200_000, "a number of 200000 characters"),
        ("seed: !!int '" + "1_" * 100_000 + "'", "a number of 200000 characters"),
        ("seed: 0x" + "f" * 390, "too large"),
        ("seed: !<" + "a" * 200_000 + "> 1", "could not determine a constructor"),
        ("? " + "k" * 200_000 + "\n: {a: 1}\n", "a key of more than 200 characters"),
        ("train: {? " + "k" * 100_000 + " : {" + ", ".join(f"a{i}: 1" for i in range(5000)) + "}}", "200 characters"),
        ("? 0x" + "f" * 390 + "\n: 1\n", "a key of more than 200 characters"),
        ("train: {? 0x" + "f" * 390 + " : 1}\n", "a key of more than 200 characters"),
        ("---\n" * 60_000, "but found another document"),
        (". " * 60_000 + ": 1", "not valid YAML"),
        ("a" + ".a" * 90 + ": 1\n", "too deeply nested"),
        ("train: " + "a" * MOST_BYTES, "cannot be read as a recipe: it has more than 256 KiB"),
    ],
    ids=lambda value: value[:12],
)
def test_what_is_huge_is_one_short_line(written, soon, text, said):
    assert said in error_of(written(text))


@pytest.mark.parametrize(
    "override", ["a." * 2000 + "b=1", "x" * 100_000 + "=1", "x" * 100_000, "seed=" + "[" * 300_000]
)
def test_a_huge_override_is_one_short_line(soon, override):
    error_of(None, override)


def test_settings_of_python_that_are_nested_without_end_are_one_line():
    deep = {}
    for _ in range(3000):
        deep = {"a": deep}
    with pytest.raises(UserError, match="nested too deeply"):
        Config.build({"train": deep})


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("train: {lr: 1e-6}\ntrain.lr: 2e-6\n", "train.lr"),
        ("train.lr: 2e-6\ntrain: {lr: 1e-6}\n", "train.lr"),
        ("model: {lora: {rank: 4}, lora.rank: 8}\n", "model.lora.rank"),
        ("model.lora: {rank: 4}\nmodel: {lora.rank: 8}\n", "model.lora.rank"),
        ("data.eval: null\ndata: {eval: x.jsonl}\n", "data.eval"),
        ("data.train: {source: a.jsonl}\ndata: {train: b.jsonl}\n", "data.train"),
        ("data.train: a.jsonl\ndata: {train: {source: b.jsonl}}\n", "data.train"),
        ("train: {lr: 1}\ntrain.lr.x: 3\n", "train.lr.x"),
    ],
)
def test_a_key_with_dots_and_in_its_section_is_there_twice(written, text, key):
    path = written(text)
    assert error_of(path) == f"{path}: {key}: appears twice, with dots and in its section; keep one"


def test_a_key_that_python_gives_twice_is_named():
    with pytest.raises(UserError, match=r"^train\.lr: appears twice"):
        Config.build({"train": {"lr": 1e-6}, "train.lr": 2e-6})


@pytest.mark.parametrize(
    "text",
    [
        "data.train: rows.jsonl\ndata.train.n: 3\n",
        "data.train.n: 3\ndata.train: rows.jsonl\n",
        "data.train.n: 3\ndata: {train: rows.jsonl}\n",
    ],
)
def test_a_source_and_its_parameters_are_no_contradiction_in_whatever_order(written, text):
    assert Config.load(written(text)).resolved()["data"]["train"] == {"source": "rows.jsonl", "n": 3}


def test_sections_may_be_split_and_empty(written):
    config = Config.load(written("train:\ntrain.lr: 3e-6\nalgo: {clip_low: 0.1}\nalgo.clip_high: 0.3\n"))
    assert (config.train.lr, config.algo.clip_low, config.algo.clip_high) == (3e-6, 0.1, 0.3)


def test_of_two_overrides_the_last_wins_and_both_win_over_the_recipe(written):
    recipe = written("train.lr: 1e-6\n")
    assert Config.load(recipe, ["train.lr=2e-6", "train.lr=3e-6", "train={steps: 7}"]).train.lr == 3e-6


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in ("/dev/zero", tmp_path / "pipe"):
        assert error_of(path) == f"{path}: cannot be read as a recipe: it is a pipe or a device, not a file"
    assert "Too many levels of symbolic links" in error_of(tmp_path / "loop")
    assert error_of("/proc/self/environ")
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    assert error_of(sparse).endswith("it has more than 256 KiB")


def test_a_pipe_that_the_shell_hands_over_is_read():
    """`dapo train <(command)`"""
    reading, writing = os.pipe()

    def write():
        with os.fdopen(writing, "w") as file:
            file.write("train.lr: 3e-6\n")

    writer = threading.Thread(target=write)
    writer.start()
    assert Config.load(f"/dev/fd/{reading}").train.lr == 3e-6
    writer.join()
    os.close(reading)
