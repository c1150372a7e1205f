"""Log-probabilities of responses under a model: a forward pass over samples, packed if the model supports it, otherwise
padded.

Shapes: B samples, P prompt columns (padded on the left), R response columns (padded on the right), T tokens of a packed
row, V tokens of the vocabulary, of which at most K are kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dapo_rl.models.attention import UnsupportedAttentionError, attending, depends_on_neighbours
from dapo_rl.models.chunked_lm_head import IMPOSSIBLE, not_kept, token_logps
from dapo_rl.models.device import quick_products, to_device
from dapo_rl.models.packing import Packed, Reads, pack
from dapo_rl.models.recompute import check_layers, recomputing
from dapo_rl.objectives.kl import entropy_from_logits
from dapo_rl.types import KEPT_IDS, IntArray, Trajectory

if TYPE_CHECKING:
    from dapo_rl.models.kernels.fuse_training import TrainingFusion


class TokenStats(NamedTuple):
    logps: Tensor
    """`[B, R]`, differentiable."""
    entropy: Tensor
    """`[B, R]`, differentiable if that was asked for."""
    mask: Tensor
    """`[B, R]`: True for response tokens."""


def response_logps(
    model: Any,
    samples: Sequence[Trajectory],
    temperature: float,
    pad_id: int,
    device: torch.device | None = None,
    entropy_grad: bool = False,
) -> TokenStats:
    """Log-probabilities of the responses under the model at a temperature; it computes on the device of its weights
    unless another is given. `entropy_grad` makes the entropies differentiable too.

    Of samples with `kept_ids`, they are over these tokens alone, and 0 for tokens without any.
    """
    device = device or next(model.parameters()).device
    inputs, mask_BR = padded_inputs(samples, pad_id, device)
    tokens_BR = inputs["input_ids"][:, -mask_BR.shape[1] :]
    # The logits at a position predict the next token: keep the last prompt position up to the last but one.
    logits_BRV = model(**inputs, use_cache=False, logits_to_keep=tokens_BR.shape[1] + 1).logits[:, :-1]
    logits_BRV = logits_BRV.float() / temperature
    if (kept := kept_ids_of(samples)) is not None:
        kept_BRK = torch.full((*tokens_BR.shape, kept.shape[1]), -1, dtype=torch.int32, device=device)
        kept_BRK[mask_BR] = to_device(kept, device)
        logits_BRV = logits_BRV.masked_fill(not_kept(kept_BRK, tokens_BR, logits_BRV.shape[-1]), IMPOSSIBLE)
    logps_BR = torch.log_softmax(logits_BRV, dim=-1).gather(-1, tokens_BR[..., None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy_BR = entropy_from_logits(logits_BRV)
    return TokenStats(logps_BR, entropy_BR, mask_BR)


def kept_ids_of(samples: Sequence[Trajectory]) -> IntArray | None:
    """The kept ids of all response tokens, `[T, K]`; None if the samples have none."""
    rows = [row for sample in samples if (row := sample.get(KEPT_IDS)) is not None]
    if rows and len(rows) < len(samples):
        raise ValueError("some samples have kept_ids, and some do not")
    return np.concatenate(rows) if rows else None


def padded_inputs(samples: Sequence[Trajectory], pad_id: int, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """A model's arguments for samples, and the mask of their response tokens, which are the last columns."""
    prompts_BP, prompt_mask_BP = pad([s.prompt_ids for s in samples], pad_id, side="left")
    tokens_BR, mask_BR = pad([s.token_ids for s in samples], pad_id, side="right")
    attention_mask = torch.cat([prompt_mask_BP, mask_BR], dim=1).long().to(device)
    inputs = {
        "input_ids": torch.cat([prompts_BP, tokens_BR], dim=1).to(device),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
    }
    return inputs, mask_BR.to(device)


