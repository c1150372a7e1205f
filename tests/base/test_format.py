"""Numbers and names for people."""

import pytest

from dapo_rl.base.format import counted
from dapo_rl.config import Config
from dapo_rl.runs.display import headline


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1000, "1000 steps")])
def test_one_is_not_many(number, text):
    assert counted(number, "step") == text


def test_the_headline_of_a_run_of_one_step():
    config = Config.build({"train.steps": 1, "sampling.prompts_per_step": 1})
    assert headline(1, config, "", 0) == "dapo: tiny on arithmetic, 1 step, 1 group of 16, 1 update per step, seed 0"
    config = Config.build({"train.steps": 3, "sampling.prompts_per_step": 4, "train.mini_batches": 2})
    assert headline(3, config, "", 0) == "dapo: tiny on arithmetic, 3 steps, 4 groups of 16, 2 updates per step, seed 0"
