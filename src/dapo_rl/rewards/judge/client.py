"""Calls of an OpenAI-compatible server, one at a time for each thread."""

from __future__ import annotations

import email.utils
import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from dapo_rl.base.quote import one_line
from dapo_rl.rewards.judge.judge_file import JudgeSettings

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
"""Before the first retry, which doubles with each one, and at most, also where a server asks for more."""
MOST_BYTES = 8 << 20
_AGAIN = (408, 409, 425, 429)
"""Statuses below 500 after which the same request may succeed."""


class JudgeReply(NamedTuple):
    text: str
    tokens: int
    """Of the prompt and the reply, as the server says."""


class CallError(Exception):
    """Why a call has no reply, as one line."""

    def __init__(self, line: str, again: bool = True, wait_s: float = 0.0, slow: bool = False) -> None:
        super().__init__(line)
        self.again, self.wait_s, self.slow = again, wait_s, slow


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Client:
    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        self._url = settings.endpoint.rstrip("/") + "/chat/completions"
        self._opener = build_opener(_NoRedirects)
        self.closing = threading.Event()
        """Ends the waiting between retries."""

    def body(self, prompt: str) -> dict[str, Any]:
        """The request: all that the reply depends on."""
        settings = self._settings
        limits = {"temperature": settings.temperature, "max_tokens": settings.max_tokens}
        messages = [{"role": "user", "content": prompt}]
        given = {name: value for name, value in limits.items() if value is not None}
        return {"model": settings.model, "messages": messages, **given}

    def ask(self, body: dict[str, Any], begin: Callable[[], None]) -> JudgeReply:
        """The reply, after retries, or CallError. `begin` is called before each request; it raises to end this."""
        for attempt in range(self._settings.retries + 1):
            begin()
            try:
                return self._ask(json.dumps(body).encode())
            except CallError as error:
                if not error.again or attempt == self._settings.retries:
                    raise
                wait = max(error.wait_s, FIRST_WAIT_S * 2**attempt)
                if self.closing.wait(min(wait, LONGEST_WAIT_S)):
                    raise
        raise AssertionError

    def _ask(self, data: bytes) -> JudgeReply:
        headers = {"Content-Type": "application/json", "User-Agent": "dapo-rl"}
        if key := self._settings.api_key():
            headers["Authorization"] = f"Bearer {key}"
        limit, started = self._settings.timeout_s, time.monotonic()
        try:
            with self._opener.open(Request(self._url, data, headers), timeout=limit) as response:
                parts, size = [], 0
                while part := response.read1(1 << 16):
                    parts.append(part)
                    size += len(part)
                    if time.monotonic() - started > limit:
                        raise TimeoutError
                    if size > MOST_BYTES:
                        raise CallError(f"its reply has more than {MOST_BYTES >> 20} MiB", again=False)
        except HTTPError as error:
            raise _refused(error, key) from None
        except TimeoutError:
            raise CallError(f"no reply within {limit:g} s", slow=True) from None
        except URLError as error:
            slow = isinstance(error.reason, TimeoutError)
            why = (
                f"no reply within {limit:g} s"
                if slow
                else f"{self._url} cannot be reached: {one_line(str(error.reason))}"
            )
            raise CallError(why, slow=slow) from None
        except (OSError, ValueError) as error:  # a connection that breaks
            raise CallError(f"{self._url}: {one_line(error)}") from None
        return _reply(b"".join(parts))


def _refused(error: HTTPError, key: str | None) -> CallError:
    with error:
        try:
            said = error.read(4096).decode("utf-8", "replace")
        except OSError:
            said = ""
    said = one_line(said.replace(key, "***") if key else said, 200)
    line = f"the server answered {error.code} {one_line(str(error.reason), 60)}{f': {said}' if said else ''}"
    return CallError(line, error.code in _AGAIN or error.code >= 500, _wait_s(error.headers.get("Retry-After")))


def _wait_s(said: str | None) -> float:
    """Retry-After: seconds, or a date."""
    if said is None:
        return 0.0
    try:
        return max(float(said), 0.0)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(said).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return 0.0


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
