"""Finished samples on their way from an engine to the driver: a few large arrays instead of many small ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dapo_rl.engines.protocol import Completion
from dapo_rl.types import BoolArray, FinishReason, FloatArray, IntArray, Sample

Done = tuple[int, Completion]
"""A finished sample with the number of its order."""


@dataclass(frozen=True, slots=True)
class PackedSamples:
    numbers: list[tuple[int, str, int]]
    """Of each sample: the number of its order, the id of its request, and its index."""
    ends: list[int]
    """Where the tokens of each sample end."""
    token_ids: IntArray
    logps: FloatArray
    texts: list[tuple[str, FinishReason]]
    versions: list[int | IntArray]
    """One number where all tokens of a sample have the same."""
    masks: list[bool | BoolArray]

    @classmethod
    def of(cls, done: Sequence[Done]) -> PackedSamples:
        samples = [completion.sample for _, completion in done]
        return cls(
            numbers=[(number, completion.request_id, completion.index) for number, completion in done],
            ends=np.cumsum([len(sample.token_ids) for sample in samples]).tolist(),
            token_ids=np.concatenate([np.empty(0, np.int32), *(sample.token_ids for sample in samples)]),
            logps=np.concatenate([np.empty(0, np.float32), *(sample.logps for sample in samples)]),
            texts=[(sample.text, sample.finish_reason) for sample in samples],
            versions=[_one_version(sample.versions) for sample in samples],
            masks=[True if sample.mask.all() else sample.mask for sample in samples],
        )

    def unpack(self) -> Iterator[Done]:
        """The samples, with memory of their own: the arrays are in Ray's object store."""
        start = 0
        entries = zip(self.numbers, self.ends, self.texts, self.versions, self.masks, strict=True)
        for (number, name, index), end, (text, reason), versions, mask in entries:
            sample = Sample(
                self.token_ids[start:end].copy(),
                self.logps[start:end].copy(),
                text,
                reason,
                versions if isinstance(versions, int) else versions.copy(),  # type: ignore[arg-type]
                mask if isinstance(mask, bool) else mask.copy(),  # type: ignore[arg-type]
            )
            start = end
            yield number, Completion(name, index, sample)


def _one_version(versions: IntArray) -> int | IntArray:
    first = int(versions[0]) if len(versions) else 0
    return first if (versions == first).all() else versions
