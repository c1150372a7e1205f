"""The sampler and its engine as a part of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from dapo_rl.base.saved import Count, Finite, Saved, parse, read_state, refuse, restoring, write_state
from dapo_rl.config import Config
from dapo_rl.rollout.engine import Engine
from dapo_rl.rollout.sampler import Sampler

FILE = "sampler.json"
Seen = Annotated[float, Field(ge=0, le=1e9)]


class _Sample(Saved):
    token_ids: Annotated[list[Count], Field(min_length=1)]
    logps: list[Finite]
    text: str
    finish_reason: Literal["stop", "length"]
    versions: Annotated[list[Count], Field(min_length=2, max_length=2)]


class _Verdict(Saved):
    model_config = ConfigDict(extra="forbid")  # it is made of all that is there
    score: Finite
    correct: bool
    status: Literal["correct", "wrong", "unparseable", "timeout", "error"]
    answer: str | None
    detail: str


class _Carried(Saved):
    draw: Count
    prompt: str
    samples: list[_Sample]
    verdicts: list[_Verdict]


class _Flight(Saved):
    draw: Count
    prompt: str
    version: Count
    samples: list[_Sample | None]


class _Acceptance(Saved):
    overall: Annotated[list[Seen], Field(min_length=2, max_length=2)]
    sources: dict[str, Annotated[list[Seen], Field(min_length=2, max_length=2)]]


class _Sampler(Saved):
    next_draw: Count
    acceptance: _Acceptance
    carried: list[_Carried]
    flights: list[_Flight]


class _Params(Saved):
    model_config = ConfigDict(extra="forbid")
    max_new_tokens: Count
    temperature: Annotated[float, Field(ge=0, le=1e9)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Count
    min_p: Annotated[float, Field(ge=0, le=1)]
    stop: list[str]
    ignore_eos: bool


class _Request(Saved):
    model_config = ConfigDict(extra="forbid")
    id: str
    prompt_ids: Annotated[list[Count], Field(min_length=1)]
    count: Count
    params: _Params
    seed: Annotated[int, Field(ge=0, lt=2**63)]


class _Begun(Saved):
    model_config = ConfigDict(extra="forbid")
    index: Count
    token_ids: Annotated[list[Count], Field(min_length=1)]
    logps: list[Finite]
    version: Count


class _Unfinished(Saved):
    request: _Request
    next_index: Count
    begun: list[_Begun]


class _Engine(Saved):
    version: Count
    room: Annotated[list[Count], Field(min_length=2, max_length=2)] = Field(default_factory=lambda: [0, 0])
    work: list[_Unfinished]


class SavedSampling(Saved):
    sampler: _Sampler
    engine: _Engine


class SamplerPart:
    """What the next `fill` depends on."""

    def __init__(self, sampler: Sampler, engine: Engine, config: Config, vocabulary: int) -> None:
        self._sampler, self._engine, self._config, self._vocabulary = sampler, engine, config, vocabulary

    def save(self, directory: Path) -> None:
        write_state(directory / FILE, {"sampler": self._sampler.state(), "engine": self._engine.state()})

    def load(self, directory: Path) -> None:
        path = directory / FILE
        with restoring(path):
            state = read_state(path)
            check_sampling(state, self._config, self._vocabulary)
            self._sampler.restore(state["sampler"])
            self._engine.restore(state["engine"])


def check_sampling(state: Any, config: Config, vocabulary: int) -> None:
    """A ValueError that says in one line where a state is not one of this run."""
    refuse(_contradictions(parse(SavedSampling, state), config, vocabulary))


def _contradictions(state: SavedSampling, config: Config, vocabulary: int) -> Iterable[tuple[str, bool]]:
    """What has the right shape and cannot be."""
    sampler, engine = state.sampler, state.engine
    kept, seen = sampler.acceptance.overall
    rates = [(kept, seen), *sampler.acceptance.sources.values()]
    yield "sampler.acceptance", seen < 1e-3 or any(kept > seen for kept, seen in rates)
    groups: list[_Carried | _Flight] = [*sampler.carried, *sampler.flights]
    draws = [group.draw for group in groups]
    yield "sampler.next_draw", len(set(draws)) < len(draws) or max(draws, default=-1) >= sampler.next_draw
    yield "sampler: the size of a group", any(len(g.samples) != config.sampling.group_size for g in groups)
    yield "sampler.carried: its verdicts", any(len(g.samples) != len(g.verdicts) for g in sampler.carried)
    longest = config.sampling.max_new_tokens
    finished = [sample for group in groups for sample in group.samples if sample is not None]
    samples: list[_Sample | _Begun] = [*finished, *(sample for entry in engine.work for sample in entry.begun)]
    for sample in samples:
        yield "a sample's tokens", len(sample.token_ids) != len(sample.logps) or max(sample.token_ids) >= vocabulary
        yield "a sample's length", len(sample.token_ids) > longest
    for entry in engine.work:
        yield "engine.work: a prompt", max(entry.request.prompt_ids) >= vocabulary
        yield "engine.work: a prompt", len(entry.request.prompt_ids) > config.data.max_prompt_tokens
        yield "engine.work: its parameters", entry.request.params.max_new_tokens != longest
        yield "engine.work: its next sample", entry.next_index > config.sampling.group_size
    yield "engine.room", engine.room[0] > config.longest_sample + 512 or engine.room[1] > longest
    yield "engine.work", len(engine.work) != len(sampler.flights)
    yield "engine.work", _in_flight(sampler.flights) != _at_work(engine.work, config.sampling.group_size)


def _in_flight(flights: Iterable[_Flight]) -> dict[str, list[int]]:
    """What the sampler waits for: the samples of each request that are not there yet."""
    return {f"draw-{flight.draw}": [i for i, s in enumerate(flight.samples) if s is None] for flight in flights}


def _at_work(work: Iterable[_Unfinished], count: int) -> dict[str, list[int]]:
    """What the engine goes on with. A request for nothing is waited for without end."""
    return {
        entry.request.id: sorted([*(begun.index for begun in entry.begun), *range(entry.next_index, count)]) or [-1]
        for entry in work
        if entry.request.count == count
    }
