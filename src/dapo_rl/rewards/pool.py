"""Verdicts in processes of their own: beside the run, and with limits on time and memory that really hold."""

from __future__ import annotations

import os
import queue
import signal
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType

from dapo_rl.config import RewardSettings
from dapo_rl.rewards.nursery import Nursery, Worker
from dapo_rl.types import Prompt, Sample, Verdict, VerdictStatus, Verifier

Ticket = Future[list[Verdict]]

GRACE_S = 0.25
"""A verifier that keeps the limit itself, as the one for mathematics does, comes before the kill."""
MAX_WORKERS = 8
_TRACEBACK = "\nTraceback (most recent call last)"


class VerifierPool:
    """A verifier whose calls run in worker processes.

    A call that exceeds `reward.timeout_s` is killed, and its verdicts are of status `timeout`; one that exceeds
    `reward.memory_mb`, or ends its process, has status `error`. What the verifier raises comes out of `result()`.
    A group is one call. Where that fails and the verifier is `per_sample`, each sample becomes a call of its own, so
    that it fails alone.
    What a function keeps between calls, it keeps in each worker apart.
    """

    def __init__(self, verifier: Verifier, settings: RewardSettings) -> None:
        self.verifier = verifier
        self.settings = settings
        self.needs_answer = bool(getattr(verifier, "needs_answer", False))
        self.workers = worker_count(settings)
        self.note = ""
        """Why there are no processes, where the settings ask for them."""
        if self.workers and not hasattr(os, "fork"):
            self.workers = 0
            self.note = "this platform cannot fork: the verifier runs in this process, without limits"
        self._crew = _Crew(verifier, settings, self.workers) if self.workers else None
        self._close = weakref.finalize(self, self._crew.close) if self._crew is not None else None

    def check(self, prompts: Sequence[Prompt]) -> None:
        """What the verifier itself says of prompts, before a run begins."""
        if its_own := getattr(self.verifier, "check", None):
            its_own(prompts)

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Verdict]:
        return self.submit(prompt, samples).result()

    def submit(self, prompt: Prompt, samples: Sequence[Sample]) -> Ticket:
        """The verdicts to be: `result()` waits for them. A ticket that no worker has taken yet can be cancelled."""
        if self._crew is not None:
            return self._crew.submit(prompt, samples)
        ticket = Ticket()
        try:
            ticket.set_result(self.verifier(prompt, samples))
        except Exception as error:
            ticket.set_exception(error)
        return ticket

    @property
    def pids(self) -> list[int]:
        """The processes that are there now; the first one forks the others."""
        return self._crew.pids() if self._crew is not None else []

    def close(self) -> None:
        """Ends all processes. Tickets without a result are cancelled, or raise RuntimeError."""
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


