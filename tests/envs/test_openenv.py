"""`openenv:URL` against servers of OpenEnv's own server library."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
from openenv_process import serve_openenv

from dapo_rl.envs import openenv
from dapo_rl.envs.openenv import OpenEnv
from dapo_rl.envs.protocol import AssistantTurn, ToolCall
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

server_module = pytest.importorskip("websockets.asyncio.server")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def words() -> Iterator[str]:
    yield from serve_openenv("words")


@pytest.fixture(scope="module")
def tools() -> Iterator[str]:
    yield from serve_openenv("tools")


def prompt(**columns: Any) -> Prompt:
    return Prompt("p", "", [1], messages=({"role": "user", "content": "Play."},), columns=columns)


def play(env: OpenEnv, *turns: AssistantTurn | str, row: Prompt | None = None, seed: int = 7) -> list[Any]:
    async def episode() -> list[Any]:
        try:
            seen: list[Any] = [await env.open(row or prompt(), seed)]
            for turn in turns:
                seen.append(await env.step(AssistantTurn(turn) if isinstance(turn, str) else turn))
            return seen
        finally:
            await env.close()

    return asyncio.run(episode())


def test_the_seed_and_the_row_reach_reset_and_rewards_come_back(words: str) -> None:
    row = prompt(word="red", unknown={1, 2})
    opening, wrong, right = play(OpenEnv(words, action="message", observation="text"), "blue", "red7", row=row)
    assert opening.messages == ({"role": "user", "content": "Play.\n\nSay red7."},)
    assert (wrong.text, wrong.reward, wrong.done) == ("heard blue", -0.25, False)
    assert (right.text, right.reward, right.done) == ("heard red7", 1.0, True)


def test_the_only_text_field_is_the_action_and_several_fields_are_json(words: str) -> None:
    opening, step = play(OpenEnv(words), "hello")
    assert opening.messages[-1]["content"] == "Play.\n\nSay go7."
    assert json.loads(step.text) == {"text": "heard hello", "turns": 1}


def test_json_text_and_tool_calls_set_all_fields(words: str) -> None:
    env = OpenEnv(words, observation="text")
    call = AssistantTurn("", (ToolCall("say", {"message": "b", "loud": True}),))
    _, text, called, other = play(env, '{"message": "a", "loud": true}', call, '{"some": "json"}')
    assert (text.text, called.text) == ("heard A", "heard B")
    assert other.text == 'heard {"some": "json"}'


def test_a_malformed_action_is_an_observation(words: str) -> None:
    env = OpenEnv(words, action="loud", observation="text")
    _, unparsed, incomplete = play(env, "maybe", "true")
    assert unparsed.text == "not a valid action: loud must be boolean"
    assert incomplete.text == "not a valid action: message: Field required"
    assert unparsed.tool_errors == incomplete.tool_errors == 1
    assert not incomplete.done


def test_an_exception_of_the_environment_is_raised(words: str) -> None:
    with pytest.raises(RuntimeError, match="the world ended"):
        play(OpenEnv(words), "raise")


def test_episodes_wait_for_a_session_and_at_last_say_what_is_missing(words: str) -> None:
    async def crowd(wait_s: float) -> list[Any]:
        async def episode(number: int) -> Any:
            env = OpenEnv(words, observation="text", wait_s=wait_s)
            try:
                await env.open(prompt(word=f"w{number}-"), number)
                await asyncio.sleep(0.5)
                return await env.step(AssistantTurn(f"w{number}-{number}"))
            finally:
                await env.close()

        return await asyncio.gather(*map(episode, range(5)), return_exceptions=True)

    assert [answer.reward for answer in asyncio.run(crowd(30))] == [1.0] * 5
    refused = [answer for answer in asyncio.run(crowd(0)) if isinstance(answer, Exception)]
    assert refused
    assert all("max_concurrent_envs" in str(answer) for answer in refused)


def test_tools_of_the_server_are_the_tools_of_the_episode(tools: str) -> None:
    call = AssistantTurn("", (ToolCall("add", {"a": 2, "b": 40}, "c1"), ToolCall("add", error="not valid JSON: x")))
    unknown = AssistantTurn("", (ToolCall("sub", {"a": 2}),))
    opening, added, missing, end = play(OpenEnv(tools), call, unknown, "It is 42.")
    assert [tool["function"]["name"] for tool in opening.tools] == ["add"]
    assert set(opening.tools[0]["function"]["parameters"]["properties"]) == {"a", "b"}
    first, second = added.messages
    assert first == {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "42"}
    assert second["content"] == "not valid JSON: x"
    assert (added.tool_calls, added.tool_errors, added.done) == (2, 1, False)
    assert missing.tool_errors == 1
    assert missing.messages[0]["content"].startswith("error: ")
    assert end.done


@pytest.mark.parametrize(("ends_at", "reward", "calls"), [(None, 0.75, 3), (1, 0.5, 1)])
def test_rewards_of_several_calls_in_a_turn_add_up(
    monkeypatch: pytest.MonkeyPatch, ends_at: int | None, reward: float, calls: int
) -> None:
    """The server speaks the protocol, and is in this process. No call follows the end of the episode."""
    rewards = {1: 0.5, 2: None, 3: 0.25}

    async def answer(socket: Any) -> None:
        async for message in socket:
            called = json.loads(message)["data"].get("arguments", {}).get("n")
            seen = {"tool_name": "count", "result": called} if called else {"tools": []}
            data = {"observation": seen, "reward": rewards.get(called), "done": called == ends_at is not None}
            await socket.send(json.dumps({"type": "observation", "data": data}))

    async def episode() -> Any:
        async with server_module.serve(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            monkeypatch.setitem(openenv._schemas, url, {})
            env = OpenEnv(url)
            try:
                await env.open(prompt(), 7)
                return await env.step(AssistantTurn("", tuple(ToolCall("count", {"n": n}) for n in rewards)))
            finally:
                await env.close()

    observation = asyncio.run(asyncio.wait_for(episode(), 20))
    assert (observation.reward, observation.tool_calls, observation.done) == (reward, calls, ends_at is not None)


def test_options_name_fields_that_exist(words: str) -> None:
    with pytest.raises(UserError, match=r"env.options.action: .* has actions with the fields message, loud, not msg"):
        play(OpenEnv(words, action="msg"))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "file:///etc", "http://", "http://[::1", "http://a:b", "http://a b"])
def test_what_is_not_a_url(url: str) -> None:
    with pytest.raises(UserError, match="is not a URL"):
        OpenEnv(url)


def test_no_server() -> None:
    with pytest.raises(UserError, match="is not an OpenEnv server that runs"):
        play(OpenEnv("http://127.0.0.1:9"))


def test_a_server_that_speaks_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            with listener.accept()[0] as client:
                client.recv(4096)
                client.sendall(b"SSH-2.0-OpenSSH_9\r\n")

        Thread(target=greet, daemon=True).start()
        with pytest.raises(UserError, match=r"is not an OpenEnv server that runs: SSH-2\.0"):
            play(OpenEnv(f"http://127.0.0.1:{listener.getsockname()[1]}"))
