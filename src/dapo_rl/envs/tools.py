"""Functions as tools: the policy calls them, and reads their results.

    def weather(city: str) -> str:
        \"\"\"The weather in a city.

        Args:
            city: Its name.
        \"\"\"
        return "sunny"

    environment = ToolsEnvironment([weather])

Type hints and the docstring, in Google's format, become the tool's schema. Tools may be `async def`.

`weather.deterministic = True` says that the same arguments always give the same result. If all tools say so, a resumed
run calls them again to bring unfinished episodes back to where they were.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dapo_rl.base.load import load_function
from dapo_rl.base.quote import describe, one_line, shown
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.envs.calculator import calculator
from dapo_rl.envs.protocol import AssistantTurn, Observation, ObservationTooLongError, Opening, ToolCall, ToolSchema
from dapo_rl.envs.python_tool import python
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

BUILTIN_TOOLS: dict[str, Callable[..., Any]] = {"python": python, "calculator": calculator}
MAX_RESULT, MAX_RAW_RESULT = 64 << 10, 8 << 20
"""Bytes of a result: a longer one is cut; beyond the second limit the episode ends."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list, tuple),
    "object": (Mapping,),
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool with its schema, as of an MCP server. `Tool.of` makes one of a function."""

    name: str
    schema: ToolSchema
    function: Callable[..., Any]
    """Called with the arguments by name; may be asynchronous."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UserError(
                f"tool {shown(self.name)}: a tool's name has 1 to 64 characters of A-Z a-z 0-9 _ -; rename the function"
            )

    @classmethod
    def of(cls, function: Callable[..., Any] | Tool) -> Tool:
        if isinstance(function, Tool):
            return function
        name = _name(function)
        return cls(name, _schema(name, function), function)

    @property
    def deterministic(self) -> bool:
        return is_deterministic(self.function)

    @property
    def is_async(self) -> bool:
        function = _unwrapped(self.function)
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004

    @property
    def parameters(self) -> Mapping[str, Any]:
        parameters = self.schema.get("function", {}).get("parameters")
        return parameters if isinstance(parameters, Mapping) else {}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call; ValueError says what is wrong with them."""
        known = self.parameters.get("properties")
        if not isinstance(known, Mapping):
            return dict(given)
        for name in given:
            if name not in known and not self.parameters.get("additionalProperties"):
                close = nearest(name, known)
                expected = f"expected {', '.join(known)}" if known else "expected none"
                raise ValueError(f"{self.name} has no argument {shown(name)}{did_you_mean(close, expected)}")
        for name in self.parameters.get("required", ()):
            if name not in given:
                raise ValueError(f"{self.name} needs the argument {name!r}")
        return {name: _checked(value, known.get(name, {}), f"argument {name!r}") for name, value in given.items()}


def is_deterministic(function: Any) -> bool:
    """Whether a function, or a class, says so."""
    return getattr(_unwrapped(function), "deterministic", False) is True


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _checked(value: Any, schema: Any, what: str) -> Any:
    """A value of the schema's type; a whole number may be written as 3.0."""
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable")):
        return value
    types = schema.get("type", ())
    types = [types] if isinstance(types, str) else types
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        value = int(value)
    if types and set(types) <= set(_TYPES) and not any(_is_a(value, kind) for kind in types):
        raise ValueError(f"{what} must be of type {' or '.join(types)}, not {shown(value)}")
    choices = schema.get("enum")
    if isinstance(choices, Sequence) and value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(map(shown, choices))}, not {shown(value)}")
    if isinstance(value, list) and "items" in schema:
        return [_checked(item, schema["items"], f"{what}, item {number}") for number, item in enumerate(value, 1)]
    return value


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def _name(function: Any) -> str:
    if not callable(function) or isinstance(function, type):
        kind = "a class" if isinstance(function, type) else f"a value of type {type(function).__name__}"
        raise UserError(f"tool {shown(function)}: a tool is a function, not {kind}")
    if isinstance(function, functools.partial):
        raise UserError(f"tool {shown(function)}: a partial function has no name and docstring; define a function")
    return str(getattr(function, "__name__", type(function).__name__))


def _schema(name: str, function: Callable[..., Any]) -> ToolSchema:
    routine = function if inspect.isroutine(function) else function.__call__  # type: ignore[operator]
    # Imported here, as it imports torch.
    templates = import_module("transformers.utils.chat_template_utils")
    try:
        parameters = inspect.signature(routine).parameters.values()
        described = templates.parse_google_format_docstring(inspect.getdoc(routine) or "")
    except Exception as error:
        raise UserError(f"tool {name}: its signature cannot be read: {describe(error)}") from None
    if not described[0]:
        raise UserError(f"tool {name}: it has no description; add a docstring, which the model reads")
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(
                f"tool {name}: the argument {parameter} cannot be given by name; use plain arguments such as query: str"
            )
        if parameter.annotation is parameter.empty:
            raise UserError(
                f"tool {name}: the argument {parameter.name!r} has no type hint; write `{parameter.name}: str`"
            )
        if not described[1].get(parameter.name):
            raise UserError(
                f"tool {name}: the argument {parameter.name!r} is not described; add a line "
                f"`{parameter.name}: …` below `Args:` in the docstring"
            )
    try:
        schema: dict[str, Any] = templates.get_json_schema(routine)
    except Exception as error:
        raise UserError(
            f"tool {name}: no schema can be made of its type hints and docstring: {describe(error)}"
        ) from None
    schema["function"]["name"] = name
    return schema


