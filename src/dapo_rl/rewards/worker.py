"""Workers: the processes in which a verifier is called, and the run's handle on them."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import sys
import time
import zlib
from collections.abc import Sequence

from dapo_rl.base.quote import TRACEBACK_LIMIT, describe, shorten
from dapo_rl.errors import UserError
from dapo_rl.rewards.control_group import ControlGroup
from dapo_rl.rewards.judge import crash, failures, judge, name_of
from dapo_rl.rewards.processes import adopt_orphans, flush, reap
from dapo_rl.rewards.state import AT_START, RewardState
from dapo_rl.rewards.wire import (
    MAX_REPLY,
    CorruptReplyError,
    Reply,
    decode_call,
    decode_reply,
    encode_call,
    encode_reply,
    is_closed,
    receive,
    send,
)
from dapo_rl.types import Prompt, Trajectory, Verifier

READY = b"!"
REAP_CALLS = 256
"""Number of calls after which a worker reaps dead processes that it has adopted."""


class Worker:
    """The run's handle on a worker."""

    def __init__(self, pid: int, generation: int, channel: socket.socket) -> None:
        self.pid = pid
        self.generation = generation
        """The generation of its fork server."""
        self._channel = channel
        self._numbers = itertools.count(1)

    def call(
        self, prompt: Prompt, samples: Sequence[Trajectory], limit_s: float, state: RewardState = AT_START
    ) -> Reply:
        """Raises TimeoutError if there is no complete reply in time, EOFError if the worker died, CorruptReplyError."""
        deadline = time.monotonic() + limit_s
        number = next(self._numbers)
        body = encode_call(prompt, samples, state)
        try:
            self._channel.settimeout(limit_s)
            send(self._channel, number, body)
            while True:
                answered, reply = receive(self._channel, deadline, MAX_REPLY)
                if answered == number:
                    return decode_reply(reply, len(samples))
                if answered > number:
                    raise CorruptReplyError
                # A duplicate reply to an earlier call, from a copy of the worker: ignore it.
        except ConnectionError as error:
            raise EOFError(str(error)) from None

    def has_ended(self) -> bool:
        return is_closed(self._channel)

    def hang_up(self) -> None:
        # Another process forked from the run may hold a copy of the socket; shutdown closes it for all of them.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()


def work(channel: socket.socket, verifier: Verifier, memory: int, wrong: float, group: ControlGroup | None) -> None:
    """The main loop of a worker: replies to calls until the run closes the socket."""
    adopt_orphans()
    _offer_to_be_killed_first()
    before = _limit_memory(memory)
    own = os.getpid()
    unclaimed: set[int] = set()
    channel.sendall(READY)
    while True:
        try:
            number, body = receive(channel)
        except (EOFError, OSError):
            return
        reply = _reply(verifier, body, wrong)
        flush()
        if os.getpid() != own:  # a copy that the verifier forked and let return; only the worker itself replies
            os._exit(0)
        if group is not None and group.was_exceeded():  # by a child, whose death the verifier may mistake for a result
            os._exit(1)
        if _data_bytes() - before > memory // 8 and not reply.good:
            reply = reply._replace(exhausted=True)
        try:
            send(channel, number, _fitting(reply, verifier, wrong))
        except OSError:  # the verifier closed the socket, or the run is gone
            os._exit(1)
        if number % REAP_CALLS == 0:
            unclaimed = reap(unclaimed)


def _reply(verifier: Verifier, body: bytearray, wrong: float) -> Reply:
    try:
        prompt, samples, state = decode_call(body)
        _seed(prompt, samples)
    except Exception as error:  # a column that cannot be unpickled, or not enough memory
        return Reply("failed", [], (f"the verifier's process cannot read the call: {describe(error)}", ""))
    try:
        return Reply("verdicts", judge(verifier, prompt, samples, wrong, state))
    except UserError as error:
        return Reply("fatal", [], (shorten(str(error), TRACEBACK_LIMIT), shorten(str(error.more), TRACEBACK_LIMIT)))
    except KeyboardInterrupt as error:  # raised by the verifier: Ctrl-C goes to the run
        return Reply("verdicts", crash(name_of(verifier), error, len(samples), wrong))


def _fitting(reply: Reply, verifier: Verifier, wrong: float) -> bytes:
    data = encode_reply(reply)
    if len(data) <= MAX_REPLY:
        return data
    detail = f"{name_of(verifier)} returned verdicts of {len(data) >> 20} MiB; the limit is {MAX_REPLY >> 20} MiB"
    return encode_reply(Reply("verdicts", failures(detail, len(reply.verdicts), wrong), exhausted=True))


def _offer_to_be_killed_first() -> None:
    """If the machine runs out of memory, the kernel kills a worker, which is replaced, rather than the run."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("1000")


def _limit_memory(memory: int) -> int:
    """Limits further allocations; memory from before the fork does not count."""
    import resource

    before = _data_bytes()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if before:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = before + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    return before


def _data_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _seed(prompt: Prompt, samples: Sequence[Trajectory]) -> None:
    """Seeds random numbers, so that a verifier draws the same ones in any worker."""
    seed = zlib.crc32(prompt.id.encode("utf-8", "surrogatepass"))
    for sample in samples:
        seed = zlib.crc32(sample.text.encode("utf-8", "surrogatepass"), seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)
