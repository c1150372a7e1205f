"""An episode as a conversation: its turns, each with its tokens and its messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_rl.board.detokenize import detokenized, pieces

OF_AN_EPISODE = ("policy_turns", "tool_calls", "tool_errors", "env_wait_s", "env_reward", "forks")
MOST_TURNS = MOST_MESSAGES = 2000
MOST_CALLS = 100
LONGEST_TEXT = 100_000
LONGEST_PROMPT = 5000
"""Tokens of the prompt of a trajectory."""


def turns_of(row: Mapping[str, Any], tokenizer: Any, ids: Sequence[int]) -> tuple[list[Any], list[tuple[str, int]]]:
    """The turns of an episode and the pieces of its tokens, none of which is in two turns; no turns if it is a single
    one without messages.

    A turn has the bounds of its pieces, `first` and `last`, and its messages. Messages that have no tokens of their
    own, such as an environment's last words, are turns without pieces.
    """
    spans = _spans(row["turns"] or [], len(ids))
    said = _said(row["messages"])
    if not spans and not said:
        return [], pieces(tokenizer, ids)
    cut: list[tuple[str, int]] = []
    turns = []
    for span in spans or _spans([{}], len(ids)):
        start, first = span.pop("start"), len(cut)
        cut += pieces(tokenizer, ids[start : start + span["tokens"]])
        messages = said.pop(0)[1] if said and said[0][0] == span["author"] else []
        turns.append({**span, "first": first, "last": len(cut), "messages": messages})
    end = {"tokens": 0, "seconds": None, "reward": None, "first": len(cut), "last": len(cut)}
    return turns + [{"author": author, **end, "messages": messages} for author, messages in said], cut


def prompt_of(row: Mapping[str, Any], tokenizer: Any) -> str:
    """The text of a trajectory's prompt; empty if the log lacks it."""
    ids = row["prompt_ids"] or []
    shown = detokenized(tokenizer, [token or 0 for token in ids[:LONGEST_PROMPT]])
    more = len(ids) - LONGEST_PROMPT
    return shown if more <= 0 else f"{shown}… ({more:,} more tokens)"


def _spans(turns: Sequence[Any], tokens: int) -> list[dict[str, Any]]:
    """Turns that cover all tokens: those between and after the recorded ones are the policy's."""
    spans: list[dict[str, Any]] = []
    end = 0

    def add(until: int, author: str, seconds: float | None = None, reward: float | None = None) -> None:
        nonlocal end
        spans.append({"author": author, "seconds": seconds, "reward": reward, "start": end, "tokens": until - end})
        end = until

    for turn in turns[:MOST_TURNS]:
        start, stop = (min(max((turn or {}).get(name) or 0, end), tokens) for name in ("start", "end"))
        if start > end:
            add(start, "policy")
        if turn:
            author = "environment" if turn["author"] == "environment" else "policy"
            add(stop, author, turn["seconds"], turn["reward"])
    if turns and end < tokens:
        add(tokens, "policy")
    return spans


def _said(text: str | None) -> list[tuple[str, list[dict[str, Any]]]]:
    """The messages by author: each of the policy, and together those that answer it."""
    said: list[tuple[str, list[dict[str, Any]]]] = []
    names: dict[str, str] = {}
    for message in _parsed(text):
        shown = _message(message)
        if shown["role"] == "assistant":
            names |= {call["id"]: call["name"] for call in shown["calls"]}
            said.append(("policy", [shown]))
            continue
        if shown["role"] == "tool":
            shown["name"] = shown["name"] or names.get(_text(message.get("tool_call_id")), "")
        if said and said[-1][0] == "environment":
            said[-1][1].append(shown)
        else:
            said.append(("environment", [shown]))
    return said


def _parsed(text: str | None) -> list[dict[str, Any]]:
    try:
        messages = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    return _objects(messages, MOST_MESSAGES)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for call in _objects(message.get("tool_calls"), MOST_CALLS):
        function = call.get("function")
        of_call = function if isinstance(function, dict) else {}
        named = {name: _text(of_call.get(name)) for name in ("name", "arguments")}
        calls.append({"id": _text(call.get("id")), **named})
    named = {name: _text(message.get(name)) for name in ("role", "name", "content")}
    return {**named, "reasoning": _text(message.get("reasoning_content")), "calls": calls}


def _objects(values: Any, most: int) -> list[dict[str, Any]]:
    return [value for value in values[:most] if isinstance(value, dict)] if isinstance(values, list) else []


def _text(value: Any) -> str:
    """A text as it is, the texts of OpenAI's content parts, and JSON of anything else."""
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        value = "".join(part["text"] for part in value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    more = len(text) - LONGEST_TEXT
    return text if more <= 0 else f"{text[:LONGEST_TEXT]}… ({more:,} more characters)"
