from __future__ import annotations

import asyncio
import os
import pickle
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp import Client
from mcp.server.lowlevel import Server
from mcp.types import ListToolsResult, Tool

from dapo_rl.envs.mcp_tools import MCPTool, MCPToolError, MCPTools, _schemas_of, list_tools, mcp_tools
from dapo_rl.errors import UserError

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("mcp_server.py")
COMMAND = shlex.join([sys.executable, str(SCRIPT)])


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(SCRIPT), str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture(scope="module")
def stdio() -> Iterator[dict[str, MCPTool]]:
    """The tools of a server that tests share, once one of them has called it: to start one takes a second."""
    yield {tool.name: tool for tool in mcp_tools(COMMAND)}
    asyncio.run(MCPTools.shared(COMMAND).close())


@pytest.fixture
def fresh(stdio: dict[str, MCPTool]) -> dict[str, MCPTool]:
    """The tools of a server that has not been called yet."""
    asyncio.run(MCPTools.shared(COMMAND).close())
    return stdio


def test_listing_leaves_no_process(stdio: dict[str, MCPTool]) -> None:
    before = children()
    schemas = asyncio.run(list_tools(COMMAND))
    assert [schema["function"]["name"] for schema in schemas] == list(stdio)
    assert schemas[0]["type"] == "function"
    assert schemas[0]["function"]["description"] == "Adds two numbers."
    assert schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert children() == before


def test_tools_are_listed_page_by_page() -> None:
    async def page(context: Any, asked: Any) -> ListToolsResult:
        number = 0 if asked is None or asked.cursor is None else int(asked.cursor)
        tool = Tool(name=f"tool{number}", input_schema={"type": "object"})
        return ListToolsResult(tools=[tool], next_cursor=str(number + 1) if number < 2 else None)

    async def listed() -> list[dict[str, Any]]:
        async with Client(Server("pages", on_list_tools=page)) as client:
            return await asyncio.wait_for(_schemas_of(client), 10)

    assert [schema["function"]["name"] for schema in asyncio.run(listed())] == ["tool0", "tool1", "tool2"]


def test_tools_over_http(url: str) -> None:
    tools = {tool.name: tool for tool in mcp_tools(url)}

    async def use() -> list[str]:
        try:
            return await asyncio.gather(*(tools["add"](a=number, b=1) for number in range(5)))
        finally:
            await MCPTools.shared(url).close()

    assert asyncio.run(use()) == ["1", "2", "3", "4", "5"]


def test_a_process_has_one_server_whatever_loop_calls(fresh: dict[str, MCPTool]) -> None:
    count = pickle.loads(pickle.dumps(fresh["count"]))
    said = [asyncio.run(count()).split() for _ in range(3)]
    assert [number for number, _ in said] == ["1", "2", "3"]
    assert len({pid for _, pid in said}) == 1
    assert said[0][1] in {str(child.pid) for child in children()}
    asyncio.run(MCPTools.shared(COMMAND).close())
    assert not psutil.pid_exists(int(said[0][1]))


def test_calls_run_at_the_same_time(stdio: dict[str, MCPTool]) -> None:
    async def many() -> float:
        await stdio["wait"](seconds=0)
        began = time.monotonic()
        assert await asyncio.gather(*(stdio["wait"](seconds=1) for _ in range(20))) == ["done"] * 20
        return time.monotonic() - began

    assert asyncio.run(many()) < 5


