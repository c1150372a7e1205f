"""A group between the draw of its prompt and its verdicts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dapo_rl.engines.protocol import Completion, Request
from dapo_rl.rollout.conversation import Conversation
from dapo_rl.types import Group, Prompt, Trajectory, Verdict

LIMIT = "max_new_tokens"
"""The scalar of a sample with its length limit, if that changes in a run."""


@dataclass(slots=True)
class InFlightGroup:
    """A group without all of its verdicts."""

    draw: int
    prompt: Prompt
    version: int
    """The version of the weights it started with."""
    request: Request
    """The request for its samples."""
    samples: list[Trajectory | None]
    """Samples whose episodes have ended."""
    conversations: list[Conversation] = field(default_factory=list)
    """Its episodes, if there is an environment."""
    turns: dict[str, Request] = field(default_factory=dict)
    """The requests that the engine works on, by their ids: its own, or those for turns of its conversations. While the
    engine does not hold them, the remaining work."""

    @property
    def finished_tokens(self) -> int:
        """Tokens in turns that have ended."""
        if self.conversations:
            return sum(conversation.finished_tokens for conversation in self.conversations)
        return sum(sample.written for sample in self.samples if sample is not None)

    @property
    def partial_tokens(self) -> int:
        """Tokens in turns that have not ended."""
        before = {c.index: c.trajectory.written for c in self.conversations}
        partial = [sample for request in self.turns.values() for sample in request.partial]
        return sum(sample.written - before.get(sample.index, 0) for sample in partial)

    @property
    def untouched(self) -> bool:
        """Whether none of its samples has tokens yet."""
        return not self.finished_tokens and not self.partial_tokens and all(s is None for s in self.samples)

    def group(self, verdicts: tuple[Verdict, ...] = ()) -> Group:
        """Its finished samples."""
        forks = tuple(fork for conversation in self.conversations for fork in conversation.forks)
        finished = (sample for sample in self.samples if sample is not None)
        samples = tuple(sample.replace(episode={}) if sample.episode else sample for sample in finished)
        if self.request.params.staged:
            limit = {LIMIT: float(self.request.params.max_new_tokens)}
            samples = tuple(sample.replace(scalars=limit) for sample in samples)
        return Group(self.draw, self.prompt, samples, verdicts, forks)

    @property
    def is_whole(self) -> bool:
        """Whether all its episodes have ended."""
        return all(sample is not None for sample in self.samples)

    def arrive(self, completion: Completion) -> bool:
        """Removes a sample from the request that it belongs to. Returns whether the request is complete."""
        index, name = completion.index, completion.request_id
        request = self.turns[name]
        if index not in request.indices:
            raise RuntimeError(f"the engine returned sample {index} of {name}, which was not requested")
        if not self.conversations:
            self.samples[index] = completion.sample
        partial = tuple(sample for sample in request.partial if sample.index != index)
        new = tuple(other for other in request.starting if other != index)
        if partial or new:
            self.turns[name] = replace(request, partial=partial, new=new)
        else:
            del self.turns[name]
        return name not in self.turns


@dataclass(frozen=True, slots=True)
class Unread:
    """A group of a paused batch that is with the verifier."""

    flight: InFlightGroup
    polls: int
    """Engine polls since it was complete; enough of them if its verdicts are due."""
    verdicts: tuple[Verdict, ...] | None
    """None: they are computed again."""
