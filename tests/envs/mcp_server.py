"""A server of the MCP SDK: `python mcp_server.py` over its standard streams, `python mcp_server.py PORT` over HTTP."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("arithmetic")
calls = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count() -> str:
    """How many times it was called, and in which process."""
    global calls
    calls += 1
    return f"{calls} {os.getpid()}"


@server.tool()
def divide(a: int, b: int) -> float:
    """Divides."""
    return a / b


@server.tool()
def picture() -> Image:
    """A picture."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        print("ready", file=sys.stderr, flush=True)
        server.run("stdio")
