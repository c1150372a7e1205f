"""The `native` engine: continuous batching on the Hugging Face module itself.

A sample that is being generated has a slot, and its keys and values are in pages of one pool. A prompt is computed once
for its group, whose samples share its pages. Free slots and pages go to the next samples in the queue. When pages run
out, the youngest samples return to the queue with their tokens, and are recomputed later.

A sample that may be continued after an observation (`Request.continues`) leaves its slot, but its pages are kept until
they are needed. Its continuation then computes only what is new.

When new weights arrive, all running samples return to the queue in the same way, and what is kept of others is
dropped. The queue is then the complete state: another engine that is given the queue continues with the same samples.
"""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic
from typing import Any

import torch

from dapo_rl.engines.native.batch import RunningBatch
from dapo_rl.engines.native.kv_cache import KEPT_ID_BYTES, KVBudget, bytes_per_token, memory_share
from dapo_rl.engines.native.model_copy import own_model, probe, reserved_model
from dapo_rl.engines.native.model_runner import CachedAttention, KernelAttention
from dapo_rl.engines.native.output_processor import OutputProcessor
from dapo_rl.engines.native.scheduler import Scheduler
from dapo_rl.engines.protocol import Completion, Engine, EngineInputs, Request
from dapo_rl.engines.stopping import stop_token_ids
from dapo_rl.errors import UserError
from dapo_rl.models.device import quick_products
from dapo_rl.models.kernels.fuse_inference import Fused, fuse
from dapo_rl.models.kernels.fuse_linears import can_prepack
from dapo_rl.models.load import take_over
from dapo_rl.models.reserved_memory import ReservedMemory
from dapo_rl.models.weights import WeightSource

PREFILL_TOKENS = {"cpu": 4096, "cuda": 32768}
"""Known tokens per pass of the model. What is beyond them waits for a decode step, if samples are running."""


MAX_BATCH = 1024
"""Concurrent sequences: the cost per sequence falls up to about this number."""


def build(inputs: EngineInputs) -> NativeEngine:
    settings = inputs.settings
    limit = settings.kv_memory_gib
    return NativeEngine(
        inputs.model,
        inputs.tokenizer,
        dtype=inputs.dtype,
        max_batch=settings.max_batch or MAX_BATCH,
        kv_memory_bytes=inputs.kv_bytes if limit is None else int(limit * 2**30),
        longest=inputs.longest,
        most_kept=settings.most_kept,
        copies=inputs.copies,
        releases_memory=inputs.releases_memory,
    )


