"""Ranks as processes on this host. The driver sends each a method to call, and collects the results."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.multiprocessing  # registers how tensors are sent: in shared memory

from dapo_rl.cluster.rank import Place
from dapo_rl.errors import NonFiniteError, UserError

GRACE = 5.0
"""Seconds that the other ranks have to finish after one has failed."""
COLLECTIVE = timedelta(hours=24)
"""The driver notices ranks that hang, sooner than a collective would."""

MakePolicy = Callable[[Place], Any]
"""Builds what a rank does: its methods are called by name. Sent to the rank, so that it is defined in a module."""


class RankLostError(Exception):
    """A rank ended or made no progress. All others have been ended too."""


class RankProcesses:
    """Ranks that are started with the object, and ended with it."""

    def __init__(
        self,
        make: MakePolicy,
        world_size: int,
        *,
        device: str = "cpu",
        timeout_s: float = 60.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        """`timeout_s` is how long a rank may go without progress; to load the model it has `start_timeout_s`."""
        self.world_size, self._timeout_s = world_size, timeout_s
        self._folder = TemporaryDirectory(prefix="dapo-ranks-")
        # Torch and transformers are imported once, by the server that the ranks are forked from.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["dapo_rl.cluster.rank"])
        self._ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                start = _Start(rank, world_size, device, str(Path(self._folder.name) / "store"), make)
                process = context.Process(target=_serve, args=(start, there), name=f"dapo-rank-{rank}", daemon=True)
                process.start()
                there.close()  # so that the end of the process ends the connection
                self._ranks.append(_Rank(rank, process, here))
            self._collect("start", start_timeout_s)
        except BaseException:
            self.close(kill=True)
            raise

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, patience: float = 1
    ) -> list[Any]:
        """Calls a method on every rank, with each rank's arguments; the results by rank. `patience` multiplies the time
        that they may go without progress.

        An error that all ranks agree on is raised, and they can be called again. After any other error all are ended.
        """
        if not self._ranks:
            raise RankLostError("the ranks have been ended")
        for rank, values in zip(self._ranks, arguments or [()] * self.world_size, strict=True):
            try:
                rank.connection.send((method, values))
            except OSError:  # it has ended, which `_collect` reports
                break
        return self._collect(method, self._timeout_s * patience)

    def close(self, *, kill: bool = False) -> None:
        """Ends all ranks, and returns when they have ended; `kill` does not wait for what they are doing."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.connection.close()  # ends a rank that waits for a call
        end = time.monotonic() + GRACE
        for rank in ranks:
            if not kill:
                rank.process.join(max(0.0, end - time.monotonic()))
            rank.process.kill()
            rank.process.join()
            rank.process.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self, method: str, timeout_s: float) -> list[Any]:
        try:
            answers = self._answers(method, timeout_s)
        except BaseException:  # what the ranks are doing is not known
            self.close(kill=True)
            raise
        failed = [answer for answer in answers if answer is not None and answer.error is not None]
        if not failed:
            return [answer.value for answer in answers if answer is not None]
        first = failed[0].error
        assert first is not None
        agreed = len(failed) == self.world_size and isinstance(first, UserError | NonFiniteError)
        if not agreed:
            self.close(kill=True)
        raise first

    def _answers(self, method: str, timeout_s: float) -> list[_Answer | None]:
        """What each rank answered; None for those that did not answer because another failed."""
        answers: list[_Answer | None] = [None] * len(self._ranks)
        heard = [time.monotonic()] * len(self._ranks)
        steps = [0] * len(self._ranks)
        failed_at: float | None = None
        while waiting := [rank for rank in self._ranks if answers[rank.number] is None]:
            now = time.monotonic()
            if failed_at is not None and now > failed_at + GRACE:
                break
            late = [rank for rank in waiting if now > heard[rank.number] + timeout_s]
            if late and failed_at is None:
                fewest = min(steps[rank.number] for rank in late)
                names = ", ".join(str(rank.number) for rank in late if steps[rank.number] == fewest)
                raise RankLostError(f"no progress for {timeout_s:g} s in {method}, on rank {names}")
            by_source: dict[Any, _Rank] = {rank.connection: rank for rank in waiting}
            for source in wait(list(by_source), timeout=0.2):
                rank = by_source[source]
                try:
                    answer = rank.connection.recv()
                except (EOFError, OSError):
                    raise RankLostError(f"rank {rank.number} {rank.end()} in {method}") from None
                heard[rank.number] = time.monotonic()
                steps[rank.number] += 1
                if answer is not None:
                    answers[rank.number] = answer
                    if answer.error is not None and failed_at is None:
                        failed_at = time.monotonic()
        return answers


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: Any
    connection: Connection

    def end(self) -> str:
        """How it ended."""
        self.process.join(GRACE)
        code = self.process.exitcode
        if code is None:
            return "closed its connection"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


@dataclass(frozen=True, slots=True)
class _Answer:
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Start:
    """What a process needs to become a rank."""

    rank: int
    world_size: int
    device: str
    store: str
    make: MakePolicy


def _serve(start: _Start, connection: Connection) -> None:
    """Calls methods until the connection ends."""
    threading.Thread(target=_end_with_driver, daemon=True).start()
    try:
        policy = start.make(replace(_join(start), alive=lambda: connection.send(None)))
        connection.send(_Answer())
    except Exception as error:
        connection.send(_Answer(error=_sendable(error, start.rank)))
        return
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            dist.destroy_process_group()
            return
        try:
            answer = _Answer(getattr(policy, method)(*arguments))
        except Exception as error:
            answer = _Answer(error=_sendable(error, start.rank))
        connection.send(answer)


def _join(start: _Start) -> Place:
    """Joins the process group."""
    # Ranks of one host talk over its loopback interface, whatever its name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if start.device == "cuda":
        device = torch.device("cuda", start.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
        share = max(1, len(os.sched_getaffinity(0)) // start.world_size)
        torch.set_num_threads(min(torch.get_num_threads(), share))
    dist.init_process_group(
        backend,
        init_method=f"file://{start.store}",
        rank=start.rank,
        world_size=start.world_size,
        timeout=COLLECTIVE,
    )
    return Place(start.rank, start.world_size, device)


def _end_with_driver() -> None:
    """Ends this process when the driver ends, even inside a collective."""
    if (driver := multiprocessing.parent_process()) is not None:
        wait([driver.sentinel])
        os._exit(1)


def _sendable(error: Exception, rank: int) -> Exception:
    """The error as the driver raises it: a mistake of the user as it is, any other with the rank's traceback."""
    if isinstance(error, UserError | NonFiniteError):
        return type(error)(str(error))
    return RuntimeError(f"rank {rank}:\n{''.join(traceback.format_exception(error))}")
