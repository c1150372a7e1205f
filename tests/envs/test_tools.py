"""Functions as tools: their schemas, calls, failures and limits."""

import asyncio
import functools
import inspect
import json
import time
from typing import Literal

import pytest
from transformers.utils import get_json_schema

from dapo_rl.config import Config
from dapo_rl.envs.build import build_environment
from dapo_rl.envs.calculator import calculator
from dapo_rl.envs.protocol import AssistantTurn, Observation, Opening, ToolCall
from dapo_rl.envs.python_tool import python
from dapo_rl.envs.tools import (
    MAX_RESULT,
    ObservationTooLongError,
    Tool,
    ToolsEnvironment,
    load_tools,
    method_tools,
)
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt


def multiply(a: int, b: int = 2) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The product.
    """
    return a * b


def paint(colour: Literal["red", "blue"], sizes: list[int] | None = None, scale: float = 1.0) -> dict:
    """Paints.

    Args:
        colour: A colour.
        sizes: Some sizes.
        scale: A factor.
    """
    return {"colour": colour, "sizes": sizes, "scale": scale, "ü": None}


def fails(how: str) -> object:
    """Fails.

    Args:
        how: In which way.
    """
    if how == "exit":
        raise SystemExit(3)
    if how == "lines":
        raise ValueError("first\nsecond")
    return {"bytes": b"\xff", "object": 1 + 2j, "surrogate": "a\ud800b", "none": None, "nan": float("nan")}[how]


async def slow(name: str, seconds: float = 0.3) -> str:
    """Waits.

    Args:
        name: What to return.
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return name


def sleeps(name: str) -> str:
    """Blocks.

    Args:
        name: What to return.
    """
    time.sleep(0.3)
    return name


def long(count: int) -> str:
    """Returns a long text.

    Args:
        count: Its length.
    """
    return "é" * count


def turn(*calls):
    return AssistantTurn("", tuple(ToolCall(name, arguments, f"id{i}") for i, (name, arguments) in enumerate(calls)))


def contents(environment, *calls):
    answer = environment.step(turn(*calls))
    return [message["content"] for message in (asyncio.run(answer) if inspect.iscoroutine(answer) else answer).messages]


def test_schemas_are_those_of_transformers():
    environment = ToolsEnvironment([multiply, paint])
    assert environment.schemas == (get_json_schema(multiply), get_json_schema(paint))
    assert environment.stateless


def test_an_episode_opens_with_the_prompt_and_the_tools():
    environment = ToolsEnvironment([multiply])
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    assert environment.open(Prompt("p", "t", (1,), messages=messages), 0) == Opening(messages, environment.schemas)
    plain = environment.open(Prompt("p", "2*3=", (1,)), 0)
    assert plain.messages == ({"role": "user", "content": "2*3="},)


def test_a_turn_without_calls_ends_the_episode():
    assert ToolsEnvironment([multiply]).step(AssistantTurn("6")) == Observation(done=True)
    assert asyncio.run(ToolsEnvironment([slow]).step(AssistantTurn("6"))) == Observation(done=True)


def test_each_call_gets_a_message():
    answer = ToolsEnvironment([multiply, paint]).step(turn(("multiply", {"a": 3}), ("paint", {"colour": "red"})))
    assert answer == Observation(
        messages=(
            {"role": "tool", "name": "multiply", "tool_call_id": "id0", "content": "6"},
            {
                "role": "tool",
                "name": "paint",
                "tool_call_id": "id1",
                "content": '{"colour": "red", "sizes": null, "scale": 1.0, "ü": null}',
            },
        ),
        tool_calls=2,
    )


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("multply", {"a": 1}, "error: no tool 'multply'; did you mean multiply?"),
        ("zzz", {}, "error: no tool 'zzz'; tools: multiply, paint, fails"),
        ("multiply", {}, "error: multiply needs the argument 'a'"),
        ("multiply", {"a": 1, "bb": 2}, "error: multiply has no argument 'bb'; did you mean b?"),
        ("multiply", {"a": "3"}, "error: argument 'a' must be of type integer, not '3'"),
        ("multiply", {"a": True}, "error: argument 'a' must be of type integer, not True"),
        ("multiply", {"a": 1.5}, "error: argument 'a' must be of type integer, not 1.5"),
        ("multiply", {"a": None}, "error: argument 'a' must be of type integer, not None"),
        ("multiply", {"a": 3.0}, "6"),
        ("paint", {"colour": "green"}, "error: argument 'colour' must be one of 'red', 'blue', not 'green'"),
        ("paint", {"colour": ["red"]}, "error: argument 'colour' must be of type string, not ['red']"),
        (
            "paint",
            {"colour": "red", "sizes": [1, "x"]},
            "error: argument 'sizes', item 2 must be of type integer, not 'x'",
        ),
        ("fails", {"how": "exit"}, "error: SystemExit: 3"),
        ("fails", {"how": "lines"}, "error: ValueError: first second"),
        ("fails", {"how": "bytes"}, "error: the tool returned 1 bytes, which are not text"),
    ],
)
def test_failures_are_read_by_the_policy(name, arguments, content):
    answer = ToolsEnvironment([multiply, paint, fails]).step(turn((name, arguments)))
    assert answer.messages[0]["content"] == content
    assert (answer.tool_calls, answer.tool_errors) == (1, content.startswith("error: "))


