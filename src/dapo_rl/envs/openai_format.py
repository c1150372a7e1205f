"""Requests and responses of the endpoint for agents: OpenAI's chat completions, and vLLM's tokens in, tokens out."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dapo_rl.base.quote import shown
from dapo_rl.envs.protocol import AssistantTurn, Message, Opening, ToolSchema, tool_call

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
CHAT_KEYS = {
    *("messages", "model", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "n", "stop", "stream"),
    *("stream_options", "logprobs", "return_token_ids"),
}
SAMPLING_KEYS = {"max_tokens", "n", "logprobs", "skip_special_tokens", "detokenize"}
LOWEST_LOGPROB = -9999.0
"""As in vLLM, for numbers that JSON cannot express."""
PARAMETER = re.compile(r"[A-Za-z0-9_]{1,40}")


class RequestError(Exception):
    """A request that is refused, with its HTTP status and OpenAI's error code."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What both kinds of requests have."""

    call: Opening
    """The conversation, or the tokens, before the turn of the policy that it asks for."""
    stream: bool
    usage_chunk: bool
    return_token_ids: bool
    logprobs: bool
    ignored: tuple[str, ...] = ()
    """Parameters without effect, such as `temperature`."""

    def _with_prompt(self, body: dict[str, Any], turn: AssistantTurn) -> dict[str, Any]:
        return {**body, "prompt_token_ids": list(turn.prompt_ids)} if self.return_token_ids else body


def _options(body: Mapping[str, Any]) -> dict[str, bool]:
    options = body.get("stream_options")
    return {
        "stream": bool(body.get("stream")),
        "usage_chunk": isinstance(options, dict) and bool(options.get("include_usage")),
        "return_token_ids": bool(body.get("return_token_ids")),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(_Asked):
    """`POST /v1/chat/completions`"""

    stop: tuple[str, ...] = ()

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ChatRequest:
        _refuse_several(body.get("n"))
        if body.get("functions") or body.get("function_call"):
            raise RequestError("functions are not supported; use tools")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages: expected a list of at least one message")
        choice = body.get("tool_choice")
        tools = body.get("tools") or []
        if not isinstance(tools, list):
            raise RequestError("tools: expected a list")
        checked = tuple(_check_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools))
        limit = body.get("max_completion_tokens")
        call = Opening(
            messages=tuple(read_message(message, f"messages[{place}]") for place, message in enumerate(messages)),
            tools=() if choice == "none" else checked,
            max_tokens=_check_limit(body.get("max_tokens") if limit is None else limit),
        )
        stop = body.get("stop") or ()
        stop = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stop, list | tuple) or not all(isinstance(end, str) for end in stop):
            raise RequestError("stop: expected a text or a list of texts")
        return cls(
            call=call,
            logprobs=bool(body.get("logprobs")),
            stop=tuple(end for end in stop if end),
            ignored=_ignored(body, CHAT_KEYS, ["tool_choice"] if choice not in (None, "auto", "none") else []),
            **_options(body),
        )

    def response(self, turn: AssistantTurn, model: str) -> dict[str, Any]:
        message = sent_message(turn, self.stop)
        choice = {"index": 0, "message": message, **self._rest(turn, message)}
        body = {**_head("chat.completion", model), "choices": [choice], "usage": _usage(turn)}
        return self._with_prompt(body, turn)

    def chunks(self, turn: AssistantTurn, model: str) -> list[dict[str, Any]]:
        """The whole turn in one chunk, the finish reason in another, and the usage, if asked for."""
        head = _head("chat.completion.chunk", model)
        delta = sent_message(turn, self.stop)
        rest = self._rest(turn, delta)
        finish_reason = rest.pop("finish_reason")
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        choice = {"index": 0, "delta": delta, "finish_reason": None, **rest}
        first = self._with_prompt({**head, "choices": [choice]}, turn)
        last = {**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish_reason}]}
        return [first, last, *([{**head, "choices": [], "usage": _usage(turn)}] if self.usage_chunk else [])]

    def _rest(self, turn: AssistantTurn, message: Message) -> dict[str, Any]:
        finish_reason = _finish_reason(turn)
        if finish_reason == "stop" and "tool_calls" in message:
            finish_reason = "tool_calls"
        logprobs = _logprobs(turn, top=False) if self.logprobs else None
        ids = {"token_ids": list(turn.token_ids)} if self.return_token_ids else {}
        return {"logprobs": logprobs, "finish_reason": finish_reason, **ids}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest(_Asked):
    """`POST /inference/v1/generate`, as in vLLM."""

    request_id: str

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> GenerateRequest:
        params = body.get("sampling_params")
        if not isinstance(params, dict):
            raise RequestError("sampling_params: expected an object")
        _refuse_several(params.get("n"))
        if body.get("features") or body.get("content_parts"):
            raise RequestError("features and content_parts are not supported: the policy reads text only")
        ids = body.get("token_ids")
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise RequestError("token_ids: expected a list of at least one token id")
        request_id = body.get("request_id")
        return cls(
            call=Opening(prompt_ids=tuple(ids), max_tokens=_check_limit(params.get("max_tokens"))),
            request_id=request_id if isinstance(request_id, str) and request_id else uuid.uuid4().hex,
            logprobs=params.get("logprobs") is not None,
            ignored=_ignored(params, SAMPLING_KEYS),
            **_options(body),
        )

    def response(self, turn: AssistantTurn, model: str) -> dict[str, Any]:
        head = {"request_id": self.request_id, "model": model, "created": int(time.time())}
        rest = {"usage": _usage(turn), "prompt_logprobs": None, "kv_transfer_params": None}
        return self._with_prompt({**head, "choices": [self._choice(turn)], **rest}, turn)

    def chunks(self, turn: AssistantTurn, model: str) -> list[dict[str, Any]]:
        usage = {"request_id": self.request_id, "choices": [], "usage": _usage(turn)}
        first = {"request_id": self.request_id, "choices": [self._choice(turn)], "usage": None}
        return [first, *([usage] if self.usage_chunk else [])]

    def _choice(self, turn: AssistantTurn) -> dict[str, Any]:
        return {
            "index": 0,
            "logprobs": _logprobs(turn, top=True) if self.logprobs else None,
            "finish_reason": _finish_reason(turn),
            "token_ids": list(turn.token_ids),
        }