def pad(rows: Sequence[Sequence[int] | IntArray], value: int, side: str) -> tuple[Tensor, Tensor]:
    """Pads rows of ids to one tensor, with a mask that is True for ids."""
    lengths = np.array([len(row) for row in rows])
    width = lengths.max()
    columns = np.arange(width)
    mask = columns >= width - lengths[:, None] if side == "left" else columns < lengths[:, None]
    ids = np.full(mask.shape, value, dtype=np.int64)
    ids[mask] = np.concatenate(rows)
    return torch.from_numpy(ids), torch.from_numpy(mask)


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
        fused = nullcontext() if self._fusion is None else self._fusion.active()
        with quick_products(device, self._dtype), fused, recompute:
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
        device: torch.device = next(self._model.parameters()).device
        return device

    def move_to(self, device: torch.device) -> None:
        """Moves the model; its memory on the old device is free, but for what torch keeps."""
        self._model.to(device)

    @abstractmethod
    def _packed(self, row: Packed, predictors: Reads, samples: Sequence[Trajectory]) -> Stats:
        """Computes packed samples, while `row` is the model's attention."""

    @abstractmethod
    def _padded(self, samples: Sequence[Trajectory]) -> Stats: ...

    @abstractmethod
    def _why_not_packed(self, longest: int) -> str | None: ...

    def _run(self, forward: Callable[[], Stats]) -> Stats:
        return forward()

    def prepare(self) -> None:
        """Finds out what can be fused, which compares results: random ones, as with dropout, are never the same."""
        _ = self._fusion

    @cached_property
    def _fusion(self) -> TrainingFusion | None:
        """What is fused; found out when the model first computes, which is when it is on its device."""
        is_cuda = self.device.type == "cuda"
        if not (self._wants_fused and is_cuda and self._dtype == torch.bfloat16 and find_spec("triton")):
            return None
        return self._find_fusion()

    def _find_fusion(self) -> TrainingFusion:
        from dapo_rl.models.kernels.fuse_training import TrainingFusion

        return TrainingFusion(self._model, self.device, self._dtype)

    def bytes_per_token(self) -> int:
        """Measures the memory of a token's activations on the GPU."""

        def taken(tokens: int) -> int:
            sample = Trajectory([0] * tokens, prompt_ids=[0])
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


_TOLERANCE = 1e-2
"""Well above float32 rounding; a different scale, cap or state changes log-probabilities by more."""


class ResponseLogps(ResponsePass[TokenStats]):
    """Computes log-probabilities and entropies of response tokens."""

    def __init__(self, model: Any, *, temperature: float, entropy_grad: bool = False, **how: Any) -> None:
        """`entropy_grad` makes entropies differentiable; the others are the arguments of `ResponsePass`."""
        self._temperature, self._entropy_grad = temperature, entropy_grad
        super().__init__(model, **how)

    def _packed(self, row: Packed, predictors: Reads, samples: Sequence[Trajectory]) -> TokenStats:
        fused = self._fusion is not None
        stats = packed_logps(self._model, row, predictors, samples, self._temperature, fused)
        return stats if self._entropy_grad else stats._replace(entropy=stats.entropy.detach())

    def _padded(self, samples: Sequence[Trajectory]) -> TokenStats:
        how = (self._temperature, self._pad_id, self.device, self._entropy_grad)
        return response_logps(self._model, samples, *how)

    def _why_not_packed(self, longest: int) -> str | None:
        """Compares the packed result with the model's own on a few tokens."""
        model = self._model
        try:
            config = model.config.get_text_config()
            if getattr(config, "final_logit_softcapping", None):  # small logits would not show it
                return "caps its logits"
            if reason := depends_on_neighbours(model, longest):
                return f"has {reason}"
            vocabulary = len(model.get_input_embeddings().weight)
            ids = torch.randint(vocabulary, (24,), generator=torch.Generator().manual_seed(0)).tolist()
            split = [(ids[:5], ids[5:9]), (ids[:5], ids[9:15]), (ids[15:18], ids[18:24])]
            samples = [Trajectory(response, prompt_ids=prompt) for prompt, response in split]
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


def packed_logps(
    model: Any,
    row: Packed,
    predictors: Reads,
    samples: Sequence[Trajectory],
    temperature: float,
    fused: bool = False,
) -> TokenStats:
    """`response_logps` for packed samples; called while `row` is the model's attention."""
    predicting_TH = predicting_states(model, row, predictors)
    responses = np.concatenate([sample.token_ids for sample in samples])
    targets = to_device(responses.astype(np.int64), predicting_TH.device)
    head = model.get_output_embeddings()
    bias, kept = getattr(head, "bias", None), kept_ids_of(samples)
    kept_TK = None if kept is None else to_device(kept, targets.device)
    logps, entropy = token_logps(predicting_TH, head.weight, bias, targets, temperature, fused=fused, kept_TK=kept_TK)
    return TokenStats(*in_rows(samples, logps, entropy))
