"""`dapo ablate --table vapo`: the rows of VAPO's Table 1, and what each changes."""

from types import SimpleNamespace

import pytest

from dapo_rl.config.recipe import flat
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.plan import paper_table
from dapo_rl.lab.ablate.plot import ablation_figure
from dapo_rl.lab.ablate.results import ArmResult, RunResult

ROWS = [
    ("VAPO", 60, {}),
    ("VAPO without Value Pre-training", 11, {"critic.pretrain_steps": 0}),
    ("VAPO without Decoupled GAE", 33, {"critic.lambda_critic": 0.95}),
    ("VAPO without Length-adaptive GAE", 45, {"critic.lambda_policy": 0.95}),
    ("VAPO without Clip-Higher", 46, {"algo.clip_high": 0.2}),
    ("VAPO without Token-level Loss", 53, {"algo.aggregation": "seq-mean-token-mean"}),
    ("VAPO without Positive Example LM Loss", 54, {"algo.positive_lm_coef": 0.0}),
    ("VAPO without Group Sampling", 55, {"sampling.prompts_per_step": 128, "sampling.group_size": 1}),
]


def vapo_table(*overrides):
    return paper_table(None, overrides, 3, None, "vapo")


def test_each_row_leaves_one_technique_out():
    whole, *others = (arms := vapo_table().arms)[:8]
    assert [(arm.label, arm.paper) for arm in arms] == [(n, p) for n, p, _ in ROWS] + [("Vanilla PPO", 5)]
    base = flat(whole.settings)
    assert (base["preset"], base["algo.advantage"], base["critic.pretrain_steps"]) == ("vapo", "gae", 5)
    assert base["critic.lambda_policy"] == "adaptive"
    for arm, (_, _, changes) in zip(others, ROWS[1:], strict=True):
        settings = flat(arm.settings)
        assert arm.compared_with == whole.name
        # The cap follows from the number of prompts.
        changed = {k: v for k, v in settings.items() if base[k] != v and k != "sampling.cap"}
        assert changed == changes, arm.label


def test_the_last_row_has_none_of_them():
    settings = flat(vapo_table().arms[-1].settings)
    assert {key: settings[key] for _, _, changes in ROWS for key in changes} == {
        key: value for _, _, changes in ROWS for key, value in changes.items()
    }
    assert settings["algo.advantage"] == "gae"


def test_an_override_that_turns_a_technique_off_is_refused():
    with pytest.raises(UserError, match=r"critic.pretrain_steps: turns Value Pre-training off"):
        vapo_table("critic.pretrain_steps=0")


def test_the_picture_names_the_table_and_tells_its_arms_apart():
    plan = vapo_table()
    results = [ArmResult(arm, (RunResult(SimpleNamespace(seed=0), {}, {0: 0.1, 1: 0.2}),), None) for arm in plan.arms]
    first, *_, accuracy, _ = ablation_figure(plan, results).axes
    assert first.get_title(loc="left") == "Each technique left out of VAPO"
    lines = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in accuracy.lines}
    assert len(lines) == len(accuracy.lines) == len(plan.arms)