class _Crew:
    """The threads of a pool, each with its worker. It does not know the pool, which can thus be collected."""

    def __init__(self, verifier: Verifier, settings: RewardSettings, workers: int) -> None:
        self.settings = settings
        self.per_sample = bool(getattr(verifier, "per_sample", False))
        self.text_only = bool(getattr(verifier, "text_only", False))
        self.run = os.getpid()
        self.closed = False
        self.one_by_one = False
        self.traceback_given = False
        self.lock = threading.Lock()
        self.tasks: queue.SimpleQueue[tuple[Ticket, Prompt, Sequence[Sample]] | None] = queue.SimpleQueue()
        self.nursery = Nursery(verifier, settings.memory_mb)  # before there are threads
        self.posts = [_Post(self.nursery, settings) for _ in range(workers)]
        self.threads = [
            threading.Thread(target=self._serve, args=(post,), name=f"dapo-verifier-{index}", daemon=True)
            for index, post in enumerate(self.posts)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, prompt: Prompt, samples: Sequence[Sample]) -> Ticket:
        ticket = Ticket()
        if os.getpid() != self.run:
            raise RuntimeError("this process was forked from the one that has the verifier pool; make one here")
        with self.lock:
            if self.closed:
                raise RuntimeError("the verifier pool is closed")
            self.tasks.put((ticket, prompt, tuple(samples)))
        return ticket

    def pids(self) -> list[int]:
        return [self.nursery.pid, *(post.worker.pid for post in self.posts if post.worker is not None)]

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
        self.nursery.close()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2.0)

    def _serve(self, post: _Post) -> None:
        while (task := self.tasks.get()) is not None:
            ticket, prompt, samples = task
            if ticket.set_running_or_notify_cancel():
                try:
                    ticket.set_result(self._judge(post, prompt, samples))
                except BaseException as error:
                    ticket.set_exception(RuntimeError("the verifier pool was closed") if self.closed else error)
            del task, ticket, prompt, samples  # nothing is held while it waits
        post.leave()

    def _judge(self, post: _Post, prompt: Prompt, samples: Sequence[Sample]) -> list[Verdict]:
        if self.text_only:
            samples = [replace(sample, token_ids=(), logps=()) for sample in samples]
        if not self.one_by_one:
            verdicts = post.call(prompt, samples)
            if not isinstance(verdicts, Verdict):
                return self._one_traceback(verdicts)
            if not self.per_sample or len(samples) <= 1:
                return [verdicts] * len(samples)
        verdicts = []
        known: dict[str, Verdict] = {}
        for sample in samples:
            verdict = known.get(sample.text) if self.text_only else None
            if verdict is None:
                answer = post.call(prompt, [sample])
                verdict = known[sample.text] = answer if isinstance(answer, Verdict) else answer[0]
            verdicts.append(verdict)
        if not any(verdict.failed for verdict in verdicts):
            self.one_by_one = True  # each within the limit, together beyond it: no use in trying the group first
        return self._one_traceback(verdicts)

    def _one_traceback(self, verdicts: list[Verdict]) -> list[Verdict]:
        """Each worker shows the first crash of a function with its traceback; of all of these one is enough."""
        return [self._without_traceback(v) if v.failed and _TRACEBACK in v.detail else v for v in verdicts]

    def _without_traceback(self, verdict: Verdict) -> Verdict:
        with self.lock:
            first, self.traceback_given = not self.traceback_given, True
        return verdict if first else replace(verdict, detail=verdict.detail[: verdict.detail.index(_TRACEBACK)])


class _Post:
    """One thread's place for a worker: it is forked at the first call, and anew after one was killed or has died."""

    def __init__(self, nursery: Nursery, settings: RewardSettings) -> None:
        self.nursery = nursery
        self.settings = settings
        self.worker: Worker | None = None

    def call(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Verdict] | Verdict:
        """The verdicts, or the one verdict on all samples where the call failed."""
        if self.worker is None:
            self.worker = self.nursery.spawn()
        try:
            reply = self.worker.call(prompt, samples, self.settings.timeout_s + GRACE_S)
        except TimeoutError:
            self._bury()
            return self._failure("timeout", f"killed: not decided within {self.settings.timeout_s:g} s")
        except EOFError:
            return self._failure("error", f"the verifier's process {_death(self._bury())}")
        if reply.worn:
            self._bury()
        if reply.kind == "raised":
            raise reply.payload
        if reply.kind == "failed":
            return self._failure("error", f"the verifier {reply.payload}")
        return reply.payload  # type: ignore[no-any-return]

    def leave(self) -> None:
        if self.worker is not None:
            self.worker.hang_up()
            self.worker = None

    def _bury(self) -> int:
        worker, self.worker = self.worker, None
        assert worker is not None
        return self.nursery.bury(worker)

    def _failure(self, status: VerdictStatus, detail: str) -> Verdict:
        return Verdict(self.settings.wrong, False, status, detail=detail)


def _death(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (is the machine out of memory?)" if -code == signal.SIGKILL else "")
