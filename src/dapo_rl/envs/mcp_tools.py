"""The tools of MCP servers. A server is a command line, which speaks MCP over its standard input and output, or the URL
of one that speaks streamable HTTP.

A command gets few variables of the run's environment, as MCP clients do it: PATH, HOME and the like. Others are set on
its command line: `env KEY=value command`. In a URL, `${NAME}` stands for a variable of the run's. Each process has one
connection to a server, shared by all its episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from dapo_rl.base.quote import one_line, printable
from dapo_rl.base.urls import with_variables
from dapo_rl.envs.protocol import ToolSchema, tool_schema
from dapo_rl.errors import UserError

if TYPE_CHECKING:
    from mcp import Client

T = TypeVar("T")
CONNECT_S = 20.0
"""How long a server may take to start and to list its tools."""
_STDERR_BYTES = 4096
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_CLOSED = (-32000, 32600)
"""The SDK's codes for a connection and for an HTTP session that have ended."""


class MCPToolError(Exception):
    """A tool's own error, for the policy to read."""


@dataclass(frozen=True)
class MCPTool:
    """A tool of a server, as a function of keyword arguments. It connects when it is first called."""

    server: str
    schema: ToolSchema

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    async def __call__(self, **arguments: Any) -> str:
        """The result's text. Raises MCPToolError with it if the tool says that it failed."""
        return await MCPTools.shared(self.server).call(self.name, arguments)


class MCPTools:
    """A connection to a server, from any thread or event loop of this process."""

    _of_process: dict[tuple[int, str], MCPTools] = {}  # noqa: RUF012
    _lock = threading.Lock()

    def __init__(self, server: str) -> None:
        self.server = server
        self._connection: _Connection | None = None

    @classmethod
    def shared(cls, server: str) -> MCPTools:
        with cls._lock:
            return cls._of_process.setdefault((os.getpid(), server), cls(server))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return await _elsewhere(self._call(name, arguments))

    async def close(self) -> None:
        await _elsewhere(self._close())

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        from mcp import MCPError

        client = await self._client()
        connection = self._connection
        try:
            result = await client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code not in _CLOSED:
                raise MCPToolError(one_line(error)) from None
            if self._connection is connection:
                await self._close()
            raise ConnectionError(f"the MCP server {_label(self.server)} ended during a call of {name}") from None
        text = "\n".join(_text_of(part) for part in result.content)
        if result.is_error:
            raise MCPToolError(text or "the tool failed")
        return text

    async def _client(self) -> Client:
        if self._connection is None or self._connection.task.done():
            self._connection = _Connection(self.server)
        return await asyncio.shield(self._connection.client)

    async def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.stop.set()
            await asyncio.wait([connection.task])


class _Connection:
    """A task that holds a connection: it has to be closed by the task that opened it."""

    def __init__(self, server: str) -> None:
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self._hold(server))

    async def _hold(self, server: str) -> None:
        try:
            async with _connected(server) as client:
                self.client.set_result(client)
                await self.stop.wait()
        except BaseException as error:
            if not self.client.done():
                self.client.set_exception(
                    error if isinstance(error, Exception) else ConnectionError(f"{_label(server)} was closed")
                )
            if not isinstance(error, Exception):
                raise


async def list_tools(server: str) -> list[ToolSchema]:
    """Starts or connects to a server, lists its tools, and leaves it."""
    deadline = asyncio.get_running_loop().time() + CONNECT_S
    try:
        async with _connected(server) as client, asyncio.timeout_at(deadline):
            schemas = await _schemas_of(client)
    except UserError:
        raise
    except Exception as error:
        cause = _leaf(error)
        reason = f"no end in {CONNECT_S:g} s" if isinstance(cause, TimeoutError) else one_line(cause)
        raise UserError(f"env.mcp: {_label(server)} does not list its tools: {reason}") from None
    if not schemas:
        raise UserError(f"env.mcp: {_label(server)} has no tools")
    return schemas


def mcp_tools(server: str) -> list[MCPTool]:
    """The tools of a server. It runs only while they are listed, and again when one is called."""
    with ThreadPoolExecutor(1) as thread:  # the caller, such as a notebook, may have an event loop
        schemas = thread.submit(asyncio.run, list_tools(server)).result()
    return [MCPTool(server, schema) for schema in schemas]


