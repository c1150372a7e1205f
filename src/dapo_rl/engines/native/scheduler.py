"""Gives waiting samples slots and pages: first those with tokens, then new ones, in the order of their requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo_rl.engines.native.batch import RunningBatch
from dapo_rl.engines.native.prefill import Prefill, compute, place
from dapo_rl.engines.native.slots import BatchRow
from dapo_rl.engines.protocol import Request
from dapo_rl.types import Trajectory

READ_SHARE = 4
"""Tokens of kept sequences that are read in a pass, per token that it can compute."""


class Scheduler:
    def __init__(self, model: Any, batch: RunningBatch, longest: int, pass_tokens: int) -> None:
        """`longest` is the longest context that was announced, or 0. A pass of the model computes up to `pass_tokens`
        known tokens."""
        self._model, self._batch = model, batch
        self._longest, self._pass_tokens = longest, pass_tokens
        self._waiting: dict[int, Request] = {}
        """What waits of each request, by its number in the order of arrival."""
        self._arrived = 0
        self.filling: Prefill | None = None
        """A sequence that is partly computed. Its rows have slots, but do not decode yet."""
        self._started: Prefill | None = None
        """A computed prompt, some of whose samples still wait for slots."""
        self._started_logits_V: Tensor | None = None
        self.prefix_hits = 0
        """Tokens that were not computed again, because their sequence was kept."""

    @property
    def samples(self) -> int:
        """The samples that do not decode yet."""
        return sum(request.samples for request in self._waiting.values()) + len(self.filling_rows)

    @property
    def waits(self) -> bool:
        """Whether there are such samples."""
        return bool(self._waiting) or self.filling is not None

    @property
    def filling_rows(self) -> Sequence[BatchRow]:
        return self.filling.rows if self.filling is not None else ()

    def add(self, request: Request) -> None:
        self._arrived += 1
        self._waiting[self._arrived] = request

    def put_back(self, row: BatchRow, partial: Trajectory) -> None:
        """Returns a sample of the row's request, with the tokens that it has."""
        waiting = self._waiting.get(row.arrival)
        others = [] if waiting is None else [*waiting.partial, *map(Trajectory.nothing, waiting.starting)]
        self._waiting[row.arrival] = row.request.left(sorted([partial, *others], key=lambda sample: sample.index))

    def cancel(self, ids: Collection[str]) -> int:
        """Removes requests; returns the number of their tokens."""
        if self.filling is not None and self.filling.request.id in ids:
            self._drop_filling()
        if self._started is not None and self._started.request.id in ids:
            self._drop_started()
        cancelled = {arrival: request for arrival, request in self._waiting.items() if request.id in ids}
        for arrival in cancelled:
            del self._waiting[arrival]
        return sum(request.tokens for request in cancelled.values())

    def give_up_pages(self) -> None:
        """Gives up all slots and pages that waiting samples have."""
        if self.filling is not None:
            self._drop_filling()
        if self._started is not None:
            self._drop_started()

    def take_all(self) -> list[Request]:
        """Empties the queue."""
        requests, self._waiting = [request for _, request in self._in_order()], {}
        return requests

    def admit(self) -> None:
        """Starts waiting samples; while samples are running, computes no more than one pass for them."""
        while True:
            work = [self.filling] if self.filling is not None else self._partial_work()
            if self.filling is None:
                if not work:
                    self._place_waiting()
                work = self._with_new_work(work)
            if not work:
                if self._batch.rows or self._started is None:
                    return
                self._drop_started()  # its pages are needed for a partial sample
                continue
            cut = sum(prefill.left for prefill in work) >= self._pass_tokens
            self._fill(work)
            if cut and self._batch.rows:
                return

    def _fill(self, work: Sequence[Prefill]) -> None:
        """One pass of the model; the rows of complete sequences begin to decode."""
        batch = self._batch
        logits = compute(self._model, batch.cache, batch.pages, work, self._pass_tokens, batch.device)
        self.filling = work[-1] if work[-1].left else None
        resumed: list[BatchRow] = []
        first: list[BatchRow] = []
        first_logits: list[Tensor] = []
        for prefill, logits_V in zip(work, logits, strict=True):
            if prefill.left:
                continue
            if len(prefill.rows[0].partial.token_ids):
                resumed += prefill.rows
            else:
                first += prefill.rows
                first_logits += [logits_V] * len(prefill.rows)
            if prefill.waits:
                prefill.shared = batch.pages.shared(prefill.rows[0].slot, len(prefill.tokens))
                batch.pages.hold(prefill.shared)
                self._started, self._started_logits_V = prefill, logits_V
        if resumed:
            batch.resume(resumed)
        if first:
            batch.start(first, torch.stack(first_logits))

    def _place_waiting(self) -> None:
        """Gives slots to more samples of the prompt that was computed last."""
        started, logits_V = self._started, self._started_logits_V
        if started is None or logits_V is None:
            return
        arrival = started.rows[0].arrival
        request = self._waiting.get(arrival)
        rows = [] if request is None else self._take_slots(arrival, request, started.shared)
        if request is not None and rows:
            self._leave(arrival, request, request.partial, request.starting[len(rows) :])
            place(self._batch.cache, self._batch.pages, started, rows)
            self._batch.start(rows, torch.stack([logits_V] * len(rows)))
        if request is None or len(rows) == len(request.starting):
            self._drop_started()

    def _partial_work(self) -> list[Prefill]:
        """Partial samples that get slots; samples of the same prompt share it."""
        work: list[Prefill] = []
        tokens = read = 0
        for arrival, request in self._in_order():
            partial = request.partial
            while partial and tokens < self._pass_tokens and read < READ_SHARE * self._pass_tokens:
                prefill = self._begin_again(arrival, request, partial[0], work)
                if prefill is None:
                    return work
                work.append(prefill)
                tokens += prefill.left
                read += prefill.done if prefill.continues else 0
                partial = partial[1:]
                self._leave(arrival, request, partial, request.starting)
            if partial:
                break
        return work

    def _begin_again(
        self, arrival: int, request: Request, partial: Trajectory, work: Sequence[Prefill]
    ) -> Prefill | None:
        """A slot for a partial sample of a request, if there is one."""
        if not self._batch.has_room_for(request, self._longest):
            return None
        pages, length = self._batch.pages, len(request.prompt_ids)
        sibling = next((prefill for prefill in work if prefill.rows[0].arrival == arrival), None)
        donor = next((row.slot for row in self._batch.rows if row.arrival == arrival), None)
        origin = sibling.rows[0].slot if sibling is not None else donor
        context = np.concatenate([request.prompt_ids, partial.token_ids[:-1]])
        kept = pages.find(context)
        shared = [] if origin is None or kept is not None else pages.shared(origin, length)
        slot = pages.start(shared, length + len(partial.token_ids), kept)
        if slot is None:
            return None
        prefill = Prefill(request, [BatchRow(arrival, request, partial, slot)], context)
        if kept is not None:
            prefill.continues, prefill.done = True, len(kept.tokens)
            self.prefix_hits += prefill.done
        elif origin is not None:
            prefill.done = min(length, len(context) - 1)  # a pass computes at least one token
            prefill.sibling, prefill.donor = sibling, donor if sibling is None else None
        return prefill

    def _with_new_work(self, work: list[Prefill]) -> list[Prefill]:
        """Adds the oldest requests whose samples get slots, up to the tokens of one pass."""
        tokens = sum(prefill.left for prefill in work)
        for arrival, request in self._in_order():
            if tokens >= self._pass_tokens or self._started is not None or request.partial:
                break
            if not self._batch.has_room_for(request, self._longest):
                break
            rows = self._take_slots(arrival, request)
            if not rows:
                break
            waits = len(rows) < len(request.starting)
            work.append(Prefill(request, rows, request.prompt_ids, waits))
            self._leave(arrival, request, request.partial, request.starting[len(rows) :])
            tokens += len(request.prompt_ids)
            if waits:
                break
        return work

    def _take_slots(self, arrival: int, request: Request, shared: Sequence[int] | None = None) -> list[BatchRow]:
        """Gives slots to new samples. They share these pages, or those of the first of them."""
        pages, rows = self._batch.pages, list[BatchRow]()
        for index in request.starting:
            slot = pages.start(shared or [], len(request.prompt_ids) + 1)
            if slot is None:
                break
            rows.append(BatchRow(arrival, request, Trajectory.nothing(index), slot))
            shared = pages.shared(slot, len(request.prompt_ids)) if shared is None else shared
        return rows

    def _drop_filling(self) -> None:
        """Returns the rows of the partly computed sequence as they were."""
        for row in self.filling_rows:
            self.put_back(row, row.partial)
            self._batch.pages.end(row.slot)
        self.filling = None

    def _drop_started(self) -> None:
        assert self._started is not None
        self._batch.pages.give_back(self._started.shared)
        self._started = self._started_logits_V = None

    def _in_order(self) -> list[tuple[int, Request]]:
        return sorted(self._waiting.items(), key=lambda item: item[0])

    def _leave(self, arrival: int, request: Request, partial: tuple[Trajectory, ...], new: tuple[int, ...]) -> None:
        """Leaves these samples of a request in the queue; without any, it leaves the queue itself."""
        if partial or new:
            self._waiting[arrival] = replace(request, partial=partial, new=new)
        else:
            del self._waiting[arrival]
