"""`tools` and `environment_factory` of `DAPOTrainer`: checked, carried to the run, and recorded in its settings."""

from functools import partial

import pytest
import torch

from dapo_rl import DAPOTrainer
from dapo_rl.compat.trl.check_arguments import check_arguments, check_environments
from dapo_rl.compat.trl.grpo_config import script_settings
from dapo_rl.config import Config
from dapo_rl.envs.trl_environment import TRLEnvironment
from dapo_rl.errors import UserError
from dapo_rl.run.inputs import TrainerInputs, resolve

ROWS = [{"prompt": "1+1=?\n", "answer": "2"}] * 4


class Game:
    def reset(self, **row): ...

    def move(self, to: str) -> str:
        """Moves.

        Args:
            to: Where.
        """
        return to

    def get_reward(self) -> float:
        return 1.0


class Unpaid:
    def reset(self, **row): ...


class Broken(Game):
    def move(self, to) -> str: ...


def look(at: str) -> str:
    """Looks.

    Args:
        at: At what.
    """
    return at


def move(to: str) -> str:
    """Moves.

    Args:
        to: Where.
    """
    return to


def make_game():
    return Game()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tools": look}, "tools: expected a list of functions, got"),
        ({"tools": ["look"]}, "tools: expected a list of functions, got ['look'] (list)"),
        ({"tools": [look, look]}, "two tools are named 'look'"),
        ({"tools": [len]}, "tool len: "),
        ({"tools": [move], "environment_factory": Game}, "two tools are named 'move'"),
        ({"environment_factory": 3}, "environment_factory: expected a class, a function that makes an environment, or"),
        ({"environment_factory": {}}, "environment_factory: expected a class"),
        ({"environment_factory": {"a": 3}}, "environment_factory: expected a class"),
        ({"environment_factory": dict}, "environment_factory: dict has no method reset(**row)"),
        ({"environment_factory": {"a": Game, "b": dict}}, "environment_factory: b: dict has no method reset(**row)"),
        ({"environment_factory": Broken}, "tool move: the argument 'to' has no type hint"),
        ({"environment_factory": Unpaid, "reward_funcs": None}, "nothing gives a reward; write a method get_reward"),
        (
            {"environment_factory": {"a": Game}, "train_dataset": None},
            "need a train_dataset whose column `environment`",
        ),
        ({"rollout_func": look}, "rollout_func: a rollout function is not supported; if it samples one response"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, said, tmp_path):
    given = {"train_dataset": ROWS, "reward_funcs": "math", "run_dir": tmp_path / "run"}
    with pytest.raises(UserError) as error:
        DAPOTrainer(**(given | arguments))
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("factory", [Game, make_game, partial(Game), {"a": Game, "b": make_game}])
def test_what_makes_environments(factory):
    check_arguments(tools=[look], environment_factory=factory)
    check_environments(factory, [look], None, ROWS, None)
    check_environments(Unpaid, None, "math", ROWS, None)


def recorded(**inputs):
    return resolve(Config(), TrainerInputs(**inputs), torch.device("cpu")).env


def test_the_settings_record_the_names():
    here = __name__
    env = recorded(tools=[look], environment_factory=Game)
    assert (env.tools, env.name, env.options) == ((f"{here}:look",), f"{here}:Game", {})
    several = recorded(environment_factory={"a": Game, "b": make_game})
    assert several.name == "dapo_rl.envs.trl_environment:TRLEnvironment"
    assert several.options == {"factory": {"a": f"{here}:Game", "b": f"{here}:make_game"}}
    assert recorded() == Config().env
    assert recorded(tools=[look]).given


def test_the_recorded_options_make_the_environment():
    several = recorded(environment_factory={"a": Game, "b": make_game})
    assert set(TRLEnvironment(**several.options)._factories) == {"a", "b"}


