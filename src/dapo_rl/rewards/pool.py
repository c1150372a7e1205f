"""Runs a verifier in worker processes: concurrently with the run, with enforced limits on time and memory."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards.judge.policy import JudgingPolicy, PolicyJudge
from dapo_rl.rewards.judge.verifier import JudgeVerifier, figures_of
from dapo_rl.rewards.model_verifier import GivenModel, ModelVerifier, Scorer
from dapo_rl.rewards.served import MixedTicket, MixedVerifier, Served
from dapo_rl.rewards.service import decode_reply, encode_call, verifier_service
from dapo_rl.rewards.trainer_state import AT_START, RewardState
from dapo_rl.rewards.validation import failure, limit_of, trait, user_errors, verify
from dapo_rl.types import Drops, FinishReason, Prompt, Trajectory, Verdict, Verifier
from dapo_rl.workers import WorkerClient, WorkerFailedError, WorkerPool

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

    skips_dropped = True
    """`submit` takes `drops`."""

    def __init__(self, verifier: Verifier, settings: RewardSettings) -> None:
        self.verifier = verifier
        self.settings = settings
        self._mixed = verifier if isinstance(verifier, MixedVerifier) else None
        """With verifiers that run in this process; the workers have the others."""
        local = verifier if self._mixed is None else self._mixed.local
        self.needs_answer = trait(verifier, "needs_answer")
        self.workers = 0 if local is None else worker_count(settings)
        self.note = ""
        """Why there are no processes although the settings ask for them."""
        if self.workers and not hasattr(os, "fork"):
            self.workers = 0
            self.note = "this platform cannot fork: the verifier runs in this process, without limits"
        self.state = AT_START
        """The progress of the run, for reward functions; calls submitted from now on get it."""
        self.policy: JudgingPolicy | None = None
        """What answers judges that are the policy, once there is an engine."""
        self._calls = None if local is None else _Calls(local, settings)
        self._workers: WorkerPool | None = None
        if local is not None and self.workers:
            limit_s = limit_of(local) or settings.timeout_s
            self._workers = WorkerPool(verifier_service(local, settings), self.workers, limit_s)
            self._close = weakref.finalize(self, self._workers.close)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Lets the verifier check the prompts before a run starts."""
        with user_errors(self.verifier, "check"):
            if its_own := getattr(self.verifier, "check", None):
                its_own(prompts)

    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
        return self.submit(prompt, samples).result()

    def submit(self, prompt: Prompt, samples: Sequence[Trajectory], drops: Drops | None = None) -> Ticket | MixedTicket:
        """A ticket whose `result()` waits for the verdicts. Reward models do not score a group that the verdicts of
        workers already drop."""
        if self._mixed is None:
            assert self._calls is not None
            return self._submit(self._calls, prompt, samples)
        local = None if self._calls is None else self._submit(self._calls, prompt, samples)
        dropped = functools.partial(self._mixed.is_dropped, local, drops)
        served = [
            each.submit(prompt, samples, dropped) if isinstance(each, ModelVerifier) else each.submit(prompt, samples)
            for each in self._mixed.served.values()
        ]
        return MixedTicket(self._mixed, local, served, len(samples))

    def _submit(self, calls: _Calls, prompt: Prompt, samples: Sequence[Trajectory]) -> Ticket:
        """It can be cancelled until a worker has taken it."""
        if self._workers is not None:
            return self._workers.submit(functools.partial(calls.verify, prompt, tuple(samples), self.state))
        ticket = Ticket()
        try:
            ticket.set_result(calls.verify_here(prompt, samples, self.state))
        except UserError as error:
            ticket.set_exception(error)
        return ticket

    @property
    def served(self) -> Sequence[Served]:
        """The verifiers that run in this process."""
        return () if self._mixed is None else tuple(self._mixed.served.values())

    def load_models(self, loader: Callable[[GivenModel], Scorer]) -> None:
        """Loads the reward models, once the run knows its device."""
        for each in self.served:
            if isinstance(each, ModelVerifier):
                each.load(loader)

    def use_policy(self, policy: JudgingPolicy) -> None:
        """Judges that are the policy ask this one from now on."""
        self.policy = policy
        for each in self.served:
            if isinstance(each, PolicyJudge):
                each.use(policy)

    def release_memory(self) -> None:
        """Frees the memory of a GPU that reward models take, until they are needed again."""
        for each in self.served:
            each.release_memory()

    def begin(self, directory: Path) -> None:
        """A run begins, or continues, in its directory, where judges keep what they have replied."""
        for each in self.served:
            each.begin(directory)

    def figures(self) -> dict[str, float]:
        """Metrics of judges since the last call."""
        return figures_of([each for each in self.served if isinstance(each, JudgeVerifier)])

    @property
    def stopped(self) -> str:
        """Why the run has to stop; empty if it does not."""
        return next((each.stopped for each in self.served if each.stopped), "")

    @property
    def pids(self) -> list[int]:
        """The current processes; the first one forks the others."""
        return self._workers.pids if self._workers is not None else []

    def close(self) -> None:
        """Ends all processes. Tickets without a result are cancelled or raise RuntimeError."""
        for each in self.served:
            each.close()
        if self._workers is not None:
            self._close()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def worker_count(settings: RewardSettings) -> int:
    if settings.workers is not None:
        return settings.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores - 1, 1), MAX_WORKERS)


