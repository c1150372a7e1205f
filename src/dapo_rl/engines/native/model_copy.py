"""The engine's copy of the model, and its comparison with the model on a few tokens before the first request.

An architecture is rejected if it keeps its own state, uses attention other than plain causal attention, or does not
look up its attention function by name: the engine would compute different logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dapo_rl.engines.native.kv_cache import CacheLayout, KVCache, LayerShape
from dapo_rl.engines.native.model_runner import next_logits
from dapo_rl.engines.native.page_table import Pages
from dapo_rl.errors import UserError
from dapo_rl.models.attention import Attend, UnsupportedAttentionError, depends_on_neighbours
from dapo_rl.models.load import copy_in
from dapo_rl.models.packing import pack
from dapo_rl.models.reserved_memory import ReservedMemory

ALIGNMENT = 16
"""Bytes. Weights whose sizes are multiples of it lie side by side, so that projections can be joined in place."""


def own_model(model: Any, dtype: torch.dtype, copies: bool) -> Any:
    """The model itself if it can sample as it is, otherwise a copy. Buffers (rotary frequencies) keep their dtype.

    Without `copies` the model itself is changed.
    """
    parameter = next(model.parameters())
    if parameter.dtype == dtype and not parameter.is_cuda:
        return model
    if copies:
        return copy_in(model, dtype).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.requires_grad_(False).eval()


def reserved_model(model: Any, dtype: torch.dtype) -> tuple[Any, ReservedMemory]:
    """A copy whose weights are in memory that can be given up, and that memory."""
    parameters = list(model.parameters())
    # Matrices first: between the projections of one input there must be no bias.
    ordered = sorted(parameters, key=lambda parameter: parameter.dim() < 2)
    sizes = [-(-parameter.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT for parameter in ordered]
    memory = ReservedMemory(sum(sizes), parameters[0].device)
    pieces = memory.tensor(torch.uint8, (sum(sizes),)).split(sizes)
    made: dict[int, Any] = {}
    for parameter, piece in zip(ordered, pieces, strict=True):
        weight = piece[: parameter.numel() * dtype.itemsize].view(dtype).view(parameter.shape)
        made[id(parameter)] = torch.nn.Parameter(weight.copy_(parameter.detach()), requires_grad=False)
    return copy.deepcopy(model, made).eval(), memory


DecodeAttention = Callable[[KVCache, Pages, Tensor, Tensor], Attend]
"""Builds the attention of a decode step from the cache, its pages, the rows' slots and their positions."""

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""The mean difference of log-probabilities that rounding explains; a different computation differs by more than 1."""


def probe(model: Any, longest: int, decode: DecodeAttention) -> tuple[dict[int, LayerShape], int]:
    """The layers with keys and values, and the vocabulary size; raises a UserError if the model is not supported."""
    name = type(model).__name__
    try:
        if reason := depends_on_neighbours(model, longest):
            raise UnsupportedAttentionError(reason)
        difference, layers, vocabulary = _compare(model, longest, decode)
    except UnsupportedAttentionError as error:
        raise UserError(f"engine=native: {name} has {error}, which is not supported; use engine=hf") from None
    except Exception as error:  # the model's code can raise anything
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise UserError(f"engine=native: {name} is not supported ({reason}); use engine=hf") from error
    if not difference < _TOLERANCE[next(model.parameters()).dtype]:
        raise UserError(
            f"engine=native: {name} gives different probabilities with this engine's KV cache (log-probabilities "
            f"differ by {difference:.2g}); it may keep other state or use a sliding window; use engine=hf"
        )
    return layers, vocabulary


@torch.inference_mode()
def _compare(model: Any, longest: int, decode: DecodeAttention) -> tuple[float, dict[int, LayerShape], int]:
    parameter = next(model.parameters())
    device, dtype = parameter.device, parameter.dtype
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in (9, 6)]
    plain = torch.stack(
        [model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -1] for ids in sequences]
    )
    prompts = [ids[:-1] for ids in sequences]
    packed, _ = pack([(prompt, ()) for prompt in prompts], device, share_prompts=False)
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def prefill(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        kept[layer] = (k_TKD.clone(), v_TKD.clone())
        return packed(layer, q_THD, k_TKD, v_TKD, scale)

    next_logits(model, packed.input_ids_T, packed.position_ids_T, prefill, max(longest, packed.longest))
    if not kept:
        raise UnsupportedAttentionError("no attention that transformers looks up by name")
    layers = {layer: LayerShape(k.shape[1], k.shape[2], v.shape[2]) for layer, (k, v) in kept.items()}
    layout = CacheLayout(16, len(sequences), len(sequences), whole=True)
    pages, cache = Pages(layout, 16, device), KVCache(layers, layout.pages, layout.page_tokens, dtype, device)
    pages_T = torch.tensor([slot for slot, prompt in enumerate(prompts) for _ in prompt], device=device)
    for layer, (k, v) in kept.items():
        cache.put(layer, pages_T, packed.position_ids_T, k, v)
    last = torch.tensor([ids[-1] for ids in sequences], device=device)
    positions = torch.tensor([len(prompt) for prompt in prompts], device=device)
    attend = decode(cache, pages, torch.arange(len(sequences), device=device), positions)
    ours = next_logits(model, last, positions, attend, max(longest, packed.longest))
    difference = (ours.float().log_softmax(-1) - plain.float().log_softmax(-1)).abs().mean().item()
    return difference, layers, ours.shape[-1]
