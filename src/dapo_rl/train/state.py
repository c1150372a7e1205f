"""The shape of state.json, so that one that is not ours is an error when it is read, and not in the middle of a step.

A checksum tells what was damaged, not what was written by somebody else. Keys that are not named here are let pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dapo_rl.base.quote import cut
from dapo_rl.config import Config

LARGEST = 2**53
Count = Annotated[int, Field(ge=0, lt=LARGEST)]
Word = Annotated[int, Field(ge=0, lt=2**32)]
Finite = Annotated[float, Field(ge=-1e30, le=1e30)]
Seen = Annotated[float, Field(ge=0, le=1e9)]
HexText = Annotated[str, AfterValidator(lambda text: bytes.fromhex(text).hex())]


class _State(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class _Progress(_State):
    step: Count
    wall_seconds: Annotated[float, Field(ge=0, le=1e12)]
    evaluations: list[Annotated[list[float], Field(min_length=2, max_length=2)]]
    ledger: dict[str, Count]
    metrics: dict[str, float | None]


class _Stream(_State):
    prompts: Count
    fingerprint: str
    seed: int
    drawn: Count
    front: list[str]
    resting: dict[str, Count]


class _Sample(_State):
    token_ids: Annotated[list[Count], Field(min_length=1)]
    logps: list[Finite]
    text: str
    finish_reason: Literal["stop", "length"]
    versions: Annotated[list[Count], Field(min_length=2, max_length=2)]


class _Verdict(_State):
    model_config = ConfigDict(extra="forbid")  # it is made of all that is there
    score: Finite
    correct: bool
    status: Literal["correct", "wrong", "unparseable", "timeout", "error"]
    answer: str | None
    detail: str


class _Carried(_State):
    draw: Count
    prompt: str
    samples: list[_Sample]
    verdicts: list[_Verdict]


class _Flight(_State):
    draw: Count
    prompt: str
    version: Count
    samples: list[_Sample | None]


class _Acceptance(_State):
    overall: Annotated[list[Seen], Field(min_length=2, max_length=2)]
    sources: dict[str, Annotated[list[Seen], Field(min_length=2, max_length=2)]]


class _Sampler(_State):
    next_draw: Count
    acceptance: _Acceptance
    carried: list[_Carried]
    flights: list[_Flight]


class _Params(_State):
    model_config = ConfigDict(extra="forbid")
    max_new_tokens: Count
    temperature: Annotated[float, Field(ge=0, le=1e9)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Count
    min_p: Annotated[float, Field(ge=0, le=1)]
    stop: list[str]
    ignore_eos: bool


class _Request(_State):
    model_config = ConfigDict(extra="forbid")
    id: str
    prompt_ids: Annotated[list[Count], Field(min_length=1)]
    count: Count
    params: _Params
    seed: Annotated[int, Field(ge=0, lt=2**63)]


class _Begun(_State):
    model_config = ConfigDict(extra="forbid")
    index: Count
    token_ids: Annotated[list[Count], Field(min_length=1)]
    logps: list[Finite]
    version: Count


class _Unfinished(_State):
    request: _Request
    next_index: Count
    begun: list[_Begun]


class _Engine(_State):
    version: Count
    room: Annotated[list[Count], Field(min_length=2, max_length=2)] = [0, 0]
    work: list[_Unfinished]


class _Random(_State):
    python: tuple[Literal[3], Annotated[list[Word], Field(min_length=625, max_length=625)], float | None]
    numpy: tuple[
        Literal["MT19937"],
        Annotated[list[Word], Field(min_length=624, max_length=624)],
        Annotated[int, Field(ge=0, le=624)],
        Annotated[int, Field(ge=0, le=1)],
        float,
    ]
    torch: HexText
    cuda: list[HexText]


class _Log(_State):
    lines: Count
    bytes: Count


class _Everything(_State):
    step: Count
    progress: _Progress
    stream: _Stream
    sampler: _Sampler
    engine: _Engine
    random: _Random
    log: _Log


def check_state(state: Any, step: int, config: Config, vocabulary: int) -> None:
    """A ValueError that says in one line where a state is not one of this run at this step."""
    try:
        known = _Everything.model_validate(_lists(state))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(cut(f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}", 300)) from None
    for where, wrong in _contradictions(known, step, config, vocabulary):
        if wrong:
            raise ValueError(f"{where} does not fit the rest")


def _contradictions(state: _Everything, step: int, config: Config, vocabulary: int) -> Iterable[tuple[str, bool]]:
    """What has the right shape and cannot be."""
    sampler, engine = state.sampler, state.engine
    yield "step", state.step != step or state.progress.step != step
    yield "progress.evaluations", any(not 0 <= at <= step or at != int(at) for at, _ in state.progress.evaluations)
    yield "progress.evaluations", any(share == share and not 0 <= share <= 1 for _, share in state.progress.evaluations)
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


def _lists(state: Any) -> Any:
    """Of tuples JSON makes lists; pydantic, when strict, wants to see tuples where there are several types."""
    if isinstance(state, Mapping) and isinstance(random := state.get("random"), Mapping):
        tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in random.items()}
        return {**state, "random": {**tuples, "cuda": random.get("cuda")}}
    return state
