"""Tasksets of verifiers against a server with the routes of a run's endpoint."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Header, HTTPException

from dapo_rl.envs.verifiers_env import COLUMN, VerifiersAgent, rows
from dapo_rl.errors import UserError

pytest.importorskip("verifiers.v1")
pytestmark = pytest.mark.slow
TINY = str(Path(__file__).parents[2] / "src" / "dapo_rl" / "models" / "tiny")


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(__file__).with_name("tasksets"))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder)  # tool servers are processes


class Policy:
    """Serves what `answer` says to a conversation, and keeps what was asked."""

    def __init__(self) -> None:
        self.answer: Callable[[list[dict[str, Any]]], str] = lambda messages: ""
        self.asked: list[tuple[str, Any]] = []
        self.keys: list[str | None] = []
        self.decode: Callable[[list[int]], str] = str
        self.encode: Callable[[str], list[int]] = lambda text: []
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.post("/inference/v1/generate")(self.generate)
        self.app.get("/v1/models")(self.models)

    async def chat(self, body: dict[str, Any], authorization: str | None = Header(None)) -> dict[str, Any]:
        self.asked.append(("chat", body["messages"]))
        self.keys.append(authorization)
        if authorization == "Bearer ended":
            raise HTTPException(410, "the episode has ended")
        self.tools = body.get("tools") or []
        said = self.answer(body["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if said.startswith("call "):
            _, name, arguments = said.split(" ", 2)
            function = {"name": name, "arguments": arguments}
            message = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if said.startswith("call ") else "stop"}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}

    async def generate(self, body: dict[str, Any], authorization: str | None = Header(None)) -> dict[str, Any]:
        self.asked.append(("generate", body["token_ids"]))
        self.keys.append(authorization)
        ids = self.encode(self.answer([{"content": self.decode(body["token_ids"])}]))
        logprobs = {"content": [{"token": f"token_id:{number}", "logprob": -0.5} for number in ids]}
        choice = {"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"}
        return {"request_id": "1", "choices": [choice]}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "policy", "object": "model", "max_model_len": 4096}]}


@pytest.fixture
def policy() -> Iterator[tuple[Policy, str]]:
    served = Policy()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(served.app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield served, f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join()


def client(url: str, key: str = "secret") -> Any:
    return SimpleNamespace(base_url=url, api_key=key)


def add(messages: list[dict[str, Any]]) -> str:
    a, b = re.findall(r"(\d+)\+(\d+)", messages[-1]["content"])[-1]
    return str(int(a) + int(b) if int(a) < 2 else -1)


def test_rows_are_the_tasks() -> None:
    listed = list(rows("sums_taskset", taskset={"size": 2}))
    assert [row["prompt"] for row in listed] == ["0+1=", "1+1="]
    assert listed[1][COLUMN]["answer"] == 2
    assert [row[COLUMN]["secret"] for row in rows("guess-taskset", limit=3)] == [0, 1, 2]


def test_single_turns_are_judged_by_the_taskset(policy: tuple[Policy, str]) -> None:
    served, url = policy
    served.answer = add
    agent = VerifiersAgent("sums_taskset")

    async def all_at_once() -> list[float]:
        episodes = [agent(row, client(url, f"key{number}")) for number, row in enumerate(rows("sums_taskset"))]
        return await asyncio.gather(*episodes)

    assert asyncio.run(all_at_once()) == [2.0, 2.0, 0.0]
    assert sorted(served.keys) == ["Bearer key0", "Bearer key1", "Bearer key2"]  # type: ignore[type-var]
    roles = [(message["role"], message["content"]) for message in served.asked[0][1]]
    assert roles == [("system", "Add."), ("user", served.asked[0][1][1]["content"])]
    assert not [name for name in os.environ if name.startswith("DAPO_API_KEY")]


def test_the_environment_of_a_taskset_plays_several_turns(policy: tuple[Policy, str]) -> None:
    served, url = policy
    served.answer = lambda messages: str(sum(m["role"] == "assistant" for m in messages))
    row = list(rows("guess_taskset", limit=4))[3]
    assert asyncio.run(VerifiersAgent("guess_taskset")(row, client(url))) == 0.25
    contents = [message["content"] for message in served.asked[-1][1]]
    assert contents == ["Guess, 0 to 9.", "0", "higher", "1", "higher", "2", "higher"]


def test_the_tools_of_a_task_are_called(policy: tuple[Policy, str]) -> None:
    served, url = policy

    def answer(messages: list[dict[str, Any]]) -> str:
        name = served.tools[0]["function"]["name"]
        says = ["call nothing {}", f"call {name} [1", f"call {name} [1]", f'call {name} {{"a": 2, "b": 40}}']
        results = [message["content"] for message in messages if message["role"] == "tool"]
        return says[len(results)] if len(results) < len(says) else f"It is {results[-1]}."

    served.answer = answer
    row = next(rows("tool_taskset"))
    assert asyncio.run(VerifiersAgent("tool_taskset")(row, client(url))) == 1.0
    results = [message["content"] for message in served.asked[-1][1] if message["role"] == "tool"]
    assert results[0].startswith("no such tool: nothing; there are ")
    assert results[1].startswith("not valid JSON: ")
    assert results[2:] == ["not valid arguments: write a JSON object", "42"]


def test_with_a_tokenizer_prompts_are_tokens(policy: tuple[Policy, str]) -> None:
    from renderers.base import load_tokenizer

    served, url = policy
    tokenizer = load_tokenizer(TINY)
    served.decode, served.answer = tokenizer.decode, add
    served.encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    first, *_, last = rows("sums_taskset")
    agent = VerifiersAgent("sums_taskset", model=TINY)
    assert asyncio.run(agent(first, client(url))) == 2.0
    assert asyncio.run(agent(last, client(url))) == 0.0
    assert [kind for kind, _ in served.asked] == ["generate", "generate"]
    assert "0+1=" in tokenizer.decode(served.asked[0][1])


def test_a_failed_rollout_is_no_reward(policy: tuple[Policy, str]) -> None:
    served, url = policy
    row = next(iter(rows("sums_taskset")))
    with pytest.raises(RuntimeError, match=r"verifiers:sums_taskset: .*the episode has ended"):
        asyncio.run(VerifiersAgent("sums_taskset")(row, client(url, "ended")))
    assert len(served.asked) == 1
    served.answer = lambda messages: "not a number"
    with pytest.raises(RuntimeError, match="invalid literal for int"):
        asyncio.run(VerifiersAgent("guess_taskset")(next(rows("guess_taskset", limit=1)), client(url)))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: VerifiersAgent("no_such_taskset"), "verifiers:no_such_taskset cannot be used: .*not found"),
        (lambda: VerifiersAgent("sums_taskset", nonsense=1), "env.options: verifiers:sums_taskset has no nonsense"),
        (lambda: VerifiersAgent("sums_taskset", taskset={"sise": 1}), "cannot be used"),
        (lambda: list(rows("guess_taskset")), "infinitely many tasks"),
        (lambda: asyncio.run(VerifiersAgent("sums_taskset")({"prompt": "x"}, client(""))), "needs its own tasks"),
    ],
)
def test_mistakes_are_one_line(make: Callable[[], Any], error: str) -> None:
    with pytest.raises(UserError, match=error) as raised:
        make()
    assert "\n" not in str(raised.value)
