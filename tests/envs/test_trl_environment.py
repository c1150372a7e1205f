"""Environments of TRL as environments here: what the policy reads, what it is paid, and what reward functions get."""

import asyncio
import inspect
import random
from types import SimpleNamespace

import numpy as np
import pytest

from dapo_rl.config import EnvSettings
from dapo_rl.envs.calculator import calculator
from dapo_rl.envs.pool import EnvironmentPool
from dapo_rl.envs.protocol import AssistantTurn, ToolCall
from dapo_rl.envs.python_tool import python
from dapo_rl.envs.trl_environment import (
    MOST_STATE,
    TRLEnvironment,
    TRLEnvironments,
    check_class,
    class_of,
    is_trl_environment,
    state_of,
)
from dapo_rl.errors import UserError
from dapo_rl.rewards.custom import EnvironmentView
from dapo_rl.types import Prompt


class IncrementEnv:
    """The environment of TRL's documentation."""

    def reset(self, **row) -> str | None:
        self.row = row
        self.counter = 0
        self.target = random.randint(1, 1000)
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        if step < 0:
            raise ValueError("a step is positive")
        self.counter += step
        return self.counter

    def _private(self) -> None: ...


class Echo:
    """Has no reward of its own, and leaves the prompt as it is."""

    limit = 3

    def __init__(self) -> None:
        self.client, self.reward = object(), 0.0

    def reset(self, prompt) -> None:
        self.prompt = prompt

    def echo(self, message: str) -> str:
        """Echoes a message.

        Args:
            message: The message.
        """
        self.reward = len(message) * 0.1
        return message


class Judged:
    def __init__(self) -> None:
        self.log = []

    async def reset(self, **row) -> str:
        await asyncio.sleep(0)
        self.closed = False
        return " Begin."

    async def note(self, text: str) -> str:
        """Writes a note.

        Args:
            text: The note.
        """
        self.log.append(f"<{text}")
        await asyncio.sleep(0.001)
        self.log.append(f"{text}>")
        return text.upper()

    def plain(self) -> str:
        """Reads."""
        return "plain"

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 0.5

    async def close(self) -> None:
        self.closed = True


def prompt(content="Hello. ", **columns):
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": content})
    return Prompt("7", "templated", np.array([1, 2]), messages=messages, columns=columns)


def calls(*named, **arguments):
    made = [ToolCall(name, arguments, id=str(at)) for at, name in enumerate(named)]
    return AssistantTurn("", tuple(made))


END = AssistantTurn("Done.")


def test_an_episode():
    env = TRLEnvironment(IncrementEnv)
    opening = env.open(prompt(level=2), seed=1)
    target = env._instance.target
    assert opening.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"Hello. Increment the counter by {target}."},
    )
    assert [tool["function"]["name"] for tool in opening.tools] == ["increment"]
    assert opening.tools[0]["function"]["parameters"]["required"] == ["step"]
    answer = env.step(calls("increment", step=target))
    assert answer.messages == ({"role": "tool", "name": "increment", "tool_call_id": "0", "content": str(target)},)
    assert (answer.done, answer.tool_calls, answer.tool_errors, answer.reward) == (False, 1, 0, 0.0)
    last = env.step(END)
    assert (last.done, last.reward) == (True, 1.0)
    assert last.state["counter"] == last.state["target"] == target


def test_reset_gets_the_row_as_in_trl():
    env = TRLEnvironment(IncrementEnv)
    given = prompt(level=2, environment="kept")
    env.open(given, seed=1)
    assert env._instance.row == {"prompt": list(given.messages), "level": 2, "environment": "kept"}
    assert given.messages[-1]["content"] == "Hello. "


def test_reset_gets_the_columns_it_names():
    env = TRLEnvironment(Echo)
    opening = env.open(prompt(level=2), seed=1)
    assert opening.messages == prompt().messages
    text = Prompt("8", "1+1=", np.array([1]))
    assert env.open(text, seed=1).messages == ({"role": "user", "content": "1+1="},)
    assert env._instance.prompt == "1+1="


def test_a_row_without_a_prompt():
    nothing = Prompt("9", "3", np.array([1]), columns={"task": 3, "split": "train"})
    env = TRLEnvironment(IncrementEnv)
    (message,) = env.open(nothing, seed=1).messages
    assert message == {"role": "user", "content": f"Increment the counter by {env._instance.target}."}
    assert env._instance.row == {"task": 3, "split": "train"}

    class Silent(IncrementEnv):
        def reset(self, **row): ...

    with pytest.raises(
        UserError, match=r"Silent\.reset: the row has no prompt, so reset has to return one; it returned"
    ):
        TRLEnvironment(Silent).open(nothing, 1)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (calls("increment", step=-1), "a step is positive"),
        (calls("decrement", step=1), "no tool 'decrement'"),
        (calls("get_reward"), "no tool 'get_reward'"),
        (calls("_private"), "no tool '_private'"),
        (calls("increment", step="x"), "must be of type integer"),
        (AssistantTurn("", (ToolCall("increment", error="not valid JSON: {"),)), "not valid JSON: {"),
    ],
)
def test_a_call_that_fails_is_read_by_the_policy(turn, said):
    env = TRLEnvironment(IncrementEnv)
    env.open(prompt(), seed=1)
    answer = env.step(turn)
    assert said in answer.messages[0]["content"]
    assert (answer.tool_calls, answer.tool_errors, answer.done) == (1, 1, False)
    assert env.step(END).state["counter"] == 0


