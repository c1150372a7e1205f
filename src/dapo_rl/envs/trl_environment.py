"""TRL's environments: classes with `reset`, whose other public methods are tools.

class Increment:
    def reset(self, **row):
        self.counter = 0
        return "Increment the counter by 3."

    def increment(self, step: int) -> int:
        \"\"\"Increments the counter.

        Args:
            step: The number to add.
        \"\"\"
        self.counter += step
        return self.counter

    def get_reward(self):
        return float(self.counter == 3)

environment = TRLEnvironment(Increment)
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeGuard

from dapo_rl.base.load import load_function
from dapo_rl.base.quote import describe, shown
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.data.tasks import is_task
from dapo_rl.envs.protocol import AssistantTurn, Observation, Opening, ToolSchema
from dapo_rl.envs.replies import opening_of
from dapo_rl.envs.tools import Tool, ToolsEnvironment, is_deterministic, load_tools, method_tools
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

Factory = Callable[[], Any]
"""Makes an environment: a class, or a function."""

ROUTE = "environment"
"""The column that chooses one of several environments."""
MOST_STATE = 256 << 10
"""Characters of JSON in an environment's state; larger attributes are left out."""


class TRLEnvironment:
    """An episode in an environment of TRL. A turn without tool calls ends it.

    `factory` is a class or a function that makes an environment, its name as in the settings (`file.py:Class`), or a
    mapping of them: the column `environment` then chooses one for each row. `tools` are functions besides the methods.

    Where a method or a tool is asynchronous, the methods here return awaitables. Calls of a turn are made one after the
    other.
    """

    has_state = True

    def __init__(self, factory: Any, tools: Sequence[Any] = ()) -> None:
        self._factories = _factories(factory)
        self._chooses = isinstance(factory, Mapping)
        self._functions = tuple(tools)
        self._instance: Any = None
        self._tools: Any = None
        self._owns_reward = False
        self.deterministic = all(map(is_deterministic, (*tools, *map(class_of, self._factories.values()))))
        self.is_async = all(Tool.of(tool).is_async for tool in tools) and _is_async(self._factories, tools)
        """A function can block an event loop. An asynchronous class is trusted not to, in all its methods."""

    def open(self, prompt: Prompt, seed: int) -> Any:
        return _then(self._begin(prompt), lambda text: self._opening(prompt, text))

    def step(self, turn: AssistantTurn) -> Any:
        return self._tools.step(turn) if turn.tool_calls else self.result()

    def result(self) -> Any:
        return _then(self._instance.get_reward() if self._owns_reward else 0.0, self._verdict)

    def close(self) -> Any:
        close = getattr(self._instance, "close", None)
        return close() if callable(close) else None

    def _begin(self, prompt: Prompt) -> Any:
        """Makes the environment and resets it: the text that the policy reads, None, or an awaitable of them."""
        given = list(map(dict, prompt.messages)) if prompt.messages else prompt.text
        row = {**({} if is_task(prompt) else {"prompt": given}), **prompt.columns}
        name = row.pop(ROUTE, None) if self._chooses else None
        if name not in self._factories:
            hint = did_you_mean(nearest(str(name), map(str, self._factories)), f"expected {', '.join(self._factories)}")
            raise UserError(f"prompt {prompt.id}: no environment {shown(name)} (column {ROUTE!r}){hint}")
        self._instance = self._factories[name]()
        self._owns_reward = callable(getattr(self._instance, "get_reward", None))
        self._tools = ToolsEnvironment([*self._functions, *_bound_tools(self._instance)], in_turn=True)
        return self._instance.reset(**_accepted(self._instance.reset, row))

    def _opening(self, prompt: Prompt, text: Any) -> Opening:
        if text is not None and not isinstance(text, str):
            kind = type(self._instance).__name__
            raise UserError(f"{kind}.reset: expected a text or None, got {shown(text)}; observations are text only")
        opening = opening_of(prompt, text)
        if not opening.messages:
            kind = type(self._instance).__name__
            raise UserError(
                f"{kind}.reset: the row has no prompt, so reset has to return one; it returned {shown(text)}"
            )
        return replace(opening, tools=self._tools.schemas)

    def _verdict(self, reward: Any) -> Observation:
        return Observation(reward=0.0 if reward is None else float(reward), done=True, state=state_of(self._instance))


