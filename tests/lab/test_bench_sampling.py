"""The cost of dynamic sampling, simulated: ours against rounds, and against somebody who knows when to stop."""

import json

import pytest
from typer.testing import CliRunner

from dapo_rl.cli import app
from dapo_rl.errors import UserError
from dapo_rl.lab.bench.sampling_simulation import STRATEGIES, build_strategy, print_simulation, simulate
from dapo_rl.lab.simulated_engine import SimulatedEngine
from dapo_rl.lab.simulated_world import World

NAMES = list(STRATEGIES)
SIZE = {"prompts": 8, "group": 4, "slots": 64, "steps": 12, "seed": 1}


@pytest.fixture(scope="module")
def rows():
    rates = (0.1, 0.5, 0.9)
    return {(rate, name): simulate(rate, name, **SIZE) for rate in rates for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_nobody_is_cheaper_than_carrying_and_it_is_close_to_the_least(rows, rate):
    ours = rows[rate, "carry"]
    assert ours["trained_groups"] == 8 * 12
    assert 1.0 <= ours["to_oracle"] <= 1.15
    for name in NAMES:
        if not name.startswith("carry"):
            assert ours["tokens_per_group"] <= rows[rate, name]["tokens_per_group"]
    assert ours["engine_steps_per_group"] < rows[rate, "rounds of 1"]["engine_steps_per_group"]
    assert ours["staleness"] < 1


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_drawing_ahead_saves_engine_steps_for_a_few_tokens(rows, rate):
    plain, half, whole = (rows[rate, name] for name in ("carry", "carry, ahead 0.5", "carry, ahead 1"))
    steps = [row["engine_steps_per_group"] for row in (whole, half, plain)]
    assert steps == sorted(steps)
    assert half["engine_steps_per_group"] < 0.9 * plain["engine_steps_per_group"]
    assert max(half["to_oracle"], whole["to_oracle"]) <= 1.15
    assert plain["staleness"] < half["staleness"] < whole["staleness"] <= 1


def test_rounds_that_give_up_train_on_groups_without_a_signal(rows):
    assert rows[0.1, "rounds of 1, ms-swift"]["trained_groups"] < 8 * 12
    assert rows[0.1, "rounds of 1"]["trained_groups"] == 8 * 12


def test_the_simulated_engine_samples_whole_groups_of_the_worlds_lengths():
    world = World(0.5, 4, seed=3)
    engine = SimulatedEngine.counting_steps(world, slots=6)
    fill = build_strategy("rounds of 1", engine, 4, 2).fill(2)
    assert engine.tokens == fill.tokens_generated
    for group in fill.sampled:
        assert tuple(len(s.token_ids) for s in group.samples) == world.lengths(group.prompt.id)
        assert any(v.correct for v in group.verdicts) == world.passes(group.prompt.id)


def test_a_strategy_that_trains_on_nothing_has_no_cost_per_group(capsys):
    how = {"prompts": 1, "group": 2, "slots": 4, "steps": 1, "seed": 0}
    row = simulate(0.01, "rounds of 1, ms-swift", **how)
    assert (row["trained_groups"], row["tokens_per_group"], row["to_oracle"]) == (0, None, None)
    json.dumps(row, allow_nan=False)
    print_simulation({"rows": [row]})
    assert capsys.readouterr().out.split()[-4:] == ["-", "-", "-", "-"]


def test_the_command():
    words = ["bench", "sampling", "--prompts", "4", "--group", "2", "--slots", "16", "--steps", "3"]
    result = CliRunner().invoke(app, [*words, "--acceptance", "0.5", "--json"])
    report = json.loads(result.stdout)
    assert [row["strategy"] for row in report["rows"]] == NAMES
    shown = CliRunner().invoke(app, [*words, "--acceptance", "0.5"]).stdout
    assert "carry" in shown
    assert "verl" in shown
    with pytest.raises(UserError, match=r"--acceptance: 'x' is not a list of shares"):
        CliRunner().invoke(app, [*words, "--acceptance", "x"], catch_exceptions=False)