def load_tools(specs: Sequence[str | Callable[..., Any] | Tool]) -> list[Callable[..., Any] | Tool]:
    """The tools that `env.tools` names: functions, `file.py:name`, `module:name`, or the name of a built-in one."""
    tools = [_load(spec) for spec in specs]
    _with_schemas(tools)
    return tools


def _load(spec: str | Callable[..., Any] | Tool) -> Callable[..., Any] | Tool:
    if not isinstance(spec, str):
        return spec
    if spec in BUILTIN_TOOLS:
        return BUILTIN_TOOLS[spec]
    if ":" not in spec:
        hint = did_you_mean(nearest(spec, BUILTIN_TOOLS), f"built in are {' and '.join(BUILTIN_TOOLS)}")
        raise UserError(f"env.tools: {spec!r} is not a tool; a function is named file.py:name or module:name{hint}")
    return load_function(spec)


def _with_schemas(tools: Sequence[Callable[..., Any] | Tool]) -> dict[str, Tool]:
    found: dict[str, Tool] = {}
    for tool in map(Tool.of, tools):
        if tool.name in found:
            raise UserError(f"two tools are named {tool.name!r}; rename one of the functions")
        found[tool.name] = tool
    return found


def method_tools(instance: Any) -> list[Callable[..., Any]]:
    """The public methods of an environment as in TRL, which are tools, in alphabetical order."""
    # Members of the class: those of the instance would evaluate its properties.
    members = inspect.getmembers(type(instance), inspect.isfunction)
    return [getattr(instance, name) for name, _ in members if not name.startswith("_") and name not in _NOT_TOOLS]


@dataclass(frozen=True, slots=True)
class _Failed:
    """A call that failed, and what the policy reads about it."""

    why: str


class ToolsEnvironment:
    """Answers tool calls with the results of functions. A turn without a call ends the episode.

    If a tool is asynchronous, `step` returns an awaitable. The calls of a turn then run concurrently, unless `in_turn`.
    """

    stateless = True

    def __init__(self, tools: Sequence[Callable[..., Any] | Tool], in_turn: bool = False) -> None:
        self._tools, self._in_turn = _with_schemas(tools), in_turn
        made = self._tools.values()
        self.schemas: tuple[ToolSchema, ...] = tuple(tool.schema for tool in made)
        self.deterministic = all(tool.deterministic for tool in made)
        self._awaits = any(tool.is_async for tool in made)
        self.is_async = self._awaits and all(tool.is_async for tool in made)

    def open(self, prompt: Prompt, seed: int) -> Opening:
        return Opening(prompt.conversation, self.schemas)

    def step(self, turn: AssistantTurn) -> Any:
        if self._awaits:
            return self._awaited(turn.tool_calls)
        return _observation(turn.tool_calls, [self._call(call) for call in turn.tool_calls])

    async def _awaited(self, calls: Sequence[ToolCall]) -> Observation:
        if self._in_turn:
            return _observation(calls, [await self._result(call) for call in calls])
        return _observation(calls, await asyncio.gather(*map(self._result, calls)))

    async def _result(self, call: ToolCall) -> Any:
        result = self._call(call)
        if isinstance(result, _Failed) or not self._tools[call.name].is_async:
            return result
        try:
            return await result
        except (Exception, SystemExit) as error:
            return _Failed(describe(error))

    def _call(self, call: ToolCall) -> Any:
        if call.error:
            return _Failed(one_line(call.error))
        tool = self._tools.get(call.name)
        if tool is None:
            hint = did_you_mean(nearest(call.name, self._tools), f"tools: {', '.join(self._tools)}")
            return _Failed(f"no tool {shown(call.name)}{hint}")
        try:
            arguments = tool.arguments(call.arguments)
        except Exception as error:
            return _Failed(one_line(error))
        try:
            return tool.function(**arguments)
        except (Exception, SystemExit) as error:
            return _Failed(describe(error))


def _observation(calls: Sequence[ToolCall], results: Sequence[Any]) -> Observation:
    if not calls:
        return Observation(done=True)
    contents = [_content(result) for result in results]
    messages = tuple(
        {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}
        for call, (text, _) in zip(calls, contents, strict=True)
    )
    failed = sum(is_error for _, is_error in contents)
    return Observation(messages=messages, tool_calls=len(calls), tool_errors=failed)


def _content(result: Any) -> tuple[str, bool]:
    """What the policy reads of a result, and whether it is an error."""
    if not isinstance(result, _Failed):
        try:
            return _limited(_text(result)), False
        except ObservationTooLongError:
            raise
        except Exception as error:
            result = _Failed(one_line(error))
    return f"error: {result.why}".encode("utf-8", "replace").decode(), True


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, bytes | bytearray | memoryview):
        if len(result) > MAX_RAW_RESULT:
            raise ObservationTooLongError(f"a tool returned {len(result):,} bytes")
        raise ValueError(f"the tool returned {len(result):,} bytes, which are not text")
    if inspect.iscoroutine(result):
        result.close()
        raise ValueError("the tool returned a coroutine; define it with async def")
    try:
        return json.dumps(result, ensure_ascii=False)
    except TypeError:
        return str(result)


def _limited(text: str) -> str:
    if len(text) > MAX_RAW_RESULT or len(data := text.encode("utf-8", "replace")) > MAX_RAW_RESULT:
        raise ObservationTooLongError(f"a tool returned {len(text):,} characters; at most {MAX_RAW_RESULT >> 20} MiB")
    if len(data) <= MAX_RESULT:
        return data.decode()
    return f"{data[:MAX_RESULT].decode(errors='ignore')}\n… ({len(data) - MAX_RESULT:,} more bytes were cut)"
