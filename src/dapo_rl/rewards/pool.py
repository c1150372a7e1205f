"""Runs a verifier in worker processes: concurrently with the run, with enforced limits on time and memory."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType

from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards.service import verifier_service
from dapo_rl.rewards.trainer_state import AT_START, RewardState
from dapo_rl.rewards.validation import failures, has_traceback, limit_of, trait, user_errors, verify, without_traceback
from dapo_rl.rewards.wire import Reply, decode_reply, encode_call
from dapo_rl.types import FinishReason, Prompt, Trajectory, Verdict, Verifier
from dapo_rl.workers import Supervisor, WorkerClient, WorkerFailedError

Ticket = Future[list[Verdict]]

MAX_WORKERS = 8


class VerifierPool:
    """A verifier whose calls run in worker processes.

    A call that exceeds `reward.timeout_s` is killed, and its verdicts have status `timeout`. A call that exceeds
    `reward.memory_mb`, ends its process, raises, or returns invalid verdicts has status `error`. Only a `UserError`,
    with which a verifier says that it cannot judge at all, is raised by `result()`.
    A group is one call. If the call is killed or its process dies, and the verifier is `per_sample`, each sample is
    called separately, so that only the sample at fault fails.
    State that a function keeps between calls is separate in each worker.
    """

    def __init__(self, verifier: Verifier, settings: RewardSettings) -> None:
        self.verifier = verifier
        self.settings = settings
        self.needs_answer = trait(verifier, "needs_answer")
        self.workers = worker_count(settings)
        self.note = ""
        """Why there are no processes although the settings ask for them."""
        if self.workers and not hasattr(os, "fork"):
            self.workers = 0
            self.note = "this platform cannot fork: the verifier runs in this process, without limits"
        self.state = AT_START
        """The progress of the run, for reward functions; calls submitted from now on get it."""
        self._one_traceback = _OneTraceback()
        self._processes = _Processes(verifier, settings, self.workers, self._one_traceback) if self.workers else None
        self._close = weakref.finalize(self, self._processes.close) if self._processes is not None else None

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Lets the verifier check the prompts before a run starts."""
        with user_errors(self.verifier, "check"):
            if its_own := getattr(self.verifier, "check", None):
                its_own(prompts)

    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
        return self.submit(prompt, samples).result()

    def submit(self, prompt: Prompt, samples: Sequence[Trajectory]) -> Ticket:
        """A ticket whose `result()` waits for the verdicts. It can be cancelled until a worker has taken it."""
        if self._processes is not None:
            return self._processes.submit(prompt, samples, self.state)
        ticket = Ticket()
        try:
            verdicts = verify(self.verifier, prompt, samples, self.settings.wrong, self.state)
            ticket.set_result(self._one_traceback(verdicts))
        except UserError as error:
            ticket.set_exception(error)
        return ticket

    @property
    def pids(self) -> list[int]:
        """The current processes; the first one forks the others."""
        return self._processes.pids() if self._processes is not None else []

    def close(self) -> None:
        """Ends all processes. Tickets without a result are cancelled or raise RuntimeError."""
        if self._close is not None:
            self._close()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def worker_count(settings: RewardSettings) -> int:
    if settings.workers is not None:
        return settings.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores - 1, 1), MAX_WORKERS)


