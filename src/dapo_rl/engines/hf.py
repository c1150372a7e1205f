"""The `hf` engine: transformers' `generate` behind the Engine protocol. Tests use it as the reference."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from dapo_rl.engines.protocol import Completion, Engine, EngineInputs, Request
from dapo_rl.engines.stopping import StopSearch, StopStrings, make_sample, stop_token_ids
from dapo_rl.engines.token_sampling import DrawParams, draw_tokens, row_keys, uniforms
from dapo_rl.models.load import pad_id, take_over
from dapo_rl.models.response_logps import pad
from dapo_rl.models.weights import WeightSource
from dapo_rl.types import FinishReason, IntArray, Trajectory

MAX_BATCH = 256
"""Lower than that of `native`: `generate` does not limit its memory."""


def build(inputs: EngineInputs) -> HFEngine:
    return HFEngine(inputs.model, inputs.tokenizer, inputs.settings.max_batch or MAX_BATCH, inputs.dtype)


class HFEngine(Engine):
    """Generates whole requests, up to `max_batch` sequences per call of `generate`."""

    version = 0

    def __init__(self, model: Any, tokenizer: Any, max_batch: int, dtype: torch.dtype = torch.float32) -> None:
        self._model, self._tokenizer, self._max_batch = model, tokenizer, max_batch
        self._dtype = dtype
        self._queue: deque[Request] = deque()
        self._stop_ids = stop_token_ids(model, tokenizer)

    @property
    def pending(self) -> int:
        """Samples submitted and not yet returned."""
        return sum(request.samples for request in self._queue)

    def submit(self, request: Request) -> None:
        self._queue.append(request)

    def cancel(self, ids: Collection[str]) -> int:
        lost = sum(request.tokens for request in self._queue if request.id in ids)
        self._queue = deque(request for request in self._queue if request.id not in ids)
        return lost

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        """Generates whole requests; `generate` cannot be interrupted."""
        rows = [(request, partial) for request in self._next_requests() for partial in request.trajectories]
        completions: list[Completion] = []
        for start in range(0, len(rows), self._max_batch):
            batch = rows[start : start + self._max_batch]
            samples = zip(batch, self._generate(batch), strict=True)
            completions += [Completion(request.id, partial.index, sample) for (request, partial), sample in samples]
        return completions

    def receive(self, version: int, source: WeightSource) -> None:
        """Loads new weights; there is nothing to copy if the engine samples from the trained module itself."""
        take_over(self._model, source)
        self.version = version

    def take_unfinished(self) -> list[Request]:
        unfinished, self._queue = list(self._queue), deque()
        return unfinished

    def _next_requests(self) -> list[Request]:
        """The oldest requests with equal parameters that fit into one batch; at least one."""
        taken: list[Request] = []
        rows = 0
        while self._queue and (not taken or rows + self._queue[0].samples <= self._max_batch):
            if taken and self._queue[0].params != taken[0].params:
                break
            taken.append(self._queue.popleft())
            rows += taken[-1].samples
        return taken

    @torch.no_grad()
    def _generate(self, rows: list[tuple[Request, Trajectory]]) -> list[Trajectory]:
        params = rows[0][0].params
        device = next(self._model.parameters()).device
        contexts = [np.concatenate([request.prompt_ids, partial.token_ids]) for request, partial in rows]
        input_ids, mask = pad(contexts, pad_id(self._tokenizer), side="left")
        input_ids, mask = input_ids.to(device), mask.to(device)
        stop_ids = frozenset[int]() if params.ignore_eos else self._stop_ids
        keys_B = row_keys([(request.seed, partial.index) for request, partial in rows]).to(device)
        had_B = torch.tensor([len(partial.token_ids) for _, partial in rows], device=device)
        # `generate` runs to the end of the longest row; the surplus tokens of the others are cut off.
        limits = [request.params_of(each.index).max_new_tokens - len(each.token_ids) for request, each in rows]
        drawing = _DrawProcessor(keys_B, had_B, DrawParams.of([params] * len(rows), device))
        stopping = _StopStrings(self._tokenizer, params.stop, [partial for _, partial in rows], input_ids.shape[1])
        # `generate` takes options that its config does not set from the model's generation config. Publishers put
        # sampling settings there, such as a repetition penalty, which would change the policy. Of a copy, because a
        # thread may be saving the model.
        model = copy.copy(self._model)
        model.generation_config = GenerationConfig()
        with torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32):
            output = model.generate(
                input_ids,
                attention_mask=mask.long(),
                generation_config=GenerationConfig(
                    max_new_tokens=max(limits),
                    do_sample=False,
                    eos_token_id=sorted(stop_ids) or None,
                    pad_token_id=pad_id(self._tokenizer),
                ),
                logits_processor=LogitsProcessorList([drawing]),
                stopping_criteria=StoppingCriteriaList([stopping] if params.stop else []),
            )
        tokens = output[:, input_ids.shape[1] :].cpu().numpy().astype(np.int32)
        columns = {"logps": torch.stack(drawing.logps, dim=1).cpu().numpy()}
        if params.keep_mask:
            columns["kept_ids"] = torch.stack(drawing.kept_ids, dim=1).cpu().numpy()
        samples = []
        for i, ((_, partial), limit) in enumerate(zip(rows, limits, strict=True)):
            end, finish = _end_of(tokens[i, :limit], stop_ids, stopping.stopped_at.get(i))
            own = {name: column[i, :end] for name, column in columns.items()}
            written = partial.then(tokens[i, :end], version=self.version, **own)
            samples.append(make_sample(self._tokenizer, written, len(written.token_ids), finish, stop_ids))
        return samples


def _end_of(tokens: IntArray, stop_ids: frozenset[int], stopped_at: int | None) -> tuple[int, FinishReason]:
    """The number of tokens of a response, and why it ends there. A stop string ends it at `stopped_at`."""
    ends = [int(place) + 1 for place in np.flatnonzero(np.isin(tokens, list(stop_ids)))[:1]]
    if stopped_at is not None and stopped_at <= len(tokens):
        ends.append(stopped_at)
    return (min(ends), "stop") if ends else (len(tokens), "length")


class _DrawProcessor(LogitsProcessor):  # type: ignore[misc]
    """Draws the token with our random numbers and masks out all others."""

    def __init__(self, keys_B: Tensor, had_B: Tensor, how: DrawParams) -> None:
        """`had_B` is the number of response tokens that each row starts with."""
        self._keys_B, self._had_B, self._how = keys_B, had_B, how
        self.logps: list[Tensor] = []
        self.kept_ids: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniforms_B = uniforms(self._keys_B, self._had_B + len(self.logps))
        tokens_B, logps_B, kept_BK = draw_tokens(scores, uniforms_B, self._how)
        self.logps.append(logps_B)
        self.kept_ids.append(kept_BK)
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens_B[:, None], 0.0)


class _StopStrings(StoppingCriteria):  # type: ignore[misc]
    """Ends a row at the token that completes a stop string, and records where."""

    def __init__(self, tokenizer: Any, strings: tuple[str, ...], partial: list[Trajectory], width: int) -> None:
        self._width = width
        shared = StopStrings(tokenizer, strings) if strings else None
        self._searches = [StopSearch(shared) for _ in partial] if shared else []
        for search, had in zip(self._searches, partial, strict=bool(shared)):
            search.skip(had.token_ids, had.mask)
        self._had = [len(had.token_ids) for had in partial]
        self.stopped_at: dict[int, int] = {}
        """The number of new tokens at the stop, by row."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        new = input_ids[:, self._width :].cpu().numpy()
        for row, (search, had) in enumerate(zip(self._searches, self._had, strict=True)):
            if row not in self.stopped_at and (end := search.find(new[row, search.count - had :])) is not None:
                self.stopped_at[row] = end - had
        stopped = [row in self.stopped_at for row in range(len(new))]
        return torch.tensor(stopped, device=input_ids.device)
