"""The `hf` engine: transformers' `generate` behind the Engine protocol, the one that others are checked against."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from dapo_rl.models.forward import pad
from dapo_rl.models.load import pad_id, take_over
from dapo_rl.rollout.draw import DrawParams, draw_tokens, row_keys, uniforms
from dapo_rl.rollout.ending import make_sample, stop_string_end, stop_token_ids
from dapo_rl.rollout.engine import Completion, Request, Unfinished
from dapo_rl.types import FinishReason, Sample


class HFEngine:
    """Samples whole requests, up to `max_batch` sequences in one call of `generate`."""

    keeps_begun = True  # `poll` returns whole requests: none has begun

    def __init__(self, model: Any, tokenizer: Any, max_batch: int, dtype: torch.dtype = torch.float32) -> None:
        self.version = 0
        self._model, self._tokenizer, self._max_batch = model, tokenizer, max_batch
        self._dtype = dtype
        self._queue: deque[Request] = deque()
        self._stop_ids = stop_token_ids(model, tokenizer)

    @property
    def pending(self) -> int:
        return sum(request.count for request in self._queue)

    @property
    def waiting(self) -> frozenset[str]:
        return frozenset(request.id for request in self._queue)

    def submit(self, request: Request) -> None:
        self._queue.append(request)

    def cancel(self, request_id: str) -> int:
        self._queue = deque(request for request in self._queue if request.id != request_id)
        return 0

    def poll(self) -> list[Completion]:
        requests = self._next_requests()
        if not requests:
            return []
        rows = [(request, index) for request in requests for index in range(request.count)]
        samples: list[Sample] = []
        for start in range(0, len(rows), self._max_batch):
            samples += self._generate(rows[start : start + self._max_batch])
        return [Completion(r.id, index, sample) for (r, index), sample in zip(rows, samples, strict=True)]

    def load_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Takes over weights; where the engine samples from the trained module itself there is nothing to copy."""
        take_over(self._model, weights)
        self.version = version

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "work": [Unfinished(request).state() for request in self._queue]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]
        self._queue = deque(Unfinished.from_state(entry).request for entry in state["work"])

    def _next_requests(self) -> list[Request]:
        """The oldest requests with the same parameters that fit into one batch: whole groups, at least one."""
        taken: list[Request] = []
        rows = 0
        while self._queue and (not taken or rows + self._queue[0].count <= self._max_batch):
            if taken and self._queue[0].params != taken[0].params:
                break
            taken.append(self._queue.popleft())
            rows += taken[-1].count
        return taken

    @torch.no_grad()
    def _generate(self, rows: list[tuple[Request, int]]) -> list[Sample]:
        params = rows[0][0].params
        device = next(self._model.parameters()).device
        input_ids, mask = pad([request.prompt_ids for request, _ in rows], pad_id(self._tokenizer), side="left")
        input_ids, mask = input_ids.to(device), mask.to(device)
        stop_ids = frozenset[int]() if params.ignore_eos else self._stop_ids
        keys_B = row_keys([(request.seed, index) for request, index in rows]).to(device)
        drawing = _DrawProcessor(keys_B, DrawParams.of([params] * len(rows), device))
        stopping = _StopStrings(self._tokenizer, params.stop, input_ids.shape[1])
        # `generate` fills what a configuration leaves open from the model's own, where publishers put their favourite
        # sampling settings (a repetition penalty, for one): those would change the policy, so none of them is left.
        theirs, self._model.generation_config = self._model.generation_config, GenerationConfig()
        try:
            with torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32):
                output = self._model.generate(
                    input_ids,
                    attention_mask=mask.long(),
                    generation_config=GenerationConfig(
                        max_new_tokens=params.max_new_tokens,
                        do_sample=False,
                        eos_token_id=sorted(stop_ids) or None,
                        pad_token_id=pad_id(self._tokenizer),
                    ),
                    logits_processor=LogitsProcessorList([drawing]),
                    stopping_criteria=StoppingCriteriaList([stopping] if params.stop else []),
                )
        finally:
            self._model.generation_config = theirs
        tokens = output[:, input_ids.shape[1] :].tolist()
        logps = torch.stack(drawing.logps, dim=1).tolist()
        stopped_at = stopping.stopped_at
        finished = enumerate(zip(tokens, logps, strict=True))
        return [self._sample(t, p, stopped_at.get(i), stop_ids) for i, (t, p) in finished]

    def _sample(
        self, tokens: list[int], logps: list[float], stopped_at: int | None, stop_ids: frozenset[int]
    ) -> Sample:
        end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), None)
        finish: FinishReason = "stop"
        if end is None or (stopped_at is not None and stopped_at < end):
            end = stopped_at
        if end is None:
            end, finish = len(tokens), "length"
        versions = (self.version, self.version)
        return make_sample(self._tokenizer, tokens[:end], logps[:end], finish, stop_ids, versions)


class _DrawProcessor(LogitsProcessor):  # type: ignore[misc]
    """Draws the token itself and leaves it as the only possible one, so that the random numbers are ours."""

    def __init__(self, keys_B: Tensor, how: DrawParams) -> None:
        self._keys_B, self._how = keys_B, how
        self.logps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens_B, logps_B = draw_tokens(scores, uniforms(self._keys_B, len(self.logps)), self._how)
        self.logps.append(logps_B)
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens_B[:, None], 0.0)


class _StopStrings(StoppingCriteria):  # type: ignore[misc]
    """Ends a row at the first token with which its text contains a stop string, and remembers where."""

    def __init__(self, tokenizer: Any, strings: tuple[str, ...], prompt_width: int) -> None:
        self._tokenizer, self._strings, self._prompt_width = tokenizer, strings, prompt_width
        self.stopped_at: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        responses = input_ids[:, self._prompt_width :].tolist()
        for row, ids in enumerate(responses):
            if row not in self.stopped_at:
                end = stop_string_end(self._tokenizer, ids, self._strings, seen=len(ids) - 1)
                if end is not None:
                    self.stopped_at[row] = end
        stopped = [row in self.stopped_at for row in range(len(responses))]
        return torch.tensor(stopped, device=input_ids.device)