def test_a_limit_ends_an_episode_with_its_reward():
    env = TRLEnvironment(IncrementEnv)
    env.open(prompt(), seed=1)
    env.step(calls("increment", step=env._instance.target))
    result = env.result()
    assert (result.reward, result.done) == (1.0, True)
    assert result.state["counter"] == env._instance.target


def test_without_a_reward_of_its_own():
    env = TRLEnvironment(Echo)
    env.open(prompt(), seed=1)
    env.step(calls("echo", message="hello"))
    last = env.step(END)
    assert (last.reward, last.done) == (0.0, True)
    assert last.state["reward"] == 0.5
    env.close()


def test_several_environments_by_the_column():
    env = TRLEnvironment({"count": IncrementEnv, "echo": Echo})
    assert [tool["function"]["name"] for tool in env.open(prompt(environment="echo"), 1).tools] == ["echo"]
    assert [tool["function"]["name"] for tool in env.open(prompt(environment="count", level=1), 1).tools] == [
        "increment"
    ]
    assert env._instance.row.keys() == {"prompt", "level"}
    with pytest.raises(UserError, match="prompt 7: no environment 'ech' \\(column 'environment'\\); did you mean echo"):
        env.open(prompt(environment="ech"), 1)
    with pytest.raises(UserError, match=r"no environment None .*expected count, echo"):
        env.open(prompt(), 1)


def test_tools_besides_the_methods():
    def double(number: int) -> int:
        """Doubles a number.

        Args:
            number: The number.
        """
        return 2 * number

    env = TRLEnvironment(IncrementEnv, [double])
    opening = env.open(prompt(), seed=1)
    assert [tool["function"]["name"] for tool in opening.tools] == ["double", "increment"]
    assert env.step(calls("double", number=4)).messages[0]["content"] == "8"


def test_asynchronous_methods():
    env = TRLEnvironment(Judged)
    assert env.is_async
    assert not TRLEnvironment(IncrementEnv).is_async
    assert TRLEnvironment({"a": IncrementEnv, "b": Judged}).is_async

    async def play():
        opening = await env.open(prompt(), seed=1)
        first = await env.step(calls("note", "note", text="a"))
        second = await env.step(calls("plain"))
        unknown = await env.step(calls("nothing"))
        last = await env.step(END)
        await env.close()
        return opening, first, second, unknown, last

    opening, first, second, unknown, last = asyncio.run(play())
    assert opening.messages[-1]["content"] == "Hello.  Begin."
    assert [message["content"] for message in first.messages] == ["A", "A"]
    assert [message["tool_call_id"] for message in first.messages] == ["0", "1"]
    assert first.tool_calls == 2
    assert env._instance.log == ["<a", "a>", "<a", "a>"]
    assert second.messages[0]["content"] == "plain"
    assert unknown.tool_errors == 1
    assert (last.reward, last.done) == (0.5, True)
    assert env._instance.closed


