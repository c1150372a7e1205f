"""Access control: requests must name this server, and actions need the token printed at the start.

Beyond this machine, reading needs the token too: the printed address carries it once, then a cookie does.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
LARGEST_BODY = 1 << 16
HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z._-]+))(?::[0-9]{1,5})?", re.ASCII)
"""A name or an address, an IPv6 address in brackets, with or without a port. Nothing else: browsers and proxies differ
on which part of `localhost:80@evil` is the host."""


def host_allowed(header: str, bound: str) -> bool:
    """Whether a Host header names this server.

    A site that resolves its own name to our address (DNS rebinding) sends that name. So names are rejected, except the
    one that the board was bound to; addresses other than loopback pass only if the board is bound to more.
    """
    match = HOST.fullmatch(header)
    if match is None:
        return False
    name = (match["six"] or match["name"]).lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return match["six"] is None and name in ("localhost", bound.lower())
    if (address.version == 6) != (match["six"] is not None):
        return False
    return name in ("127.0.0.1", "::1", bound.lower()) or not is_loopback(bound)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def token_matches(given: str | None, token: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


class Guard:
    """Rejects requests that are not for this server, and adds headers that isolate the page."""

    def __init__(self, app: Any, bound: str, token: str | None = None) -> None:
        """`token` is needed to read; None if reading needs none."""
        self._app, self._bound, self._token = app, bound, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        brought = self._token is not None and token_matches(_in_address(scope), self._token)
        # A target may name a host too (`GET http://evil/`); it would count more than the header.
        if len(hosts) != 1 or not host_allowed(hosts[0], self._bound) or not scope["path"].startswith("/"):
            status, body = 421, b"unknown host name: open the board at the address that it printed\n"
        elif self._token is not None and not (brought or token_matches(_in_cookie(scope), self._token)):
            status, body = 403, b"this board needs a token: open it at the address that it printed\n"
        elif scope["method"] not in ("GET", "HEAD") and _length(scope) > LARGEST_BODY:
            status, body = 413, b"request too large\n"
        else:
            if brought:
                cookie = f"{_cookie_name(scope)}={self._token}; Path=/; HttpOnly; SameSite=Strict"
                extra.append((b"set-cookie", cookie.encode()))
            await self._app(scope, receive, send_with_headers)
            return
        await send_with_headers(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]}
        )
        await send({"type": "http.response.body", "body": body})


def _in_address(scope: Any) -> str | None:
    given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [])
    return given[0] if len(given) == 1 else None


def _in_cookie(scope: Any) -> str | None:
    for name, value in scope["headers"]:
        if name == b"cookie":
            try:
                found = SimpleCookie(value.decode("latin-1")).get(_cookie_name(scope))
            except CookieError:
                continue
            if found is not None:
                return found.value
    return None


def _cookie_name(scope: Any) -> str:
    """With the port, since cookies are shared by all ports of a host: two boards do not overwrite each other's."""
    server = scope.get("server")
    return f"dapo-board-{server[1] if server else 0}"


def _length(scope: Any) -> float:
    """The declared length of a body; infinite if it is not declared."""
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return float("inf")
    length = headers.get(b"content-length", b"0")
    return int(length) if length.isdigit() else float("inf")