class _Calls:
    """Verifies groups, here or with a worker. Does not refer to the pool, so that the pool can be garbage-collected."""

    def __init__(self, verifier: Verifier, settings: RewardSettings) -> None:
        self._verifier, self._wrong = verifier, settings.wrong
        self._per_sample = trait(verifier, "per_sample")
        self._text_only = trait(verifier, "text_only")
        self._one_by_one = False
        self._lock = threading.Lock()
        self._traceback_given = False

    def verify_here(self, prompt: Prompt, samples: Sequence[Trajectory], state: RewardState) -> list[Verdict]:
        return self._with_one_traceback(verify(self._verifier, prompt, samples, self._wrong, state))

    def verify(
        self, prompt: Prompt, samples: Sequence[Trajectory], state: RewardState, client: WorkerClient
    ) -> list[Verdict]:
        if self._text_only:
            samples = [Trajectory.of_text(sample.text, sample.finish_reason) for sample in samples]
        if not self._one_by_one:
            verdicts = self._call(client, prompt, samples, state)
            if not isinstance(verdicts, Verdict):
                return self._with_one_traceback(verdicts)
            if not self._per_sample or len(samples) <= 1:
                return [verdicts] * len(samples)
        verdicts = []
        known: dict[tuple[str, FinishReason | None], Verdict] = {}
        for sample in samples:
            key = sample.text, sample.finish_reason
            verdict = known.get(key) if self._text_only else None
            if verdict is None:
                answer = self._call(client, prompt, [sample], state)
                verdict = known[key] = answer if isinstance(answer, Verdict) else answer[0]
            verdicts.append(verdict)
        if not any(verdict.failed for verdict in verdicts):
            self._one_by_one = True  # each is within the limit, but the group is not: do not try groups again
        return self._with_one_traceback(verdicts)

    def _call(
        self, client: WorkerClient, prompt: Prompt, samples: Sequence[Trajectory], state: RewardState
    ) -> list[Verdict] | Verdict:
        """The verdicts, or a single verdict for all samples if the call failed."""
        try:
            reply = client.call(encode_call(prompt, samples, state), lambda data: decode_reply(data, len(samples)))
        except WorkerFailedError as error:
            return failure(str(error), self._wrong, error.status)
        if reply.exhausted:
            client.kill()
        line, more = reply.error
        if reply.kind == "fatal":
            raise UserError(line, more)
        if reply.kind == "failed":
            return failure(line, self._wrong)
        if reply.good:
            client.supervisor.call_went_well()
        return reply.verdicts

    def _with_one_traceback(self, verdicts: list[Verdict]) -> list[Verdict]:
        """Removes the traceback from all failed verdicts except the first: it would fill every rollout file."""
        result = []
        for verdict in verdicts:
            line, _, more = verdict.detail.partition("\n")
            if verdict.failed and "Traceback (most recent call last)" in more:
                with self._lock:
                    given, self._traceback_given = self._traceback_given, True
                verdict = replace(verdict, detail=line) if given else verdict
            result.append(verdict)
        return result