class _OneTraceback:
    """Removes the traceback from all failed verdicts except the first: it would fill every rollout file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given = False

    def __call__(self, verdicts: list[Verdict]) -> list[Verdict]:
        return [without_traceback(v) if has_traceback(v) and not self._is_first() else v for v in verdicts]

    def _is_first(self) -> bool:
        with self._lock:
            first, self._given = not self._given, True
        return first


class _Processes:
    """The threads of a pool, each with its worker. Does not refer to the pool, so that it can be garbage-collected."""

    def __init__(
        self, verifier: Verifier, settings: RewardSettings, workers: int, one_traceback: _OneTraceback
    ) -> None:
        self.settings = settings
        self.per_sample = trait(verifier, "per_sample")
        self.text_only = trait(verifier, "text_only")
        self.run = os.getpid()
        self.closed = False
        self.one_by_one = False
        self.one_traceback = one_traceback
        self.lock = threading.Lock()
        self.tasks: queue.SimpleQueue[tuple[Ticket, Prompt, Sequence[Trajectory], RewardState] | None] = (
            queue.SimpleQueue()
        )
        self.supervisor = Supervisor(verifier_service(verifier, settings))  # before any threads start
        limit_s = limit_of(verifier) or settings.timeout_s
        self.clients = [WorkerClient(self.supervisor, limit_s) for _ in range(workers)]
        self.threads = [
            threading.Thread(target=self._serve, args=(client,), name=f"dapo-verifier-{index}", daemon=True)
            for index, client in enumerate(self.clients)
        ]
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:  # of threads, too, a system may have no more
            self.close()
            raise

    def submit(self, prompt: Prompt, samples: Sequence[Trajectory], state: RewardState) -> Ticket:
        ticket = Ticket()
        if os.getpid() != self.run:
            raise RuntimeError("this process was forked from the owner of the verifier pool; create a pool here")
        with self.lock:
            if self.closed:
                raise RuntimeError("the verifier pool is closed")
            self.tasks.put((ticket, prompt, tuple(samples), state))
        return ticket

    def pids(self) -> list[int]:
        workers = [client.worker for client in self.clients]
        return [self.supervisor.server_pid, *(worker.pid for worker in workers if worker is not None)]

    def close(self) -> None:
        if os.getpid() != self.run:
            return
        with self.lock:
            self.closed = True
        while True:
            try:
                task = self.tasks.get_nowait()
            except queue.Empty:
                break
            if task is not None:
                task[0].cancel()
        for _ in self.threads:
            self.tasks.put(None)
        self.supervisor.close()
        for thread in self.threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=2.0)

    def _serve(self, client: WorkerClient) -> None:
        while (task := self.tasks.get()) is not None:
            ticket, prompt, samples, state = task
            if ticket.set_running_or_notify_cancel():
                try:
                    ticket.set_result(self.one_traceback(self._verify(client, prompt, samples, state)))
                except BaseException as error:
                    ticket.set_exception(RuntimeError("the verifier pool was closed") if self.closed else error)
            del task, ticket, prompt, samples  # hold no references while waiting
        client.leave()

    def _verify(
        self, client: WorkerClient, prompt: Prompt, samples: Sequence[Trajectory], state: RewardState
    ) -> list[Verdict]:
        if self.text_only:
            samples = [Trajectory.of_text(sample.text, sample.finish_reason) for sample in samples]
        if not self.one_by_one:
            verdicts = self._call(client, prompt, samples, state)
            if not isinstance(verdicts, Verdict):
                return verdicts
            if not self.per_sample or len(samples) <= 1:
                return [verdicts] * len(samples)
        verdicts = []
        known: dict[tuple[str, FinishReason | None], Verdict] = {}
        for sample in samples:
            seen = sample.text, sample.finish_reason
            verdict = known.get(seen) if self.text_only else None
            if verdict is None:
                answer = self._call(client, prompt, [sample], state)
                verdict = known[seen] = answer if isinstance(answer, Verdict) else answer[0]
            verdicts.append(verdict)
        if not any(verdict.failed for verdict in verdicts):
            self.one_by_one = True  # each is within the limit, but the group is not: do not try groups again
        return verdicts

    def _call(
        self, client: WorkerClient, prompt: Prompt, samples: Sequence[Trajectory], state: RewardState
    ) -> list[Verdict] | Verdict:
        """The verdicts, or a single verdict for all samples if the call failed."""

        def decode(data: bytearray) -> Reply:
            return decode_reply(data, len(samples))

        try:
            reply = client.call(encode_call(prompt, samples, state), decode)
        except WorkerFailedError as error:
            return failures(str(error), 1, self.settings.wrong, error.status)[0]
        if reply.exhausted:
            client.kill()
        line, more = reply.error
        if reply.kind == "fatal":
            raise UserError(line, more)
        if reply.kind == "failed":
            return failures(line, 1, self.settings.wrong)[0]
        if reply.good:
            self.supervisor.call_went_well()
        return reply.verdicts
