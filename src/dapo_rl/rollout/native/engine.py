"""The `native` engine: continuous batching on the Hugging Face module itself.

A sample that is being generated has a slot, and its keys and values are in pages of one pool. A prompt is computed once
for its group, whose samples share its pages. Free slots and pages go to the next samples in the queue. When pages run
out, the youngest samples return to the queue with their tokens, and are recomputed later.

When new weights arrive, all running samples return to the queue in the same way. The queue is then the complete state:
another engine that is given the queue continues with the same samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo_rl.errors import UserError
from dapo_rl.models.gpu_memory import ReservedMemory
from dapo_rl.models.load import take_over
from dapo_rl.models.products import enough_threads, largest_product, quick_products
from dapo_rl.models.transfer import to_device
from dapo_rl.models.weights import WeightSource
from dapo_rl.rollout.draw import draw_tokens, row_keys, uniforms
from dapo_rl.rollout.ending import stop_token_ids
from dapo_rl.rollout.engine import Begun, Completion, Request
from dapo_rl.rollout.native.budget import KVBudget, memory_share
from dapo_rl.rollout.native.cache import KVCache, bytes_per_token
from dapo_rl.rollout.native.decode import CachedAttention, eager_step
from dapo_rl.rollout.native.finish import Finisher
from dapo_rl.rollout.native.fuse import Fused, fuse
from dapo_rl.rollout.native.graphs import GraphedSteps, KernelAttention, Look
from dapo_rl.rollout.native.own import own_model, reserved_model
from dapo_rl.rollout.native.pages import Pages
from dapo_rl.rollout.native.prefill import Prefill, compute, place
from dapo_rl.rollout.native.prepack import can_prepack
from dapo_rl.rollout.native.probe import probe
from dapo_rl.rollout.native.row import NO_SLOT, BatchRow
from dapo_rl.rollout.native.state import SlotState
from dapo_rl.rollout.native.waiting import Waiting

PREFILL_TOKENS = {"cpu": 4096, "cuda": 32768}
"""Known tokens per pass of the model. What is beyond them waits for a decode step, if samples are running."""
STEPS_PER_LOOK = {"cpu": 1, "cuda": 8}
"""Decode steps between looks at the rows: on a GPU each look takes the host's time."""


