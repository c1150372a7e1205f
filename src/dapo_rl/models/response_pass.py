"""A forward pass over samples that gives something for each response token: packed if the model supports it, otherwise
padded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from dapo_rl.models.attention import attending
from dapo_rl.models.gather import Reads
from dapo_rl.models.packed import Packed, pack
from dapo_rl.models.products import quick_products
from dapo_rl.models.recompute import check_layers, recomputing
from dapo_rl.models.transfer import to_device
from dapo_rl.types import Trajectory

if TYPE_CHECKING:
    from dapo_rl.models.kernels.training import TrainingFusion

Stats = TypeVar("Stats")
"""What the pass gives: a named tuple of `[B, R]` tensors, the first of them differentiable."""


class ResponsePass(ABC, Generic[Stats]):
    """Runs a model on samples; a subclass says what it computes from the hidden states."""

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int,
        dtype: torch.dtype = torch.float32,
        packed: bool = True,
        recompute: bool = False,
        fused: bool = True,
        longest: int = 0,
    ) -> None:
        """`longest` is the length of the longest sample: some models cannot be packed beyond a length. `fused` uses
        Triton kernels on a GPU in bfloat16, and has no effect elsewhere."""
        if recompute:
            check_layers(model)
        self._model, self._pad_id, self._dtype = model, pad_id, dtype
        self._recompute, self._wants_fused = recompute, fused
        self.note: str | None = None
        """Why samples are padded although packing was requested."""
        if packed and (reason := self._why_not_packed(longest)):
            self.note = f"{type(model).__name__} {reason}; samples are padded, which is slower and uses more memory"
        self.packed = packed and self.note is None

    @contextmanager
    def compute(self, samples: Sequence[Trajectory]) -> Iterator[Stats]:
        """The results for the samples. Run the backward pass inside, since it may recompute layers."""
        device = self.device
        # autocast's cache would hold copies of all weights until the end of the forward pass. Autograd keeps the same
        # copies for the backward pass anyway, unless there is none or it recomputes them.
        cached = torch.is_grad_enabled() and not self._recompute
        in_dtype = torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32, cache_enabled=cached)
        recompute = recomputing(self._model, self._recompute and torch.is_grad_enabled())
        # Recomputing wraps the forward pass of each layer, so that it comes after what replaces it.
        with quick_products(device, self._dtype), self._fused_modules(), recompute:
            if self.packed:
                row, predictors = pack([(s.prompt_ids, s.token_ids) for s in samples], device)
                with attending(self._model, row, row.longest):
                    with in_dtype:
                        stats = self._run(lambda: self._packed(row, predictors, samples))
                    yield stats
            else:
                with in_dtype:
                    stats = self._run(lambda: self._padded(samples))
                yield stats

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = next(self._model.parameters()).device
        return device

    @abstractmethod
    def _packed(self, row: Packed, predictors: Reads, samples: Sequence[Trajectory]) -> Stats:
        """Computes packed samples, while `row` is the model's attention."""

    @abstractmethod
    def _padded(self, samples: Sequence[Trajectory]) -> Stats: ...

    @abstractmethod
    def _why_not_packed(self, longest: int) -> str | None: ...

    def _run(self, forward: Callable[[], Stats]) -> Stats:
        """Runs the forward pass."""
        return forward()

    def prepare(self) -> None:
        """Finds out what can be fused, which compares results: random ones, as with dropout, are never the same."""
        _ = self._fusion

    def _fused_modules(self) -> AbstractContextManager[None]:
        return nullcontext() if self._fusion is None else self._fusion.active()

    @cached_property
    def _fusion(self) -> TrainingFusion | None:
        """What is fused; found out when the model first computes, which is when it is on its device."""
        is_cuda = self.device.type == "cuda"
        if not (self._wants_fused and is_cuda and self._dtype == torch.bfloat16 and find_spec("triton")):
            return None
        return self._find_fusion()

    def _find_fusion(self) -> TrainingFusion:
        from dapo_rl.models.kernels.training import TrainingFusion

        return TrainingFusion(self._model, self.device, self._dtype)

    def bytes_per_token(self) -> int:
        """Measures the memory of a token's activations on the GPU."""

        def taken(tokens: int) -> int:
            sample = plain_sample([0], [0] * tokens)
            before = torch.cuda.memory_allocated()
            with self.compute([sample]):
                return torch.cuda.memory_allocated() - before

        taken(64)  # the first pass also allocates what stays
        return max((taken(1088) - taken(64)) // 1024, 1)


def predicting_states(model: Any, row: Packed, predictors: Reads) -> Tensor:
    """The hidden state that predicts each response token of packed samples, `[T, H]`."""
    hidden_TH = model.base_model(
        input_ids=row.input_ids_T[None], position_ids=row.position_ids_T[None], use_cache=False
    ).last_hidden_state[0]
    if hidden_TH.is_cuda:
        return predictors.of(hidden_TH)
    states: Tensor = hidden_TH.index_select(0, predictors.indices)
    return states


def in_rows(samples: Sequence[Trajectory], *of_tokens: Tensor) -> tuple[Tensor, ...]:
    """Results of all response tokens, `[T]` each, as one padded row per response; then the mask of the tokens."""
    lengths = [len(sample.token_ids) for sample in samples]
    device = of_tokens[0].device
    is_token_BR = np.arange(max(lengths)) < np.asarray(lengths)[:, None]
    mask_BR = to_device(is_token_BR, device)
    places_T = to_device(np.flatnonzero(is_token_BR), device)
    empty = torch.zeros(mask_BR.numel(), device=device)
    return (*(empty.scatter(0, places_T, x).view(mask_BR.shape) for x in of_tokens), mask_BR)


def plain_sample(prompt: list[int], response: list[int]) -> Trajectory:
    return Trajectory(response, prompt_ids=prompt)
