"""The `native` engine: continuous batching on the Hugging Face module itself.

Each sequence has a slot of the KV cache. A prompt is prefilled once for its group, and its keys and values are copied
to the slots of its samples. Free slots go to the next samples in the queue.

When new weights arrive, all running samples return to the head of the queue with their tokens, and their keys and
values are recomputed. The queue is then the complete state: another engine that is given the queue continues with the
same samples.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo_rl.models.load import take_over
from dapo_rl.models.packed import pack
from dapo_rl.models.products import enough_threads, largest_product, quick_products
from dapo_rl.models.weights import WeightSource
from dapo_rl.rollout.draw import draw_tokens, row_keys, uniforms
from dapo_rl.rollout.ending import StopSearch, StopStrings, make_sample, stop_token_ids
from dapo_rl.rollout.engine import Begun, Completion, Request
from dapo_rl.rollout.native.budget import KVBudget, memory_share
from dapo_rl.rollout.native.cache import KVCache, bytes_per_token
from dapo_rl.rollout.native.decode import CachedAttention, eager_step, next_logits
from dapo_rl.rollout.native.fuse import Fused, fuse
from dapo_rl.rollout.native.graphs import GraphedSteps, KernelAttention
from dapo_rl.rollout.native.prepack import can_prepack
from dapo_rl.rollout.native.probe import probe
from dapo_rl.rollout.native.state import SlotState
from dapo_rl.types import FinishReason, IntArray

PREFILL_TOKENS = {"cpu": 4096, "cuda": 32768}
"""Prompt tokens per prefill pass."""
STEPS_PER_LOOK = 8
"""On a GPU, decode steps between checks for finished rows: each check synchronises with the device."""


@dataclass(slots=True)
class _Row:
    """A sample that is being generated."""

    request: Request
    begun: Begun
    """Its state when it was given its slot."""
    slot: int
    search: StopSearch | None = None
    """The search for stop strings, if the request has any."""

    @property
    def index(self) -> int:
        return self.begun.index


@dataclass(slots=True)
class _Started:
    """A prefilled request, some of whose samples still wait for slots."""

    request: Request
    done: int
    """The number of its new samples that have been given slots."""
    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    logits_V: Tensor


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
    ) -> None:
        """`longest` is the longest context of the run, if known: the cache has room for it from the start, and a model
        that does not support it is rejected now."""
        self.version = 0
        self._tokenizer = tokenizer
        self._stop_ids = stop_token_ids(model, tokenizer)
        self._device = next(model.parameters()).device
        self._on_gpu = self._device.type == "cuda"
        self._model, self._dtype = _own(model, dtype), dtype
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
        self._longest = longest
        self._slots = 0
        self._cache = KVCache(self._layers, 0, 0, dtype, self._device)
        self._state = SlotState.empty(0, 0, self._device)
        self._graphs: GraphedSteps | None = None
        self._queue: deque[Request] = deque()
        self._started: _Started | None = None
        self._rows: list[_Row] = []
        self._known_strings: dict[tuple[str, ...], StopStrings] = {}

    @property
    def pending(self) -> int:
        """Samples submitted and not yet returned."""
        waiting = sum(request.samples for request in self._queue)
        if self._started is not None:
            waiting += len(self._started.request.starting) - self._started.done
        return waiting + len(self._rows)

    def submit(self, request: Request) -> None:
        self._budget.check(request.longest)
        self._queue.append(request)

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        deadline = None if timeout_s is None else monotonic() + timeout_s
        with torch.inference_mode(), quick_products(self._device, self._dtype):
            while self.pending and (deadline is None or monotonic() < deadline):
                self._admit()
                finished = self._collect()
                if not finished:
                    self._step()
                    finished = self._collect()
                if finished:
                    return finished
        return []

    def cancel(self, ids: Collection[str]) -> int:
        lost = sum(request.tokens for request in self._queue if request.id in ids)
        self._queue = deque(request for request in self._queue if request.id not in ids)
        if self._started is not None and self._started.request.id in ids:
            self._started = None
        rows = [row for row in self._rows if row.request.id in ids]
        if rows:
            slots = torch.tensor([row.slot for row in rows], device=self._device)
            with torch.inference_mode():
                lost += int(self._state.generated[slots].sum())
                self._release(rows)
        return lost

    def receive(self, version: int, source: WeightSource) -> None:
        """Loads new weights; there is nothing to copy if the engine samples from the trained module itself."""
        self._back_to_the_queue()
        take_over(self._model, source)
        self._fused.refresh()
        self.version = version

    def take_unfinished(self) -> list[Request]:
        self._back_to_the_queue()
        unfinished, self._queue = list(self._queue), deque()
        return unfinished

    def _back_to_the_queue(self) -> None:
        """Returns running samples to the head of the queue, in the order of their requests."""
        if self._started is None and not self._rows:
            return
        requests = {row.request.id: row.request for row in self._rows}
        new: dict[str, tuple[int, ...]] = dict.fromkeys(requests, ())
        begun: dict[str, list[Begun]] = {name: [] for name in requests}
        generated = self._state.generated.tolist()
        for row, written in self._written([(row, generated[row.slot]) for row in self._rows]):
            begun[row.request.id].append(written)
        if self._started is not None:
            requests[self._started.request.id] = self._started.request
            new[self._started.request.id] = self._started.request.starting[self._started.done :]
        with torch.inference_mode():
            self._release(self._rows)
        self._started = None
        behind = {request.id: request for request in self._queue}
        for name in requests:
            if name in behind:  # some of the request's samples were still waiting for slots
                begun[name] += behind[name].begun
                new[name] = behind[name].starting
        front = [
            replace(
                request,
                begun=tuple(sorted(begun.get(name, []), key=lambda sample: sample.index)),
                new=new[name],
            )
            for name, request in requests.items()
        ]
        rest = [request for name, request in behind.items() if name not in requests]
        self._queue = deque([*front, *rest])

    def _written(self, rows: Sequence[tuple[_Row, int]]) -> list[tuple[_Row, Begun]]:
        """Rows with their tokens, given the number of tokens of each row."""
        if not rows:
            return []
        width = max(count for _, count in rows)
        with torch.inference_mode():
            slots = torch.tensor([row.slot for row, _ in rows], device=self._device)
            tokens, logps = (x[slots, :width].cpu().numpy() for x in (self._state.tokens, self._state.logps))
        result = []
        for (row, count), row_tokens, row_logps in zip(rows, tokens, logps, strict=True):
            had = len(row.begun.token_ids)
            new = (row_tokens[had:count].astype(np.int32), row_logps[had:count])
            result.append((row, row.begun.then(*new, self.version)))
        return result

    # Admission: requests take slots.

    def _admit(self) -> None:
        self._resume_begun()
        rows: list[_Row] = []
        logits: list[Tensor] = []
        if self._started is not None:
            new = self._take_slots(self._started.request, self._started.done)
            if new:
                self._place(self._started, new)
                rows += new
                logits += [self._started.logits_V] * len(new)
                self._started.done += len(new)
                if self._started.done == len(self._started.request.starting):
                    self._started = None
        while self._started is None and self._queue:
            batch = self._next_batch()
            if not batch:
                break
            batch_logits = self._prefill(batch)
            for (_, new), logits_V in zip(batch, batch_logits, strict=True):
                rows += new
                logits += [logits_V] * len(new)
        if rows:
            self._draw_first(rows, torch.stack(logits))

    def _resume_begun(self) -> None:
        """Gives slots to partial samples first, and recomputes their keys and values."""
        while any(request.begun for request in self._queue):
            batch: list[_Row] = []
            tokens = 0
            for place, request in enumerate(self._queue):
                while request.begun and tokens < PREFILL_TOKENS[self._device.type]:
                    if not self._room_for(request):
                        break
                    slots = self._free_slots(1)
                    if not slots:
                        break
                    begun, *others = request.begun
                    batch.append(_Row(request, begun, slots[0]))
                    self._rows.append(batch[-1])
                    tokens += len(request.prompt_ids) + len(begun.token_ids)
                    request = self._queue[place] = replace(request, begun=tuple(others))
                if request.begun:
                    break
            if not batch:
                break
            self._compute_again(batch)
        self._queue = deque(request for request in self._queue if request.samples)

    def _compute_again(self, batch: Sequence[_Row]) -> None:
        pairs = [(row.request.prompt_ids, row.begun.token_ids) for row in batch]
        packed, _ = pack(pairs, self._device)
        tokens_E = torch.from_numpy(np.concatenate(packed.sequences)).to(self._device)
        positions_E = torch.cat([torch.arange(len(places)) for places in packed.sequences]).to(self._device)
        lengths = torch.tensor([len(places) for places in packed.sequences])
        slots_B = torch.tensor([row.slot for row in batch])
        slots_E = slots_B.repeat_interleave(lengths).to(self._device)

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
            self._cache.put(layer, slots_E, positions_E, k_TKD[tokens_E], v_TKD[tokens_E])
            return packed(layer, q_THD, k_TKD, v_TKD, scale)

        some = torch.zeros(1, dtype=torch.int64, device=self._device)
        next_logits(self._model, packed.input_ids_T, packed.position_ids_T, attend, packed.longest, some)
        self._start(batch)
        for row in batch:
            self._state.resume(row.slot, row.begun.token_ids, row.begun.logps)

    def _next_batch(self) -> list[tuple[Request, list[_Row]]]:
        """The oldest requests that get slots, up to the prompt tokens of one prefill pass."""
        batch: list[tuple[Request, list[_Row]]] = []
        tokens = 0
        while self._queue and tokens < PREFILL_TOKENS[self._device.type]:
            request = self._queue[0]
            if request.begun or not self._room_for(request):
                break
            rows = self._take_slots(request, 0)
            if not rows:
                break
            batch.append((self._queue.popleft(), rows))
            tokens += len(request.prompt_ids)
            if len(rows) < len(request.starting):
                break
        return batch

    def _take_slots(self, request: Request, start: int) -> list[_Row]:
        """Gives free slots to the request's new samples, from the `start`-th on."""
        new = request.starting[start:]
        rows = [_Row(request, Begun.nothing(i), slot) for i, slot in zip(new, self._free_slots(len(new)), strict=False)]
        self._rows += rows
        return rows

    def _free_slots(self, count: int) -> list[int]:
        taken = {row.slot for row in self._rows}
        return [slot for slot in range(self._slots) if slot not in taken][:count]

    def _prefill(self, batch: Sequence[tuple[Request, list[_Row]]]) -> Tensor:
        """Prefills prompts, writes the slots of their samples, and returns the next-token logits of each prompt."""
        prompts = [request.prompt_ids for request, _ in batch]
        packed, _ = pack([(prompt, ()) for prompt in prompts], self._device, share_prompts=False)
        starts = [0]
        for prompt in prompts:
            starts.append(starts[-1] + len(prompt))
        tokens, slots, positions = [], [], []
        for (request, rows), start in zip(batch, starts[:-1], strict=True):
            span = torch.arange(len(request.prompt_ids))
            for row in rows:
                tokens.append(start + span)
                slots.append(torch.full_like(span, row.slot))
                positions.append(span)
        tokens_E, slots_E, positions_E = (torch.cat(x).to(self._device) for x in (tokens, slots, positions))
        (last_request, last_rows), last_start = batch[-1], starts[-2]
        waits = len(last_rows) < len(last_request.starting)
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
            self._cache.put(layer, slots_E, positions_E, k_TKD[tokens_E], v_TKD[tokens_E])
            if waits:
                keys[layer], values[layer] = k_TKD[last_start:].clone(), v_TKD[last_start:].clone()
            return packed(layer, q_THD, k_TKD, v_TKD, scale)

        ends = torch.tensor(starts[1:], device=self._device) - 1
        logits = next_logits(self._model, packed.input_ids_T, packed.position_ids_T, attend, packed.longest, ends)
        if waits:
            self._started = _Started(last_request, len(last_rows), keys, values, logits[-1])
        return logits

    def _place(self, started: _Started, rows: Sequence[_Row]) -> None:
        """Copies a prefilled prompt to the slots of more of its samples."""
        length = len(started.request.prompt_ids)
        slots_E = torch.tensor([row.slot for row in rows], device=self._device).repeat_interleave(length)
        positions_E = torch.arange(length, device=self._device).repeat(len(rows))
        for layer in started.keys:
            self._cache.put(
                layer, slots_E, positions_E, started.keys[layer][positions_E], started.values[layer][positions_E]
            )

    def _start(self, rows: Sequence[_Row]) -> tuple[Tensor, Tensor]:
        """Sets the rows' sampling parameters; returns their slots and random-number keys."""
        slots = torch.tensor([row.slot for row in rows], device=self._device)
        keys_B = row_keys([(row.request.seed, row.index) for row in rows]).to(self._device)
        params = [row.request.params_of(row.index) for row in rows]
        self._state.start(slots, keys_B, [len(row.request.prompt_ids) for row in rows], params)
        return slots, keys_B

    def _draw_first(self, rows: Sequence[_Row], logits_BV: Tensor) -> None:
        slots, keys_B = self._start(rows)
        how = self._state.how(slots, any(row.request.params.truncates for row in rows))
        tokens_B, logps_B = draw_tokens(logits_BV, uniforms(keys_B, 0), how)
        self._state.advance(slots, tokens_B, logps_B, self._is_stop_V, cached=0)

    # Decoding: every row gets its next tokens.

    def _step(self) -> None:
        truncates = any(row.request.params.truncates for row in self._rows)
        if self._graphs is None:
            self._close_gaps()
            rows = len(self._rows)
            with enough_threads(rows * self._largest_product):
                eager_step(self._model, self._cache, self._state, rows, truncates, self._is_stop_V)
        else:
            self._graphs.run([row.slot for row in self._rows], STEPS_PER_LOOK, truncates)

    def _close_gaps(self) -> None:
        """Moves the last rows into free slots, so that the rows occupy the first slots."""
        taken = {row.slot for row in self._rows}
        gaps = [slot for slot in range(len(self._rows)) if slot not in taken]
        behind = [row for row in self._rows if row.slot >= len(self._rows)]
        for row, gap in zip(behind, gaps, strict=True):
            self._cache.move(row.slot, gap, int(self._state.position[row.slot]))
            self._state.move(row.slot, gap)
            row.slot = gap

    # Collecting: finished rows become samples.

    def _collect(self) -> list[Completion]:
        if not self._rows:
            return []
        slots = torch.tensor([row.slot for row in self._rows], device=self._device)
        done, generated = torch.stack([self._state.done[slots].int(), self._state.generated[slots]]).tolist()
        rows = list(zip(self._rows, map(bool, done), generated, strict=True))
        # The device does not know stop strings: a row that is not done may have reached one.
        stopped = self._search([(row, count) for row, _, count in rows if row.request.params.stop])
        ended = [(row, count) for row, is_done, count in rows if is_done or row.slot in stopped]
        completions: list[Completion] = []
        leaving: list[_Row] = []
        for row, written in self._written(ended):
            end = self._end(row, written.token_ids, stopped.get(row.slot))
            stop_ids = frozenset[int]() if row.request.params.ignore_eos else self._stop_ids
            sample = make_sample(self._tokenizer, written, *end, stop_ids)
            completions.append(Completion(row.request.id, row.index, sample))
            leaving.append(row)
        self._release(leaving)
        return completions

    def _search(self, rows: Sequence[tuple[_Row, int]]) -> dict[int, int]:
        """Searches the tokens since the last look for stop strings; returns the lengths of the responses that have one,
        by slot."""
        found: dict[int, int] = {}
        new: list[tuple[_Row, StopSearch, int]] = []
        for row, count in rows:
            if row.search is None:
                row.search = StopSearch(self._stop_strings(row.request.params.stop))
            if count > row.search.count:
                new.append((row, row.search, count - row.search.count))
        if not new:
            return found
        slots = torch.tensor([row.slot for row, _, _ in new], device=self._device)
        starts = torch.tensor([search.count for _, search, _ in new], device=self._device)
        width = torch.arange(max(count for _, _, count in new), device=self._device)
        places = (starts[:, None] + width).clamp(max=self._state.tokens.shape[1] - 1)
        tokens = self._state.tokens[slots[:, None], places].cpu().numpy().astype(np.int32)
        for (row, search, count), row_tokens in zip(new, tokens, strict=True):
            if (end := search.find(row_tokens[:count])) is not None:
                found[row.slot] = end
        return found

    def _stop_strings(self, strings: tuple[str, ...]) -> StopStrings:
        if strings not in self._known_strings:
            self._known_strings[strings] = StopStrings(self._tokenizer, strings)
        return self._known_strings[strings]

    def _end(self, row: _Row, tokens: IntArray, stopped: int | None) -> tuple[int, FinishReason]:
        """The length of a finished response, and its finish reason."""
        if stopped is not None:
            return stopped, "stop"
        by_token = int(tokens[-1]) in self._stop_ids and not row.request.params.ignore_eos
        return len(tokens), "stop" if by_token else "length"

    def _release(self, rows: Sequence[_Row]) -> None:
        if not rows:
            return
        leaving = {row.slot for row in rows}
        self._state.done[torch.tensor(sorted(leaving), device=self._device)] = True
        self._rows = [row for row in self._rows if row.slot not in leaving]

    # Memory.

    def _room_for(self, request: Request) -> bool:
        """Whether a request fits into a slot. The cache is enlarged if needed, once no rows are running."""
        needs = self._budget.capacity(max(request.longest, self._longest))
        if needs > self._cache.capacity:
            if self._rows:
                return False
            self._make_room(needs)
        return True

    def _make_room(self, capacity: int) -> None:
        """Allocates slots of this capacity, after freeing the old cache; no rows may be running."""
        self._slots = self._budget.slots(capacity)
        self._graphs = None
        del self._cache, self._state
        count = self._slots + self._on_gpu
        self._cache = KVCache(self._layers, count, capacity, self._dtype, self._device)
        self._state = SlotState.empty(count, capacity, self._device)
        if self._on_gpu:
            self._graphs = GraphedSteps(self._model, self._cache, self._state, self._is_stop_V, spare_slot=self._slots)


def _own(model: Any, dtype: torch.dtype) -> Any:
    """The model itself if it can sample as it is, otherwise a copy. Buffers (rotary frequencies) keep their dtype."""
    parameter = next(model.parameters())
    if parameter.dtype == dtype and not parameter.is_cuda:
        return model
    own = copy.deepcopy(model).requires_grad_(False).eval()
    for parameter in own.parameters():
        parameter.data = parameter.data.to(dtype)
    return own