def test_contents_that_are_not_text_are_described(stdio: dict[str, MCPTool]) -> None:
    assert asyncio.run(stdio["picture"]()) == "[image image/png]"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [("divide", {"a": 1, "b": 0}, "divide"), ("add", {"a": "x", "b": 1}, "valid integer"), ("none", {}, "none")],
)
@pytest.mark.usefixtures("stdio")
def test_a_failed_call_says_why(name: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(MCPToolError, match=said):
        asyncio.run(MCPTools.shared(COMMAND).call(name, arguments))


def test_a_server_that_dies_is_started_again(stdio: dict[str, MCPTool]) -> None:
    with pytest.raises(ConnectionError, match="ended during a call of die"):
        asyncio.run(stdio["die"]())
    with pytest.raises(ConnectionError, match=r"^the MCP server env KEY=… ") as error:
        asyncio.run(MCPTools.shared(f"env KEY=hush {COMMAND}").call("die", {}))
    assert "hush" not in str(error.value), "the policy reads it"
    assert asyncio.run(stdio["count"]()).startswith("1 ")


def test_a_cancelled_call_leaves_the_connection(fresh: dict[str, MCPTool]) -> None:
    async def impatient() -> str:
        await fresh["count"]()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fresh["wait"](seconds=60), 0.2)
        return await fresh["count"]()

    assert asyncio.run(impatient()).startswith("2 ")


PYTHON = shlex.quote(sys.executable)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("no-such-command --flag", "no-such-command --flag does not start as an MCP server, .*: No such file"),
        (f"""{PYTHON} -c 'import sys; print("a"); sys.exit("no config")'""", "it says: no config$"),
        (f"{PYTHON} -c 'import time; time.sleep(60)'", "no answer in 2 s$"),
        ("http://127.0.0.1:9/mcp", "http://127.0.0.1:9/mcp does not start"),
        ("http://me:hush@127.0.0.1:9/mcp?key=hush", r"http://127.0.0.1:9/mcp\?… does not start"),
        ("env 'A=hush b' KEY=hush no-such-command -x", r"env A=… KEY=… no-such-command -x does not start"),
        ("env KEY='hush", "env KEY=… is neither a URL nor a command"),
        ("", "an entry is empty"),
        ("a 'b", "neither a URL nor a command"),
    ],
)
def test_a_server_that_does_not_start_is_one_line(
    server: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dapo_rl.envs.mcp_tools.CONNECT_S", 2.0)
    before = children()
    with pytest.raises(UserError, match=said) as error:
        mcp_tools(server)
    assert "\n" not in str(error.value)
    assert "hush" not in str(error.value), "values of variables may be keys"
    assert children() == before
    assert capfd.readouterr().err == ""


LISTS = """
import json, sys

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answers = {
        "refuses": {"error": {"code": -32601, "message": "Method not found"}},
        "odd": {"result": {"tools": 5}},
        "endless": {"result": {"tools": [], "nextCursor": "more"}},
    }
    answer = answers.get(sys.argv[1])
    if asked["method"] == "initialize":
        server, version = {"name": "x", "version": "1"}, asked["params"]["protocolVersion"]
        answer = {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}}
    elif asked["method"] != "tools/list":
        answer = answers["refuses"]
    if answer is not None:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [("refuses", "Method not found$"), ("odd", "valid list"), ("silent", "no end in 2 s$"), ("endless", "no end in 2")],
)
def test_a_server_that_does_not_list_its_tools_is_one_line(
    how: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapo_rl.envs.mcp_tools.CONNECT_S", 2.0)
    script = tmp_path / "lists.py"
    script.write_text(LISTS)
    with pytest.raises(UserError, match=f"lists.py {how} does not list its tools: .*{said}"):
        mcp_tools(f"env KEY=hush {shlex.join([sys.executable, str(script), how])}")


def test_a_flood_of_errors_is_not_kept(tmp_path: Path) -> None:
    script = tmp_path / "loud.py"
    flood = "import sys; sys.stderr.write('x' * 50_000_000 + '\\nlast words\\n'); sys.exit(1)"
    script.write_text(flood)
    with pytest.raises(UserError, match=r"it says: last words$"):
        mcp_tools(shlex.join([sys.executable, str(script)]))


def test_few_variables_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    show = "import os, sys; sys.exit(str(os.environ.get('SECRET')) + os.environ.get('GIVEN', ''))"
    with pytest.raises(UserError, match=r"it says: Nonehere$"):
        mcp_tools(f"env GIVEN=here {shlex.join([sys.executable, '-c', show])}")
    assert os.environ["SECRET"] == "s"
