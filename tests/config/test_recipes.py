"""Every recipe of the repository is sound: its settings, its verifier, and those of its sources that need no file."""

import pytest
from support import REPOSITORY

from dapo_rl.config import Config, SourceSettings
from dapo_rl.data import load_rows
from dapo_rl.lab.check import conformance
from dapo_rl.models.get import PRETRAINED
from dapo_rl.rewards import build_verifier

RECIPES = {path.stem: path for path in sorted((REPOSITORY / "recipes").glob("*.yaml"))}
VERDICTS = {
    "dapo-qwen2.5-32b": "conformant: every row matches the paper",
    "qwen2.5-0.5b-gsm8k": "algorithm conformant, ",
    "smollm2-arithmetic-cpu": "algorithm conformant, ",
    "smollm2-gsm8k-gpu": "algorithm conformant, ",
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_sound(name):
    text = RECIPES[name].read_text()
    assert text.startswith("# "), "what it is, and whether it was run"
    config = Config.load(RECIPES[name])
    assert conformance(config).verdict.startswith(VERDICTS[name])
    build_verifier(config.reward)
    if name.startswith("smollm2"):
        assert config.model.name in PRETRAINED


def test_the_prompts_of_the_arithmetic_are_there_and_held_out_ones_are_others():
    pytest.importorskip("reasoning_gym")
    config = Config.load(RECIPES["smollm2-arithmetic-cpu"])
    assert isinstance(config.data.train, SourceSettings)
    train, held_out = (
        [row.columns for row in load_rows(source, key=key).good]
        for source, key in ((config.data.train, "data.train"), (config.data.eval, "data.eval"))
    )
    questions = {row["question"] for row in train}
    shared = [row for row in held_out if row["question"] in questions]
    assert len(held_out) == 100
    assert len(shared) == 16  # as the recipe says
