"""Conversations between the policy and an environment, token by token.

Sampled tokens are kept as they are. What the environment says is rendered as a suffix and tokenized once. Where it does
not continue the conversation, because the chat template or the agent rewrites history, the conversation forks: the
trajectory so far is put aside, and another one begins; both share the reward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dapo_rl.base.quote import describe
from dapo_rl.config import EnvSettings
from dapo_rl.engines.protocol import Request
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.envs.chat_format import ChatFormat
from dapo_rl.envs.compare_messages import same, same_messages
from dapo_rl.envs.messages import with_system
from dapo_rl.envs.openai_format import malformed_as_text
from dapo_rl.envs.pool import Environments
from dapo_rl.envs.protocol import AssistantTurn, EpisodeFailure, Message, Observation, Opening, ToolSchema
from dapo_rl.errors import UserError
from dapo_rl.types import FinishReason, Prompt, Trajectory, Turn, Verdict

Result = Opening | Observation | EpisodeFailure
Replay = Generator[Future[Any], Any, tuple[bool, Future[Any] | None]]
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What chat templates and tokenizers raise for messages that they do not expect."""


@dataclass(slots=True)
class Conversation:
    """One sample of a group, with its environment."""

    key: str
    """Names the episode to the environments' processes."""
    index: int
    seed: int
    trajectory: Trajectory
    """Its tokens so far."""
    messages: list[Message] = field(default_factory=list)
    """The whole conversation so far, with the prompt's messages."""
    opening: tuple[Message, ...] = ()
    """Those before the first turn."""
    tools: tuple[ToolSchema, ...] = ()
    forks: list[Trajectory] = field(default_factory=list)
    """Trajectories that were put aside."""
    turns: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    """Tool calls and their errors, seconds, rewards."""
    correct: bool | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    """The environment's last state, for reward functions."""
    limit: int | None = None
    """Tokens that the environment allows for the next turn."""
    ends: FinishReason | None = None
    """Why it ends, once it does; its last reward may still be missing."""
    cut: bool = False
    """Whether its last turn was cut off."""
    verdict: Verdict | None = None
    """The environment's verdict, once it has ended."""
    since: float = field(default_factory=time.monotonic)
    """When it was last handed to the engine or to the environment."""

    @property
    def finished_tokens(self) -> int:
        """Tokens of the policy in turns that have ended, which are counted as generated."""
        return self.trajectory.written + sum(fork.written for fork in self.forks)

    @property
    def observed_tokens(self) -> int:
        """Tokens of the environment after its prompts, in all its trajectories."""
        return sum(len(each.token_ids) - each.written for each in (*self.forks, self.trajectory))

    def for_verifier(self) -> dict[str, Any]:
        """`Trajectory.episode`. An agent that began another conversation is judged by its last one."""
        begun = len(self.opening)
        if self.forks and not same_messages(self.opening, self.messages[:begun]):
            begun = len(self.messages) - len(self.trajectory.messages)
        return {"messages": list(self.messages), "opening": begun, "state": dict(self.state)}

    def become(self, other: Conversation) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))

    def count(self, name: str, value: float) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + value

    def lap(self) -> float:
        """Seconds since it was last handed over."""
        before, self.since = self.since, time.monotonic()
        return self.since - before