@contextlib.asynccontextmanager
async def _connected(server: str) -> AsyncIterator[Client]:
    """A client; a server that does not answer as one of MCP is the user's mistake."""
    try:
        from mcp import Client
    except ImportError:
        raise UserError(f"env.mcp: {_label(server)} needs mcp 2: pip install 'dapo-rl[envs]'") from None
    logging.getLogger("mcp").addHandler(logging.NullHandler())  # errors are raised; it would also print them
    with _Stderr() as stderr, contextlib.ExitStack() as failures:
        failures.enter_context(_explained(server, stderr))
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(CONNECT_S):
                client = await stack.enter_async_context(Client(_transport(server, stderr.file)))
            failures.pop_all()
            yield client


@contextlib.contextmanager
def _explained(server: str, stderr: _Stderr) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        lines = stderr.tail().strip().splitlines()
        cause = _leaf(error)
        reason = f"no answer in {CONNECT_S:g} s" if isinstance(cause, TimeoutError) else one_line(cause)
        if isinstance(cause, OSError) and cause.strerror:
            reason = cause.strerror
        said = f"; it says: {one_line(printable(lines[-1]))}" if lines else ""
        raise UserError(
            f"env.mcp: {_label(server)} does not start as an MCP server, try it by itself: {reason}{said}"
        ) from None


def _transport(server: str, stderr: TextIO) -> Any:
    from mcp.client.stdio import StdioServerParameters, stdio_client

    if server.startswith(("http://", "https://")):
        return with_variables(server, "env.mcp")
    try:
        words = shlex.split(server)
    except ValueError as error:
        raise UserError(f"env.mcp: {_label(server)} is neither a URL nor a command: {error}") from None
    if not words:
        raise UserError("env.mcp: an entry is empty; give a command or a URL")
    return stdio_client(StdioServerParameters(command=words[0], args=words[1:]), errlog=stderr)


class _Stderr:
    """Where a server writes its errors: a pipe whose last bytes are kept."""

    def __enter__(self) -> _Stderr:
        self._end, write = os.pipe()
        self.file = open(write, "w")
        self._kept = b""
        self._thread = threading.Thread(target=self._read, name="mcp-stderr", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def _read(self) -> None:
        with open(self._end, "rb", buffering=0) as pipe:
            while chunk := pipe.read(_STDERR_BYTES):
                self._kept = (self._kept + chunk)[-_STDERR_BYTES:]

    def tail(self) -> str:
        self.file.close()
        self._thread.join(1.0)
        return self._kept.decode(errors="replace")


def _label(server: str) -> str:
    """How messages name a server. The policy may read them, so they leave out values of variables, credentials and
    queries of URLs, which are often keys."""
    if server.startswith(("http://", "https://")):
        scheme, _, rest = server.partition("://")
        address, query, _ = rest.partition("?")
        host, slash, path = address.partition("/")
        return one_line(f"{scheme}://{host.rpartition('@')[2]}{slash}{path}{'?…' if query else ''}")
    try:
        words = shlex.split(server)
    except ValueError:
        return one_line(re.sub("=.*", "=…", server, flags=re.DOTALL))
    if not any(map(_VARIABLE.match, words)):
        return one_line(server)
    return one_line(" ".join(f"{set_[0]}…" if (set_ := _VARIABLE.match(word)) else shlex.quote(word) for word in words))


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _schemas_of(client: Client) -> list[ToolSchema]:
    schemas: list[ToolSchema] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        schemas += [tool_schema(tool.name, tool.description, tool.input_schema) for tool in page.tools]
        cursor = page.next_cursor
        if cursor is None:
            return schemas


def _text_of(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource" and hasattr(part.resource, "text"):
        return str(part.resource.text)
    where = getattr(part, "uri", None) or getattr(getattr(part, "resource", None), "uri", "")
    kind = getattr(part, "mime_type", None) or ""
    return f"[{' '.join(filter(None, (part.type, str(where), kind)))}]"


_loops: dict[int, asyncio.AbstractEventLoop] = {}
_loops_lock = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's connections, in a thread of its own: callers' loops may be short-lived."""
    with _loops_lock:
        if os.getpid() not in _loops:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
            _loops[os.getpid()] = loop
        return _loops[os.getpid()]


async def _elsewhere(work: Coroutine[Any, Any, T]) -> T:
    loop = _loop()
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
