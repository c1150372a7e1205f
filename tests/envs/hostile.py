"""Environments that do in a call what its name says: hang, crash, flood, lie."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import time

from dapo_rl.envs import Observation, Opening
from dapo_rl.types import Verdict

MANY = 100 << 20
SPARED = set()
"""Sockets of the tests themselves, which no worker would have otherwise, by inode."""


class UnspeakableError(Exception):
    def __str__(self):
        raise SystemExit("no")

    __repr__ = __str__


def nested(depth=100_000):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def itself():
    value = {}
    value["me"] = value
    return value


def sockets():
    for number in range(3, 256):
        try:
            found = os.fstat(number)
            if stat.S_ISSOCK(found.st_mode) and found.st_ino not in SPARED:
                yield socket.socket(fileno=os.dup(number))
        except OSError:
            continue


def write_garbage():
    for channel in sockets():
        channel.setblocking(False)
        with_errors_ignored(lambda channel=channel: channel.send(b"\0garbage" * 100))
    return 1.0


def forge(**row):
    """Replies in the worker's name, for many calls."""

    def reply():
        body = json.dumps({"results": {str(n): row for n in range(1, 500)}, **row}).encode()
        for number in range(1, 500):
            for channel in sockets():
                channel.setblocking(False)
                header = struct.pack("<4sQQ", b"dapo", number, len(body))
                with_errors_ignored(lambda channel=channel, header=header: channel.send(header + body))
        time.sleep(60)

    return reply


def with_errors_ignored(call):
    with contextlib.suppress(OSError):
        call()


def raising(error):
    def call():
        raise error

    return call


def fork_and_return():
    os.fork()
    return 1.0


def daemonize():
    mark = os.environ["HOSTILE_MARK"]
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(12321)", mark], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execlp("sh", "sh", "-c", "sleep 12321; :", mark)
        os._exit(0)
    return 1.0


def flood():
    chunk = b"x" * (1 << 20)
    for _ in range(100):
        os.write(1, chunk)
    return 1.0


def hang():
    while True:
        pass


def take_memory():
    return str(len(bytearray(4 << 30)))


def close_files():
    os.closerange(0, 1000)
    return 1.0


CALLS = {
    "nothing": (lambda: "go on", None),
    "hang": (hang, "timeout"),
    "sleep": (lambda: time.sleep(60), "timeout"),
    "stop itself": (lambda: os.kill(os.getpid(), signal.SIGSTOP), "timeout"),
    "exit": (lambda: os._exit(0), "crashed"),
    "kill": (lambda: os.kill(os.getpid(), 9), "crashed"),
    "segfault": (lambda: ctypes.string_at(0), "crashed"),
    "fork": (fork_and_return, None),
    "daemon": (daemonize, None),
    "flood": (flood, None),
    "close files": (close_files, "crashed"),
    "garbage": (write_garbage, "crashed"),
    "take memory": (take_memory, "crashed"),
    "MemoryError": (raising(MemoryError()), "crashed"),
    "long text": (lambda: "x" * MANY, "too_long"),
    "long message": (lambda: Observation(messages=({"role": "user", "content": "x" * (40 << 20)},)), "too_long"),
    "bytes": (lambda: b"bytes", "error"),
    "None": (lambda: None, "error"),
    "dict": (lambda: {"text": "hello"}, "error"),
    "list": (lambda: ["hello"], "error"),
    "object": (object, "error"),
    "nan": (lambda: float("nan"), "error"),
    "inf": (lambda: float("inf"), "error"),
    "1e300": (lambda: 1e300, "error"),
    "huge int": (lambda: Observation(reward=10**5000), "error"),
    "reward text": (lambda: Observation(reward="1"), "error"),
    "nan verdict": (lambda: Verdict(float("nan"), True, "correct"), "error"),
    "text bytes": (lambda: Observation(b"bytes"), "error"),
    "nested": (lambda: Observation(state={"deep": nested()}), "error"),
    "itself": (lambda: Observation(state=itself()), "error"),
    "objects": (lambda: Observation(state={"thing": object()}), "error"),
    "messages": (lambda: Observation(messages="hello"), "error"),
    "message": (lambda: Observation(messages=("hello",)), "error"),
    "no role": (lambda: Observation(messages=({"content": "hello"},)), "error"),
    "content": (lambda: Observation(messages=({"role": "user", "content": 5},)), "error"),
    "calls": (lambda: Observation(messages=({"role": "assistant", "content": "", "tool_calls": 5},)), "error"),
    "tokens": (lambda: Observation(prompt_ids=(1, -1)), "error"),
    "huge token": (lambda: Observation(prompt_ids=(2**70,)), "error"),
    "token text": (lambda: Observation(prompt_ids=("1",)), "error"),
    "max_tokens": (lambda: Observation("hello", max_tokens=0), "error"),
    "correct": (lambda: Observation("hello", correct="yes"), "error"),
    "tool_calls": (lambda: Observation("hello", tool_calls=-1), "error"),
    "conversation": (lambda: Observation(conversation=Opening(messages=5)), "error"),
    "surrogate": (lambda: Observation("a\ud800b", state={"x": "\udfff"}), None),
    "exit exception": (raising(SystemExit(0)), "error"),
    "interrupt": (raising(KeyboardInterrupt()), "error"),
    "generator exit": (raising(GeneratorExit()), "error"),
    "long exception": (raising(ValueError("x" * MANY)), "error"),
    "unspeakable": (raising(UnspeakableError()), "error"),
    "recursion": (lambda: CALLS["recursion"][0](), "error"),
    "forged failure": (forge(kind="failure", reason=5, detail={}), "crashed"),
    "forged reward": (forge(kind="observation", reward=10**400), "crashed"),
    "forged opening": (forge(kind="opening", messages=[5]), "crashed"),
    "forged kind": (forge(kind=["x"]), "crashed"),
}
"""What is done, and the reason why the episode ends; None: it goes on."""