class TRLEnvironments:
    """Makes the environment of each episode, for an `EnvironmentPool`."""

    def __init__(self, factory: Any, tools: Sequence[Any] = ()) -> None:
        self._arguments = (factory, tuple(tools))
        self.environment = self()
        """An example, which says whether it is asynchronous and deterministic."""
        self.tools: Sequence[ToolSchema] = _schemas(factory, tools)

    def __call__(self) -> TRLEnvironment:
        return TRLEnvironment(*self._arguments)


def state_of(instance: Any) -> dict[str, Any]:
    """The attributes of an environment that JSON can express, as JSON has them; those of its class count."""
    state: dict[str, Any] = {}
    room = MOST_STATE
    for name, value in _attributes(instance):
        try:
            text = json.dumps(value, default=_listed)
        except (TypeError, ValueError, RecursionError):
            continue
        if len(text) <= room:
            room -= len(text)
            state[name] = json.loads(text)
    return state


def _attributes(instance: Any) -> Iterator[tuple[str, Any]]:
    found: dict[str, Any] = {}
    for kind in reversed(type(instance).__mro__[:-1]):
        found |= {name: value for name, value in vars(kind).items() if not name.startswith("_") and _is_data(value)}
    yield from (found | getattr(instance, "__dict__", {})).items()


def _is_data(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple | dict)


def _listed(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy
        return value.tolist()
    raise TypeError


def is_trl_environment(kind: Any) -> TypeGuard[type]:
    """Whether a class is an environment of TRL, rather than one with the protocol here or gymnasium's."""
    return isinstance(kind, type) and callable(getattr(kind, "reset", None)) and not hasattr(kind, "step")


@cache
def class_of(factory: Factory, where: str = "environment_factory") -> type:
    """The class of the environments that a factory makes. A function is called once."""
    if isinstance(factory, type):
        return factory
    try:
        return type(factory())
    except Exception as error:
        raise UserError(f"{where}: making an environment failed: {describe(error)}") from error


def check_class(kind: type, where: str = "environment_factory", tools: Sequence[Any] = ()) -> None:
    """Raises UserError for a class without `reset`, and for a method that cannot be a tool besides the others."""
    if not callable(getattr(kind, "reset", None)):
        raise UserError(f"{where}: {kind.__name__} has no method reset(**row), which begins an episode")
    load_tools([*tools, *_tools_of(kind)])


@cache
def _tools_of(kind: Any) -> tuple[Tool, ...]:
    """The methods of a class that are tools, bound to an object that is not initialised."""
    try:
        blank = object.__new__(kind)
    except TypeError:  # a subclass of a built-in type
        blank = kind.__new__(kind)
    return tuple(map(Tool.of, method_tools(blank)))


def _bound_tools(instance: Any) -> list[Tool]:
    kind: type = type(instance)
    return [replace(tool, function=getattr(instance, tool.name)) for tool in _tools_of(kind)]


def _factories(factory: Any) -> dict[Any, Factory]:
    """By the names in the column `environment`; a single one has the name None."""
    named = factory if isinstance(factory, Mapping) else {None: factory}
    return {name: load_function(each) if isinstance(each, str) else each for name, each in named.items()}


def owns_reward(factory: Any) -> bool:
    """Whether an environment, or one of several, gives rewards."""
    return any(hasattr(class_of(each), "get_reward") for each in _factories(factory).values())


def _schemas(factory: Any, tools: Sequence[Any]) -> list[ToolSchema]:
    """The tools of one episode: those of the first environment, if there are several."""
    kind = class_of(next(iter(_factories(factory).values())))
    return [Tool.of(tool).schema for tool in (*tools, *_tools_of(kind))]


def _is_async(factories: Mapping[Any, Factory], tools: Sequence[Any]) -> bool:
    for kind in map(class_of, factories.values()):
        reserved = (getattr(kind, name, None) for name in ("reset", "get_reward", "close"))
        if any(map(inspect.iscoroutinefunction, reserved)) or any(tool.is_async for tool in _tools_of(kind)):
            return True
    return any(Tool.of(tool).is_async for tool in tools)


def _accepted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a function takes: all of them, if it has `**row`."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(row)
    return {name: value for name, value in row.items() if name in parameters}


def _then(value: Any, use: Callable[[Any], Observation | Opening]) -> Any:
    """Converts a value, or an awaitable's result once it is there."""
    if not inspect.isawaitable(value):
        return use(value)

    async def later() -> Observation | Opening:
        return use(await value)

    return later()