class NativeEngine(Engine):
    version = preempted = 0

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
        most_kept: int = 0,
        copies: bool = True,
        releases_memory: bool = False,
    ) -> None:
        """`longest` is the longest context of the run, if known: the memory is taken for it once, and a model that does
        not support it is rejected now. `page_tokens` and `prefill_tokens` are chosen for the device by default.
        Requests with `keep_mask` have a `top_k` of up to `most_kept`.

        Without `copies` the engine changes the model itself, if it cannot sample from it as it is: nothing else may
        use the model then. `release_memory` works only with `releases_memory`, on a GPU.
        """
        stop_ids = stop_token_ids(model, tokenizer)
        self._device = next(model.parameters()).device
        self._on_gpu = self._device.type == "cuda"
        self._weights: ReservedMemory | None = None
        if releases_memory and self._on_gpu:
            self._model, self._weights = reserved_model(model, dtype)
        else:
            self._model = own_model(model, dtype, copies)
        self._dtype = dtype
        layers, vocabulary = probe(self._model, longest, KernelAttention if self._on_gpu else CachedAttention)
        # In float32 on a CPU the engine samples from the trained module itself, whose weights must not move.
        prepack = dtype == torch.bfloat16 and can_prepack(self._model.get_output_embeddings().weight)
        self._fused = fuse(self._model, prepack=prepack) if self._on_gpu or prepack else Fused()
        is_stop_V = torch.zeros(vocabulary, dtype=torch.bool, device=self._device)
        is_stop_V[[i for i in stop_ids if i < vocabulary]] = True
        memory = memory_share(self._device) if kv_memory_bytes is None else kv_memory_bytes
        token_bytes, kept_bytes = bytes_per_token(layers, dtype, self._device), KEPT_ID_BYTES * most_kept
        self._budget = KVBudget(memory, token_bytes, max_batch, self._device, kept_bytes)
        self._budget.check(longest)
        self._longest, self._most_kept = longest, most_kept
        self._batch = RunningBatch(
            self._model,
            layers,
            is_stop_V,
            OutputProcessor(tokenizer, stop_ids),
            self._budget,
            dtype,
            page_tokens=page_tokens,
            most_kept=most_kept,
            reserved=self._weights is not None,
        )
        pass_tokens = prefill_tokens or PREFILL_TOKENS[self._device.type]
        self._scheduler = Scheduler(self._model, self._batch, longest, pass_tokens)
        self._full_steps = self._full_pages = 0
        """Steps in which samples waited, and the sum of the pages that were in use in them."""

    @property
    def prefix_hits(self) -> int:
        return self._scheduler.prefix_hits

    @property
    def pending(self) -> int:
        """Samples submitted and not yet returned."""
        return self._scheduler.samples + len(self._batch.rows) + len(self._batch.finished)

    def cache_figures(self) -> dict[str, int | None]:
        """Pages of the cache, those in use at a time (at most, and at full load, while samples wait), and the
        tokens of a page."""
        pages = self._batch.pages
        return {
            "pages": pages.usable,
            "most_used": pages.most_used,
            "used_at_full_load": round(self._full_pages / self._full_steps) if self._full_steps else None,
            "page_tokens": pages.page_tokens,
        }

    def submit(self, request: Request) -> None:
        self._budget.check(request.longest)
        if 0 < self._longest < request.longest:
            raise UserError(
                f"engine=native: a request of up to {request.longest} tokens is longer than the {self._longest} that "
                "the memory was taken for"
            )
        if request.params.most_kept > self._most_kept:
            raise UserError(
                f"engine=native: a request keeps {request.params.most_kept} tokens, and the engine was built for "
                f"{self._most_kept} (most_kept)"
            )
        self._scheduler.add(request)

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        deadline = None if timeout_s is None else monotonic() + timeout_s
        batch = self._batch
        with torch.inference_mode(), quick_products(self._device, self._dtype):
            while (
                not batch.finished
                and (batch.rows or self._scheduler.waits)
                and (deadline is None or monotonic() < deadline)
            ):
                self._scheduler.admit()
                batch.collect()
                if not batch.finished:
                    self._step()
        finished, batch.finished = batch.finished, []
        return finished

    def cancel(self, ids: Collection[str]) -> int:
        batch = self._batch
        with torch.inference_mode():
            batch.drain()
            lost = sum(len(done.sample.token_ids) for done in batch.finished if done.request_id in ids)
            batch.finished = [done for done in batch.finished if done.request_id not in ids]
            rows = [row for row in batch.rows if row.request.id in ids]
            lost += sum(row.written for row in rows)
            batch.release(rows)
            return lost + self._scheduler.cancel(ids)

    def release_memory(self) -> None:
        self._back_to_the_queue()
        if self._weights is not None:
            self._weights.release()
        for memory in self._batch.reserved_memory:
            memory.release()

    def receive(self, version: int, source: WeightSource) -> None:
        """Loads new weights; there is nothing to copy if the engine samples from the trained module itself."""
        self._back_to_the_queue()
        if self._weights is not None:
            self._weights.restore()
        for memory in self._batch.reserved_memory:
            memory.restore()
        take_over(self._model, source)
        self._fused.refresh()
        self.version = self._batch.version = version

    def take_unfinished(self) -> list[Request]:
        self._back_to_the_queue()
        return self._scheduler.take_all()

    def _step(self) -> None:
        if self._scheduler.waits:
            self._full_steps += 1
            self._full_pages += self._batch.pages.used
        self.preempted += self._batch.step(self._scheduler.filling_rows, self._scheduler.put_back)
        self._batch.collect()

    def _back_to_the_queue(self) -> None:
        """Returns all samples that have slots to the queue, and drops what is kept of others."""
        with torch.inference_mode():
            self._batch.drain()
            self._batch.leave(self._batch.rows, self._scheduler.put_back)
            self._scheduler.give_up_pages()
            self._batch.pages.drop_kept()
