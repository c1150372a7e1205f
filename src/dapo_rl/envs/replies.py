"""Replies of environments as bytes, and what their methods may return.

A reply is JSON and is validated, since user code has access to the worker's end of the socket.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, Literal, get_args

from dapo_rl.base.quote import TRACEBACK_LIMIT, describe, describe_traceback, shorten, shown
from dapo_rl.data.tasks import is_task
from dapo_rl.envs.opening import with_text
from dapo_rl.envs.protocol import (
    AgentError,
    AssistantTurn,
    EpisodeFailure,
    FailureReason,
    InvalidAnswerError,
    Observation,
    ObservationTooLongError,
    Opening,
)
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt, Verdict
from dapo_rl.workers.limits import MAX_REPLY
from dapo_rl.workers.worker import CorruptReplyError

MAX_TEXT = 8 << 20
"""Characters of an observation. A longer one ends the episode; what does not fit the context does so, too."""
OUT_OF_MEMORY = b"ran out of memory (env.memory_mb)"
MAX_REWARD = 1e6
MAX_TOKEN = 2**31

Operation = Literal["open", "step", "result", "close"]
Result = Opening | Observation | EpisodeFailure | UserError
REASONS = get_args(FailureReason)
KINDS = {Opening: "opening", Observation: "observation", EpisodeFailure: "failure"}


class GoneError(Exception):
    """The process that had the episode has ended."""


def encode_result(result: Result, exhausted: bool = False) -> dict[str, Any]:
    if isinstance(result, UserError):
        line, more = shorten(str(result), TRACEBACK_LIMIT), shorten(str(result.more), TRACEBACK_LIMIT)
        return {"kind": "fatal", "line": line, "more": more}
    return {"kind": KINDS[type(result)], "exhausted": exhausted, **asdict(result)}


def decode_result(row: Any) -> Result:
    """The validated result, or CorruptReplyError."""
    try:
        values = {str(name): value for name, value in row.items() if name != "exhausted"}
        kind = values.pop("kind")
        if kind == "fatal":
            line, more = (shorten(str(values[name]), TRACEBACK_LIMIT) for name in ("line", "more"))
            return UserError(line, more)
        if kind == "failure":
            return _failure(**values)
        if kind == "opening":
            return _opening(values)
        if kind != "observation":
            raise CorruptReplyError
        if values.get("conversation") is not None:
            values["conversation"] = _opening(values["conversation"])
        values["messages"] = tuple(values.get("messages", ()))
        values["prompt_ids"] = tuple(values.get("prompt_ids", ()))
        observation = Observation(**values)
        if _fault_of(observation):
            raise CorruptReplyError
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError):
        raise CorruptReplyError from None
    return observation


def encode_bounded(row: dict[str, Any], name: str) -> bytes:
    try:
        data = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace")
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps(
            encode_result(EpisodeFailure("error", f"{name} gave no JSON values: {describe(error)}"))
        ).encode()
    if len(data) <= MAX_REPLY // 2:
        return data
    detail = f"{name} answered with {len(data) >> 20} MiB; the limit is {MAX_REPLY >> 21} MiB"
    return json.dumps(encode_result(EpisodeFailure("too_long", detail), exhausted=True)).encode()


def decode_call_result(data: bytearray) -> tuple[Result, bool]:
    row = parse_reply(data)
    return decode_result(row), row.get("exhausted") is True


def parse_reply(data: bytearray) -> dict[str, Any]:
    """A reply as a dict whose strings can be encoded."""
    try:
        row = json.loads(data)
        if b"\\u" in data:  # only so can a lone surrogate be written
            row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise CorruptReplyError from None
    if not isinstance(row, dict):
        raise CorruptReplyError
    return row


def _failure(reason: FailureReason, detail: str) -> EpisodeFailure:
    if reason not in REASONS or not isinstance(detail, str):
        raise CorruptReplyError
    return EpisodeFailure(reason, shorten(detail, 2 * TRACEBACK_LIMIT))


def _opening(values: Mapping[str, Any]) -> Opening:
    values = dict(values)
    messages, tools, ids = (tuple(values.pop(name, ())) for name in ("messages", "tools", "prompt_ids"))
    opening = Opening(messages, tools, ids, **values)
    if _fault_of_opening(opening):
        raise CorruptReplyError
    return opening


def _fault_of(observation: Observation) -> str:
    reward = observation.reward
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return f"gave a reward that is {type(reward).__name__}, not a number"
    if not -MAX_REWARD <= reward <= MAX_REWARD:
        return f"gave the reward {shown(reward)}; it has to be finite, and at most {MAX_REWARD:g}"
    if not isinstance(observation.text, str):
        return f"gave an observation that is {type(observation.text).__name__}, not a string"
    if not isinstance(observation.done, bool) or not isinstance(observation.correct, bool | None):
        return "gave an observation whose `done` or `correct` is not True or False"
    if not _is_count(observation.tool_calls) or not _is_count(observation.tool_errors):
        return "gave an observation whose `tool_calls` or `tool_errors` is not a number of calls"
    if not isinstance(observation.state, Mapping):
        return "gave an observation whose `state` is not a dict"
    told = observation.conversation
    if told is not None and not isinstance(told, Opening):
        return "gave an observation whose `conversation` is not an Opening"
    parts = Opening(observation.messages, (), observation.prompt_ids, observation.max_tokens)
    return _fault_of_opening(parts) or (_fault_of_opening(told) if told is not None else "")


def _fault_of_opening(opening: Opening) -> str:
    if not _has_only(opening.messages, lambda message: isinstance(message, Mapping) and _is_message(message)):
        return "gave messages that are not dicts with a `role` and a `content`, as chat templates have them"
    if not _has_only(opening.tools, lambda tool: isinstance(tool, Mapping)):
        return "gave tools that are not dicts"
    if not _has_only(opening.prompt_ids, lambda token: _is_count(token) and token < MAX_TOKEN):
        return "gave `prompt_ids` that are not tokens"
    if opening.max_tokens is not None and not (_is_count(opening.max_tokens) and opening.max_tokens):
        return f"gave the max_tokens {shown(opening.max_tokens)}; it is a number above 0, or None"
    return ""


def _has_only(values: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str | bytes) and all(map(fits, values))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_message(message: Mapping[str, Any]) -> bool:
    content, calls = message.get("content"), message.get("tool_calls") or ()
    is_content = isinstance(content, str | None) or _has_only(content, lambda part: isinstance(part, str | Mapping))
    return isinstance(message.get("role"), str) and is_content and _has_only(calls, lambda x: isinstance(x, Mapping))


def opening_of(prompt: Prompt, answer: Any) -> Opening:
    """What `open` returned as an Opening."""
    if isinstance(answer, Opening):
        if fault := _fault_of_opening(answer):
            raise InvalidAnswerError(fault)
        return answer
    if answer is not None and not isinstance(answer, str):
        raise InvalidAnswerError(f"open returned {type(answer).__name__}; return an Opening, a text or None")
    messages = () if is_task(prompt) and not prompt.messages else prompt.conversation
    return Opening(with_text(messages, answer or ""))


def observation_of(answer: Any) -> Observation:
    """What `step` or `result` returned as a valid Observation."""
    answer = _plain(answer)
    if isinstance(answer, bool | int | float):
        answer = Observation(reward=float(answer), done=True)
    elif isinstance(answer, str):
        answer = Observation(answer)
    elif isinstance(answer, Verdict):
        answer = Observation(reward=_plain(answer.score), done=True, correct=_plain(answer.correct))
    elif isinstance(answer, Observation):
        answer = replace(answer, reward=_plain(answer.reward), correct=_plain(answer.correct), done=_plain(answer.done))
    if not isinstance(answer, Observation):
        raise InvalidAnswerError(
            f"returned {type(answer).__name__}; return an Observation, a text, or a number to end with"
        )
    if fault := _fault_of(answer):
        raise InvalidAnswerError(fault)
    if len(answer.text) > MAX_TEXT:
        raise ObservationTooLongError(f"answered with {len(answer.text):,} characters; the limit is {MAX_TEXT:,}")
    return answer


def _plain(value: Any) -> Any:
    """A scalar of NumPy or torch as a number."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def failure_of(name: str, error: BaseException) -> EpisodeFailure | UserError:
    if isinstance(error, UserError):
        return error
    if isinstance(error, GoneError):
        return EpisodeFailure("lost", str(error))
    if isinstance(error, MemoryError):
        return EpisodeFailure("crashed", f"{name} {OUT_OF_MEMORY.decode()}")
    if isinstance(error, AgentError):
        own = error.__cause__
        return EpisodeFailure("error", f"{error}\n{describe_traceback(own)}" if own is not None else str(error))
    if isinstance(error, InvalidAnswerError):
        return EpisodeFailure("error", f"{name}: {shorten(str(error))}")
    if isinstance(error, ObservationTooLongError):
        return EpisodeFailure("too_long", f"{name} {shorten(str(error))}")
    try:
        return EpisodeFailure("error", f"{name} raised {describe(error)}\n{describe_traceback(error)}")
    except BaseException:  # of the exception's own methods
        return EpisodeFailure("error", f"{name} raised an exception that cannot be shown")


def seen_turn(turn: AssistantTurn, takes_tokens: bool) -> AssistantTurn:
    """The turn as an environment gets it."""
    if takes_tokens:
        return turn
    names = {f.name for f in fields(turn)} - {"token_ids", "logps", "prompt_ids"}
    return AssistantTurn(**{name: getattr(turn, name) for name in names})
