"""`openenv:URL`: episodes on an OpenEnv server. Each episode is a session, which is one WebSocket connection.

The policy's text becomes an action: a JSON object with the action's fields, or else the value of one field. That is
the only field that an action has, the only one of type string, or `env.options={action: NAME}`. The observation is the
value of its only field or of `env.options={observation: NAME}`, or else a JSON object with all its fields.

If the server's actions are tool calls, its tools are the episode's tools. A turn without a call ends the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dapo_rl.base.quote import one_line
from dapo_rl.envs.opening import opening
from dapo_rl.envs.protocol import AssistantTurn, Observation, Opening, ToolCall, ToolSchema, tool_schema
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

PREFIX = "openenv:"
MAX_MESSAGE_BYTES = 16 * 2**20
_SCHEMA_BYTES = 4 * 2**20
_CONNECT_S = 10.0

Schema = Mapping[str, Any]
_schemas: dict[str, Schema] = {}


class _ServerError(RuntimeError):
    """The server's answer to a message that it cannot process."""

    def __init__(self, url: str, data: Mapping[str, Any]) -> None:
        super().__init__(f"{PREFIX}{url}: {one_line(data.get('message', 'an error without a message'))}")
        self.code = str(data.get("code", ""))
        self.errors: Sequence[Any] = data.get("errors") or ()


class OpenEnv:
    """An episode on an OpenEnv server.

    - `action`, `observation`: the fields that stand for the policy's text and for the text it gets
    - `reset`: arguments of the server's `reset`, besides the seed and the row's columns
    - `wait_s`: how long to wait for a session if the server has no more than its `max_concurrent_envs`
    - `deterministic`: whether the same seed and actions always give the same observations
    """

    def __init__(
        self,
        url: str,
        *,
        action: str | None = None,
        observation: str | None = None,
        reset: Mapping[str, Any] | None = None,
        wait_s: float = 20.0,
        deterministic: bool = False,
    ) -> None:
        self.url = _checked(url)
        self.deterministic = deterministic
        self._action, self._observation = action, observation
        self._reset, self._wait_s = dict(reset or {}), wait_s
        self._socket: ClientConnection | None = None
        self._schema: Schema = {}

    async def open(self, prompt: Prompt, seed: int) -> Opening:
        self._schema = await _schema_of(self.url)
        self._check_fields()
        arguments = {**_columns_of(prompt), "seed": seed, **self._reset}
        tools: tuple[ToolSchema, ...] = ()
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                await self._connect()
                answer = await self._ask("reset", arguments)
                if self._has_tools:
                    tools = await self._list_tools()
                break
            except _ServerError as error:
                await self.close()
                if error.code != "CAPACITY_REACHED":
                    raise
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{error}; start the server with a larger max_concurrent_envs") from None
                await asyncio.sleep(0.2)
        text = self._text_of(answer.get("observation") or {})
        return opening(prompt, text, tools)

    async def step(self, turn: AssistantTurn) -> Observation:
        if self._has_tools:
            return await self._call_tools(turn.tool_calls)
        try:
            action = self._action_of(turn)
        except ValueError as error:
            return Observation(text=str(error), tool_calls=1, tool_errors=1)
        try:
            answer = await self._ask("step", action)
        except _ServerError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return Observation(text=f"not a valid action: {_first_of(error)}", tool_calls=1, tool_errors=1)
        text = self._text_of(answer.get("observation") or {})
        return Observation(text=text, reward=_reward_of(answer), done=bool(answer.get("done")), tool_calls=1)

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    @property
    def _fields(self) -> Mapping[str, Any]:
        return _own_fields(self._schema.get("action"))

    @property
    def _has_tools(self) -> bool:
        """Whether actions are tool calls. Environments with several kinds of actions declare no field at all."""
        return not self._fields or {"tool_name", "arguments"} <= set(self._fields)

    def _check_fields(self) -> None:
        for option, name in (("action", self._action), ("observation", self._observation)):
            fields = _own_fields(self._schema.get(option))
            if name is not None and fields and name not in fields:
                raise UserError(
                    f"env.options.{option}: {PREFIX}{self.url} has {option}s with {_listed(fields)}, not {name}"
                )

    def _action_of(self, turn: AssistantTurn) -> Mapping[str, Any]:
        """Raises ValueError for the policy to read."""
        fields = self._fields
        for call in turn.tool_calls:
            if call.error:
                raise ValueError(call.error)
            return call.arguments
        text = turn.text.strip()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and value and value.keys() <= fields.keys():
            return value
        name = self._action or _text_field(fields)
        if name is None:
            raise ValueError(f"not a valid action: write a JSON object with {_listed(fields)}")
        if "string" in _types_of(fields.get(name, {"type": "string"})):
            return {name: text}
        if value is None:
            raise ValueError(f"not a valid action: {name} must be {' or '.join(sorted(_types_of(fields[name])))}")
        return {name: value}

    async def _call_tools(self, calls: Sequence[ToolCall]) -> Observation:
        messages, reward, errors, done = [], 0.0, 0, not calls
        for call in calls:
            result, failed = call.error, bool(call.error)
            if not failed:
                action = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
                answer = await self._ask("step", action)
                observed = answer.get("observation") or {}
                failed = bool(observed.get("error"))
                result = _tool_text(observed) if "tool_name" in observed else self._text_of(observed)
                reward += _reward_of(answer)
                done = bool(answer.get("done"))
            errors += failed
            messages.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result})
            if done:
                break
        return Observation(
            messages=tuple(messages), reward=reward, done=done, tool_calls=len(messages), tool_errors=errors
        )

    async def _list_tools(self) -> tuple[ToolSchema, ...]:
        answer = await self._ask("step", {"type": "list_tools"})
        tools = (answer.get("observation") or {}).get("tools") or ()
        nothing = {"type": "object", "properties": {}}
        return tuple(tool_schema(t["name"], t.get("description"), t.get("input_schema") or nothing) for t in tools)

    def _text_of(self, observed: Mapping[str, Any]) -> str:
        own = {k: v for k, v in observed.items() if k != "metadata" and v is not None}
        if self._observation is not None:
            return _as_text(own.get(self._observation, ""))
        return _as_text(next(iter(own.values()))) if len(own) == 1 else _as_text(own) if own else ""

    async def _connect(self) -> None:
        from websockets.asyncio.client import connect

        try:
            self._socket = await connect(
                f"ws{self.url.removeprefix('http')}/ws",
                open_timeout=_CONNECT_S,
                max_size=MAX_MESSAGE_BYTES,
                proxy=None if _is_local(self.url) else True,
            )
        except Exception as error:
            raise ConnectionError(f"{PREFIX}{self.url} does not answer: {one_line(error)}") from None

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        from websockets.exceptions import ConnectionClosed

        if self._socket is None:
            raise RuntimeError("the episode is not open")
        try:
            with contextlib.suppress(ConnectionClosed):  # a server without room says so before it closes
                await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._socket.recv())
        except ConnectionClosed as error:
            raise ConnectionError(f"{PREFIX}{self.url} closed the connection: {one_line(error)}") from None
        content: Mapping[str, Any] = answer.get("data") or {}
        if answer.get("type") == "error":
            raise _ServerError(self.url, content)
        return content


