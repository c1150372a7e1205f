"""Log-probabilities and entropies of tokens from hidden states, without the logits of all tokens at any time.

Logits are made a chunk of rows at a time and made again in the backward pass; those of the last chunk wait for it.
Softmax and sums are in float32, products in the type of the hidden states.

Shapes: T tokens, C of them in a chunk, H the width of a hidden state, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**27}
"""Logits in a chunk at most: enough rows for a product at full speed, and a fraction of the activations' memory."""


def token_logps(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Each target's log-probability, and the entropy (without gradient) of the distribution that it is drawn from."""
    device = hidden_TH.device.type
    if torch.is_autocast_enabled(device):
        hidden_TH = hidden_TH.to(torch.get_autocast_dtype(device))
    budget = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"])
    rows = chunk_rows or max(1, budget // len(weight_VH))
    with torch.autocast(device, enabled=False):
        logps_T, entropy_T = _TokenLogps.apply(  # type: ignore[no-untyped-call]
            hidden_TH, weight_VH, bias_V, targets_T, temperature, rows
        )
    return logps_T, entropy_T


def project(hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float = 1.0) -> Tensor:
    """Logits in float32 from a product in the type of both; on a GPU its sums are never rounded to that type."""
    if hidden_TH.is_cuda and hidden_TH.dtype != torch.float32:
        logits_TV = torch.mm(hidden_TH, weight_VH.T, out_dtype=torch.float32)
    else:
        logits_TV = (hidden_TH @ weight_VH.T).float()
    if bias_V is not None:
        logits_TV.add_(bias_V)
    return logits_TV if temperature == 1 else logits_TV.div_(temperature)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        temperature: float,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        weight = weight_VH.to(hidden_TH.dtype)
        logps_T, entropy_T, log_sums_T = (hidden_TH.new_empty(len(hidden_TH), dtype=torch.float32) for _ in range(3))
        exps_CV = sums_C = None
        for chunk in _chunks(len(hidden_TH), rows):
            del exps_CV  # before the next chunk needs the memory
            logits_CV = project(hidden_TH[chunk], weight, bias_V, temperature)
            highest_C = logits_CV.amax(-1)
            logits_CV.sub_(highest_C[:, None])
            at_target_C = logits_CV.gather(-1, targets_T[chunk, None]).squeeze(-1)
            exps_CV = logits_CV.exp()
            sums_C = exps_CV.sum(-1)
            log_sums_C = sums_C.log()
            logps_T[chunk] = at_target_C - log_sums_C
            # −Σ p·log p, where p = e / Σe and log p = logit − log Σe.
            entropy_T[chunk] = log_sums_C - torch.linalg.vecdot(exps_CV, logits_CV) / sums_C
            log_sums_T[chunk] = log_sums_C + highest_C
            del logits_CV
        ctx.last_probs = None
        if exps_CV is not None and sums_C is not None and any(ctx.needs_input_grad[:3]):
            ctx.last_probs = exps_CV.div_(sums_C[:, None])
        ctx.temperature, ctx.rows = temperature, rows
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, logps_T, log_sums_T)
        ctx.mark_non_differentiable(entropy_T)
        return logps_T, entropy_T

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_T: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, bias_V, targets_T, logps_T, log_sums_T = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        weight = weight_VH.to(hidden_TH.dtype)
        grad_hidden_TH = torch.empty_like(hidden_TH) if wants_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if wants_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias else None
        # The gradient of a logit is g · (1[target] − p). As a factor on the hidden states g is a pass over H numbers
        # a token, instead of V.
        factor_T1 = (-grad_T.float() / ctx.temperature)[:, None]
        probs_CV, ctx.last_probs = ctx.last_probs, None
        for chunk in reversed(list(_chunks(len(hidden_TH), ctx.rows))):
            if probs_CV is None:
                logits_CV = project(hidden_TH[chunk], weight, bias_V, ctx.temperature)
                probs_CV = logits_CV.sub_(log_sums_T[chunk, None]).exp_()
                del logits_CV
            # p − 1 from log p: near certainty, a difference of rounded numbers has no digits left.
            probs_CV.scatter_(-1, targets_T[chunk, None], torch.expm1(logps_T[chunk, None]))
            if grad_bias_V is not None:
                grad_bias_V.addmv_(probs_CV.T, factor_T1[chunk, 0])
            pulls_CV = probs_CV.to(hidden_TH.dtype)
            probs_CV = None
            if grad_hidden_TH is not None:
                torch.mul(pulls_CV @ weight, factor_T1[chunk], out=grad_hidden_TH[chunk])
            if grad_weight_VH is not None:
                _add_product(grad_weight_VH, pulls_CV.T, (hidden_TH[chunk] * factor_T1[chunk]).to(hidden_TH.dtype))
            del pulls_CV
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        if grad_bias_V is not None:
            grad_bias_V = grad_bias_V.to(bias_V.dtype)
        return grad_hidden_TH, grad_weight_VH, grad_bias_V, None, None, None


def _add_product(total_VH: Tensor, a_VC: Tensor, b_CH: Tensor) -> None:
    """`total += a @ b` in float32, whatever the type of a and b."""
    if a_VC.dtype == torch.float32:
        total_VH.addmm_(a_VC, b_CH)
    elif a_VC.is_cuda:
        torch.addmm(total_VH, a_VC, b_CH, out_dtype=torch.float32, out=total_VH)
    else:
        total_VH += a_VC @ b_CH


def _chunks(count: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))
