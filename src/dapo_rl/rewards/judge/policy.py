"""A judge that is the policy: the run's own engine answers, with the weights that it has then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dapo_rl.errors import UserError, VerifierStopError
from dapo_rl.rewards.judge.verifier import JudgeCounts, JudgeReply, JudgeVerifier, Mark


class JudgingPolicy(Protocol):
    """The model of the run, for judges."""

    @property
    def version(self) -> int:
        """Of its weights."""
        ...

    @property
    def has_questions(self) -> bool:
        """Whether some wait for an answer."""
        ...

    def ask(self, question: JudgeQuestion) -> None:
        """Takes a question, which waits for `answer`."""
        ...

    def answer(self, check: Callable[[], None]) -> None:
        """Answers all questions, with an engine that has no other work. `check` is called every fraction of a second;
        it raises to end this, and the questions wait again."""
        ...

    def forget(self) -> None:
        """Gives up the questions that wait."""
        ...


class PolicyJudge(JudgeVerifier):
    """Replies are kept as long as the weights stay the same."""

    _policy: JudgingPolicy | None = None
    _version = 0
    """Of the weights that have replied."""

    def use(self, policy: JudgingPolicy) -> None:
        """From now on, this policy is asked."""
        self._policy, self._version = policy, policy.version
        self.record.forget_replies()

    def finish(self, marks: Sequence[Future[Mark]]) -> None:
        if self._policy is not None and not all(mark.done() for mark in marks):
            self._policy.answer(lambda: None)

    def _call(self, key: str, body: dict[str, Any]) -> Future[Mark]:
        assert self._policy is not None
        question = JudgeQuestion(self, key, body["messages"][0]["content"])
        self._policy.ask(question)
        return question.mark

    def _ask(self, text: str) -> Future[Mark]:
        if self._policy is None:
            raise UserError(f"{self.file}: endpoint: policy: there is no engine here to answer")
        if self._policy.version != self._version:
            self.use(self._policy)
        return super()._ask(text)

    def take(self, question: JudgeQuestion, reply: JudgeReply) -> Mark | None:
        """The mark of a reply; None: the question is asked again."""
        assert self._policy is not None
        self.record.log_call()
        self._count(JudgeCounts(calls=1, tokens=reply.tokens, seconds=time.monotonic() - question.since))
        mark = self._take_reply(question.key, reply)
        if mark.fault and self.judge.is_random and question.attempt < self.judge.retries:
            self._policy.ask(replace(question, attempt=question.attempt + 1))
            return None
        return mark


@dataclass(slots=True, eq=False)
class JudgeQuestion:
    """What a judge asks the policy. Those who wait for its mark share it."""

    judge: PolicyJudge
    key: str
    """Names the request, whatever the weights."""
    text: str
    attempt: int = 0
    mark: Future[Mark] = field(default_factory=Future)
    since: float = 0.0
    """When the engine got it."""

    def begin(self) -> bool:
        """Whether there is a budget for it."""
        try:
            self.judge.record.reserve_call()
        except VerifierStopError as error:
            self._stop(error)
            return False
        self.since = time.monotonic()
        return True

    def refuse(self, fault: str) -> None:
        """It cannot be asked."""
        self.mark.set_result(Mark(fault=fault))

    def end(self, reply: JudgeReply) -> None:
        try:
            mark = self.judge.take(self, reply)
        except VerifierStopError as error:
            self._stop(error)
            return
        if mark is not None:
            self.mark.set_result(mark)

    def interrupt(self) -> None:
        """It waits to be asked again, so that it does not count."""
        self.judge.record.release_call()

    def give_up(self) -> None:
        self.mark.cancel()
        self.mark.set_running_or_notify_cancel()  # tells those who wait

    def _stop(self, error: VerifierStopError) -> None:
        self.judge.record.stopped = str(error)
        self.mark.set_exception(error)
