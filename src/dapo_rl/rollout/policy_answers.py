"""The run's engine as the model of judges (`endpoint: policy`).

Questions wait until verdicts are read. The engine then has no other work: how far samples get between two decisions
depends on no judge, so a seed gives the same run, and a stop changes nothing. No question waits when an update begins:
judges have the weights of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np

from dapo_rl.config import Config
from dapo_rl.data.chat import PromptReader
from dapo_rl.data.rows import BadRowError
from dapo_rl.engines.protocol import Engine, Request, SamplingParams
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.rewards.judge.policy import JudgeQuestion, JudgingPolicy, PolicyJudge
from dapo_rl.rewards.judge.verifier import JudgeReply
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.rollout.episodes import poll_engine
from dapo_rl.types import Verifier


class PolicyAnswers:
    """Answers questions with an engine, through the chat template of its model."""

    def __init__(self, engine: Engine, reader: PromptReader, params: SamplingParams, context: int, seed: int) -> None:
        """`params` hold where a judge has none of its own; `context` limits question and reply together."""
        self._engine, self._reader, self._params, self._context, self._seed = engine, reader, params, context, seed
        self._waiting: deque[JudgeQuestion] = deque()
        self._numbers = count()

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def has_questions(self) -> bool:
        return bool(self._waiting)

    def ask(self, question: JudgeQuestion) -> None:
        self._waiting.append(question)

    def answer(self, check: Callable[[], None]) -> None:
        asked: dict[str, tuple[JudgeQuestion, Request]] = {}
        try:
            while self._waiting or asked:
                self._submit(asked)
                if not asked:
                    continue
                completions = poll_engine(self._engine, check)
                if not completions:
                    raise RuntimeError(f"the engine returned nothing with {len(asked)} unanswered questions")
                for done in completions:
                    if done.request_id not in asked:
                        raise RuntimeError(f"the engine returned {done.request_id} while it answered a judge")
                    question, request = asked.pop(done.request_id)
                    question.end(JudgeReply(done.sample.text, len(request.prompt_ids) + done.sample.written))
        except BaseException:
            with suppress(Exception):  # the engine itself may have failed
                self._engine.cancel(list(asked))
            for question, _ in reversed(asked.values()):
                question.interrupt()
                self._waiting.appendleft(question)
            raise

    def forget(self) -> None:
        while self._waiting:
            self._waiting.popleft().give_up()

    def _submit(self, asked: dict[str, tuple[JudgeQuestion, Request]]) -> None:
        """Hands all questions that wait to the engine."""
        waiting = list(self._waiting)
        messages = [({"role": "user", "content": question.text},) for question in waiting]
        for question, reading in zip(waiting, self._reader.read(messages), strict=True):
            self._waiting.popleft()
            if isinstance(reading, BadRowError):
                question.refuse(str(reading))
            elif (room := self._context - len(reading.token_ids)) < 1:
                question.refuse(f"its question has {len(reading.token_ids)} tokens, of a context of {self._context}")
            elif question.begin():
                request = self._request(question, reading.token_ids, room)
                asked[request.id] = question, request
                self._engine.submit(request)

    def _request(self, question: JudgeQuestion, ids: tuple[int, ...], room: int) -> Request:
        judge, of_run = question.judge.judge, self._params
        params = SamplingParams(
            max_new_tokens=min(judge.max_tokens or of_run.max_new_tokens, room),
            temperature=of_run.temperature if judge.temperature is None else judge.temperature,
        )
        seed = derive_seed(self._seed, "judge", question.key, question.attempt)
        return Request(f"judge-{next(self._numbers)}", np.asarray(ids), 1, params, seed)


def policy_of(verifier: Verifier | None) -> JudgingPolicy | None:
    """What answers the judges of a verifier that are the policy; None if none is."""
    return verifier.policy if isinstance(verifier, VerifierPool) else None


def longest_question(verifier: VerifierPool | None, tokenizer: Any, config: Config, model: Any, longest: int) -> int:
    """The tokens of the longest request to an engine whose samples have at most `longest`: a judge reads a prompt and
    its response in a text of its own, and replies. Raises if the model has no chat template."""
    judges = _judges(verifier)
    for each in judges:
        reader = question_reader(each, tokenizer, config)
        (blank,) = reader.read([({"role": "user", "content": each.judge.prompt},)])
        own = 0 if isinstance(blank, BadRowError) else len(blank.token_ids)
        truth = config.data.max_prompt_tokens if each.needs_answer else 0
        longest = max(longest, longest + own + truth + (each.judge.max_tokens or config.sampling.max_new_tokens))
    limit = getattr(model.config, "max_position_embeddings", None)
    return min(longest, limit) if judges and isinstance(limit, int) else longest


def use_as_judge(verifier: VerifierPool | None, engine: Engine, tokenizer: Any, config: Config, context: int) -> None:
    """From now on, the engine answers the judges that are the policy. `context` is what `longest_question` gave."""
    if verifier is not None and (judges := _judges(verifier)):
        reader = question_reader(judges[0], tokenizer, config)
        params = SamplingParams.of(config.sampling)
        verifier.use_policy(PolicyAnswers(engine, reader, params, context, config.seed))


def question_reader(judge: PolicyJudge, tokenizer: Any, config: Config) -> PromptReader:
    """Reads questions as prompts of chat messages are read, without the system prompt of the data."""
    return PromptReader(tokenizer, config.data.model_copy(update={"system_prompt": None}), judge.file)


def _judges(verifier: VerifierPool | None) -> list[PolicyJudge]:
    return [] if verifier is None else [each for each in verifier.served if isinstance(each, PolicyJudge)]
