"""The endpoint for agents: an OpenAI-compatible server whose model is the policy.

| route | |
|---|---|
| `POST /v1/chat/completions` | OpenAI's, with tools, streaming and vLLM's `return_token_ids` |
| `POST /inference/v1/generate` | vLLM's: tokens in, tokens and log-probabilities out |
| `GET /v1/models` | the policy, with vLLM's `max_model_len` |

Every request needs its episode's secret as the API key. `model` may be any name. Sampling parameters are the run's:
those of requests are ignored and listed in the response header `x-dapo-ignored`, and so is a `tool_choice` that demands
a call. `max_tokens` lowers the run's limits. `stop` cuts the text that the agent gets; the turn keeps its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from dapo_rl.base.quote import describe, one_line
from dapo_rl.base.unicode import is_unicode
from dapo_rl.envs.openai_format import ChatRequest, GenerateRequest, RequestError, model_list
from dapo_rl.envs.protocol import AssistantTurn, Opening
from dapo_rl.errors import UserError

Handle = Callable[[Opening], Awaitable[AssistantTurn]]

BODY_LIMIT = 8 * 2**20
DRAIN_LIMIT = 8 * BODY_LIMIT
"""A longer body is not read to its end: its connection is closed, and the client may not see why."""
BODY_SECONDS = 60.0
IDLE_SECONDS = 600
"""How long a connection may stay open between requests: longer than agents usually take, since a client that sends
while the server closes gets an error."""
ENDED_KEPT = 10_000
"""Secrets of ended episodes to remember."""

POST_ROUTES: dict[str, Callable[[dict[str, Any]], ChatRequest | GenerateRequest]] = {
    "/v1/chat/completions": ChatRequest.parse,
    "/inference/v1/generate": GenerateRequest.parse,
}
METHODS = {"/v1/models": "GET", **dict.fromkeys(POST_ROUTES, "POST")}


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process that the server is part of."""
        yield


@dataclass(eq=False, slots=True)
class _Episode:
    handle: Handle
    max_model_len: int
    waiting: set[asyncio.Future[AssistantTurn]] = field(default_factory=set)