def _checked(url: str) -> str:
    try:
        import websockets  # noqa: F401
    except ImportError:
        raise UserError(f"env.name: {PREFIX}{url} needs websockets: pip install 'dapo-rl[envs]'") from None
    scheme, _, rest = url.partition("://")
    url = {"ws": "http", "wss": "https"}.get(scheme, scheme) + "://" + rest
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the brackets or the port
        is_url = False
    if not is_url or any(map(str.isspace, url)):
        raise UserError(f"env.name: {PREFIX}{one_line(url)} is not a URL; for example {PREFIX}http://127.0.0.1:8000")
    return url.rstrip("/")


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _schema_of(url: str) -> Schema:
    """The JSON schemas of its actions and observations."""
    if url not in _schemas:
        _schemas[url] = await asyncio.to_thread(_fetch_schema, url)
    return _schemas[url]


def _fetch_schema(url: str) -> Schema:
    proxies = [urllib.request.ProxyHandler({})] if _is_local(url) else []
    try:
        with urllib.request.build_opener(*proxies).open(f"{url}/schema", timeout=_CONNECT_S) as response:
            schema = json.loads(response.read(_SCHEMA_BYTES))
    except (OSError, ValueError, HTTPException, RecursionError) as error:
        raise UserError(f"env.name: {PREFIX}{url} is not an OpenEnv server that runs: {one_line(error)}") from None
    if not isinstance(schema, dict) or not isinstance(schema.get("action"), dict):
        raise UserError(f"env.name: {PREFIX}{url} is not an OpenEnv server: its /schema has no action")
    return schema


def _own_fields(schema: Any) -> Mapping[str, Any]:
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    return {name: field for name, field in properties.items() if name not in ("metadata", "reward", "done")}


def _types_of(field: Mapping[str, Any]) -> set[str]:
    kinds = {str(kind.get("type")) for kind in field.get("anyOf", ())} | {str(field.get("type", "string"))}
    return kinds - {"null"} if len(kinds) > 1 else kinds


def _text_field(fields: Mapping[str, Any]) -> str | None:
    texts = [name for name, field in fields.items() if "string" in _types_of(field)]
    return next(iter(fields)) if len(fields) == 1 else texts[0] if len(texts) == 1 else None


def _listed(fields: Mapping[str, Any]) -> str:
    return ("the field " if len(fields) == 1 else "the fields ") + ", ".join(fields)


def _columns_of(prompt: Prompt) -> dict[str, Any]:
    """What of the row can be written as JSON; the server passes on the arguments that its `reset` takes."""
    columns = {**prompt.columns, **({} if prompt.answer is None else {"answer": prompt.answer})}
    return {name: value for name, value in columns.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _first_of(error: _ServerError) -> str:
    for entry in error.errors:
        where = ".".join(str(part) for part in entry.get("loc", ()))
        return one_line(f"{where}: {entry.get('msg', '')}" if where else entry.get("msg", ""))
    return one_line(error)


def _reward_of(answer: Mapping[str, Any]) -> float:
    return float(answer.get("reward") or 0.0)


def _tool_text(observed: Mapping[str, Any]) -> str:
    if observed.get("error"):
        return f"error: {observed['error'].get('message', '')}"
    result = observed.get("result")
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        return "\n".join(part["text"] if "text" in part else f"[{part.get('type')}]" for part in result["content"])
    return _as_text(result)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
