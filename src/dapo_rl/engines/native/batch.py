"""The samples that are being generated: their slots, their pages, and how they get their next tokens."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo_rl.engines.native.kv_cache import KVBudget, KVCache, LayerShape, zeros
from dapo_rl.engines.native.model_runner import GraphedSteps, Look, eager_step
from dapo_rl.engines.native.output_processor import OutputProcessor
from dapo_rl.engines.native.page_table import Pages
from dapo_rl.engines.native.preemption import extend_or_preempt
from dapo_rl.engines.native.slots import NO_SLOT, BatchRow, SlotState
from dapo_rl.engines.protocol import Completion, Request
from dapo_rl.engines.token_sampling import draw_tokens, row_keys, uniforms
from dapo_rl.models.device import enough_threads, fill_rows, largest_product, to_device
from dapo_rl.models.reserved_memory import ReservedMemory
from dapo_rl.types import IntArray, Trajectory

STEPS_PER_LOOK = {"cpu": 1, "cuda": 8}
"""Decode steps between looks at the rows: on a GPU each look takes the host's time."""


class RunningBatch:
    def __init__(
        self,
        model: Any,
        layers: Mapping[int, LayerShape],
        is_stop_V: Tensor,
        outputs: OutputProcessor,
        budget: KVBudget,
        dtype: torch.dtype,
        *,
        page_tokens: int | None,
        most_kept: int = 0,
        reserved: bool,
    ) -> None:
        """`page_tokens` are chosen for the device by default. Of each token, the ids of up to `most_kept` that
        truncation kept are recorded. If `reserved`, the memory of pages and of these ids can be given up."""
        self.device = budget.device
        self._model, self._layers, self._is_stop_V, self._dtype = model, layers, is_stop_V, dtype
        self._outputs, self._budget = outputs, budget
        self._page_tokens, self._most_kept, self._reserved = page_tokens, most_kept, reserved
        self._largest_product = largest_product(model)
        self.rows: list[BatchRow] = []
        """The samples that decode."""
        self.finished: list[Completion] = []
        self._looks: deque[Look] = deque()
        """On a GPU, looks at rows whose results are not yet known here."""
        self.version = 0
        self.make_room(0)

    def make_room(self, longest: int) -> None:
        """Takes the memory for contexts of this length, after giving up what was taken; no pages may be in use."""
        on_gpu = self.device.type == "cuda"
        self._graphs: GraphedSteps | None = None
        self.cache = KVCache({}, 0, 0, self._dtype, self.device)
        self.state, self._kept_memory = SlotState.empty(0, 0, self.device), None
        room = self._budget.capacity(longest)
        layout = self._budget.layout(longest, self._page_tokens)
        self.pages = Pages(layout, room, self.device)
        self.cache = KVCache(self._layers, layout.pages, layout.page_tokens, self._dtype, self.device, self._reserved)
        slots = layout.slots + on_gpu
        kept_ids, self._kept_memory = self._room_for_kept_ids((slots, room, self._most_kept))
        self.state = SlotState.empty(slots, room, self.device, kept_ids)
        if on_gpu:
            parts = (self._model, self.cache, self.pages, self.state, self._is_stop_V)
            self._graphs = GraphedSteps(*parts, reach=longest)

    def _room_for_kept_ids(self, shape: tuple[int, ...]) -> tuple[Tensor, ReservedMemory | None]:
        """Memory that can be given up, if that of pages can."""
        if not self._reserved or 0 in shape:
            return zeros(shape, torch.int32, self.device), None
        memory = ReservedMemory(math.prod(shape) * torch.int32.itemsize, self.device)
        return memory.tensor(torch.int32, shape), memory

    @property
    def reserved_memory(self) -> list[ReservedMemory]:
        """Memory that can be given up while no rows have slots."""
        return [memory for memory in (self.cache.memory, self._kept_memory) if memory is not None]

    def has_room_for(self, request: Request, longest: int) -> bool:
        """Whether the table has room for a request. If its length was not announced (`longest`), memory is taken again
        for it, once nothing is in use."""
        if request.longest > self.pages.longest:
            if self.pages.used:
                return False
            self.make_room(max(request.longest, longest))
        return True

    # Starting.

    def start(self, rows: Sequence[BatchRow], logits_BV: Tensor) -> None:
        """Draws the first tokens of rows after their prompts."""
        slots, keys_B = self._set_params(rows)
        how = self.state.how(slots, any(row.request.params.truncates for row in rows))
        tokens_B, logps_B, kept_BK = draw_tokens(logits_BV, uniforms(keys_B, 0), how)
        self.state.record_kept(slots, kept_BK)
        advance = self.state.advance if self._graphs is None else self._graphs.advance
        advance(slots, tokens_B, logps_B, self._is_stop_V, cached=0)
        for row in rows:
            row.written = 1
        self.rows += rows

    def resume(self, rows: Sequence[BatchRow]) -> None:
        """Continues rows that have tokens."""
        self._set_params(rows)
        self.state.resume([row.slot for row in rows], [row.partial for row in rows])
        for row in rows:
            row.written = len(row.partial.token_ids)
        self.rows += rows

    def _set_params(self, rows: Sequence[BatchRow]) -> tuple[Tensor, Tensor]:
        """Sets the rows' sampling parameters; returns their slots and random-number keys."""
        slots = to_device(np.array([row.slot for row in rows]), self.device)
        keys = row_keys([(row.request.seed, row.index) for row in rows]).numpy()
        params = [row.request.params_of(row.index) for row in rows]
        self.state.start(slots, keys, [len(row.request.prompt_ids) for row in rows], params)
        return slots, self.state.key[slots]

    # Decoding: every row gets its next tokens.

    def step(self, waiting: Sequence[BatchRow], put_back: Callable[[BatchRow, Trajectory], None]) -> int:
        """Decodes. If pages run out, the youngest rows are put back; returns their number. `waiting` are rows that have
        slots, but do not decode yet."""
        steps = STEPS_PER_LOOK[self.device.type]
        left = self._extend(steps, put_back)
        if not self.rows:
            return left
        truncates = any(row.request.params.truncates for row in self.rows)
        if self._graphs is None:
            self._close_gaps(waiting)
            self.pages.write_table()
            count = len(self.rows)
            with enough_threads(count * self._largest_product):
                eager_step(self._model, self.cache, self.pages, self.state, count, truncates, self._is_stop_V)
        else:
            self.pages.write_table()
            self._looks.append(self._graphs.run(self.rows, steps, truncates))
        return left

    def _extend(self, steps: int, put_back: Callable[[BatchRow, Trajectory], None]) -> int:
        """Gives the rows pages for the next steps; returns how many were preempted."""
        if self.pages.whole:
            return 0
        short = self._short(steps)
        if sum(self.pages.lacking(row.slot, tokens) for row, tokens in short) > self.pages.free:
            self.drain()
            short = self._short(steps)
        return extend_or_preempt(short, self.rows, self.pages, lambda row: self.leave([row], put_back))

    def _short(self, steps: int) -> list[tuple[BatchRow, int]]:
        """Rows that lack pages for the next steps, and the tokens that they can have then."""
        ahead = steps * (1 + len(self._looks))
        return [(row, row.context + ahead) for row in self.rows if row.context + ahead > self.pages.room(row.slot)]

    def _close_gaps(self, waiting: Sequence[BatchRow]) -> None:
        """Moves rows to other slots, so that those that decode occupy the first slots."""
        count = len(self.rows)
        behind = [row for row in self.rows if row.slot >= count]
        for row in waiting:
            if row.slot < count:
                other = behind.pop()
                if self.pages.whole:
                    self.cache.swap(row.slot, other.slot)
                self.pages.swap(row.slot, other.slot)
                self.state.move(other.slot, row.slot)
                row.slot, other.slot = other.slot, row.slot
        taken = {row.slot for row in self.rows}
        gaps = [slot for slot in range(count) if slot not in taken]
        for row, gap in zip(behind, gaps, strict=True):
            if self.pages.whole:
                length = int(self.state.position[row.slot])
                if kept := self.pages.kept_tokens(gap):
                    self.cache.swap(row.slot, gap, max(length, kept))
                else:
                    self.cache.move(row.slot, gap, length)
            self.pages.swap(row.slot, gap)
            self.state.move(row.slot, gap)
            row.slot = gap

    # Ending: finished rows become samples, others return to the queue.

    def collect(self) -> None:
        """Collects finished rows. On a GPU these are the results of the last look but one, so that the device always
        has work."""
        if self._graphs is not None:
            while len(self._looks) > 1 or (self._looks and not self.rows):
                self._use(self._looks.popleft())
        elif self.rows:
            slots = torch.tensor([row.slot for row in self.rows])
            done, generated = torch.stack([self.state.done[slots].int(), self.state.generated[slots]]).tolist()
            self._take_note(self.rows, done, generated)

    def drain(self) -> None:
        """Collects all that the device was given to do."""
        while self._looks:
            self._use(self._looks.popleft())

    def leave(self, rows: Sequence[BatchRow], put_back: Callable[[BatchRow, Trajectory], None]) -> None:
        """Takes rows out, with their tokens."""
        for row, partial in zip(rows, self._outputs.written(self.state, rows, self.version), strict=True):
            put_back(row, partial)
        self.release(rows)

    def release(self, rows: Sequence[BatchRow], continued: Mapping[int, IntArray] | None = None) -> None:
        """Takes rows out. Those that may be `continued` are kept: the tokens of each, by slot."""
        if not rows:
            return
        fill_rows(self.state.done, [row.slot for row in rows], True)
        for row in rows:
            if continued and row.slot in continued:
                self.pages.keep(row.slot, continued[row.slot])
            else:
                self.pages.end(row.slot)
            row.slot = NO_SLOT
        self.rows = [row for row in self.rows if row.slot != NO_SLOT]

    def _use(self, look: Look) -> None:
        assert self._graphs is not None
        done, generated = look.wait()
        running = [n for n, row in enumerate(look.rows) if row.slot != NO_SLOT]
        rows = [look.rows[n] for n in running]
        reading = self._graphs.reading(look)
        self._take_note(rows, [done[n] for n in running], [generated[n] for n in running], reading)

    def _take_note(
        self,
        rows: Sequence[BatchRow],
        done: Sequence[int],
        generated: Sequence[int],
        reading: AbstractContextManager[None] | None = None,
    ) -> None:
        """Notes how far the rows have come; finished ones become samples."""
        for row, count in zip(rows, generated, strict=True):
            row.written = count
        with reading or nullcontext():
            completions, leaving = self._outputs.collect(self.state, rows, done, self.version)
        self.finished += completions
        self.release(
            leaving,
            {
                row.slot: np.concatenate([row.request.prompt_ids, done.sample.token_ids[:-1]])
                for row, done in zip(leaving, completions, strict=True)
                if row.request.continues
            },
        )
