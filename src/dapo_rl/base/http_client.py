"""Calls of an HTTP server that speaks JSON, one at a time for each thread."""

from __future__ import annotations

import email.utils
import io
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from dapo_rl.base.quote import one_line, shown
from dapo_rl.base.urls import fault_of_credentials

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
"""Before the first retry, which doubles with each one, and at most, also where a server asks for more."""
_AGAIN = (408, 409, 425, 429)
"""Statuses below 500 after which the same request may succeed."""
T = TypeVar("T")


class CallError(Exception):
    """Why a call has no reply, as one line. `status` is that of a server that refused it, or 0."""

    def __init__(self, line: str, again: bool = True, wait_s: float = 0.0, slow: bool = False, status: int = 0) -> None:
        super().__init__(line)
        self.again, self.wait_s, self.slow, self.status = again, wait_s, slow, status


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class _UntilDeadline(io.RawIOBase):
    """Reads of a socket whose time limit holds for all of them together: that of a socket holds for each."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._raw = sock, sock.makefile("rb", buffering=0)
        limit = sock.gettimeout()
        self._deadline = None if limit is None else time.monotonic() + limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp.close()
        self.fp = io.BufferedReader(_UntilDeadline(sock))


class _Connection(HTTPConnection):
    response_class = _Response


class _SecureConnection(HTTPSConnection):
    response_class = _Response


class _Http(HTTPHandler):
    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_Connection, req)


class _Https(HTTPSHandler):
    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_SecureConnection, req, context=self._context)  # type: ignore[attr-defined]


class HttpClient:
    def __init__(
        self, *, timeout_s: float, retries: int, api_key: Callable[[], str | None], most_bytes: int = 8 << 20
    ) -> None:
        """`most_bytes` is the size of the largest reply."""
        self._timeout_s, self._retries, self._api_key, self._most_bytes = timeout_s, retries, api_key, most_bytes
        self._opener = build_opener(_NoRedirects, _Http, _Https)
        self.closing = threading.Event()
        """Ends the waiting between retries."""

    def call(self, url: str, body: Any, read: Callable[[bytes], T], begin: Callable[[], None] = lambda: None) -> T:
        """What `read` makes of the reply to a POST of the body as JSON, or to a GET if it is None; after retries, or
        CallError, which `read` may raise too. `begin` is called before each request; it raises to end this."""
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(self._retries + 1):
            begin()
            try:
                return read(self._reply(url, data))
            except CallError as error:
                if not error.again or attempt == self._retries:
                    raise
                wait = max(error.wait_s, FIRST_WAIT_S * 2**attempt)
                if self.closing.wait(min(wait, LONGEST_WAIT_S)):
                    raise
        raise AssertionError

    def _reply(self, url: str, data: bytes | None) -> bytes:
        headers = {"Content-Type": "application/json", "User-Agent": "dapo-rl"}
        if key := self._api_key():
            if not (key.isascii() and key.isprintable()):  # http.client's error would show the key
                raise CallError("the API key has characters that an HTTP header cannot have", again=False)
            headers["Authorization"] = f"Bearer {key}"
        limit, started = self._timeout_s, time.monotonic()
        try:
            with self._opener.open(Request(url, data, headers), timeout=limit) as response:
                parts, size = [], 0
                while part := response.read1(1 << 16):
                    parts.append(part)
                    size += len(part)
                    if time.monotonic() - started > limit:
                        raise TimeoutError
                    if size > self._most_bytes:
                        raise CallError(f"its reply has more than {self._most_bytes >> 20} MiB", again=False)
        except HTTPError as error:
            raise _refused(error, key) from None
        except TimeoutError:
            raise CallError(f"no reply within {limit:g} s", slow=True) from None
        except URLError as error:
            slow = isinstance(error.reason, TimeoutError)
            why = f"no reply within {limit:g} s" if slow else f"{url} cannot be reached: {one_line(str(error.reason))}"
            raise CallError(why, slow=slow) from None
        except (OSError, ValueError) as error:  # a connection that breaks
            raise CallError(f"{url}: {one_line(error)}") from None
        except HTTPException as error:  # what came is not HTTP, or was cut off
            raise CallError(f"{url}: {type(error).__name__}: {one_line(error)}") from None
        return b"".join(parts)


def fault_of_url(url: str) -> str:
    """Why this is not the base URL of a server; empty if it is."""
    if fault := fault_of_credentials(url):
        return fault
    try:
        found = urlsplit(url)
        good = found.scheme in ("http", "https") and bool(found.hostname) and (found.port is None or found.port > 0)
    except ValueError:
        good = False
    what = "it" if "@" in url else shown(url)  # the part before the @ may be a password
    return "" if good else f"{what} is not a base URL such as http://localhost:8000/v1"


def key_in(variable: str | None) -> str | None:
    """The key in an environment variable, without the line break of the file that it may come from."""
    return None if variable is None else os.environ.get(variable, "").strip() or None


def _refused(error: HTTPError, key: str | None) -> CallError:
    with error:
        try:
            said = error.read(4096).decode("utf-8", "replace")
        except (OSError, HTTPException):
            said = ""
    said = said and one_line(said.replace(key, "***") if key else said, 200)
    line = f"the server answered {error.code} {one_line(str(error.reason), 60)}{f': {said}' if said else ''}"
    again = error.code in _AGAIN or error.code >= 500
    return CallError(line, again, _wait_s(error.headers.get("Retry-After")), status=error.code)


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