async def swallow_cancellation():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


async def cancel_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(60)


async def cancel_all():
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(60)


async def stop_the_loop():
    asyncio.get_event_loop().stop()
    return 1.0


async def exit_in_a_task():
    async def leave():
        raise SystemExit

    asyncio.create_task(leave())  # noqa: RUF006
    await asyncio.sleep(0.01)
    return 1.0


async def kill_in_a_task():
    async def leave():
        os._exit(0)

    asyncio.create_task(leave())  # noqa: RUF006
    await asyncio.sleep(60)


async def await_long():
    await asyncio.sleep(60)


async def nap():
    await asyncio.sleep(0.5)
    return "go on"


ASYNC_CALLS = {
    "nap": (nap, None),
    "await": (await_long, "timeout"),
    "swallow cancellation": (swallow_cancellation, "timeout"),
    "cancel itself": (cancel_itself, "error"),
    "cancel all": (cancel_all, "error"),
    "stop the loop": (stop_the_loop, None),
    "exit in a task": (exit_in_a_task, None),
    "kill in a task": (kill_in_a_task, "crashed"),
}


def act(where, what):
    """`what` names a call, or as `open:CALL` one in another method."""
    place, colon, name = what.partition(":")
    if (place if colon else "step") != where:
        return None if where != "step" else "go on"
    return (CALLS | ASYNC_CALLS)[name if colon else what][0]()


class Stateful:
    """Does what the answer of its prompt says."""

    def open(self, prompt, seed):
        self.what = str(prompt.answer)
        return act("open", self.what)

    def step(self, turn):
        return 1.0 if turn.text == "end" else act("step", self.what)

    def result(self):
        return act("result", self.what)

    def close(self):
        return act("close", self.what)


class Stateless:
    """Does what a turn says."""

    stateless = True

    def step(self, turn):
        return 1.0 if turn.text == "end" else act("step", turn.text)


class Asynchronous:
    async def open(self, prompt, seed):
        self.what = str(prompt.answer)
        return await self._act("open")

    async def step(self, turn):
        if turn.text == "end":
            return 1.0
        await asyncio.sleep(0)
        return await self._act("step")

    async def result(self):
        return await self._act("result")

    async def close(self):
        return await self._act("close")

    async def _act(self, where):
        value = act(where, self.what)
        return await value if asyncio.iscoroutine(value) else value
