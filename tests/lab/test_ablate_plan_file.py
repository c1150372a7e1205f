"""A plan.json that somebody else wrote is a plan, or one line."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.plan import AblationPlan, arms_by_part, grid, paper_table

PLANS = {"table": paper_table(DEFAULT_RECIPE, [], 2), "grid": grid(DEFAULT_RECIPE, [], 1, ["train.lr=1e-4,1e-5"])}
WRONG = [None, True, -1, 10**30, 0.5, "", "x", "../../x", "/etc", [], {}, [1], {"x": 1}]


def load(path):
    """A plan with which everything that reads plans can do something, or one line."""
    try:
        plan = AblationPlan.load(path)
    except UserError as error:
        line = str(error)
    else:
        assert arms_by_part(plan.arms)
        assert all(not os.path.isabs(arm.directory) and ".." not in arm.directory for arm in plan.arms)
        return [arm.config(seed) for arm in plan.arms for seed in plan.seeds]
    assert line.startswith(f"{path}: cannot be read as the plan of an ablation")
    assert "\n" not in line
    return None


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_comes_back(tmp_path, name):
    PLANS[name].save(tmp_path / "plan.json")
    assert AblationPlan.load(tmp_path / "plan.json") == PLANS[name]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_plan_with_a_change_is_one_or_one_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    PLANS["grid"].save(path)
    plan = json.loads(path.read_text())
    level, key = plan, data.draw(st.sampled_from(list(plan)))
    while isinstance(level[key], dict | list) and level[key] and data.draw(st.booleans()):
        level = level[key]
        key = data.draw(st.sampled_from(list(level) if isinstance(level, dict) else range(len(level))))
    level[key] = data.draw(st.sampled_from(WRONG))
    path.write_text(json.dumps(plan))
    load(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", "../../x"), ("name", ".."), ("directory", "/etc"), ("directory", "x"), ("compared_with", "x")],
)
def test_no_name_in_a_plan_leads_elsewhere(tmp_path, key, value):
    PLANS["grid"].save(tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["arms"][1][key] = value
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert load(tmp_path / "plan.json") is None


@pytest.mark.parametrize(("key", "value"), [("seeds", []), ("seeds", [-1]), ("arms", [])])
def test_a_plan_has_arms_and_seeds(tmp_path, key, value):
    PLANS["grid"].save(tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(plan | {key: value}))
    assert load(tmp_path / "plan.json") is None


@pytest.mark.parametrize("text", ["", "null", "[" * 100_000, '{"arms": []}', "\ud800", "{"], ids=lambda text: text[:9])
def test_what_is_no_plan_is_one_line(tmp_path, text):
    (tmp_path / "plan.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert load(tmp_path / "plan.json") is None


def test_a_plan_that_is_no_file_is_one_line(tmp_path):
    os.mkfifo(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") is None