class Conversations:
    """How conversations go on, by the environments' answers, the chat format and the limits on turns and tokens."""

    def __init__(
        self,
        pool: Environments,
        chat: ChatFormat,
        settings: EnvSettings,
        *,
        max_new_tokens: int,
        context: int,
        rewards: bool = True,
        encode: Callable[[str], Sequence[int]] = lambda text: (),
        system: str | None = None,
        threshold: float = 0.5,
        wrong: float = 0.0,
        vocabulary: int = 2**31 - 1,
    ) -> None:
        """`context` limits prompt and response together. `rewards`: whether the environment gives rewards. `encode`
        tokenizes text without special tokens. `system` is added to conversations that have no system message. Episodes
        are correct with a reward above `threshold`; those that fail get `wrong`. The model has `vocabulary` tokens."""
        self.pool, self.chat, self._settings = pool, chat, settings
        self._max_new_tokens, self.context, self._system = max_new_tokens, context, system
        self._encode, self._vocabulary = encode, vocabulary
        self.rewards, self._threshold, self._wrong = rewards, threshold, wrong
        self.reward_weight, self.max_error_share = settings.reward_weight, settings.max_error_share
        self.cut_turns_continue = False
        """For benchmarks: a turn that reaches `env.max_turn_tokens` goes to the environment like any other."""

    # Beginning.

    def new(self, request: Request) -> list[Conversation]:
        """The conversations of a group, which is to be requested like this."""
        return [self.fresh(index, request.seed) for index in range(request.count)]

    def fresh(self, index: int, seed: int) -> Conversation:
        return Conversation(self.pool.new_key(), index, seed, Trajectory.nothing(index))

    def open(self, conversation: Conversation, prompt: Prompt) -> Future[Any]:
        conversation.since = time.monotonic()
        context = (self.context,) if self.pool.takes_tokens else ()
        return self.pool.open(conversation.key, prompt, conversation.seed, *context)

    def opened(self, conversation: Conversation, result: Result) -> None:
        """Takes the environment's opening; a failure ends the conversation."""
        conversation.count("env_wait_s", conversation.lap())
        if isinstance(result, EpisodeFailure):
            self._fail(conversation, result)
            return
        assert isinstance(result, Opening)
        result = replace(result, messages=with_system(result.messages, self._system))
        try:
            self._begin(conversation, result)
        except UNREADABLE as error:
            self._fail(conversation, EpisodeFailure("error", f"its messages cannot be rendered: {describe(error)}"))

    def _begin(self, conversation: Conversation, opening: Opening) -> None:
        """Begins a trajectory."""
        conversation.messages, conversation.tools = list(opening.messages), opening.tools
        if not conversation.turns:
            conversation.opening = opening.messages
        ids = list(opening.prompt_ids) or self.chat.prompt(opening.messages, opening.tools)
        conversation.limit = opening.max_tokens
        if self._has_foreign(conversation, ids):
            return
        if not 0 < len(ids) < self.context:
            why = f"the prompt has {len(ids)} tokens, of a context of {self.context} (data.max_prompt_tokens)"
            self._fail(conversation, EpisodeFailure("too_long", why))
            return
        conversation.trajectory = Trajectory.nothing(conversation.index).replace(prompt_ids=ids)

    def _has_foreign(self, conversation: Conversation, ids: Sequence[int]) -> bool:
        """Ends a conversation with tokens that the model does not have, as an agent with another tokenizer sends."""
        if (last := max(ids, default=0)) < self._vocabulary:
            return False
        why = f"its prompt has the token {last}, and the model has those from 0 to {self._vocabulary - 1}"
        self._fail(conversation, EpisodeFailure("error", why))
        return True

    # With the engine.

    def request(self, conversation: Conversation, whole: Request) -> Request:
        """The request for its next turn; `whole` is that of its group."""
        trajectory, index = conversation.trajectory, conversation.index
        has_tokens = len(trajectory.token_ids) > 0
        seed = whole.seed if not conversation.forks else derive_seed(whole.seed, "fork", len(conversation.forks))
        return replace(
            whole,
            id=f"{whole.id}.{index}.{conversation.turns}",
            prompt_ids=trajectory.prompt_ids,
            seed=seed,
            params=replace(whole.params, max_new_tokens=len(trajectory.token_ids) + self._room(conversation)),
            partial=(trajectory,) if has_tokens else (),
            new=() if has_tokens else (index,),
            continues=conversation.turns + 1 < self._settings.max_turns,
        )

    def _room(self, conversation: Conversation) -> int:
        """Tokens that the next turn may have; 0 or less if a limit is reached."""
        trajectory = conversation.trajectory
        return min(
            self._max_new_tokens - conversation.finished_tokens,
            self.context - len(trajectory.prompt_ids) - len(trajectory.token_ids),
            *(limit for limit in (self._settings.max_turn_tokens, conversation.limit) if limit is not None),
        )

    def end_turn(self, conversation: Conversation, sample: Trajectory) -> Future[Any] | None:
        """Takes a turn from the engine and hands it to the environment; None: the conversation has ended."""
        before = conversation.trajectory
        start = len(before.token_ids)
        parsed = self.chat.parse(sample.token_ids[start:].tolist(), conversation.tools)
        conversation.turns += 1
        tokens: dict[str, Any] = {}
        if self.pool.takes_tokens:
            tokens["token_ids"] = tuple(sample.token_ids[start:].tolist())
            tokens["logps"] = tuple(sample.logps[start:].tolist())
            tokens["prompt_ids"] = (*before.prompt_ids.tolist(), *before.token_ids.tolist())
        calls = tuple(
            call if call.id else replace(call, id=f"call_{conversation.turns}_{number}")
            for number, call in enumerate(parsed.tool_calls)
        )
        turn = AssistantTurn(
            parsed.text,
            calls,
            sample.finish_reason or "stop",
            conversation.turns,
            reasoning=parsed.reasoning,
            **tokens,
        )
        message = malformed_as_text(turn).message if self.pool.takes_tokens else turn.message
        conversation.messages.append(message)
        conversation.trajectory = sample.replace(
            text=parsed.text,
            finish_reason=None,
            index=conversation.index,
            prompt_ids=before.prompt_ids,
            turns=(*before.turns, Turn(start, len(sample.token_ids), "policy", conversation.lap())),
            messages=(*before.messages, message),
        )
        conversation.cut = sample.truncated and not self.cut_turns_continue
        if conversation.cut:
            return self.end(conversation, "length")
        return self.pool.step(conversation.key, turn)

    # With the environment.

    def answer(self, conversation: Conversation, result: Result) -> Future[Any] | None:
        """Takes the environment's answer to a turn, after which the conversation goes on, unless it has ended. Returns
        the last reward, if a limit ends it."""
        waited = conversation.lap()
        conversation.count("env_wait_s", waited)
        if isinstance(result, EpisodeFailure):
            self._fail(conversation, result)
            return None
        assert isinstance(result, Observation)
        self._reward(conversation, result)
        if result.done or conversation.ends is not None:
            self._finish(conversation, conversation.ends or "stop")
            return None
        if conversation.turns >= self._settings.max_turns:
            return self.end(conversation, "turns")
        before, forks = conversation.trajectory, len(conversation.forks)
        messages, tools = [*conversation.messages], conversation.tools
        try:
            self._observe(conversation, result, waited)
        except (UserError, *UNREADABLE) as error:
            self._fail(conversation, EpisodeFailure("error", f"its messages cannot be rendered: {describe(error)}"))
        if conversation.verdict is None and self._room(conversation) <= 0:
            # The policy does not see what it cannot answer.
            conversation.trajectory, conversation.forks = before, conversation.forks[:forks]
            conversation.messages, conversation.tools = messages, tools
            return self.end(conversation, "length")
        return None

    def end(self, conversation: Conversation, reason: FinishReason) -> Future[Any] | None:
        """Ends a conversation by a limit: asks the environment for its last reward and state, if it has them."""
        conversation.ends = reason
        if self.rewards or self.pool.has_state:
            return self.pool.result(conversation.key)
        self._finish(conversation, reason)
        return None

    def _reward(self, conversation: Conversation, observation: Observation) -> None:
        trajectory, reward = conversation.trajectory, float(observation.reward)
        conversation.count("env_reward", reward)
        conversation.count("tool_calls", observation.tool_calls)
        conversation.count("tool_errors", observation.tool_errors)
        if observation.correct is not None:
            conversation.correct = observation.correct
        if observation.state:
            conversation.state = observation.state
        if reward and trajectory.turns:
            last = replace(trajectory.turns[-1], reward=trajectory.turns[-1].reward + reward)
            conversation.trajectory = trajectory.replace(turns=(*trajectory.turns[:-1], last))

    def _observe(self, conversation: Conversation, observation: Observation, seconds: float) -> None:
        """Appends what the environment says, or forks."""
        conversation.limit = observation.max_tokens
        trajectory = conversation.trajectory
        before = [*trajectory.prompt_ids.tolist(), *trajectory.token_ids.tolist()]
        if observation.prompt_ids:
            ids = list(observation.prompt_ids)
            if self._has_foreign(conversation, ids):
                return
            if ids[: len(before)] != before:
                self._fork(conversation, Opening((), (), tuple(ids)))
            else:
                self._append(conversation, ids[len(before) :], (), seconds)
            return
        if observation.inline:
            said = {"role": "environment", "content": observation.text}
            self._append(conversation, self._encode(observation.text), [said], seconds)
            return
        told = observation.conversation
        if told is None:
            messages = list(observation.messages) or [{"role": "user", "content": observation.text}]
        elif told.prompt_ids:
            self._observe(conversation, replace(observation, prompt_ids=told.prompt_ids), seconds)
            return
        else:
            told = replace(told, messages=with_system(told.messages, self._system))
            known = len(conversation.messages)
            follows = same_messages(conversation.messages, told.messages[:known]) and same(
                told.tools, conversation.tools
            )
            messages = list(told.messages[known:]) if follows else []
            if not messages or any(message.get("role") == "assistant" for message in messages):
                self._fork(conversation, told)
                return
        suffix = self.chat.suffix(before, messages, conversation.tools)
        if suffix is None:
            self._fork(conversation, Opening((*conversation.messages, *messages), conversation.tools))
        else:
            self._append(conversation, suffix, messages, seconds)

    def _append(
        self, conversation: Conversation, ids: Sequence[int], messages: Sequence[Message], seconds: float
    ) -> None:
        before = conversation.trajectory
        start = len(before.token_ids)
        conversation.messages += messages
        if not ids:  # the next turn of the policy follows its last one
            return
        conversation.trajectory = before.then_observed(ids).replace(
            turns=(*before.turns, Turn(start, start + len(ids), "environment", seconds)),
            messages=(*before.messages, *messages),
        )
        if conversation.observed_tokens > self._settings.max_observation_tokens:
            conversation.limit = 0

    def _fork(self, conversation: Conversation, opening: Opening) -> None:
        aside = conversation.trajectory.replace(finish_reason="stop")
        limit = conversation.limit if opening.max_tokens is None else opening.max_tokens
        self._begin(conversation, replace(opening, max_tokens=limit))
        if conversation.verdict is None:
            conversation.forks.append(aside)

    # After a restart of the run.

    def replay(
        self,
        conversation: Conversation,
        prompt: Prompt,
        saved: Trajectory | None,
        with_engine: bool,
        ends: tuple[FinishReason, bool] | None,
    ) -> Replay:
        """Brings a new conversation to where a saved one was, by giving its turns to a new environment, whose answers
        have to be the same. Yields calls of the environment and gets their results. Returns whether it is there, and
        the answer that is missing, unless it is with the engine."""
        if not self.pool.deterministic or conversation.forks:
            return False, None
        self.opened(conversation, (yield self.open(conversation, prompt)))
        if conversation.verdict is not None or saved is None:
            return conversation.verdict is None, None
        if not np.array_equal(conversation.trajectory.prompt_ids, saved.prompt_ids):
            return False, None
        turns = saved.turns
        answer: Future[Any] | None = None
        for number, turn in enumerate(turns):
            if turn.author == "policy":
                is_last = number == len(turns) - 1
                cut = is_last and ends is not None and ends[1]
                answer = self.end_turn(
                    conversation, saved.until(turn.end).replace(finish_reason="length" if cut else "stop")
                )
                if is_last and not with_engine and (ends is None or cut):
                    break
                assert answer is not None
                answer = self.answer(conversation, (yield answer))
                if conversation.verdict is not None:
                    return False, None
        own = conversation.trajectory.token_ids
        if conversation.forks or not np.array_equal(own, saved.token_ids[: len(own)]):
            return False, None
        conversation.trajectory = conversation.trajectory.replace(turns=turns)
        return True, answer

    def restart(
        self, conversations: Sequence[Conversation], prompt: Prompt, whole: Request
    ) -> Iterator[Request | None]:
        """Begins conversations anew. Yields their first requests; None for one whose environment fails."""
        self.close(conversations)
        for conversation in conversations:
            conversation.become(self.fresh(conversation.index, conversation.seed))
        opening = [self.open(conversation, prompt) for conversation in conversations]
        for conversation, future in zip(conversations, opening, strict=True):
            self.opened(conversation, future.result())
            yield None if conversation.verdict is not None else self.request(conversation, whole)

    # Ending.

    def _finish(self, conversation: Conversation, reason: FinishReason) -> None:
        reward = conversation.counts.get("env_reward", 0.0)
        correct = reward > self._threshold if conversation.correct is None else conversation.correct
        self._set_verdict(conversation, reason, Verdict(reward, correct, "correct" if correct else "wrong"))

    def _fail(self, conversation: Conversation, failure: EpisodeFailure) -> None:
        """Ends an episode whose environment failed."""
        detail = f"{failure.reason}: {failure.detail}".removesuffix("\n")
        verdict = Verdict(self._wrong, False, "timeout" if failure.reason == "timeout" else "error", detail=detail)
        conversation.counts["env_failed"] = 1.0
        self._set_verdict(conversation, "stop", verdict)

    def _set_verdict(self, conversation: Conversation, reason: FinishReason, verdict: Verdict) -> None:
        conversation.verdict = verdict
        conversation.counts |= {"turns": conversation.turns, "forks": len(conversation.forks)}
        conversation.trajectory = conversation.trajectory.replace(
            finish_reason=reason,
            index=conversation.index,
            scalars=conversation.counts,
            episode=conversation.for_verifier(),
        )
        self.pool.close_episodes([conversation.key])

    def close(self, conversations: Sequence[Conversation]) -> None:
        """Gives up conversations."""
        self.pool.close_episodes([conversation.key for conversation in conversations])