def test_values_of_other_kinds():
    found = contents(ToolsEnvironment([fails]), *(("fails", {"how": how}) for how in ("object", "surrogate", "none")))
    assert found == ["(1+2j)", "a?b", "null"]
    both = contents(ToolsEnvironment([paint]), ("paint", {"colour": "red", "sizes": None, "scale": 2}))
    assert json.loads(both[0])["scale"] == 2


def test_a_malformed_call_is_an_observation():
    call = ToolCall("multiply", {}, "x", error="not valid JSON:\nExpecting ','")
    answer = ToolsEnvironment([multiply]).step(AssistantTurn("", (call, ToolCall("multiply", {"a": 1}))))
    assert [m["content"] for m in answer.messages] == ["error: not valid JSON: Expecting ','", "2"]
    assert (answer.tool_calls, answer.tool_errors) == (2, 1)


def test_long_results_are_cut_and_huge_ones_end_the_episode():
    environment = ToolsEnvironment([long])
    (text,) = contents(environment, ("long", {"count": MAX_RESULT}))
    assert text == "é" * (MAX_RESULT // 2) + f"\n… ({MAX_RESULT:,} more bytes were cut)"
    assert contents(environment, ("long", {"count": MAX_RESULT // 2})) == ["é" * (MAX_RESULT // 2)]
    with pytest.raises(ObservationTooLongError):
        environment.step(turn(("long", {"count": 5 << 20})))
    with pytest.raises(ObservationTooLongError):
        asyncio.run(ToolsEnvironment([slow, long]).step(turn(("long", {"count": 5 << 20}))))


def test_asynchronous_tools_run_concurrently():
    environment = ToolsEnvironment([slow, sleeps, multiply])
    assert not environment.is_async, "a tool can block the event loop"
    assert ToolsEnvironment([slow]).is_async
    assert not ToolsEnvironment([multiply]).is_async
    began = time.monotonic()
    calls = [("slow", {"name": str(n)}) for n in range(20)] + [("sleeps", {"name": "s"}), ("multiply", {"a": "x"})]
    found = contents(environment, *calls)
    assert time.monotonic() - began < 2
    assert found[:21] == [*map(str, range(20)), "s"]
    assert found[21].startswith("error: ")


def test_a_cancelled_step_cancels_its_tools():
    async def play():
        await asyncio.wait_for(ToolsEnvironment([slow]).step(turn(("slow", {"name": "a", "seconds": 60}))), 0.1)

    with pytest.raises(TimeoutError):
        asyncio.run(play())


class Counter:
    """A counter."""

    def __init__(self):
        self.value = 0

    @property
    def broken(self):
        raise AssertionError

    def reset(self, **row):
        return None

    def get_reward(self):
        return 1.0

    def close(self): ...

    def _hidden(self): ...

    def increment(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: How much.
        """
        self.value += step
        return self.value

    async def look(self) -> int:
        """Shows the counter."""
        return self.value


def test_methods_are_tools():
    counter = Counter()
    tools = method_tools(counter)
    assert [tool.__name__ for tool in tools] == ["increment", "look"]
    environment = ToolsEnvironment(tools)
    assert list(environment.schemas[0]["function"]["parameters"]["properties"]) == ["step"]
    contents(environment, ("increment", {"step": 3}))
    assert contents(environment, ("look", {})) == ["3"]
    assert counter.value == 3


class Adder:
    def __call__(self, a: int) -> int:
        """Adds one.

        Args:
            a: A number.
        """
        return a + 1


def test_objects_that_can_be_called_are_tools():
    environment = ToolsEnvironment([Adder()])
    assert environment.schemas[0]["function"]["name"] == "Adder"
    assert contents(environment, ("Adder", {"a": 1})) == ["2"]


def test_tools_with_schemas_of_their_own():
    schema = {"type": "function", "function": {"name": "any", "description": "", "parameters": {"type": "object"}}}
    assert contents(ToolsEnvironment([Tool("any", schema, lambda **given: given)]), ("any", {"x": 1})) == ['{"x": 1}']


def test_tools_are_loaded_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text('def hello() -> str:\n    """Says hello."""\n    return "hello"\n')
    tools = load_tools(["mine.py:hello", "python", "calculator", multiply])
    environment = ToolsEnvironment(tools)
    assert [s["function"]["name"] for s in environment.schemas] == ["hello", "python", "calculator", "multiply"]
    assert contents(environment, ("hello", {}), ("calculator", {"expression": "2**10"})) == ["hello", "1024"]
    assert contents(environment, ("calculator", {"expression": "1/0"})) == ["error: ValueError: division by zero"]


def test_tools_are_deterministic_if_all_of_them_say_so():
    def sure(a: int) -> int:
        """Adds 1.

        Args:
            a: A number.
        """
        return a + 1

    sure.deterministic = True
    schema = Tool.of(sure).schema
    assert ToolsEnvironment([calculator, sure]).deterministic
    assert not ToolsEnvironment([sure, multiply]).deterministic
    assert not ToolsEnvironment([python]).deterministic, "it has a clock, and random numbers"
    assert Tool("half", schema, functools.partial(sure, a=1)).deterministic
    assert not Tool("served", schema, lambda **given: given).deterministic


@pytest.mark.parametrize(
    ("env", "holds"),
    [
        ({"tools": ["calculator"]}, True),
        ({"tools": ["calculator", "python"]}, False),
        ({"name": "guess"}, True),
        ({"name": "openenv:http://localhost:1", "options": {"deterministic": True}}, True),
        ({"name": "openenv:http://localhost:1"}, False),
    ],
)
def test_a_run_knows_whether_its_episodes_can_be_replayed(env, holds):
    pool = build_environment(Config.build({"env": env}))
    try:
        assert pool.deterministic is holds
    finally:
        pool.close()


def no_hint(a):
    """Has no type hint.

    Args:
        a: A value.
    """


def no_docstring(a: int): ...


def undescribed(a: int, b: int):
    """Describes one argument.

    Args:
        a: A value.
    """


def only_arguments(a: int):
    """
    Args:
        a: A value.
    """


def star(*many: int):
    """Takes many.

    Args:
        many: Values.
    """


def unknown_hint(a: "Missing"):  # noqa: F821
    """Has a type hint of an unknown type.

    Args:
        a: A value.
    """


def renamed(name):
    def tool() -> str:
        """A tool."""
        return ""

    tool.__name__ = name
    return tool


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([no_hint], "tool no_hint: the argument 'a' has no type hint; write `a: str`"),
        ([no_docstring], "tool no_docstring: it has no description"),
        ([undescribed], "tool undescribed: the argument 'b' is not described; add a line `b: …` below `Args:`"),
        ([only_arguments], "tool only_arguments: it has no description"),
        ([star], "tool star: the argument .*many.* cannot be given by name"),
        ([unknown_hint], "tool unknown_hint: no schema can be made .*Missing"),
        ([multiply, multiply], "two tools are named 'multiply'"),
        ([renamed("a b")], "tool 'a b': a tool's name has 1 to 64 characters"),
        ([renamed("é")], "tool 'é': a tool's name"),
        ([renamed("a" * 65)], "a tool's name"),
        ([renamed("<lambda>")], "a tool's name"),
        ([5], "tool 5: a tool is a function, not a value of type int"),
        ([Counter], "a tool is a function, not a class"),
        ([functools.partial(multiply, 1)], "a partial function has no name"),
        (["pyton"], "env.tools: 'pyton' is not a tool; .*did you mean python?"),
        (["nothing"], "built in are python and calculator"),
        (["missing.py:f"], "no such file"),
        (["json:nothing"], "has no 'nothing'"),
        (["json:decoder"], "expected a function"),
    ],
)
def test_mistakes_are_one_line(tools, message):
    with pytest.raises(UserError, match=message) as caught:
        load_tools(tools)
    assert "\n" not in str(caught.value)