def model_list(model: str, max_model_len: int) -> dict[str, Any]:
    """`GET /v1/models`, with vLLM's `max_model_len`."""
    card = {"id": model, "object": "model", "created": 0, "owned_by": "dapo-rl", "max_model_len": max_model_len}
    return {"object": "list", "data": [card]}


def sent_message(turn: AssistantTurn, stop: tuple[str, ...] = ()) -> dict[str, Any]:
    """The turn as agents receive it: `malformed_as_text`, and the text ends before the first of the agent's stop
    strings. `read_message` is its inverse, apart from these."""
    turn = malformed_as_text(turn)
    found = [place for end in stop if (place := turn.text.find(end)) >= 0]
    text = turn.text[: min(found)] if found else turn.text
    calls = [
        tool_call(
            call.id or f"call_{turn.number}_{place}", call.name, json.dumps(dict(call.arguments), ensure_ascii=False)
        )
        for place, call in enumerate(turn.tool_calls)
        if not found
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    return {**message, "tool_calls": calls} if calls else message


def malformed_as_text(turn: AssistantTurn) -> AssistantTurn:
    """The turn with its malformed tool calls as text, as in vLLM."""
    text = "\n".join(filter(None, (turn.text, *(call.raw for call in turn.tool_calls))))
    return replace(turn, text=text, tool_calls=tuple(call for call in turn.tool_calls if not call.error))


def read_message(message: Any, where: str = "message") -> dict[str, Any]:
    """A message of an agent in the form of `AssistantTurn.message`: contents are text, arguments of tool calls are
    objects, and what chat templates do not know is left out."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or message["role"] not in ROLES:
        raise RequestError(f"{where}: expected an object with a role of {', '.join(ROLES)}")
    read: dict[str, Any] = {
        "role": ROLES[message["role"]],
        "content": _read_content(message.get("content"), f"{where}.content"),
    }
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        read["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls: expected a list")
        read["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    return read


def _read_content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{where}: expected a text or a list of parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"{where}: a part of type {shown(kind)} is not supported: the policy reads text only")
        texts.append(text)
    return "\n".join(texts)


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: expected an object with function.name and function.arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.function.arguments: expected a JSON object")
    return tool_call(str(call.get("id") or ""), function["name"], arguments)


def _check_tool(tool: Any, where: str) -> ToolSchema:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f'{where}: expected {{"type": "function", "function": {{"name": …}}}}')
    checked: ToolSchema = tool
    return checked


def _check_limit(limit: Any) -> int | None:
    if limit is not None and (type(limit) is not int or limit < 1):
        raise RequestError(f"max_tokens: expected a positive whole number, got {shown(limit)}")
    return limit


def _refuse_several(n: Any) -> None:
    if n not in (None, 1):
        raise RequestError(f"n={shown(n)} is not supported: every call is one turn of an episode; use n=1")


def _ignored(given: Mapping[str, Any], known: set[str], more: list[str] | None = None) -> tuple[str, ...]:
    unknown = [key for key in given if key not in known and given[key] is not None and PARAMETER.fullmatch(key)]
    return tuple(sorted([*unknown, *(more or [])])[:32])


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _usage(turn: AssistantTurn) -> dict[str, int]:
    before, own = len(turn.prompt_ids), len(turn.token_ids)
    return {"prompt_tokens": before, "completion_tokens": own, "total_tokens": before + own}


def _finish_reason(turn: AssistantTurn) -> str:
    return "stop" if turn.finish_reason == "stop" else "length"


def _logprobs(turn: AssistantTurn, top: bool) -> dict[str, Any]:
    """Tokens are named by their ids, as by vLLM's `return_tokens_as_token_ids`."""
    content = []
    for token_id, logp in zip(turn.token_ids, turn.logps, strict=True):
        entry = {"token": f"token_id:{token_id}", "logprob": max(float(logp), LOWEST_LOGPROB), "bytes": None}
        content.append({**entry, "top_logprobs": [entry] if top else []})
    return {"content": content}
