"""Agents as environments: programs that talk to an OpenAI-compatible endpoint, unchanged.

    async def solve(task, client):
        reply = await client.chat.completions.create(model="policy", messages=task["messages"])
        return float(task["answer"] in reply.choices[0].message.content)

An agent is one of:

- `async def solve(task, client)`, which gets an `openai.AsyncOpenAI` and returns its reward;
- `def solve(task, client)`, which gets an `openai.OpenAI` and runs in a thread of its own;
- a command line. It finds the endpoint in the environment variables `OPENAI_BASE_URL` and `OPENAI_API_KEY`, and its
  task as JSON in `DAPO_TASK` and on its standard input. The last line that it prints is its reward: a number, or JSON
  such as `{"reward": 1.0, "correct": true}`. With `env.tls`, it must itself trust the certificate.

The task is a dict of the row's columns with `messages`, `prompt` (the content of the last message), `answer` and
`seed`. Each call of the agent is a turn of the policy. Calls at the same time are answered one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import re
import shlex
import shutil
import signal
import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from dapo_rl.base.load import load_function, spec_of
from dapo_rl.base.quote import describe, one_line, shown
from dapo_rl.envs.endpoint import Endpoint
from dapo_rl.envs.protocol import AgentError, AssistantTurn, InvalidAnswerError, Observation, Opening
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt, Verdict

FUNCTION = re.compile(r"\S+\.py:\w+|\w+(\.\w+)*:\w+")
LONGEST_VARIABLE = 100_000
"""Bytes; Linux refuses environment variables of more than 128 KiB."""
OUTPUT_KEPT = 1 << 16
"""Bytes of a command's output: the last ones."""
END_SECONDS = 2.0
"""For an agent to end once its calls are refused, and for its output to arrive once it has ended."""

_endpoints: dict[tuple[asyncio.AbstractEventLoop, tuple[Any, ...]], asyncio.Future[Endpoint]] = {}