class NativeEngine:
    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        dtype: torch.dtype = torch.float32,
        max_batch: int = 256,
        kv_memory_bytes: int | None = None,
        longest: int = 0,
        page_tokens: int | None = None,
        prefill_tokens: int | None = None,
        copies: bool = True,
        rests: bool = False,
    ) -> None:
        """`longest` is the longest context of the run, if known: the memory is taken for it once, and a model that does
        not support it is rejected now. `page_tokens` and `prefill_tokens` are chosen for the device by default.

        Without `copies` the engine changes the model itself, if it cannot sample from it as it is: nothing else may
        use the model then. If it `rests`, on a GPU, `rest` gives up the memory of its weights and pages.
        """
        self.version = 0
        self._stop_ids = stop_token_ids(model, tokenizer)
        self._device = next(model.parameters()).device
        self._on_gpu = self._device.type == "cuda"
        self._weights: ReservedMemory | None = None
        if rests and self._on_gpu:
            self._model, self._weights = reserved_model(model, dtype)
        else:
            self._model = own_model(model, dtype, copies)
        self._dtype = dtype
        self._largest_product = largest_product(self._model)
        self._layers, vocabulary = probe(self._model, longest, KernelAttention if self._on_gpu else CachedAttention)
        # In float32 on a CPU the engine samples from the trained module itself, whose weights must not move.
        prepack = dtype == torch.bfloat16 and can_prepack(self._model.get_output_embeddings().weight)
        self._fused = fuse(self._model, prepack=prepack) if self._on_gpu or prepack else Fused()
        self._is_stop_V = torch.zeros(vocabulary, dtype=torch.bool, device=self._device)
        self._is_stop_V[[i for i in self._stop_ids if i < vocabulary]] = True
        memory = memory_share(self._device) if kv_memory_bytes is None else kv_memory_bytes
        self._budget = KVBudget(memory, bytes_per_token(self._layers, dtype, self._device), max_batch, self._device)
        self._budget.check(longest)
        self._longest, self._page_tokens = longest, page_tokens
        self._prefill_tokens = prefill_tokens or PREFILL_TOKENS[self._device.type]
        self._make_room(0)
        self._finisher = Finisher(tokenizer, self._stop_ids)
        self._waiting = Waiting()
        self._filling: Prefill | None = None
        """A sequence that is partly computed. Its rows have slots, but do not decode yet."""
        self._started: Prefill | None = None
        """A computed prompt, some of whose samples still wait for slots."""
        self._started_logits_V: Tensor | None = None
        self._rows: list[BatchRow] = []
        """The samples that decode."""
        self._looks: deque[Look] = deque()
        """On a GPU, looks at rows whose results are not yet known here."""
        self._finished: list[Completion] = []
        self.preempted = 0
        """Samples that had to return to the queue because pages ran out."""

    @property
    def pending(self) -> int:
        """Samples submitted and not yet returned."""
        filling = len(self._filling.rows) if self._filling is not None else 0
        return self._waiting.samples + filling + len(self._rows) + len(self._finished)

    @property
    def memory(self) -> dict[str, int]:
        """Pages of the cache, the most that were in use at a time, and the tokens of a page."""
        pages = self._pages
        return {"pages": pages.usable, "most_used": pages.most_used, "page_tokens": pages.page_tokens}

    def submit(self, request: Request) -> None:
        self._budget.check(request.longest)
        if 0 < self._longest < request.longest:
            raise UserError(
                f"engine=native: a request of up to {request.longest} tokens is longer than the {self._longest} that "
                "the memory was taken for"
            )
        self._waiting.add(request)

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        deadline = None if timeout_s is None else monotonic() + timeout_s
        with torch.inference_mode(), quick_products(self._device, self._dtype):
            while self.pending and (deadline is None or monotonic() < deadline):
                self._admit()
                self._collect()
                if not self._finished:
                    self._step()
                    self._collect()
                if self._finished:
                    finished, self._finished = self._finished, []
                    return finished
        return []

    def cancel(self, ids: Collection[str]) -> int:
        with torch.inference_mode():
            self._drain()
            lost = sum(len(done.sample.token_ids) for done in self._finished if done.request_id in ids)
            self._finished = [done for done in self._finished if done.request_id not in ids]
            if self._filling is not None and self._filling.request.id in ids:
                self._drop(self._filling)
            rows = [row for row in self._rows if row.request.id in ids]
            lost += sum(row.written for row in rows)
            self._release(rows)
            if self._started is not None and self._started.request.id in ids:
                self._drop_started()
        return lost + self._waiting.cancel(ids)

    def rest(self) -> None:
        """Gives up the memory of weights and pages until the next `receive`, if the engine was built for that."""
        self._back_to_the_queue()
        for memory in (self._weights, self._cache.memory):
            if memory is not None:
                memory.release()

    def receive(self, version: int, source: WeightSource) -> None:
        """Loads new weights; there is nothing to copy if the engine samples from the trained module itself."""
        self._back_to_the_queue()
        for memory in (self._weights, self._cache.memory):
            if memory is not None:
                memory.restore()
        take_over(self._model, source)
        self._fused.refresh()
        self.version = version

    def take_unfinished(self) -> list[Request]:
        self._back_to_the_queue()
        unfinished, self._waiting = self._waiting.requests, Waiting()
        return unfinished

    def _back_to_the_queue(self) -> None:
        """Returns all samples that have slots to the queue."""
        with torch.inference_mode():
            self._drain()
            if self._filling is not None:
                self._drop(self._filling)
            if self._rows:
                self._put_back(self._rows)
            if self._started is not None:
                self._drop_started()

    def _put_back(self, rows: Sequence[BatchRow]) -> None:
        """Returns rows to the queue with their tokens."""
        for row, begun in zip(rows, self._finisher.written(self._state, rows, self.version), strict=True):
            self._waiting.put_back(row.arrival, row.request, [begun])
        self._release(rows)

    def _drop(self, filling: Prefill) -> None:
        """Returns the rows of a partly computed sequence to the queue as they were."""
        for row in filling.rows:
            begun = [row.begun] if len(row.begun.token_ids) else []
            self._waiting.put_back(row.arrival, row.request, begun, () if begun else [row.index])
            self._pages.end(row.slot)
        self._filling = None

    # Admission: samples take slots and pages.

    def _admit(self) -> None:
        """Starts waiting samples; while samples are running, computes no more than one pass for them."""
        while True:
            self._place_waiting()
            work = [self._filling] if self._filling is not None else self._begun_work() or self._new_work()
            if not work:
                if self._rows or self._started is None:
                    return
                self._drop_started()  # its pages are needed for a sample that has begun
                continue
            cut = sum(prefill.left for prefill in work) >= self._prefill_tokens
            self._fill(work)
            if cut and self._rows:
                return

    def _fill(self, work: Sequence[Prefill]) -> None:
        """One pass of the model; the rows of complete sequences begin to decode."""
        logits = compute(self._model, self._cache, self._pages, work, self._prefill_tokens, self._device)
        self._filling = work[-1] if work[-1].left else None
        resumed: list[BatchRow] = []
        first: list[BatchRow] = []
        first_logits: list[Tensor] = []
        for prefill, logits_V in zip(work, logits, strict=True):
            if prefill.left:
                continue
            self._rows += prefill.rows
            if len(prefill.rows[0].begun.token_ids):
                resumed += prefill.rows
            else:
                first += prefill.rows
                first_logits += [logits_V] * len(prefill.rows)
            if prefill.waits:
                prefill.shared = self._pages.shared(prefill.rows[0].slot, len(prefill.tokens))
                self._pages.hold(prefill.shared)
                self._started, self._started_logits_V = prefill, logits_V
        if resumed:
            self._resume(resumed)
        if first:
            self._draw_first(first, torch.stack(first_logits))

    def _place_waiting(self) -> None:
        """Gives slots to more samples of the prompt that was computed last."""
        started = self._started
        if started is None:
            return
        arrival = started.rows[0].arrival
        request = self._waiting.get(arrival)
        new = () if request is None else request.starting
        rows = [] if request is None else self._take_slots(arrival, request, started.shared)
        if rows and request is not None:
            self._waiting.set(arrival, replace(request, new=new[len(rows) :]))
            place(self._cache, self._pages, started, rows)
            self._rows += rows
            assert self._started_logits_V is not None
            self._draw_first(rows, torch.stack([self._started_logits_V] * len(rows)))
        if len(rows) == len(new):
            self._drop_started()

    def _drop_started(self) -> None:
        assert self._started is not None
        self._pages.give_back(self._started.shared)
        self._started = self._started_logits_V = None

    def _begun_work(self) -> list[Prefill]:
        """Partial samples that get slots; samples of the same prompt share it."""
        work: list[Prefill] = []
        tokens = 0
        for arrival, request in self._waiting:
            length = len(request.prompt_ids)
            while request.begun and tokens < self._prefill_tokens:
                if not self._room_for(request):
                    return work
                begun = request.begun[0]
                sibling = next((prefill for prefill in work if prefill.rows[0].arrival == arrival), None)
                donor = next((row.slot for row in self._rows if row.arrival == arrival), None)
                origin = sibling.rows[0].slot if sibling is not None else donor
                shared = [] if origin is None else self._pages.shared(origin, length)
                slot = self._pages.start(shared, length + len(begun.token_ids))
                if slot is None:
                    return work
                context = np.concatenate([request.prompt_ids, begun.token_ids[:-1]])
                prefill = Prefill(request, [BatchRow(arrival, request, begun, slot)], context)
                if origin is not None:
                    prefill.done = min(length, len(context) - 1)  # a pass computes at least one token
                    prefill.sibling, prefill.donor = sibling, donor if sibling is None else None
                work.append(prefill)
                tokens += prefill.left
                request = replace(request, begun=request.begun[1:])
                self._waiting.set(arrival, request)
            if request.begun:
                break
        return work

    def _new_work(self) -> list[Prefill]:
        """The oldest requests whose samples get slots, up to the tokens of one pass."""
        work: list[Prefill] = []
        tokens = 0
        for arrival, request in self._waiting:
            if tokens >= self._prefill_tokens or self._started is not None:
                break
            if request.begun or not self._room_for(request):
                break
            rows = self._take_slots(arrival, request)
            if not rows:
                break
            waits = len(rows) < len(request.starting)
            work.append(Prefill(request, rows, request.prompt_ids, waits))
            self._waiting.set(arrival, replace(request, new=request.starting[len(rows) :]))
            tokens += len(request.prompt_ids)
            if waits:
                break
        return work

    def _take_slots(self, arrival: int, request: Request, shared: Sequence[int] | None = None) -> list[BatchRow]:
        """Gives slots to new samples. They share these pages, or those of the first of them."""
        rows: list[BatchRow] = []
        for index in request.starting:
            slot = self._pages.start(shared or [], len(request.prompt_ids) + 1)
            if slot is None:
                break
            rows.append(BatchRow(arrival, request, Begun.nothing(index), slot))
            shared = self._pages.shared(slot, len(request.prompt_ids)) if shared is None else shared
        return rows

    def _start(self, rows: Sequence[BatchRow]) -> tuple[Tensor, Tensor]:
        """Sets the rows' sampling parameters; returns their slots and random-number keys."""
        slots = torch.tensor([row.slot for row in rows], device=self._device)
        keys_B = row_keys([(row.request.seed, row.index) for row in rows]).to(self._device)
        params = [row.request.params_of(row.index) for row in rows]
        self._state.start(slots, keys_B, [len(row.request.prompt_ids) for row in rows], params)
        return slots, keys_B

    def _resume(self, rows: Sequence[BatchRow]) -> None:
        self._start(rows)
        self._state.resume([row.slot for row in rows], [row.begun for row in rows])
        for row in rows:
            row.written = len(row.begun.token_ids)

    def _draw_first(self, rows: Sequence[BatchRow], logits_BV: Tensor) -> None:
        slots, keys_B = self._start(rows)
        how = self._state.how(slots, any(row.request.params.truncates for row in rows))
        tokens_B, logps_B = draw_tokens(logits_BV, uniforms(keys_B, 0), how)
        self._state.advance(slots, tokens_B, logps_B, self._is_stop_V, cached=0)
        for row in rows:
            row.written = 1

    # Decoding: every row gets its next tokens.

    def _step(self) -> None:
        steps = STEPS_PER_LOOK[self._device.type]
        self._extend(steps)
        if not self._rows:
            return
        truncates = any(row.request.params.truncates for row in self._rows)
        if self._graphs is None:
            self._close_gaps()
            self._pages.write_table()
            rows = len(self._rows)
            with enough_threads(rows * self._largest_product):
                eager_step(self._model, self._cache, self._pages, self._state, rows, truncates, self._is_stop_V)
        else:
            self._pages.write_table()
            self._looks.append(self._graphs.run(self._rows, steps, truncates))

    def _extend(self, steps: int) -> None:
        """Gives the rows pages for the next steps, the oldest first. If there are too few, the youngest rows return to
        the queue."""
        if self._pages.whole:
            return
        short = self._short(steps)
        if sum(self._pages.lacking(row.slot, tokens) for row, tokens in short) > self._pages.free:
            self._drain()
            short = self._short(steps)
        by_age = sorted(self._rows, key=lambda row: row.age) if short else []
        for row, tokens in sorted(short, key=lambda pair: pair[0].age):
            while row.slot != NO_SLOT and self._pages.lacking(row.slot, tokens) > self._pages.free:
                self._put_back([by_age.pop()])
                self.preempted += 1
            if row.slot != NO_SLOT:
                self._pages.extend(row.slot, tokens)

    def _short(self, steps: int) -> list[tuple[BatchRow, int]]:
        """Rows that lack pages for the next steps, and the tokens that they can have then."""
        ahead = steps * (1 + len(self._looks))
        return [(row, row.context + ahead) for row in self._rows if row.context + ahead > self._pages.room(row.slot)]

    def _close_gaps(self) -> None:
        """Moves rows to other slots, so that those that decode occupy the first slots."""
        count = len(self._rows)
        behind = [row for row in self._rows if row.slot >= count]
        for row in self._filling.rows if self._filling is not None else ():
            if row.slot < count:
                other = behind.pop()
                if self._pages.whole:
                    self._cache.swap(row.slot, other.slot)
                self._pages.swap(row.slot, other.slot)
                self._state.move(other.slot, row.slot)
                row.slot, other.slot = other.slot, row.slot
        taken = {row.slot for row in self._rows}
        gaps = [slot for slot in range(count) if slot not in taken]
        for row, gap in zip(behind, gaps, strict=True):
            if self._pages.whole:
                self._cache.move(row.slot, gap, int(self._state.position[row.slot]))
            self._pages.swap(row.slot, gap)
            self._state.move(row.slot, gap)
            row.slot = gap

    # Collecting: finished rows become samples.

    def _collect(self) -> None:
        """Collects finished rows. On a GPU these are the results of the last look but one, so that the device always
        has work."""
        if self._graphs is not None:
            while len(self._looks) > 1 or (self._looks and not self._rows):
                self._use(self._looks.popleft())
        elif self._rows:
            slots = torch.tensor([row.slot for row in self._rows])
            done, generated = torch.stack([self._state.done[slots].int(), self._state.generated[slots]]).tolist()
            self._take_note(self._rows, done, generated)

    def _drain(self) -> None:
        """Collects all that the device was given to do."""
        while self._looks:
            self._use(self._looks.popleft())

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
            completions, leaving = self._finisher.collect(self._state, rows, done, self.version)
        self._finished += completions
        self._release(leaving)

    def _release(self, rows: Sequence[BatchRow]) -> None:
        if not rows:
            return
        self._state.done[to_device(np.array([row.slot for row in rows]), self._device)] = True
        for row in rows:
            self._pages.end(row.slot)
            row.slot = NO_SLOT
        self._rows = [row for row in self._rows if row.slot != NO_SLOT]

    # Memory.

    def _room_for(self, request: Request) -> bool:
        """Whether the table has room for a request. If its length was not announced, memory is taken again for it, once
        nothing is in use."""
        if request.longest > self._pages.longest:
            if self._pages.used:
                return False
            self._make_room(max(request.longest, self._longest))
        return True

    def _make_room(self, longest: int) -> None:
        """Takes the memory for contexts of this length, after giving up what was taken; no rows may be running."""
        self._graphs: GraphedSteps | None = None
        self._cache = KVCache({}, 0, 0, self._dtype, self._device)
        room = self._budget.capacity(longest)
        layout = self._budget.layout(longest, self._page_tokens)
        self._pages = Pages(layout, room, self._device)
        reserved = self._weights is not None
        self._cache = KVCache(self._layers, layout.pages, layout.page_tokens, self._dtype, self._device, reserved)
        self._state = SlotState.empty(layout.slots + self._on_gpu, room, self._device)
        if self._on_gpu:
            parts = (self._model, self._cache, self._pages, self._state, self._is_stop_V)
            self._graphs = GraphedSteps(*parts, reach=longest)
