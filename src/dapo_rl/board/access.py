"""Access control: requests must name this server, and actions need the token printed at the start.

Beyond this machine, reading needs the token too: the printed address carries it once, then a cookie does.
"""

from __future__ import annotations

import hmac
import ipaddress
import re

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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

    def __init__(self, app: ASGIApp, bound: str, token: str | None = None) -> None:
        """`token` is needed to read; None if reading needs none."""
        self._app, self._bound, self._token = app, bound, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        request = HTTPConnection(scope)
        # With the port, since cookies are shared by all ports of a host: two boards do not overwrite each other's.
        cookie = f"dapo-board-{(scope.get('server') or ('', 0))[1]}"
        given = request.query_params.getlist("token")
        brought = self._token is not None and len(given) == 1 and token_matches(given[0], self._token)
        refusal = self._refusal(request, brought or token_matches(request.cookies.get(cookie), self._token or ""))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if brought and refusal is None:
                    headers.append("Set-Cookie", f"{cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: HTTPConnection, has_token: bool) -> PlainTextResponse | None:
        hosts, scope = request.headers.getlist("host"), request.scope
        # A target may name a host too (`GET http://evil/`); it would count more than the header.
        if len(hosts) != 1 or not host_allowed(hosts[0], self._bound) or not scope["path"].startswith("/"):
            return PlainTextResponse("unknown host name: open the board at the address that it printed\n", 421)
        if self._token is not None and not has_token:
            return PlainTextResponse("this board needs a token: open it at the address that it printed\n", 403)
        if scope["method"] not in ("GET", "HEAD") and _length(request) > LARGEST_BODY:
            return PlainTextResponse("request too large\n", 413)
        return None


def _length(request: HTTPConnection) -> float:
    """The declared length of a body; infinite if it is not declared."""
    length = request.headers.get("content-length", "0")
    return int(length) if length.isdecimal() and "transfer-encoding" not in request.headers else float("inf")