class AgentEnvironment:
    """One episode of an agent. All episodes on an event loop share an endpoint."""

    takes_tokens = True

    def __init__(
        self,
        agent: str | Callable[..., Any],
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        tls: tuple[str, str] | None = None,
    ) -> None:
        self.name = agent if isinstance(agent, str) else spec_of(agent)
        self._agent = load_function(agent) if isinstance(agent, str) and FUNCTION.fullmatch(agent) else agent
        self._settings = (model, host, port, tls and (tls[0], tls[1]))
        self._calls: deque[tuple[Opening, asyncio.Future[AssistantTurn]]] = deque()
        self._news = asyncio.Event()
        self._running: asyncio.Task[Any] | None = None
        self._answer: asyncio.Future[AssistantTurn] | None = None
        """To the call that is with the policy."""
        self._secret = ""

    async def open(self, prompt: Prompt, seed: int, context: int = 32768) -> Opening:
        self._endpoint = await _shared_endpoint(*self._settings)
        self._secret = self._endpoint.open(self._receive, context)
        self._running = asyncio.create_task(self._run(task_of(prompt, seed)))
        self._running.add_done_callback(lambda _: self._news.set())
        call = await self._next_call()
        if call is None:
            self._reward()
            raise UserError(
                f"env.agent: {self.name} ended without calling the endpoint; it must send its requests to the client "
                "that it gets, or to OPENAI_BASE_URL"
            )
        return call

    async def step(self, turn: AssistantTurn) -> Observation:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(turn)
        call = await self._next_call()
        if call is None:
            answer = self._reward()
        elif call.prompt_ids:
            answer = Observation(prompt_ids=call.prompt_ids, max_tokens=call.max_tokens)
        else:
            answer = Observation(conversation=Opening(call.messages, call.tools), max_tokens=call.max_tokens)
        malformed = sum(bool(made.error) for made in turn.tool_calls)
        return replace(answer, tool_calls=len(turn.tool_calls), tool_errors=malformed)

    async def result(self) -> Observation | None:
        """Refuses further calls, and waits a moment for an agent that then ends with a reward."""
        if self._running is None:
            return None
        self._endpoint.close(self._secret)
        await asyncio.wait({self._running}, timeout=END_SECONDS)
        try:
            return self._reward() if self._running.done() else None
        except (AgentError, UserError):
            return None

    async def close(self) -> None:
        if self._running is None:
            return
        self._endpoint.close(self._secret)
        self._running.cancel()
        await asyncio.wait({self._running}, timeout=END_SECONDS)
        if self._running.done() and not self._running.cancelled():
            self._running.exception()  # marks it as seen

    async def _receive(self, call: Opening) -> AssistantTurn:
        answer: asyncio.Future[AssistantTurn] = asyncio.get_running_loop().create_future()
        self._calls.append((call, answer))
        self._news.set()
        return await answer

    async def _next_call(self) -> Opening | None:
        """The agent's next call, or None when it has ended. Calls whose clients have disconnected are skipped."""
        running = self._running
        assert running is not None
        while not running.done():
            while self._calls:
                call, self._answer = self._calls.popleft()
                if not self._answer.done():
                    return call
            self._news.clear()
            await self._news.wait()
        return None

    def _reward(self) -> Observation:
        """The last observation of an agent that has ended; raises if it failed."""
        assert self._running is not None
        try:
            return last_observation(self._running.result())
        except (AgentError, UserError):
            raise
        except asyncio.CancelledError:
            raise AgentError(f"env.agent: {self.name}: cancelled") from None
        except InvalidAnswerError as error:
            raise AgentError(f"env.agent: {self.name}: {error}") from None
        except BaseException as error:
            raise self._failure(error) from error

    async def _run(self, task: dict[str, Any]) -> Any:
        try:
            if isinstance(self._agent, str):
                return await run_command(self._agent, self._endpoint, self._secret, task)
            if inspect.iscoroutinefunction(self._agent) or inspect.iscoroutinefunction(type(self._agent).__call__):
                async with _client("AsyncOpenAI", self._endpoint, self._secret) as client:
                    return await self._agent(task, client)
            return await self._run_in_thread(self._agent, task)
        except (SystemExit, KeyboardInterrupt) as error:  # they would end the loop, with the episodes of others
            raise self._failure(error) from error

    async def _run_in_thread(self, function: Callable[..., Any], task: dict[str, Any]) -> Any:
        """A thread of its own: those of a pool could all be taken by agents that wait, and would keep a process alive
        that ends."""
        result: Future[Any] = Future()
        result.set_running_or_notify_cancel()

        def work() -> None:
            try:
                with _client("OpenAI", self._endpoint, self._secret) as client:
                    result.set_result(function(task, client))
            except BaseException as error:
                failure = self._failure(error)
                failure.__cause__ = error
                result.set_exception(failure)

        threading.Thread(target=work, name="agent", daemon=True).start()
        return await asyncio.wrap_future(result)

    def _failure(self, error: BaseException) -> AgentError:
        return AgentError(f"env.agent: {self.name}: {describe(error)}")


def task_of(prompt: Prompt, seed: int) -> dict[str, Any]:
    """What an agent gets."""
    messages = [dict(message) for message in prompt.conversation]
    given = {"prompt": messages[-1]["content"], "messages": messages, "answer": prompt.answer, "seed": seed}
    return {**prompt.columns, **given}


def last_observation(reward: Any) -> Observation:
    """What an agent's result means: a number, a verdict, or a mapping with `reward` and possibly `correct`."""
    correct = None
    if isinstance(reward, Verdict):
        reward, correct = reward.score, reward.correct
    elif isinstance(reward, Mapping):
        reward, correct = reward.get("reward"), reward.get("correct")
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError):
        raise InvalidAnswerError(f"its reward is {shown(reward)}; it must return a number") from None
    if not math.isfinite(value):
        raise InvalidAnswerError(f"its reward is {value}; it must return a finite number")
    return Observation(reward=value, done=True, correct=None if correct is None else bool(correct))


def check_agent(agent: str) -> None:
    """Raises UserError for a function that cannot be called with a task and a client, and for a command that is not
    there."""
    if not FUNCTION.fullmatch(agent):
        if shutil.which(_words(agent)[0]) is None:
            raise UserError(f"env.agent: {agent}: no such program; it must be file.py:function or a command")
        return
    function = load_function(agent)
    try:
        inspect.signature(function).bind({}, None)
    except TypeError as error:
        raise UserError(f"env.agent: {agent} must take a task and a client: {error}") from None
    except ValueError:  # it has no signature
        pass


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"env.agent: {command}: {one_line(error)}; it must be file.py:function or a command") from None
    if not words:
        raise UserError("env.agent: it is empty; it must be file.py:function or a command")
    return words


