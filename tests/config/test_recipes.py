"""Every recipe of the package is sound: its settings, its verifier, and those of its sources that need no file."""

from pathlib import Path

import pytest

from dapo_rl import DAPOTrainer
from dapo_rl.config import Config, SourceSettings
from dapo_rl.data import load_rows
from dapo_rl.data.files import RECIPE_FILES
from dapo_rl.demo import source_name
from dapo_rl.errors import UserError
from dapo_rl.lab.check import conformance
from dapo_rl.models.download import PRETRAINED
from dapo_rl.recipes import find_recipe, measured, packaged_name, packaged_recipe, recipe_names
from dapo_rl.rewards import build_verifier

VERDICTS = {
    "calculator": "algorithm conformant, ",
    "dapo-math-qwen2.5-32b": "conformant: every row matches the paper",
    "demo": "algorithm conformant, ",
    "gsm8k-python-qwen2.5-1.5b": "algorithm conformant, ",
    "gsm8k-qwen2.5-0.5b": "algorithm conformant, ",
    "gsm8k-qwen2.5-1.5b": "algorithm conformant, ",
    "gsm8k-smollm2-135m": "algorithm conformant, ",
    "guess": "algorithm conformant, ",
    "lab/clip-higher": "not DAPO: ",  # the baseline of an experiment has no technique
    "lab/dynamic-sampling": "not DAPO: ",
    "lab/informative-prompts": "not DAPO: ",
    "lab/off-policy": "not DAPO: ",
    "lab/overlong-filtering": "not DAPO: ",
    "lab/presets": "algorithm conformant, ",
    "lab/qwen-gsm8k": "not DAPO: ",
    "lab/smollm2-sums": "not DAPO: ",
    "lab/soft-overlong-punishment": "not DAPO: ",
    "lab/token-level-loss": "not DAPO: ",
    "lab/value-pretraining": "algorithm conformant, ",
    "sums-smollm2-135m-cpu": "algorithm conformant, ",
    "vapo-math-qwen2.5-32b": "conformant: every row matches the paper",
}


def test_every_recipe_has_a_verdict():
    assert recipe_names() == list(VERDICTS)


@pytest.mark.parametrize("name", VERDICTS)
def test_a_recipe_is_sound(name):
    text = packaged_recipe(name).read_text()
    assert text.startswith("# "), "what it is"
    assert len(measured(text)) > 8
    config = Config.load(name)
    assert conformance(config).verdict.startswith(VERDICTS[name])
    if config.reward.verifiers:
        build_verifier(config.reward)
    if "smollm2" in name:
        assert config.model.name in PRETRAINED


@pytest.mark.parametrize("name", VERDICTS)
def test_a_missing_file_is_one_line_that_says_how_to_get_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config.load(name)
    for key, source in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        file = source_name(source)
        if file.endswith((".jsonl", ".parquet")):
            with pytest.raises(UserError) as caught:
                load_rows(source, key=key)
            assert str(caught.value).startswith(f"{key}: {file}: no such file in the working directory; {key}=")


def test_the_settings_that_a_missing_file_suggests_read_the_hub():
    config = Config.load(
        "gsm8k-qwen2.5-0.5b", ["data.eval=openai/gsm8k", "data.eval.name=main", "data.eval.split=test"]
    )
    assert RECIPE_FILES["gsm8k-test.jsonl"].how_to_get("data.eval") == (
        "data.eval=openai/gsm8k data.eval.name=main data.eval.split=test reads it from the Hub "
        "(pip install 'dapo-rl[datasets]'); or put a file with the columns question and answer there"
    )
    assert (config.data.eval.source, config.data.eval.model_extra) == (
        "openai/gsm8k",
        {"name": "main", "split": "test"},
    )


def test_a_missing_file_is_found_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^data\.train: gsm8k-train\.jsonl: no such file"):
        DAPOTrainer(config="gsm8k-qwen2.5-0.5b", run_dir=tmp_path / "run")
    (tmp_path / "gsm8k-train.jsonl").write_text("")
    with pytest.raises(UserError, match=r"^data\.eval: gsm8k-test\.jsonl: no such file"):
        DAPOTrainer(config="gsm8k-qwen2.5-0.5b", run_dir=tmp_path / "run")


def test_a_path_that_exists_wins_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("demo") == packaged_recipe("demo")
    assert find_recipe(Path("demo")) == packaged_recipe("demo")
    assert find_recipe("./demo.yaml") == Path("demo.yaml")
    assert find_recipe(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").write_text("seed: 7\n")
    assert find_recipe("demo") == Path("demo")
    assert Config.load("demo").seed == 7


def test_a_recipe_in_the_folder_of_experiments_has_the_folder_in_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = find_recipe("lab/dynamic-sampling")
    assert path == packaged_recipe("lab/dynamic-sampling")
    assert packaged_name(path) == "lab/dynamic-sampling"
    assert packaged_name(packaged_recipe("demo")) == "demo"
    assert packaged_name(path.with_name("none.yaml")) is None
    assert packaged_name(tmp_path / "lab" / "dynamic-sampling.yaml") is None
    assert find_recipe("dynamic-sampling") == Path("dynamic-sampling")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "dynamic-sampling").write_text("seed: 7\n")
    assert Config.load("lab/dynamic-sampling").seed == 7


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("gsm8k-qwen2.5-1.5", "; did you mean gsm8k-qwen2.5-1.5b? `dapo recipes` lists them all"),
        ("gsm8k-qwen2.5-1.5b.yaml", "; did you mean gsm8k-qwen2.5-1.5b? `dapo recipes` lists them all"),
        ("gsm8k-q", "; did you mean gsm8k-qwen2.5-0.5b or gsm8k-qwen2.5-1.5b? `dapo recipes` lists them all"),
        ("lab/dynamic", "; did you mean lab/dynamic-sampling? `dapo recipes` lists them all"),
        ("xyz", "; `dapo recipes` lists those there are"),
    ],
)
def test_an_unknown_name_is_one_line(given, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        Config.load(given)
    assert str(caught.value) == f"{given}: no such recipe{line}"


@pytest.mark.parametrize(
    "text", ["", "seed: 1\n", "# A recipe.\nseed: 1\n# Measured: late\n", "# Measured: a\n# Measured: b\n"]
)
def test_a_comment_that_does_not_say_what_was_measured_is_refused(text):
    with pytest.raises(ValueError, match="not one"):
        measured(text)


def test_what_was_measured_may_take_several_lines():
    assert measured("# A\n#\n# Measured: one\n# two.\nseed: 1 # Measured: x\n") == "one two."


def test_the_prompts_of_the_arithmetic_are_there_and_held_out_ones_are_others():
    pytest.importorskip("reasoning_gym")
    config = Config.load("sums-smollm2-135m-cpu")
    assert isinstance(config.data.train, SourceSettings)
    train, held_out = (
        [row.columns for row in load_rows(source, key=key).good]
        for source, key in ((config.data.train, "data.train"), (config.data.eval, "data.eval"))
    )
    questions = {row["question"] for row in train}
    shared = [row for row in held_out if row["question"] in questions]
    assert len(held_out) == 100
    assert len(shared) == 16  # as the recipe says