class Endpoint:
    """Serves on the running event loop. `url` is known once it has started."""

    def __init__(
        self,
        model: str,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: tuple[str, str] | None = None,
    ) -> None:
        self.model, self.host, self.port, self.tls = model, host, port, tls
        self._episodes: dict[str, _Episode] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The base URL for clients, which ends in `/v1`."""
        host = _own_name() if self.host in ("", "0.0.0.0", "::") else self.host
        return f"{'https' if self.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}/v1"

    async def start(self) -> None:
        settings = uvicorn.Config(
            self._app,
            interface="asgi3",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=1,
            ssl_certfile=self.tls[0] if self.tls else None,
            ssl_keyfile=self.tls[1] if self.tls else None,
        )
        try:
            settings.load()
        except (OSError, ssl.SSLError) as error:
            raise UserError(
                f"env.tls: {' and '.join(self.tls or ())}: {one_line(error)}; they must be a certificate and its key "
                "as PEM files"
            ) from None
        _allow_files()
        listener = self._listen()
        self.port = listener.getsockname()[1]
        self._server = _Server(settings)
        self._serving = asyncio.create_task(_serve(self._server, listener))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.001)
        if self._serving.done():
            self._serving.result()

    async def stop(self) -> None:
        """Refuses waiting requests and closes all connections."""
        for secret in list(self._episodes):
            self.close(secret)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None

    def open(self, handle: Handle, max_model_len: int) -> str:
        """Begins an episode: `handle` answers the calls that come with the secret that this returns. Prompt and
        response of a call have at most `max_model_len` tokens together."""
        secret = f"dapo-{secrets.token_urlsafe(32)}"
        self._episodes[secret] = _Episode(handle, max_model_len)
        return secret

    def close(self, secret: str) -> None:
        """Ends an episode: its requests are refused, also those that wait."""
        episode = self._episodes.pop(secret, None)
        if episode is None:
            return
        self._ended[secret] = None
        while len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)
        for call in episode.waiting:
            call.cancel()

    def _listen(self) -> socket.socket:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, protocol)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(2048)
                listener.setblocking(False)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            raise UserError(
                f"env.host, env.port: cannot listen on {self.host}:{self.port}: {error.strerror or error}; "
                "env.port=0 takes a free port"
            ) from None
        return listener

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            response = await self._respond(request)
        except ClientDisconnect:
            return
        except RequestError as error:
            closes = {"connection": "close"} if error.status in (408, 413) else None
            response = JSONResponse(error.body, error.status, headers=closes)
        except Exception as error:
            failed = RequestError(describe(error), 500)
            response = JSONResponse(failed.body, failed.status)
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        path, method = request.url.path, request.method
        if path not in METHODS:
            raise RequestError(f"no such route: the endpoint has {', '.join(METHODS)}", 404, "not_found")
        if method != METHODS[path]:
            raise RequestError(f"{path} takes {METHODS[path]} requests", 405, "method_not_allowed")
        episode = self._authorize(request)
        if path not in POST_ROUTES:
            return JSONResponse(model_list(self.model, episode.max_model_len))
        asked = POST_ROUTES[path](await _read_body(request))
        length = len(asked.call.prompt_ids)
        if length >= episode.max_model_len:
            raise RequestError(
                f"the prompt has {length} tokens, and the model's maximum context length is {episode.max_model_len} "
                "tokens with at least one of the response",
                code="context_length_exceeded",
            )
        turn = await self._take_turn(episode, asked.call, request)
        headers = {"x-dapo-ignored": ", ".join(asked.ignored)} if asked.ignored else None
        if not asked.stream:
            return JSONResponse(asked.response(turn, self.model), headers=headers)
        events = [json.dumps(chunk, ensure_ascii=False, allow_nan=False) for chunk in asked.chunks(turn, self.model)]
        text = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        return Response(text, media_type="text/event-stream", headers={"cache-control": "no-cache", **(headers or {})})

    def _authorize(self, request: Request) -> _Episode:
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        secret = secret.strip()
        if scheme.lower() == "bearer" and secret in self._episodes:
            return self._episodes[secret]
        if secret in self._ended:
            raise _ended()
        raise RequestError("the API key is not the secret of an episode", 401, "invalid_api_key")

    async def _take_turn(self, episode: _Episode, call: Opening, request: Request) -> AssistantTurn:
        """Waits for the policy; cancelled when the client disconnects or the episode ends."""
        turn = asyncio.ensure_future(episode.handle(call))
        left = asyncio.ensure_future(_disconnected(request))
        episode.waiting.add(turn)
        try:
            await asyncio.wait({turn, left}, return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                raise ClientDisconnect
            if turn.cancelled():
                raise _ended()
            return turn.result()
        finally:
            episode.waiting.discard(turn)
            turn.cancel()
            left.cancel()


async def _serve(server: _Server, listener: socket.socket) -> None:
    try:
        await server.serve([listener])
    finally:  # also if the event loop ends
        for listening in getattr(server, "servers", []):
            listening.close()
        listener.close()


def _ended() -> RequestError:
    return RequestError("the episode has ended", 410, "episode_ended")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request) -> dict[str, Any]:
    too_long = RequestError(f"the request is longer than {BODY_LIMIT:,} bytes", 413, "request_too_large")
    body = bytearray()
    length = 0
    try:
        if int(request.headers.get("content-length", 0)) > DRAIN_LIMIT:
            raise too_long
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                length += len(chunk)
                if length <= BODY_LIMIT:
                    body += chunk
                if length > DRAIN_LIMIT:
                    raise too_long
    except TimeoutError:
        raise RequestError(f"the request took longer than {BODY_SECONDS:g} s", 408) from None
    if length > BODY_LIMIT:
        raise too_long
    try:
        parsed = json.loads(bytes(body))
        # JSON can express lone surrogates, which no tokenizer takes. Python reads them in bytes that are no UTF-8, too.
        if (b"\\ud" in body.lower() or not _is_utf8(body)) and not is_unicode(json.dumps(parsed, ensure_ascii=False)):
            raise ValueError("it contains a lone surrogate")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {one_line(error, 100)}") from None
    if not isinstance(parsed, dict):
        raise RequestError("the request is not a JSON object")
    return parsed


def _is_utf8(data: bytearray) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _allow_files() -> None:
    """Raises the limit on open files as far as it goes: every waiting agent has a connection, with two ends if it runs
    in this process, and the usual limit is 1024."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _own_name() -> str:
    """The name under which this host is found, for an endpoint that listens on all addresses."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name