async def run_command(command: str, endpoint: Endpoint, secret: str, task: dict[str, Any]) -> Any:
    """The reward that a command prints. Its processes are killed when it ends or the task is cancelled."""
    words = _words(command)
    given = json.dumps(task, ensure_ascii=False, default=_plain).encode("utf-8", "replace")
    host = endpoint.url.partition("://")[2].rpartition(":")[0]
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), host]))
    variables = {
        **os.environ,
        "OPENAI_BASE_URL": endpoint.url,
        "OPENAI_API_KEY": secret,
        "NO_PROXY": direct,
        "no_proxy": direct,
        **({"DAPO_TASK": given.decode()} if len(given) < LONGEST_VARIABLE else {}),
    }
    loop = asyncio.get_running_loop()
    try:
        transport, process = await loop.subprocess_exec(_Process, *words, env=variables, start_new_session=True)
    except (OSError, ValueError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UserError(f"env.agent: {command}: {why}; it must be file.py:function or a command") from None
    try:
        stdin: Any = transport.get_pipe_transport(0)
        stdin.write(given)
        stdin.write_eof()
        await process.exited
    finally:
        _kill_group(transport.get_pid())
        await asyncio.wait({process.exited, process.output_ended}, timeout=END_SECONDS)
        code = transport.get_returncode()
        transport.close()
    printed, complaint = (bytes(process.output[stream]).decode("utf-8", "replace").splitlines() for stream in (1, 2))
    if code:
        why = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
        said = next((line for line in reversed(complaint) if line.strip()), "")
        raise InvalidAnswerError(f"{why}{': ' if said else ''}{said}")
    last = next((line.strip() for line in reversed(printed) if line.strip()), "")
    try:
        return json.loads(last, parse_int=float)
    except (ValueError, RecursionError):
        raise InvalidAnswerError(
            f"the last line that it printed is {shown(last)}; it must be a number or JSON with reward"
        ) from None


class _Process(asyncio.SubprocessProtocol):
    """Keeps the last output of a process. `asyncio.create_subprocess_exec` would wait for its children too."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.output_ended: asyncio.Future[None] = loop.create_future()
        self.output = {1: bytearray(), 2: bytearray()}
        self._open = set(self.output)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output[fd] += data
        del self.output[fd][:-OUTPUT_KEPT]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open and not self.output_ended.done():
            self.output_ended.set_result(None)

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _client(kind: str, endpoint: Endpoint, secret: str) -> Any:
    """OpenAI's client. It waits for the policy as long as it takes, and does not retry: every call is a turn."""
    try:
        import openai
    except ImportError:
        raise UserError("env.agent needs the package openai; install dapo-rl[envs]") from None
    http = openai.DefaultAsyncHttpxClient if kind == "AsyncOpenAI" else openai.DefaultHttpxClient
    return getattr(openai, kind)(
        base_url=endpoint.url,
        api_key=secret,
        max_retries=0,
        timeout=None,
        http_client=http(verify=_trust(endpoint.tls and endpoint.tls[0]), timeout=None, trust_env=False),
    )


def _trust(certificate: str | None) -> ssl.SSLContext:
    """Trusts the endpoint's own certificate alone, under any name. Loading the usual ones takes longer than a call."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    if certificate is not None:
        context.load_verify_locations(certificate)
    return context


async def _shared_endpoint(*settings: Any) -> Endpoint:
    """The endpoint of the running loop, started at first use. It ends with the loop."""
    for key in [key for key in _endpoints if key[0].is_closed()]:
        del _endpoints[key]
    key = (asyncio.get_running_loop(), settings)
    if key not in _endpoints:
        _endpoints[key] = asyncio.ensure_future(_start(*settings))
    try:
        return await asyncio.shield(_endpoints[key])
    except UserError:
        _endpoints.pop(key, None)
        raise


async def _start(*settings: Any) -> Endpoint:
    endpoint = Endpoint(*settings)
    await endpoint.start()
    return endpoint
