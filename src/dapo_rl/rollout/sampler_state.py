"""The sampler's state between steps: `sampler.json`, with the tokens in `samples.safetensors`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dapo_rl.base.format import counted
from dapo_rl.base.saved import AsTuple, Count, Finite, Saved, parse_state, read_state, refuse, restoring, write_state
from dapo_rl.rewards.judge import fault_of
from dapo_rl.rollout.acceptance import Acceptance
from dapo_rl.rollout.engine import Begun, Request
from dapo_rl.rollout.flights import Flight
from dapo_rl.rollout.grading import Grading, Observed
from dapo_rl.types import FinishReason, Group, Prompt, RewardPart, Sample, Verdict

FILE = "sampler.json"
TOKENS = "samples.safetensors"
Tokens = Sample | Begun
"""Both have ids, log-probabilities, versions and a mask."""


@dataclass(frozen=True, slots=True)
class SamplerState:
    next_draw: int
    acceptance: Acceptance
    grading: Grading
    carried: tuple[Group, ...]
    """Good groups that wait for the next step."""
    flights: tuple[Flight, ...]
    """Incomplete groups, in the order in which they are resubmitted to the engine."""

    def write(self, directory: Path) -> None:
        arrived = [[sample for sample in flight.samples if sample is not None] for flight in self.flights]
        state = {
            "next_draw": self.next_draw,
            "acceptance": self.acceptance.state(),
            "grading": asdict(self.grading),
            "carried": [
                {
                    "draw": group.draw,
                    "prompt": group.prompt.id,
                    "finish_reasons": [sample.finish_reason for sample in group.samples],
                    "verdicts": [asdict(verdict) for verdict in group.verdicts],
                }
                for group in self.carried
            ],
            "flights": [
                {
                    "draw": flight.draw,
                    "prompt": flight.prompt.id,
                    "version": flight.version,
                    "arrived": [i for i, sample in enumerate(flight.samples) if sample is not None],
                    "finish_reasons": [sample.finish_reason for sample in samples],
                    "begun": [begun.index for begun in flight.request.begun],
                    "new": list(flight.request.starting),
                }
                for flight, samples in zip(self.flights, arrived, strict=True)
            ],
        }
        tokens: list[Tokens] = [sample for group in self.carried for sample in group.samples]
        for flight, samples in zip(self.flights, arrived, strict=True):
            tokens += [*samples, *flight.request.begun]
        write_state(directory / FILE, state)
        _write_tokens(directory / TOKENS, tokens)

    @classmethod
    def read(
        cls,
        directory: Path,
        find: Callable[[str], Prompt],
        request: Callable[[int, Prompt], Request],
        group_size: int,
        longest: int,
        vocabulary: int,
    ) -> SamplerState:
        """`find` returns the prompt with an id, `request` the full request of a draw."""
        with restoring(directory / FILE):
            state = parse_state(SavedSampler, read_state(directory / FILE))
            refuse(state.misfits(group_size))
        with restoring(directory / TOKENS):
            tokens = _TokenFile(directory / TOKENS, longest, vocabulary)
            if tokens.count != state.samples:
                raise ValueError(f"it has {counted(tokens.count, 'sample')} instead of {state.samples}")
        with restoring(directory / FILE):
            carried = tuple(
                Group(
                    entry.draw,
                    find(entry.prompt),
                    tuple(tokens.sample(reason) for reason in entry.finish_reasons),
                    tuple(verdict.restored() for verdict in entry.verdicts),
                )
                for entry in state.carried
            )
            flights = tuple(_flight(entry, find(entry.prompt), request, tokens, group_size) for entry in state.flights)
        acceptance = Acceptance.from_state(state.acceptance.model_dump())
        return cls(state.next_draw, acceptance, state.grading.restored(), carried, flights)


def _flight(
    entry: _Flight,
    prompt: Prompt,
    request: Callable[[int, Prompt], Request],
    tokens: _TokenFile,
    group_size: int,
) -> Flight:
    samples: list[Sample | None] = [None] * group_size
    for index, reason in zip(entry.arrived, entry.finish_reasons, strict=True):
        samples[index] = tokens.sample(reason)
    begun = tuple(tokens.begun(index) for index in entry.begun)
    whole = request(entry.draw, prompt)
    return Flight(entry.draw, prompt, entry.version, replace(whole, begun=begun, new=tuple(entry.new)), samples)


def _write_tokens(path: Path, samples: Sequence[Tokens]) -> None:
    texts = [sample.text.encode("utf-8", "surrogatepass") if isinstance(sample, Sample) else b"" for sample in samples]

    def joined(parts: Iterable[np.ndarray], dtype: type) -> np.ndarray:  # type: ignore[type-arg]
        return np.concatenate([np.empty(0, dtype), *parts])

    save_file(
        {
            "lengths": np.array([len(sample.token_ids) for sample in samples], np.int64),
            "token_ids": joined((sample.token_ids for sample in samples), np.int32),
            "logps": joined((sample.logps for sample in samples), np.float32),
            "versions": joined((sample.versions for sample in samples), np.int32),
            "mask": joined((sample.mask for sample in samples), np.bool_),
            "text_lengths": np.array([len(text) for text in texts], np.int64),
            "texts": np.frombuffer(b"".join(texts), np.uint8),
        },
        path,
    )


class _TokenFile:
    """Reads the samples of a file one after the other."""

    def __init__(self, path: Path, longest: int, vocabulary: int) -> None:
        try:
            arrays = load_file(path)
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        kinds = {"lengths": "int64", "token_ids": "int32", "logps": "float32", "versions": "int32", "mask": "bool"}
        kinds |= {"text_lengths": "int64", "texts": "uint8"}
        if {name: str(array.dtype) for name, array in arrays.items()} != kinds:
            raise ValueError("it has the wrong columns")
        if any(array.ndim != 1 for array in arrays.values()):
            raise ValueError("its columns are not one-dimensional")
        self._arrays = arrays
        lengths, text_lengths = arrays["lengths"], arrays["text_lengths"]
        count = len(arrays["token_ids"])
        fits = len(lengths) == len(text_lengths) and (text_lengths >= 0).all()
        fits = fits and ((lengths > 0) & (lengths <= longest)).all() and lengths.sum() == count
        fits = fits and (text_lengths <= len(arrays["texts"])).all() and text_lengths.sum() == len(arrays["texts"])
        if not fits or any(len(arrays[name]) != count for name in ("logps", "versions", "mask")):
            raise ValueError("lengths are inconsistent")
        if count and not (arrays["token_ids"].min() >= 0 and arrays["token_ids"].max() < vocabulary):
            raise ValueError("it has tokens outside the vocabulary")
        if not np.isfinite(arrays["logps"]).all() or (count and arrays["versions"].min() < 0):
            raise ValueError("it has invalid log-probabilities or versions")
        self._ends, self._text_ends = np.cumsum(lengths).tolist(), np.cumsum(text_lengths).tolist()
        self.count, self._next = len(lengths), 0

    def sample(self, finish_reason: FinishReason) -> Sample:
        place, text = self._take()
        columns = [self._arrays[name][place] for name in ("token_ids", "logps", "versions", "mask")]
        return Sample(columns[0], columns[1], text, finish_reason, columns[2], columns[3])

    def begun(self, index: int) -> Begun:
        place, _ = self._take()
        return Begun(index, *(self._arrays[name][place] for name in ("token_ids", "logps", "versions", "mask")))

    def _take(self) -> tuple[slice, str]:
        i = self._next
        self._next += 1
        place = slice(self._ends[i - 1] if i else 0, self._ends[i])
        text = self._arrays["texts"][self._text_ends[i - 1] if i else 0 : self._text_ends[i]]
        return place, text.tobytes().decode("utf-8", "surrogatepass")


_Seen = Annotated[float, Field(ge=0, le=1e9)]
_Rate = Annotated[list[_Seen], Field(min_length=2, max_length=2)]


class _Verdict(Saved):
    score: Finite
    correct: bool
    status: Literal["correct", "wrong", "unparseable", "timeout", "error"]
    answer: str | None
    detail: str
    parts: list[Annotated[tuple[str, Finite, Finite], AsTuple]] = Field(default_factory=list)
    extra: dict[str, str | int | Finite | bool | None] = Field(default_factory=dict)
    metrics: dict[str, Annotated[tuple[float, Count], AsTuple]] = Field(default_factory=dict)

    def restored(self) -> Verdict:
        parts = tuple(RewardPart(*part) for part in self.parts)
        verdict = Verdict(
            self.score, self.correct, self.status, self.answer, self.detail, parts, self.extra, self.metrics
        )
        if fault := fault_of(verdict):
            raise ValueError(fault.removeprefix("returned "))
        return verdict


class _Carried(Saved):
    draw: Count
    prompt: str
    finish_reasons: list[Literal["stop", "length"]]
    verdicts: list[_Verdict]


class _Flight(Saved):
    draw: Count
    prompt: str
    version: Count
    arrived: list[Count]
    finish_reasons: list[Literal["stop", "length"]]
    begun: list[Count]
    new: list[Count]


class _Acceptance(Saved):
    overall: _Rate
    sources: dict[str, _Rate]


class _Grading(Saved):
    correct: Finite | None = None
    wrong: Finite | None = None
    graded: bool = False
    rewards: dict[str, Annotated[tuple[Finite, Finite, Finite], AsTuple]] = Field(default_factory=dict)

    def restored(self) -> Grading:
        rewards = {name: Observed(*seen) for name, seen in self.rewards.items()}
        return Grading(self.correct, self.wrong, self.graded, rewards)


class SavedSampler(Saved):
    next_draw: Count
    acceptance: _Acceptance
    grading: _Grading = _Grading()
    carried: list[_Carried]
    flights: list[_Flight]

    @property
    def samples(self) -> int:
        carried = sum(len(group.finish_reasons) for group in self.carried)
        return carried + sum(len(flight.arrived) + len(flight.begun) for flight in self.flights)

    def contradictions(self) -> Iterable[tuple[str, bool]]:
        kept, seen = self.acceptance.overall
        rates = [(kept, seen), *self.acceptance.sources.values()]
        yield "acceptance", seen < 1e-3 or any(kept > seen for kept, seen in rates)
        draws = [*(group.draw for group in self.carried), *(flight.draw for flight in self.flights)]
        yield "next_draw", len(set(draws)) < len(draws) or max(draws, default=-1) >= self.next_draw

    def misfits(self, group_size: int) -> Iterable[tuple[str, bool]]:
        """Entries that do not fit a run with groups of this size."""
        everyone = list(range(group_size))
        for group in self.carried:
            yield "carried", not len(group.finish_reasons) == len(group.verdicts) == group_size
        for flight in self.flights:
            yield "flights", sorted([*flight.arrived, *flight.begun, *flight.new]) != everyone
            yield "flights", len(flight.arrived) != len(flight.finish_reasons) or len(flight.arrived) == group_size
