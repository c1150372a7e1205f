"""Calls of an OpenAI-compatible server, one at a time for each thread."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from dapo_rl.base.http_client import CallError, HttpClient
from dapo_rl.base.quote import one_line
from dapo_rl.rewards.judge.judge_file import JudgeSettings


class JudgeReply(NamedTuple):
    text: str
    tokens: int
    """Of the prompt and the reply, as the server says."""


class Client:
    def __init__(self, settings: JudgeSettings) -> None:
        self._url = settings.endpoint.rstrip("/") + "/chat/completions"
        how: dict[str, Any] = {"timeout_s": settings.timeout_s, "retries": settings.retries}
        self._http = HttpClient(**how, api_key=settings.api_key)
        self.closing = self._http.closing
        """Ends the waiting between retries."""

    def ask(self, body: dict[str, Any], begin: Callable[[], None]) -> JudgeReply:
        """The reply, after retries, or CallError. `begin` is called before each request; it raises to end this."""
        return self._http.call(self._url, body, _reply, begin)


def _reply(data: bytes) -> JudgeReply:
    try:
        found = json.loads(data)
        text = found["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise CallError(
            f"its reply is not that of a chat completion: {one_line(data[:200].decode('utf-8', 'replace'))}"
        )
    usage = found.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return JudgeReply(text, tokens if type(tokens) is int and 0 <= tokens < 2**40 else 0)
