"""Log-probabilities of responses under a model: packed if the model supports it, otherwise padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dapo_rl.models.attention import UnsupportedAttentionError, attending, depends_on_neighbours
from dapo_rl.models.forward import TokenStats, response_logps
from dapo_rl.models.gather import Reads
from dapo_rl.models.logprobs import token_logps
from dapo_rl.models.packed import Packed, pack
from dapo_rl.models.products import quick_products
from dapo_rl.models.recompute import check_layers, recomputing
from dapo_rl.models.transfer import to_device
from dapo_rl.types import TrainSample

if TYPE_CHECKING:
    from dapo_rl.models.fused.modules import TrainingFusion

_TOLERANCE = 1e-2
"""Well above float32 rounding; a different scale, cap or state changes log-probabilities by more."""


class ResponseLogps:
    """Computes log-probabilities and entropies of response tokens."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
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
        self._model, self._temperature, self._pad_id, self._dtype = model, temperature, pad_id, dtype
        self._recompute, self._wants_fused = recompute, fused
        self.note: str | None = None
        """Why samples are padded although packing was requested."""
        if packed and (reason := why_not_packed(model, longest)):
            self.note = f"{type(model).__name__} {reason}; samples are padded, which is slower and uses more memory"
        self.packed = packed and self.note is None

    @contextmanager
    def compute(self, samples: Sequence[TrainSample]) -> Iterator[TokenStats]:
        """Log-probabilities of the samples. Run the backward pass inside, since it may recompute layers."""
        device = self.device
        # autocast's cache would hold copies of all weights until the end of the forward pass. Autograd keeps the same
        # copies for the backward pass anyway, unless there is none or it recomputes them.
        cached = torch.is_grad_enabled() and not self._recompute
        in_dtype = torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32, cache_enabled=cached)
        recompute = recomputing(self._model, self._recompute and torch.is_grad_enabled())
        # Recomputing wraps the forward pass of each layer, so that it comes after what replaces it.
        with quick_products(device, self._dtype), self._fused_modules(), recompute:
            if self.packed:
                row, predictors = pack([(s.prompt_ids, s.response_ids) for s in samples], device)
                with attending(self._model, row, row.longest):
                    how = (row, predictors, samples, self._temperature, self._fusion is not None)
                    with in_dtype:
                        stats = self._run(lambda: packed_logps(self._model, *how))
                    yield stats
            else:
                with in_dtype:
                    stats = self._run(
                        lambda: response_logps(self._model, samples, self._temperature, self._pad_id, device)
                    )
                yield stats

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = next(self._model.parameters()).device
        return device

    def _run(self, forward: Callable[[], TokenStats]) -> TokenStats:
        """Runs the forward pass."""
        return forward()

    def _fused_modules(self) -> AbstractContextManager[None]:
        return nullcontext() if self._fusion is None else self._fusion.active()

    @cached_property
    def _fusion(self) -> TrainingFusion | None:
        """What is fused; found out when the model first computes, which is when it is on its device."""
        is_cuda = next(self._model.parameters()).is_cuda
        if not (self._wants_fused and is_cuda and self._dtype == torch.bfloat16 and find_spec("triton")):
            return None
        from dapo_rl.models.fused.modules import TrainingFusion

        return TrainingFusion(self._model, self._dtype)

    def bytes_per_token(self) -> int:
        """Measures the memory of a token's activations on the GPU."""

        def taken(tokens: int) -> int:
            sample = _plain_sample([0], [0] * tokens)
            before = torch.cuda.memory_allocated()
            with self.compute([sample]):
                return torch.cuda.memory_allocated() - before

        taken(64)  # the first pass also allocates what stays
        return max((taken(1088) - taken(64)) // 1024, 1)


def packed_logps(
    model: Any,
    row: Packed,
    predictors: Reads,
    samples: Sequence[TrainSample],
    temperature: float,
    fused: bool = False,
) -> TokenStats:
    """`response_logps` for packed samples; called while `row` is the model's attention."""
    hidden_TH = model.base_model(
        input_ids=row.input_ids_T[None], position_ids=row.position_ids_T[None], use_cache=False
    ).last_hidden_state[0]
    responses = np.concatenate([sample.response_ids for sample in samples])
    targets = to_device(responses.astype(np.int64), hidden_TH.device)
    predicting = predictors.of(hidden_TH) if hidden_TH.is_cuda else hidden_TH.index_select(0, predictors.indices)
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    logps, entropy = token_logps(predicting, head.weight, bias, targets, temperature, fused=fused)
    return _in_rows(logps, entropy, [len(sample.response_ids) for sample in samples])


def why_not_packed(model: Any, longest: int = 0) -> str | None:
    """Why samples cannot be packed, if so: compares the packed result with the model's own on a few tokens."""
    try:
        config = model.config.get_text_config()
        if getattr(config, "final_logit_softcapping", None):  # small logits would not show it
            return "caps its logits"
        if reason := depends_on_neighbours(model, longest):
            return f"has {reason}"
        vocabulary = len(model.get_input_embeddings().weight)
        ids = torch.randint(vocabulary, (24,), generator=torch.Generator().manual_seed(0)).tolist()
        split = [(ids[:5], ids[5:9]), (ids[:5], ids[9:15]), (ids[15:18], ids[18:24])]
        samples = [_plain_sample(prompt, response) for prompt, response in split]
        with torch.no_grad():
            plain = response_logps(model, samples, 1.0, pad_id=0)
            row, predictors = pack(split, plain.logps.device)
            with attending(model, row, max(longest, row.longest)):
                packed = packed_logps(model, row, predictors, samples, 1.0)
    except UnsupportedAttentionError as error:
        return f"has {error}"
    except Exception as error:  # an architecture may fail in any way
        return f"does not run on packed samples ({type(error).__name__})"
    difference = (packed.logps - plain.logps)[plain.mask].abs().max().item()
    if not difference < _TOLERANCE:
        return f"gives different results for packed samples (log-probabilities differ by {difference:.2g})"
    return None


def _plain_sample(prompt: list[int], response: list[int]) -> TrainSample:
    nothing = np.zeros(len(response), np.float32)
    return TrainSample(np.asarray(prompt, np.int32), np.asarray(response, np.int32), nothing, nothing, group=0)


def _in_rows(logps_T: Tensor, entropy_T: Tensor, lengths: Sequence[int]) -> TokenStats:
    """One padded row per response, as the loss expects."""
    is_token_BR = np.arange(max(lengths)) < np.asarray(lengths)[:, None]
    mask_BR = to_device(is_token_BR, logps_T.device)
    places_T = to_device(np.flatnonzero(is_token_BR), logps_T.device)
    empty = torch.zeros(mask_BR.numel(), device=logps_T.device)
    logps_BR, entropy_BR = (empty.scatter(0, places_T, x).view(mask_BR.shape) for x in (logps_T, entropy_T))
    return TokenStats(logps_BR, entropy_BR, mask_BR)
