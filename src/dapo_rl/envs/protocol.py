"""The `Environment` protocol: one episode's other half, and the records that pass between it and the policy.

    class Guess:
        deterministic = True

        def open(self, prompt, seed):
            self.secret = random.Random(seed).randint(0, 9)
            return "Guess my number, 0 to 9."

        def step(self, turn):
            guess = turn.text.strip()
            if guess == str(self.secret):
                return 1.0                                  # a number ends the episode with this reward
            return "higher" if guess < str(self.secret) else "lower"   # a text is the next message to the policy

Methods may be `async def`. Environments run in worker processes, with limits on the time and memory of every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from dapo_rl.types import FinishReason, Prompt, Verdict

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and for tools `tool_calls`, `name`, `tool_call_id`."""
ToolSchema = Mapping[str, Any]
"""A tool in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""
Messages = Sequence[Message]
Tools = Sequence[ToolSchema]
FailureReason = Literal["timeout", "crashed", "too_long", "error", "lost"]
"""`lost`: its process was ended by another episode, or with its node. That is not the environment's fault."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How an episode begins."""

    messages: tuple[Message, ...] = ()
    """The whole conversation before the first turn."""
    tools: tuple[ToolSchema, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    """Instead of `messages`: all tokens before the first turn, for agents that render the conversation themselves."""
    max_tokens: int | None = None
    """A limit on the first turn, as agents ask for."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str = ""
    """Why the call cannot be made, such as `not valid JSON: …`; it was malformed."""
    raw: str = ""
    """The text of a malformed call, if it is not in the turn's text."""


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """A turn of the policy."""

    text: str
    """Its text without tool calls and special tokens."""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"
    number: int = 1
    """Counts the turns of the episode from 1."""
    token_ids: tuple[int, ...] = ()
    logps: tuple[float, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    """The tokens before it. Only environments that declare `takes_tokens = True` get the tokens; their `open` also gets
    the model's context."""
    reasoning: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a chat message in OpenAI's form."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [tool_call(call.id, call.name, dict(call.arguments)) for call in self.tool_calls]
        return message


def tool_schema(name: str, description: str | None, parameters: Any) -> ToolSchema:
    return {
        "type": "function",
        "function": {"name": name, "description": description or "", "parameters": parameters},
    }


def tool_call(number: str, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call in OpenAI's form."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers to a turn."""

    text: str = ""
    """Becomes a user message, or the result of the turn's tool call."""
    reward: float = 0.0
    """Reward of the turn. The rewards of an episode's turns add up to its reward."""
    done: bool = False
    """Ends the episode; the text is then not shown to the policy."""
    inline: bool = False
    """Appends the text to the policy's turn as it is, outside of the chat template; the policy goes on after it."""
    messages: tuple[Message, ...] = ()
    """Instead of `text`: the messages to append, for example several tool results."""
    conversation: Opening | None = None
    """Instead of `text`: the whole conversation for the next turn, for agents that write their own. If it does not
    continue the last one, the episode forks: another trajectory begins, with the same reward."""
    prompt_ids: tuple[int, ...] = ()
    """Instead of `text`: all tokens before the next turn, for agents that render the conversation themselves."""
    tool_calls: int = 0
    """Tool calls made in this step, for the metrics."""
    tool_errors: int = 0
    """How many of them were malformed, failed or raised an exception."""
    correct: bool | None = None
    """Of the last step: whether the episode counts as solved; by default, if its reward is above `reward.threshold`."""
    max_tokens: int | None = None
    """A limit on the next turn, as agents ask for."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Of the last step: what reward functions get of the environment (TRL's `environments`), as JSON has it."""


Answer = Observation | Verdict | str | float
"""A text is an `Observation` of it; a number, or a verdict, ends the episode."""


class Environment(Protocol):
    """One episode. Users' classes need not inherit from this: `open` and `close` are optional.

    - `deterministic = True`: opened again with the same prompt and seed, and given the same turns, it answers the same.
      A resumed run then replays its unfinished episodes, and checks that they do.
    - `stateless = True`: `step` depends on its turn alone, so that processes can be shared.
    - `rewards = False`: it gives no rewards; `reward.verifier` does.
    """

    def open(self, prompt: Prompt, seed: int) -> Opening | str | None:
        """Begins the episode. A text is appended to the prompt's last message; None leaves the prompt as it is. All
        episodes of a group get the same prompt and seed."""
        ...

    def step(self, turn: AssistantTurn) -> Answer: ...

    def result(self) -> float | Verdict | Observation | None:
        """Called when a limit ends the episode: its last reward. Optional."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EpisodeFailure:
    """An episode that ended because its environment failed."""

    reason: FailureReason
    detail: str


class ObservationTooLongError(Exception):
    """An environment answers with more than a policy could read: its episode ends."""


class InvalidAnswerError(ValueError):
    """An environment answers with something that it must not, such as the reward NaN: its episode ends."""


class AgentError(Exception):
    """An agent failed; one line says why. Its cause is the agent's own exception, if it raised one."""
