"""The `native` engine: continuous batching on the Hugging Face module itself.

Each sequence has a slot of the cache. A prompt is computed once for its group and its keys and values are copied to
the slots of its samples; whenever slots are free, the next samples in the queue take them.

New weights send all samples back to the head of the queue, with the tokens that they have: their keys and values are
computed anew. The queue is then all that there is, and an engine that takes it over computes the same from there.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo_rl.models.load import take_over
from dapo_rl.models.packed import pack
from dapo_rl.models.products import enough_threads, largest_product, quick_products
from dapo_rl.rollout.draw import draw_tokens, row_keys, uniforms
from dapo_rl.rollout.ending import make_sample, stop_string_end, stop_token_ids
from dapo_rl.rollout.engine import Begun, Completion, Request, Unfinished
from dapo_rl.rollout.native.budget import KVBudget, memory_share
from dapo_rl.rollout.native.cache import KVCache, bytes_per_token
from dapo_rl.rollout.native.decode import CachedAttention, eager_step, next_logits
from dapo_rl.rollout.native.fuse import Fused, fuse
from dapo_rl.rollout.native.graphs import GraphedSteps, KernelAttention
from dapo_rl.rollout.native.prepack import can_prepack
from dapo_rl.rollout.native.probe import probe
from dapo_rl.rollout.native.state import SlotState
from dapo_rl.types import FinishReason

PREFILL_TOKENS = {"cpu": 4096, "cuda": 32768}
"""Prompt tokens that are computed in one pass."""
STEPS_PER_LOOK = 8
"""On a GPU, tokens between two looks at what has finished: a look waits for the device."""


@dataclass(slots=True)
class _Row:
    """A sample that is being generated."""

    request: Request
    index: int
    slot: int
    version: int
    """The weights that it started with."""
    searched: int = 0
    """Tokens in which no stop string was found."""


@dataclass(slots=True)
class _Started:
    """A request whose prompt is computed, and of which some samples still wait for slots."""

    request: Request
    next_index: int
    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    logits_V: Tensor


class NativeEngine:
    keeps_begun = True

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
        """`longest` is the longest context to come, where it is known: a model that cannot have it is refused now."""
        self.version = 0
        self._tokenizer = tokenizer
        self._stop_ids = stop_token_ids(model, tokenizer)
        self._device = next(model.parameters()).device
        self._on_gpu = self._device.type == "cuda"
        self._model, self._dtype = _own(model, dtype), dtype
        self._largest_product = largest_product(self._model)
        self._layers, vocabulary = probe(self._model, longest, KernelAttention if self._on_gpu else CachedAttention)
        # In float32 a CPU's engine samples from the trained module itself: its weights stay where they are.
        prepack = dtype == torch.bfloat16 and can_prepack(self._model.get_output_embeddings().weight)
        self._fused = fuse(self._model, prepack=prepack) if self._on_gpu or prepack else Fused()
        self._is_stop_V = torch.zeros(vocabulary, dtype=torch.bool, device=self._device)
        self._is_stop_V[[i for i in self._stop_ids if i < vocabulary]] = True
        memory = memory_share(self._device) if kv_memory_bytes is None else kv_memory_bytes
        self._budget = KVBudget(memory, bytes_per_token(self._layers, dtype, self._device), max_batch, self._device)
        self._budget.check(longest)
        self._slots = 0
        self._cache = KVCache(self._layers, 0, 0, dtype, self._device)
        self._state = SlotState.empty(0, 0, self._device)
        self._graphs: GraphedSteps | None = None
        self._queue: deque[Unfinished] = deque()
        self._started: _Started | None = None
        self._rows: list[_Row] = []

    @property
    def pending(self) -> int:
        waiting = sum(entry.samples for entry in self._queue)
        if self._started is not None:
            waiting += self._started.request.count - self._started.next_index
        return waiting + len(self._rows)

    @property
    def waiting(self) -> frozenset[str]:
        return frozenset(entry.request.id for entry in self._queue if entry.untouched)

    def submit(self, request: Request) -> None:
        self._budget.check(len(request.prompt_ids) + request.params.max_new_tokens)
        self._queue.append(Unfinished(request))

    def poll(self) -> list[Completion]:
        with torch.inference_mode(), quick_products(self._device, self._dtype):
            while self.pending:
                self._admit()
                finished = self._collect()
                if not finished:
                    self._step()
                    finished = self._collect()
                if finished:
                    return finished
        return []

    def cancel(self, request_id: str) -> int:
        lost = sum(entry.tokens for entry in self._queue if entry.request.id == request_id)
        self._queue = deque(entry for entry in self._queue if entry.request.id != request_id)
        if self._started is not None and self._started.request.id == request_id:
            self._started = None
        rows = [row for row in self._rows if row.request.id == request_id]
        if rows:
            slots = torch.tensor([row.slot for row in rows], device=self._device)
            with torch.inference_mode():
                lost += int(self._state.generated[slots].sum())
                self._release(rows)
        return lost

    def load_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Takes over weights; where the engine samples from the trained module itself there is nothing to copy."""
        self._back_to_the_queue()
        take_over(self._model, weights)
        self._fused.refresh()
        self.version = version

    def state(self) -> dict[str, Any]:
        self._back_to_the_queue()
        # How much room there is decides what is computed together.
        room = [self._cache.capacity, self._state.tokens.shape[1]]
        return {"version": self.version, "room": room, "work": [entry.state() for entry in self._queue]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]
        self._started = None
        self._queue = deque(Unfinished.from_state(entry) for entry in state["work"])
        with torch.inference_mode():
            self._release(self._rows)
            if any(state["room"]):
                self._make_room(*state["room"])

    def _back_to_the_queue(self) -> None:
        """Samples that have begun, in the order of their requests."""
        if self._started is None and not self._rows:
            return
        begun: dict[str, list[Begun]] = {}
        requests: dict[str, Request] = {}
        with torch.inference_mode():
            generated = self._state.generated.tolist()
            for row in sorted(self._rows, key=lambda row: row.index):
                count = generated[row.slot]
                tokens, logps = (x[row.slot, :count].tolist() for x in (self._state.tokens, self._state.logps))
                begun.setdefault(row.request.id, []).append(Begun(row.index, tuple(tokens), tuple(logps), row.version))
            for row in self._rows:
                requests[row.request.id] = row.request
            next_index = {name: request.count for name, request in requests.items()}
            if self._started is not None:
                requests[self._started.request.id] = self._started.request
                next_index[self._started.request.id] = self._started.next_index
            self._release(self._rows)
        self._started = None
        behind = {entry.request.id: entry for entry in self._queue}
        for name, entry in behind.items():
            if name in requests:  # of an entry with begun samples not all had found a slot
                begun[name] = sorted([*begun.get(name, []), *entry.begun], key=lambda sample: sample.index)
                next_index[name] = entry.next_index
        front = [Unfinished(requests[name], next_index[name], tuple(begun.get(name, ()))) for name in requests]
        rest = [entry for name, entry in behind.items() if name not in requests]
        self._queue = deque([*front, *rest])

    # Admission: requests take slots.

    def _admit(self) -> None:
        self._resume_begun()
        rows: list[_Row] = []
        logits: list[Tensor] = []
        if self._started is not None:
            new = self._take_slots(self._started.request, self._started.next_index)
            if new:
                self._place(self._started, new)
                rows += new
                logits += [self._started.logits_V] * len(new)
                self._started.next_index += len(new)
                if self._started.next_index == self._started.request.count:
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
        """Samples that have begun go on first: they take slots, and their keys and values are computed again."""
        while any(entry.begun for entry in self._queue):
            batch: list[tuple[Begun, _Row]] = []
            tokens = 0
            for place, entry in enumerate(self._queue):
                request = entry.request
                while entry.begun and tokens < PREFILL_TOKENS[self._device.type]:
                    if not self._room_for(request):
                        break
                    slots = self._free_slots(1)
                    if not slots:
                        break
                    first, *others = entry.begun
                    self._rows.append(_Row(request, first.index, slots[0], first.version))
                    batch.append((first, self._rows[-1]))
                    tokens += len(request.prompt_ids) + len(first.token_ids)
                    entry = self._queue[place] = replace(entry, begun=tuple(others))
                if entry.begun:
                    break
            if not batch:
                break
            self._compute_again(batch)
        self._queue = deque(entry for entry in self._queue if entry.samples)

    def _compute_again(self, batch: Sequence[tuple[Begun, _Row]]) -> None:
        pairs = [(row.request.prompt_ids, begun.token_ids) for begun, row in batch]
        packed, _ = pack(pairs, self._device)
        tokens_E = torch.from_numpy(np.concatenate(packed.sequences)).to(self._device)
        positions_E = torch.cat([torch.arange(len(places)) for places in packed.sequences]).to(self._device)
        lengths = torch.tensor([len(places) for places in packed.sequences])
        slots_B = torch.tensor([row.slot for _, row in batch])
        slots_E = slots_B.repeat_interleave(lengths).to(self._device)

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
            self._cache.put(layer, slots_E, positions_E, k_TKD[tokens_E], v_TKD[tokens_E])
            return packed(layer, q_THD, k_TKD, v_TKD, scale)

        some = torch.zeros(1, dtype=torch.int64, device=self._device)
        with self._fused:
            next_logits(self._model, packed.input_ids_T, packed.position_ids_T, attend, packed.longest, some)
        self._start([row for _, row in batch])
        for begun, row in batch:
            self._state.resume(row.slot, begun.token_ids, begun.logps)

    def _next_batch(self) -> list[tuple[Request, list[_Row]]]:
        """The oldest requests that find slots, up to the prompt tokens of one pass."""
        batch: list[tuple[Request, list[_Row]]] = []
        tokens = 0
        while self._queue and tokens < PREFILL_TOKENS[self._device.type]:
            entry = self._queue[0]
            if entry.begun or not self._room_for(entry.request):
                break
            rows = self._take_slots(entry.request, entry.next_index)
            if not rows:
                break
            batch.append((self._queue.popleft().request, rows))
            tokens += len(entry.request.prompt_ids)
            if entry.next_index + len(rows) < entry.request.count:
                break
        return batch

    def _take_slots(self, request: Request, start: int) -> list[_Row]:
        """As many of the request's samples as there are slots, from an index on."""
        free = self._free_slots(request.count - start)
        rows = [_Row(request, start + i, slot, self.version) for i, slot in enumerate(free)]
        self._rows += rows
        return rows

    def _free_slots(self, count: int) -> list[int]:
        taken = {row.slot for row in self._rows}
        return [slot for slot in range(self._slots) if slot not in taken][:count]

    def _prefill(self, batch: Sequence[tuple[Request, list[_Row]]]) -> Tensor:
        """Computes prompts, fills the slots of their samples, and returns each prompt's next-token logits."""
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
        waits = last_rows[-1].index + 1 < last_request.count
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
            self._cache.put(layer, slots_E, positions_E, k_TKD[tokens_E], v_TKD[tokens_E])
            if waits:
                keys[layer], values[layer] = k_TKD[last_start:].clone(), v_TKD[last_start:].clone()
            return packed(layer, q_THD, k_TKD, v_TKD, scale)

        ends = torch.tensor(starts[1:], device=self._device) - 1
        with self._fused:
            logits = next_logits(self._model, packed.input_ids_T, packed.position_ids_T, attend, packed.longest, ends)
        if waits:
            self._started = _Started(last_request, last_rows[-1].index + 1, keys, values, logits[-1])
        return logits

    def _place(self, started: _Started, rows: Sequence[_Row]) -> None:
        """A computed prompt goes to the slots of more of its samples."""
        length = len(started.request.prompt_ids)
        slots_E = torch.tensor([row.slot for row in rows], device=self._device).repeat_interleave(length)
        positions_E = torch.arange(length, device=self._device).repeat(len(rows))
        for layer in started.keys:
            self._cache.put(
                layer, slots_E, positions_E, started.keys[layer][positions_E], started.values[layer][positions_E]
            )

    def _start(self, rows: Sequence[_Row]) -> tuple[Tensor, Tensor]:
        """The rows' slots and keys of random numbers, after the slots know how they are to be sampled."""
        slots = torch.tensor([row.slot for row in rows], device=self._device)
        keys_B = row_keys([(row.request.seed, row.index) for row in rows]).to(self._device)
        params = [row.request.params for row in rows]
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
            with self._fused, enough_threads(rows * self._largest_product):
                eager_step(self._model, self._cache, self._state, rows, truncates, self._is_stop_V)
        else:
            with self._fused:
                self._graphs.run([row.slot for row in self._rows], STEPS_PER_LOOK, truncates)

    def _close_gaps(self) -> None:
        """The last rows move into slots that are free, so that the rows are the first slots."""
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
        lengths = {row.slot: length for row, length in zip(self._rows, generated, strict=True)}
        finished = [row for row, is_done in zip(self._rows, done, strict=True) if is_done]
        finished += [
            row for row, is_done in zip(self._rows, done, strict=True) if row.request.params.stop and not is_done
        ]
        if not finished:
            return []
        width = max(lengths[row.slot] for row in finished)
        slots = torch.tensor([row.slot for row in finished], device=self._device)
        tokens = self._state.tokens[slots, :width].tolist()
        logps = self._state.logps[slots, :width].tolist()
        ended = dict(zip((row.slot for row in self._rows), done, strict=True))
        completions: list[Completion] = []
        leaving: list[_Row] = []
        for row, row_tokens, row_logps in zip(finished, tokens, logps, strict=True):
            end = self._end(row, row_tokens[: lengths[row.slot]], bool(ended[row.slot]))
            if end is None:
                continue
            length, reason = end
            stop_ids = frozenset[int]() if row.request.params.ignore_eos else self._stop_ids
            versions = (row.version, self.version)
            sample = make_sample(self._tokenizer, row_tokens[:length], row_logps[:length], reason, stop_ids, versions)
            completions.append(Completion(row.request.id, row.index, sample))
            leaving.append(row)
        self._release(leaving)
        return completions

    def _end(self, row: _Row, tokens: list[int], done: bool) -> tuple[int, FinishReason] | None:
        """How many tokens a row's response has and why it ended; none where it goes on."""
        params = row.request.params
        if params.stop:
            end = stop_string_end(self._tokenizer, tokens, params.stop, row.searched)
            if end is not None:
                return end, "stop"
            row.searched = len(tokens)
        if not done:
            return None
        return len(tokens), "stop" if tokens[-1] in self._stop_ids and not params.ignore_eos else "length"

    def _release(self, rows: Sequence[_Row]) -> None:
        if not rows:
            return
        leaving = {row.slot for row in rows}
        self._state.done[torch.tensor(sorted(leaving), device=self._device)] = True
        self._rows = [row for row in self._rows if row.slot not in leaving]

    # Memory.

    def _room_for(self, request: Request) -> bool:
        """Whether the cache has, or now gets, the capacity that a request needs."""
        needs = self._budget.capacity(len(request.prompt_ids) + request.params.max_new_tokens)
        return self._make_room(needs, request.params.max_new_tokens)

    def _make_room(self, capacity: int, longest: int) -> bool:
        """For sequences and responses of these lengths, beside the longest so far."""
        capacity = max(capacity, self._cache.capacity)
        longest = max(longest, self._state.tokens.shape[1])
        if capacity == self._cache.capacity and longest == self._state.tokens.shape[1]:
            return True
        slots = self._budget.slots(capacity)
        if len(self._rows) > slots:
            return False
        self._close_gaps()
        held = len(self._rows)
        cache = KVCache(self._layers, slots + self._on_gpu, capacity, self._dtype, self._device)
        cache.take_over(self._cache, held)
        state = SlotState.empty(slots + self._on_gpu, longest, self._device)
        state.take_over(self._state, held)
        self._slots, self._cache, self._state = slots, cache, state
        if self._on_gpu:
            self._graphs = GraphedSteps(self._model, cache, state, self._is_stop_V, spare_slot=slots)
        return True


def _own(model: Any, dtype: torch.dtype) -> Any:
    """The model itself where it can sample as it is, else a copy. Buffers (rotary frequencies) keep their type."""
    parameter = next(model.parameters())
    if parameter.dtype == dtype and not parameter.is_cuda:
        return model
    own = copy.deepcopy(model).requires_grad_(False).eval()
    for parameter in own.parameters():
        parameter.data = parameter.data.to(dtype)
    return own
