"""The samples that have slots: on the host the row of each, on the device its last token, position, sampling parameters
and generated tokens.

All tensors are indexed by slot. On a GPU there is one extra slot for padding rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.engines.stopping import StopSearch
from dapo_rl.engines.token_sampling import DrawParams
from dapo_rl.models.device import to_device
from dapo_rl.types import Trajectory

NO_SLOT = -1


@dataclass(slots=True)
class BatchRow:
    arrival: int
    """The place of its request in the order of arrival."""
    request: Request
    partial: Trajectory
    """Its state when it was given its slot."""
    slot: int
    """`NO_SLOT` once it has given it up."""
    written: int = 0
    """Tokens generated, as of the last look at the device."""
    search: StopSearch | None = None
    """The search for stop strings, if the request has any."""

    @property
    def index(self) -> int:
        return self.partial.index

    @property
    def context(self) -> int:
        """The tokens of its prompt and response."""
        return len(self.request.prompt_ids) + self.written

    @property
    def age(self) -> tuple[int, int]:
        """Orders samples from the oldest to the youngest."""
        return self.arrival, self.index


@dataclass(frozen=True, slots=True)
class SlotState:
    last_token: Tensor
    position: Tensor
    """The number of tokens whose keys and values are in the cache: all but the last token."""
    generated: Tensor
    limit: Tensor
    done: Tensor
    heeds_stop: Tensor
    key: Tensor
    """The key of the random numbers."""
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    keeps: Tensor
    tokens: Tensor
    """`[S, M]`: the generated tokens of each slot."""
    logps: Tensor
    kept_ids: Tensor
    """`[S, M, K]`, int32: the tokens that truncation kept, of slots that record them; K is 0 if none does."""

    @classmethod
    def empty(cls, slots: int, longest: int, device: torch.device, kept_ids: Tensor | None = None) -> SlotState:
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        return cls(
            last_token=zeros(torch.int64),
            position=zeros(torch.int32),
            generated=zeros(torch.int32),
            limit=zeros(torch.int32),
            done=torch.ones(slots, dtype=torch.bool, device=device),
            heeds_stop=zeros(torch.bool),
            key=zeros(torch.int64),
            temperature=torch.ones(slots, device=device),
            top_p=torch.ones(slots, device=device),
            top_k=zeros(torch.int64),
            min_p=zeros(torch.float32),
            keeps=zeros(torch.bool),
            tokens=zeros(torch.int64, longest),
            logps=zeros(torch.float32, longest),
            kept_ids=zeros(torch.int32, longest, 0) if kept_ids is None else kept_ids,
        )

    def start(
        self, slots: Tensor, keys: npt.NDArray[np.int64], lengths: Sequence[int], params: Sequence[SamplingParams]
    ) -> None:
        """Starts responses in these slots, after prompts of these lengths."""
        how = DrawParams.of(params)
        values = {
            "position": np.array(lengths, np.int32),
            "generated": np.zeros(len(params), np.int32),
            "limit": np.array([p.max_new_tokens for p in params], np.int32),
            "done": np.zeros(len(params), bool),
            "heeds_stop": np.array([not p.ignore_eos for p in params]),
            "key": keys,
            "temperature": how.temperature_B.numpy(),
            "top_p": how.top_p_B.numpy(),
            "top_k": how.top_k_B.numpy(),
            "min_p": how.min_p_B.numpy(),
            "keeps": how.keeps_B.numpy(),
        }
        for name, value in values.items():
            getattr(self, name)[slots] = to_device(value, self.done.device)

    def resume(self, slots: Sequence[int], partial: Sequence[Trajectory]) -> None:
        """Sets the tokens that started slots already have; all but the last are in the cache."""
        counts = np.array([len(sample.token_ids) for sample in partial])
        tokens = np.zeros((len(partial), counts.max()), np.int64)
        logps = np.zeros(tokens.shape, np.float32)
        for row, (sample, count) in enumerate(zip(partial, counts, strict=True)):
            tokens[row, :count], logps[row, :count] = sample.token_ids, sample.logps
        device = self.done.device
        slots_B, counts_B = to_device(np.array(slots), device), to_device(counts, device)
        self.position[slots_B] += counts_B.int() - 1
        self.generated[slots_B] = counts_B.int()
        self.last_token[slots_B] = to_device(tokens[np.arange(len(partial)), counts - 1], device)
        self.tokens[slots_B, : tokens.shape[1]] = to_device(tokens, device)
        self.logps[slots_B, : tokens.shape[1]] = to_device(logps, device)

    def how(self, slots: Tensor | slice, truncates: bool) -> DrawParams:
        settings = (self.temperature[slots], self.top_p[slots], self.top_k[slots], self.min_p[slots])
        return DrawParams(*settings, truncates, self.keeps[slots], self.kept_ids.shape[-1] if truncates else 0)

    def record_kept(self, slots: Tensor, kept_BK: Tensor) -> None:
        """Records which tokens truncation kept for the next token; call it before `advance` appends that token. A
        finished slot gets a row beyond its last token, which nothing reads."""
        if kept_BK.shape[-1]:
            self.kept_ids[slots, self.generated[slots].long()] = kept_BK

    def advance(self, slots: Tensor, tokens_B: Tensor, logps_B: Tensor, is_stop_V: Tensor, cached: int) -> None:
        """Appends the drawn tokens; the cache has grown by `cached` tokens. A finished slot does not change."""
        active = ~self.done[slots]
        slots, tokens_B, logps_B = slots[active], tokens_B[active], logps_B[active]
        written = self.generated[slots].long()
        self.position[slots] += cached
        self.tokens[slots, written] = tokens_B
        self.logps[slots, written] = logps_B
        self.last_token[slots] = tokens_B
        self.generated[slots] += 1
        self.done[slots] = (is_stop_V[tokens_B] & self.heeds_stop[slots]) | (written + 1 >= self.limit[slots])

    def move(self, source: int, target: int) -> None:
        for field in fields(self):
            tensor = getattr(self, field.name)
            if field.name != "kept_ids":
                tensor[target] = tensor[source]
            elif tensor.shape[-1]:
                count = int(self.generated[source])
                tensor[target, :count] = tensor[source, :count]
