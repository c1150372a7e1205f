"""Which pages of the KV cache hold which sequence.

A sequence has a slot, and the slot a row of the table: its pages in order. Samples of a group share the full pages of
their prompt; a page returns to the pool when its last user leaves. Nothing here reads or writes keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt
import torch

from dapo_rl.engines.native.kv_cache import CacheLayout
from dapo_rl.models.device import to_device

Places = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""The page of each token, and its place in the page."""


class Pages:
    def __init__(self, layout: CacheLayout, longest: int, device: torch.device) -> None:
        """Pages for sequences of at most `longest` tokens.

        If a page holds a whole sequence, page i belongs to slot i, so that the first slots are contiguous in memory.
        Otherwise page 0 is not given out: entries of the table that are not in use point to it. The table has one more
        row than there are slots, for padding rows.
        """
        self.page_tokens, self.whole, self.longest = layout.page_tokens, layout.whole, longest
        self.columns = -(-longest // self.page_tokens)
        self.usable = layout.pages if self.whole else layout.pages - 1
        self.table = torch.zeros(layout.slots + 1, self.columns, dtype=torch.int32, device=device)
        if self.whole and self.columns:
            self.table[:, 0] = torch.arange(layout.slots + 1)
        self._free = [] if self.whole else list(range(self.usable, 0, -1))
        self._users = [0] * (self.usable + 1)
        self._of_slot: dict[int, list[int]] = {}
        self._free_slots = list(range(layout.slots))
        """A heap, which may also contain slots that were taken by `swap`."""
        self._cleared: set[int] = set()
        self._changed: dict[tuple[int, int], int] = {}
        self.most_used = 0
        """The most pages that were in use at a time."""

    @property
    def free(self) -> int:
        return self.usable - len(self._of_slot) if self.whole else len(self._free)

    @property
    def used(self) -> int:
        return self.usable - self.free

    def needed(self, tokens: int) -> int:
        """Pages for this many tokens."""
        return -(-tokens // self.page_tokens)

    def full(self, tokens: int) -> int:
        """Pages that the first tokens fill, and that can therefore be shared."""
        return 0 if self.whole else tokens // self.page_tokens

    def hold(self, pages: Iterable[int]) -> None:
        """Keeps pages in use beyond their sequence; `give_back` ends this."""
        for page in pages:
            self._users[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def start(self, shared: Sequence[int], tokens: int) -> int | None:
        """Starts a sequence of so many tokens, of which the first are in shared pages: returns its slot, or None if it
        must wait. What is running must be able to go on for a page each."""
        while self._free_slots and self._free_slots[0] in self._of_slot:
            heappop(self._free_slots)
        reserve = 0 if self.whole else len(self._of_slot)
        if not self._free_slots or self.needed(tokens) - len(shared) > self.free - reserve:
            return None
        slot = heappop(self._free_slots)
        self.hold(shared)
        self._of_slot[slot] = list(shared)
        if not self.whole:
            self._cleared.add(slot)
            for column, page in enumerate(shared):
                self._changed[slot, column] = page
        self.extend(slot, tokens)
        return slot

    def lacking(self, slot: int, tokens: int) -> int:
        """The pages that a sequence lacks for so many tokens."""
        if self.whole:
            return 0
        return max(min(self.needed(tokens), self.columns) - len(self._of_slot[slot]), 0)

    def extend(self, slot: int, tokens: int) -> None:
        """Adds the pages that the sequence lacks; there must be as many."""
        pages = self._of_slot[slot]
        for _ in range(self.lacking(slot, tokens)):
            page = self._free.pop()
            self._users[page] = 1
            self._changed[slot, len(pages)] = page
            pages.append(page)
        self.most_used = max(self.most_used, self.used)

    def room(self, slot: int) -> int:
        """The tokens that fit into the pages of a sequence."""
        return self.page_tokens * (1 if self.whole else len(self._of_slot[slot]))

    def end(self, slot: int) -> None:
        pages = self._of_slot.pop(slot)
        heappush(self._free_slots, slot)
        self.give_back(pages)
        for column in range(len(pages)):
            self._changed.pop((slot, column), None)

    def swap(self, one: int, other: int) -> None:
        """Exchanges the sequences of two slots, one of which may be free. If a page holds a whole sequence, the
        contents must be exchanged too."""
        pages = {slot: self._of_slot.pop(slot, None) for slot in (one, other)}
        for slot, came in ((one, pages[other]), (other, pages[one])):
            if came is None:
                heappush(self._free_slots, slot)
                continue
            self._of_slot[slot] = came
            if not self.whole:
                self._cleared.add(slot)
                for column in [column for changed, column in self._changed if changed == slot]:
                    del self._changed[slot, column]
                self._changed |= {(slot, column): page for column, page in enumerate(came)}

    def write_table(self) -> None:
        """Writes the changes to the table, on its device; call it before the table is read."""
        if self._cleared:
            self.table[to_device(np.array(sorted(self._cleared)), self.table.device)] = 0
            self._cleared.clear()
        if self._changed:
            entries = [(*place, page) for place, page in self._changed.items()]
            slots, columns, pages = to_device(np.ascontiguousarray(np.array(entries).T), self.table.device)
            self.table[slots, columns] = pages.int()
            self._changed.clear()

    def places(self, slot: int, start: int, stop: int) -> Places:
        """Where a sequence's tokens `start` to `stop` are."""
        pages = [slot] if self.whole else self._of_slot[slot]
        positions = np.arange(start, stop)
        return np.asarray(pages, np.int64)[positions // self.page_tokens], positions % self.page_tokens

    def shared(self, slot: int, tokens: int) -> list[int]:
        """The pages of a sequence that its first tokens fill."""
        return self._of_slot[slot][: self.full(tokens)]