def test_data_are_not_needed_where_the_environment_makes_its_tasks():
    TrainerInputs(model="some/model", environment_factory=Game).check_data(Config())
    with pytest.raises(UserError, match=r"data\.train is not set"):
        TrainerInputs(model="some/model", tools=[look]).check_data(Config())


trl = pytest.importorskip("trl")


def grpo(**fields):
    return trl.GRPOConfig(output_dir="out", use_cpu=True, bf16=False, **fields)


def settings(several_turns, config=None, **fields):
    return script_settings(grpo(max_steps=2, **fields), config, None, lambda _: 8, True, several_turns)


def test_without_data_the_steps_are_counted():
    check_environments(Game, None, None, None, grpo(max_steps=3))
    with pytest.raises(UserError, match="args: without train_dataset there are no epochs to count; set max_steps"):
        check_environments(Game, None, None, None, grpo())


def test_a_limit_on_iterations_leaves_one_turn_after_them():
    env = settings(True, max_tool_calling_iterations=3, max_completion_length=64).config.env
    assert (env.max_turns, env.max_observation_tokens) == (4, 64)
    assert settings(True, max_tool_calling_iterations=0).config.env.max_turns == 1


def test_without_a_limit_the_length_ends_an_episode():
    script = settings(True, max_completion_length=64)
    assert script.config.env.max_turns == 64
    assert any("max_completion_length counts the policy's tokens here" in note for note in script.notes)
    assert settings(True, {"env.max_turns": 5}, max_completion_length=64).config.env.max_turns == 5


def test_scripts_of_one_turn_have_the_defaults():
    script = settings(False)
    assert script.config.env == Config().env
    assert not any("max_completion_length" in note for note in script.notes)


class Paid(Game):
    def reset(self, **row):
        self.task = row["task"]
        return f"{self.task}+1=?"

    def get_reward(self) -> float:
        return 0.25


@pytest.mark.slow
def test_an_environment_trains_without_data(tmp_path):
    args = grpo(max_steps=1, max_completion_length=16, max_tool_calling_iterations=2)
    config = {"sampling.dynamic": False, "overlong.shape": "off", "log.report": False}
    given = {"args": args, "environment_factory": Paid, "config": config, "run_dir": tmp_path / "run"}
    with DAPOTrainer("tiny", **given) as trainer:
        summary = trainer.train()
    assert summary["metrics"]["reward/mean"] == 0.25
    assert (trainer.config.data.train, trainer.config.env.name) == ("tasks", f"{__name__}:Paid")
    assert trainer.config.env.max_turns == 3


@pytest.mark.slow
def test_a_class_of_trl_can_be_named_in_the_settings(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Paid:\n"
        "    def reset(self, **row):\n        return 'Hello'\n\n"
        "    def get_reward(self):\n        return 0.25\n"
    )
    config = {"env.name": f"{tmp_path}/mine.py:Paid", "data.train": "tasks", "train.steps": 1, "log.report": False}
    config |= {"sampling.prompts_per_step": 1, "sampling.group_size": 2, "sampling.max_new_tokens": 8}
    config |= {"sampling.dynamic": False, "overlong.shape": "off"}
    with DAPOTrainer("tiny", config=config, run_dir=tmp_path / "run") as trainer:
        assert trainer.train()["metrics"]["reward/mean"] == 0.25


def test_settings_that_do_not_fit_the_tools_that_are_passed(tmp_path):
    """The run would write a config.yaml that it could not read again."""

    def add(a: int, b: int) -> int:
        """Adds.

        Args:
            a: A number.
            b: A number.
        """
        return a + b

    config = {"data.max_prompt_tokens": 32, "sampling.max_new_tokens": 32, "train.token_budget": 100}
    rows = [{"prompt": "1+1=?", "answer": "2"}] * 4
    with pytest.raises(UserError, match=r"^train\.token_budget: 100 does not hold one sample"):
        DAPOTrainer("tiny", "math", None, rows, tools=[add], config=config, run_dir=tmp_path / "run")