def test_an_asynchronous_tool_besides_synchronous_methods():
    async def wait(seconds: float) -> str:
        """Waits.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return "waited"

    env = TRLEnvironment(IncrementEnv, [wait])

    async def play():
        env.open(prompt(), seed=1)
        return await env.step(calls("wait", seconds=0.0)), env.step(END)

    answer, last = asyncio.run(play())
    assert answer.messages[0]["content"] == "waited"
    assert last.reward == 0.0


def test_a_function_that_makes_environments_is_called_once_to_learn_its_class():
    made = []

    def make():
        made.append(IncrementEnv())
        return made[-1]

    assert class_of(make) is IncrementEnv
    first, second = TRLEnvironment(make), TRLEnvironment(make)
    assert len(made) == 1
    first.open(prompt(), 1)
    second.open(prompt(), 1)
    assert first._instance is not second._instance
    with pytest.raises(UserError, match=r"environment_factory: making an environment failed: .*no server"):
        class_of(lambda: (_ for _ in ()).throw(OSError("no server")))


def test_a_name_of_the_settings_is_loaded(tmp_path):
    (tmp_path / "mine.py").write_text(inspect.getsource(Echo))
    env = TRLEnvironment({"echo": f"{tmp_path}/mine.py:Echo"})
    assert env.open(prompt(environment="echo"), 1).tools[0]["function"]["name"] == "echo"


def test_what_reward_functions_get():
    class Odd:
        shared, _hidden = "class", "no"

        def __init__(self):
            self.array, self.number = np.array([1, 2]), np.float32(0.5)
            self.function, self.loop = len, []
            self.loop.append(self.loop)
            self.pair, self._private = (1, "ä"), 3
            self.large = "x" * (MOST_STATE + 1)

    state = state_of(Odd())
    assert state == {"shared": "class", "array": [1, 2], "number": 0.5, "pair": [1, "ä"], "_private": 3}
    view = EnvironmentView(**state)
    assert isinstance(view, SimpleNamespace)
    assert (view.number, view._private) == (0.5, 3)
    with pytest.raises(AttributeError, match="environments: no attribute 'get_reward'; reward functions get the attr"):
        view.get_reward()
    assert state_of(Echo())["limit"] == 3


def test_a_deterministic_class_says_so():
    class Sure(IncrementEnv):
        deterministic = True

    assert TRLEnvironment(Sure).deterministic
    assert not TRLEnvironment(IncrementEnv).deterministic
    assert not TRLEnvironment({"a": Sure, "b": IncrementEnv}).deterministic
    assert TRLEnvironment(Sure, [calculator]).deterministic
    assert not TRLEnvironment(Sure, [python]).deterministic


def test_classes_are_checked():
    class Nothing:
        pass

    class Untyped(IncrementEnv):
        def search(self, query):
            """Searches.

            Args:
                query: What for.
            """

    with pytest.raises(UserError, match=r"^environment_factory: Nothing has no method reset\(\*\*row\)"):
        check_class(Nothing)
    with pytest.raises(UserError, match=r"search.*'query' has no type hint"):
        check_class(Untyped)
    check_class(IncrementEnv)
    assert is_trl_environment(IncrementEnv)
    assert not is_trl_environment(Nothing)
    assert not is_trl_environment(TRLEnvironment)


def test_classes_that_are_made_in_unusual_ways():
    class Board(dict):
        def reset(self, **row):
            self["cell"] = 1

        def read(self) -> int:
            """Reads the cell."""
            return self["cell"]

    class Single:
        def __new__(cls, server):
            return super().__new__(cls)

        def reset(self, **row): ...

        def read(self) -> int:
            """Reads."""
            return 2

    for factory, seen in ((Board, "1"), (lambda: Single("here"), "2")):
        env = TRLEnvironment(factory)
        env.open(prompt(), 1)
        assert env.step(calls("read")).messages[0]["content"] == seen


def test_an_observation_must_be_text():
    class Pictures(IncrementEnv):
        def reset(self, **row):
            return [{"type": "image"}]

    with pytest.raises(UserError, match=r"Pictures\.reset: expected a text or None, got \[\{'type': 'image'\}\]"):
        TRLEnvironment(Pictures).open(prompt(), 1)


def played(pool, turn, seed):
    """The opening, the answer to a turn, and the result at a limit."""
    key = pool.new_key()
    opening = pool.open(key, prompt(), seed).result(20)
    answer = pool.step(key, turn).result(20)
    last = pool.result(key).result(20)
    pool.close_episodes([key])
    return opening, answer, last


@pytest.mark.slow
def test_in_other_processes():
    with EnvironmentPool(TRLEnvironments(IncrementEnv), EnvSettings()) as pool:
        assert not pool.is_async
        turn = calls("increment", step=4)
        first, second, other = (played(pool, turn, seed) for seed in (5, 5, 6))
    assert first[0] == second[0], "a group shares its task"
    assert first[0] != other[0]
    assert first[1].messages[0]["content"] == "4"
    view = EnvironmentView(**first[2].state)
    assert (view.counter, first[2].reward, first[2].done) == (4, 0.0, True)


@pytest.mark.slow
def test_asynchronous_ones_share_a_process():
    with EnvironmentPool(TRLEnvironments({"judged": Judged}), EnvSettings()) as pool:
        assert pool.is_async
        keys = [pool.new_key() for _ in range(3)]
        openings = [pool.open(key, prompt(environment="judged"), 1) for key in keys]
        assert {opening.result(20).messages[-1]["content"] for opening in openings} == {"Hello.  Begin."}
        answers = [pool.step(key, calls("note", text=key)) for key in keys]
        assert [answer.result(20).messages[0]["content"] for answer in answers] == [key.upper() for key in keys]
        last = pool.step(keys[0], END).result(20)
        assert (last.reward, last.state["log"]) == (0.5, [f"<{keys[0]}", f"{keys[0]}>"])
        pool.close_episodes(keys)
