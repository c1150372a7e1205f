"""A harness for verifiers that runs in the process of the episode: a chat with the task's tools.

Harnesses of verifiers start a program for each rollout, and install its packages first. This one needs neither.
"""

from __future__ import annotations

import json
import ssl
from contextlib import AsyncExitStack
from typing import Any

import openai
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]


class ChatHarnessConfig(HarnessConfig):  # type: ignore[misc]
    pass


class ChatHarness(Harness[ChatHarnessConfig]):  # type: ignore[misc]
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Runs until the model answers without a tool call, or its context is full."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        elif prompt is not None:
            messages += [message_to_wire(message) for message in prompt]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            # verifiers' own server is local; loading certificates for it would take longer than a call.
            plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            http = openai.DefaultAsyncHttpxClient(verify=plain, trust_env=False, timeout=None)
            client = await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http)
            )
            try:
                while calls := await _turn(client, ctx.model, messages, tools):
                    for call in calls:
                        content = await _called(call, dispatch, connections)
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            except openai.APIStatusError as error:
                if trace.stop_condition is None and not is_context_overflow(error):
                    raise
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _turn(client: Any, model: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[Any]:
    """Appends the model's answer to the messages, and returns its tool calls."""
    reply = await client.chat.completions.create(model=model, messages=messages, **({"tools": tools} if tools else {}))
    message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return list(message.tool_calls or ())


async def _called(call: Any, dispatch: dict[str, Any], connections: dict[str, Any]) -> Any:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        return f"not valid JSON: {error}"
    if not isinstance(arguments, dict):
        return "not valid arguments: write a JSON object"
    if call.function.name not in dispatch:
        return f"no such tool: {call.function.name}; there are {', '.join(dispatch) or 'none'}"
    return await call_mcp(connections, dispatch, call.function.name, arguments)
