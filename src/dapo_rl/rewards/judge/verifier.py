"""The verifier of a judge: its marks as verdicts, and its metrics."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dapo_rl.base.quote import printable, shorten
from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards.judge.judge_file import JudgeSettings, rendered
from dapo_rl.rewards.judge.reading import NoMarkError, score_of
from dapo_rl.rewards.judge.record import JudgeRecord, key_of
from dapo_rl.rewards.model_verifier import exchange_of
from dapo_rl.rewards.served import Served
from dapo_rl.rewards.validation import failure, fault_of_score
from dapo_rl.types import Prompt, Trajectory, Verdict, VerdictStatus


class Mark(NamedTuple):
    """A judge's score of a response, or why there is none."""

    score: float = 0.0
    fault: str = ""
    slow: bool = False


class JudgeReply(NamedTuple):
    text: str
    tokens: int
    """Of the prompt and the reply, as the server says."""


@dataclass(slots=True)
class JudgeCounts:
    """Since they were read last."""

    calls: int = 0
    cached: int = 0
    errors: int = 0
    tokens: int = 0
    """Of the policy alone, which has spent the time of the run's engine on them."""
    seconds: float = 0.0
    compared: int = 0
    agreed: int = 0

    def add(self, other: JudgeCounts) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def figures(self) -> dict[str, float]:
        figures = {"judge/calls": self.calls, "judge/cached": self.cached, "judge/errors": self.errors}
        means = {"judge/seconds": (self.seconds, self.calls), "judge/agreement": (self.agreed, self.compared)}
        return figures | {name: total / count for name, (total, count) in means.items() if count}


class JudgeVerifier(Served):
    """Scores with a judge. A sample is correct if its score is above `reward.threshold`."""

    def __init__(self, judge: JudgeSettings, settings: RewardSettings, name: str, file: str) -> None:
        self.judge, self.settings, self.name, self.file = judge, settings, name, file
        self.needs_answer, self.agree_with = judge.needs_answer, judge.agree_with
        self.record = JudgeRecord(judge, file, name)
        self._lock = threading.Lock()
        self._asked: dict[str, Future[Mark]] = {}
        """The calls being made, by their keys: equal requests share one."""
        self._counts = JudgeCounts()

    def _call(self, key: str, body: dict[str, Any]) -> Future[Mark]:
        """Asks the judge, or sees to it that it is asked."""
        raise NotImplementedError

    def finish(self, marks: Sequence[Future[Mark]]) -> None:
        """Sees to it that the marks come, for callers that wait for them."""

    def begin(self, directory: Path) -> None:
        self.record.begin(directory)

    def submit(self, prompt: Prompt, samples: Sequence[Trajectory]) -> Marks:
        truth = prompt.answer or ""
        if self.needs_answer and not truth.strip():
            raise UserError(
                f"prompt {prompt.id}: {self.file} needs its ground truth; set data.answer_key to its column"
            )
        return Marks(self, [self._ask(rendered(self.judge.prompt, *_texts(prompt, each), truth)) for each in samples])

    def verdict(self, mark: Mark) -> Verdict:
        if mark.fault:
            self._count(JudgeCounts(errors=1))
            status: VerdictStatus = "timeout" if mark.slow else "error"
            return failure(f"{self.file}: {printable(shorten(mark.fault))}", self.settings.wrong, status)
        return self.scored(mark.score)

    def compare(self, verdict: Verdict, rule: Verdict) -> None:
        self._count(JudgeCounts(compared=1, agreed=int(verdict.correct == rule.correct)))

    def take_counts(self) -> JudgeCounts:
        with self._lock:
            counts, self._counts = self._counts, JudgeCounts()
        return counts

    @property
    def stopped(self) -> str:
        return self.record.stopped

    def _ask(self, text: str) -> Future[Mark]:
        body = self.judge.request(text)
        key = key_of(body)
        with self._lock:
            if (asked := self._asked.get(key)) is not None and not asked.cancelled():
                self._counts.cached += 1
                return asked
            if (reply := self.record.reply(key)) is not None:
                self._counts.cached += 1
                ready: Future[Mark] = Future()
                ready.set_result(self._mark(reply))
                return ready
            future = self._asked[key] = self._call(key, body)
        future.add_done_callback(lambda _: self._forget(key, future))
        return future

    def _forget(self, key: str, future: Future[Mark]) -> None:
        with self._lock:
            if self._asked.get(key) is future:
                del self._asked[key]

    def _mark(self, reply: str) -> Mark:
        try:
            score = score_of(reply, self.judge.parse, self.judge.scale)
        except NoMarkError as error:
            return Mark(fault=str(error))
        fault = fault_of_score(score)
        return Mark(score, f"its mark {fault}" if fault else "")

    def _take_reply(self, key: str, reply: JudgeReply) -> Mark:
        mark = self._mark(reply.text)
        self.record.end_call(key, None if mark.fault else reply.text, reply.tokens)
        return mark

    def _count(self, counts: JudgeCounts) -> None:
        with self._lock:
            self._counts.add(counts)


@dataclass(slots=True)
class Marks:
    """The verdicts on the samples of a group, while the judge is asked for them."""

    verifier: JudgeVerifier
    futures: Sequence[Future[Mark]]
    _verdicts: tuple[Verdict, ...] = ()

    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def result(self) -> Sequence[Verdict]:
        if not self._verdicts:
            self.verifier.finish(self.futures)
            marks = [future.result() for future in self.futures]
            self._verdicts = tuple(map(self.verifier.verdict, marks))
        return self._verdicts


def figures_of(judges: Sequence[JudgeVerifier]) -> dict[str, float]:
    """The metrics of all judges together since the last call; none without judges."""
    if not judges:
        return {}
    counts = JudgeCounts()
    for judge in judges:
        counts.add(judge.take_counts())
    own = {"judge/tokens": counts.tokens} if any(judge.judge.is_policy for judge in judges) else {}
    return counts.figures() | own


def _texts(prompt: Prompt, sample: Trajectory) -> tuple[str, str]:
    """The prompt and the response as a judge reads them: of a conversation, what was said in it."""
    exchange = exchange_of(prompt, sample)
    return _plain(exchange.asked), _plain(exchange.said)


def _plain(messages: Sequence[Mapping[str, Any]]) -> str:
    if len(messages) == 1:
        return str(messages[0].get("content") or "")
    return "\n\n".join(f"{each.get('role')}: {_content(each)}" for each in messages)


def _content(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls")
    return f"{message.get('content') or ''}{f' {calls}' if calls else ''}".strip()
