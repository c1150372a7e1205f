"""Sequences that have left their slots, but whose keys and values are still in the cache, in case they are continued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dapo_rl.types import IntArray

BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True, eq=False)
class KeptSequence:
    tokens: IntArray
    """The tokens whose keys and values are there."""
    pages: list[int]


class KeptSequences:
    """In the order in which they were kept, and found by their tokens."""

    def __init__(self) -> None:
        self._key: dict[KeptSequence, tuple[int, int]] = {}
        self._by_key: dict[tuple[int, int], list[KeptSequence]] = {}
        self._lengths = Counter[int]()

    def __len__(self) -> int:
        return len(self._key)

    def __iter__(self) -> Iterator[KeptSequence]:
        return iter(self._key)

    def add(self, kept: KeptSequence) -> None:
        key = len(kept.tokens), int(_prefix_hashes(kept.tokens)[-1])
        self._key[kept] = key
        self._by_key.setdefault(key, []).append(kept)
        self._lengths[key[0]] += 1

    def remove(self, kept: KeptSequence) -> None:
        key = self._key.pop(kept)
        self._by_key[key].remove(kept)
        if not self._by_key[key]:
            del self._by_key[key]
        self._lengths[key[0]] -= 1
        if not self._lengths[key[0]]:
            del self._lengths[key[0]]

    def oldest(self) -> KeptSequence:
        return next(iter(self._key))

    def find(self, tokens: IntArray) -> KeptSequence | None:
        """The longest that these tokens continue by at least one token."""
        if not self._key:
            return None
        hashes, found = _prefix_hashes(tokens), None
        for length in self._lengths:
            if (0 if found is None else len(found.tokens)) < length < len(tokens):
                alike = self._by_key.get((length, int(hashes[length - 1])))
                if alike is not None and np.array_equal(alike[-1].tokens, tokens[:length]):
                    found = alike[-1]
        return found


def _prefix_hashes(tokens: IntArray) -> npt.NDArray[np.uint64]:
    """A hash of the first token, of the first two, and so on."""
    powers = np.cumprod(np.full(len(tokens), BASE))
    hashes: npt.NDArray[np.uint64] = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers)
    return hashes
