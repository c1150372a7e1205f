"""Which pages of the KV cache hold which sequence.

A sequence has a slot, and the slot a row of the table: its pages in order. Samples of a group share the full pages of
their prompt; a page returns to the pool when its last user leaves. Nothing here reads or writes keys and values.

A sequence that ends can be kept in case it is continued. Pages that only kept sequences have count as free: when others
run out, the sequences that were kept first are dropped. Whether sequences are kept therefore changes neither which
samples run nor which are preempted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt
import torch

from dapo_rl.engines.native.kept_sequences import KeptSequence, KeptSequences
from dapo_rl.engines.native.kv_cache import CacheLayout
from dapo_rl.models.device import fill_rows, to_device
from dapo_rl.types import IntArray

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
        self._kept = KeptSequences()
        self._keepers = [0] * (self.usable + 1)
        """The kept sequences that a page belongs to."""
        self._only_kept = 0
        """Pages without users that belong to kept sequences."""
        self._kept_slots: dict[int, KeptSequence] = {}
        """If a page holds a whole sequence: the kept sequences by their slots."""
        self._of_slot: dict[int, list[int]] = {}
        self._free_slots = list(range(layout.slots))
        """A heap, which may also contain slots that were taken by `swap`, or are kept."""
        self._cleared: set[int] = set()
        self._changed: dict[tuple[int, int], int] = {}
        self.most_used = 0
        """The most pages that were in use at a time."""

    @property
    def free(self) -> int:
        """Pages without users, those of kept sequences included."""
        return self.usable - len(self._of_slot) if self.whole else len(self._free) + self._only_kept

    @property
    def used(self) -> int:
        return self.usable - self.free

    @property
    def kept(self) -> int:
        """Pages that only kept sequences have."""
        return len(self._kept_slots) if self.whole else self._only_kept

    def needed(self, tokens: int) -> int:
        """Pages for this many tokens."""
        return -(-tokens // self.page_tokens)

    def full(self, tokens: int) -> int:
        """Pages that the first tokens fill, and that can therefore be shared."""
        return 0 if self.whole else tokens // self.page_tokens

    def hold(self, pages: Iterable[int]) -> None:
        """Keeps pages in use beyond their sequence; `give_back` ends this."""
        for page in pages:
            self._only_kept -= not self._users[page] and self._keepers[page] > 0
            self._users[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._set_free(page)

    def _set_free(self, page: int) -> None:
        """What becomes of a page without users."""
        if self._keepers[page]:
            self._only_kept += 1
        else:
            self._free.append(page)

    def start(self, shared: Sequence[int], tokens: int, kept: KeptSequence | None = None) -> int | None:
        """Starts a sequence of so many tokens, of which the first are in shared pages, or continues a kept one: returns
        its slot, or None if it must wait. What is running must be able to go on for a page each."""
        first = shared if kept is None else kept.pages
        reserve = 0 if self.whole else len(self._of_slot)
        lacking = self.needed(tokens) - sum(self._users[page] > 0 for page in first)
        if lacking > self.free - reserve:
            return None
        slot = self._free_slot() if kept is None or not self.whole else kept.pages[0]
        if slot is None:
            return None
        if not self.whole:
            self.hold(first)
            self._cleared.add(slot)
            for column, page in enumerate(first):
                self._changed[slot, column] = page
        if kept is not None:
            self._forget(kept)
        self._of_slot[slot] = [] if self.whole else list(first)
        self.extend(slot, tokens)
        return slot

    def _free_slot(self) -> int | None:
        while True:
            while self._free_slots:
                slot = heappop(self._free_slots)
                if slot not in self._of_slot and slot not in self._kept_slots:
                    return slot
            if not self._kept_slots:
                return None
            self._drop(self._kept.oldest())

    def lacking(self, slot: int, tokens: int) -> int:
        """The pages that a sequence lacks for so many tokens."""
        if self.whole:
            return 0
        return max(min(self.needed(tokens), self.columns) - len(self._of_slot[slot]), 0)

    def extend(self, slot: int, tokens: int) -> None:
        """Adds the pages that the sequence lacks; there must be as many."""
        pages = self._of_slot[slot]
        for _ in range(self.lacking(slot, tokens)):
            while not self._free:
                self._drop(self._kept.oldest())
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

    # Sequences that have ended, and are kept in case they are continued.

    def keep(self, slot: int, tokens: IntArray) -> None:
        """Ends a sequence and keeps it. These are the tokens whose keys and values are there."""
        if self.whole:
            del self._of_slot[slot]
            kept = self._kept_slots[slot] = KeptSequence(tokens, [slot])
        else:
            kept = KeptSequence(tokens, self._of_slot[slot][: self.needed(len(tokens))])
            for page in kept.pages:
                self._keepers[page] += 1
            self.end(slot)
        self._kept.add(kept)

    def find(self, tokens: IntArray) -> KeptSequence | None:
        """The longest kept sequence that these tokens continue."""
        return self._kept.find(tokens)

    def kept_tokens(self, slot: int) -> int:
        """If a page holds a whole sequence: the tokens that are kept in a slot."""
        return len(self._kept_slots[slot].tokens) if slot in self._kept_slots else 0

    def drop_kept(self) -> None:
        """Drops all kept sequences."""
        for kept in list(self._kept):
            self._drop(kept)

    def _drop(self, kept: KeptSequence) -> None:
        self._forget(kept)
        if self.whole:
            heappush(self._free_slots, kept.pages[0])

    def _forget(self, kept: KeptSequence) -> None:
        self._kept.remove(kept)
        if self.whole:
            del self._kept_slots[kept.pages[0]]
            return
        for page in kept.pages:
            self._keepers[page] -= 1
            if not self._users[page] and not self._keepers[page]:
                self._only_kept -= 1
                self._free.append(page)

    def swap(self, one: int, other: int) -> None:
        """Exchanges the sequences of two slots, one of which may be free. If a page holds a whole sequence, one of them
        may be kept, and the contents must be exchanged too."""
        kept = {slot: self._kept_slots.pop(slot, None) for slot in (one, other)}
        pages = {slot: self._of_slot.pop(slot, None) for slot in (one, other)}
        for slot, from_slot in ((one, other), (other, one)):
            came, came_kept = pages[from_slot], kept[from_slot]
            if came_kept is not None:
                came_kept.pages[0] = slot
                self._kept_slots[slot] = came_kept
                continue
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
            fill_rows(self.table, sorted(self._cleared), 0)
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
