"""An MCP server over its standard streams: `python mcp_calculator.py`. Its tool is the calculator."""

from mcp.server.mcpserver import MCPServer

from dapo_rl.envs.calculator import calculator

server = MCPServer("calculator")


@server.tool()
def calculate(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return calculator(expression)


if __name__ == "__main__":
    server.run("stdio")
