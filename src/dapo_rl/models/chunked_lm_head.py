"""Log-probabilities and entropies of tokens from hidden states, without holding the logits of all tokens at once.

Logits are computed in slices of rows and recomputed in the backward pass, which multiplies a whole chunk of slices at
once; only the last chunk keeps what its backward pass needs. Softmax and sums are in float32, matrix products in the
type of the hidden states.

Shapes: T tokens, C of them in a chunk, S in a slice, H the width of a hidden state, V the vocabulary, of which at most
K tokens are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**27}
"""Maximum logits per chunk: enough rows for a fast matrix product, but little memory compared with activations."""

IMPOSSIBLE = -1e30
"""The logit of a token that was not kept. Unlike −inf it is finite, so that 0 times it is 0."""

SLICE_ELEMENTS = {"cpu": 2**22}
"""Logits per softmax: as many as fit in a CPU's cache. A GPU processes a whole chunk at once."""


def token_logps(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
    fused: bool = False,
    kept_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The log-probability of each target, and the entropy of its distribution: over the vocabulary, or over the ids
    that are kept for it, if they are given. Then a row of −1 alone has 0 for both, without a gradient.

    `fused` reads the logits once in a Triton kernel, instead of once in each operation.
    """
    device = hidden_TH.device.type
    if torch.is_autocast_enabled(device):
        hidden_TH = hidden_TH.to(torch.get_autocast_dtype(device))
    budget = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"])
    if fused:  # there are no exponentials beside the logits, so twice the rows take the same memory
        budget *= 2
    rows = chunk_rows or max(1, budget // len(weight_VH))
    with torch.autocast(device, enabled=False):
        logps_T, entropy_T = _TokenLogps.apply(  # type: ignore[no-untyped-call]
            hidden_TH, weight_VH, bias_V, targets_T, temperature, rows, fused, kept_TK
        )
    return logps_T, entropy_T


def project(hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float = 1.0) -> Tensor:
    """Logits in float32 from a product in the inputs' type; on a GPU its sums are never rounded to that type."""
    if hidden_TH.is_cuda and hidden_TH.dtype != torch.float32:
        logits_TV = torch.mm(hidden_TH, weight_VH.T, out_dtype=torch.float32)
    else:
        logits_TV = (hidden_TH @ weight_VH.T).float()
    if bias_V is not None:
        logits_TV.add_(bias_V)
    return logits_TV if temperature == 1 else logits_TV.div_(temperature)


def not_kept(kept_SK: Tensor, targets_S: Tensor, vocabulary: int) -> Tensor:
    """A mask of the tokens that were not kept, `[…, V]`. The target counts as kept: of ids that are −1 alone, it is the
    only one, and certain."""
    ids_SK = torch.where(kept_SK < 0, targets_S[..., None], kept_SK.long())
    mask_SV = torch.ones(*targets_S.shape, vocabulary, dtype=torch.bool, device=kept_SK.device)
    return mask_SV.scatter_(-1, ids_SK, False)


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
        fused: bool,
        kept_TK: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        stats = _fused_stats if fused else _stats
        weight = weight_VH.to(hidden_TH.dtype)
        logps_T, entropy_T, log_sums_T = (hidden_TH.new_empty(len(hidden_TH), dtype=torch.float32) for _ in range(3))
        keeps = any(ctx.needs_input_grad[:3])
        pulls_CV: Tensor | None = None
        for chunk in _chunks(0, len(hidden_TH), rows):
            if keeps and chunk.stop == len(hidden_TH):
                pulls_CV = hidden_TH.new_empty(chunk.stop - chunk.start, len(weight))
            for part in _slices(chunk, weight):
                logits_SV = _kept_logits(hidden_TH, weight, bias_V, targets_T, temperature, kept_TK, part)
                pulls_SV = None if pulls_CV is None else pulls_CV[part.start - chunk.start : part.stop - chunk.start]
                logps_T[part], entropy_T[part], log_sums_T[part] = stats(logits_SV, targets_T[part], pulls_SV)
                del logits_SV
        ctx.last_pulls = pulls_CV
        ctx.temperature, ctx.rows, ctx.fused = temperature, rows, fused
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, logps_T, entropy_T, log_sums_T, kept_TK)
        ctx.set_materialize_grads(False)
        return logps_T, entropy_T

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, bias_V, targets_T, logps_T, entropy_T, log_sums_T, kept_TK = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        weight = weight_VH.to(hidden_TH.dtype)
        grad_hidden_TH = torch.empty_like(hidden_TH) if wants_hidden else None
        grad_weight_VH: Tensor | None = None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias else None
        grad_T = torch.zeros_like(logps_T) if grad_T is None else grad_T.float()
        # The gradient of a logit is g · (1[target] − p). Applying g to the hidden states touches H numbers per token
        # instead of V. That of the entropy, −h · p · (log p + entropy), is not a multiple of it.
        factor_T1 = (-(grad_T if grad_entropy_T is None else torch.ones_like(grad_T)) / ctx.temperature)[:, None]
        pulls_CV, ctx.last_pulls = ctx.last_pulls if grad_entropy_T is None else None, None
        for chunk in reversed(list(_chunks(0, len(hidden_TH), ctx.rows))):
            if pulls_CV is None:
                pulls_CV = hidden_TH.new_empty(chunk.stop - chunk.start, len(weight))
                for part in _slices(chunk, weight):
                    logits_SV = _kept_logits(hidden_TH, weight, bias_V, targets_T, ctx.temperature, kept_TK, part)
                    out_SV = pulls_CV[part.start - chunk.start : part.stop - chunk.start]
                    if grad_entropy_T is not None:
                        logits_SV.sub_(log_sums_T[part, None])
                        probs_SV = logits_SV.exp()
                        by_entropy_SV = logits_SV.add_(entropy_T[part, None]).mul_(probs_SV)
                        by_entropy_SV.masked_fill_(probs_SV == 0, 0.0).mul_(grad_entropy_T[part, None])
                        pulls_SV = _pulls(probs_SV, targets_T[part], logps_T[part]).mul_(grad_T[part, None])
                        out_SV.copy_(pulls_SV.add_(by_entropy_SV))
                        del probs_SV, by_entropy_SV, pulls_SV
                    elif ctx.fused:
                        _fused_pulls(logits_SV, targets_T[part], logps_T[part], log_sums_T[part], out_SV)
                    else:
                        probs_SV = logits_SV.sub_(log_sums_T[part, None]).exp_()
                        out_SV.copy_(_pulls(probs_SV, targets_T[part], logps_T[part]))
                        del probs_SV
                    del logits_SV
            if grad_bias_V is not None:
                grad_bias_V += pulls_CV.T @ factor_T1[chunk, 0].to(pulls_CV.dtype)
            if grad_hidden_TH is not None:
                torch.mul(pulls_CV @ weight, factor_T1[chunk], out=grad_hidden_TH[chunk])
            if wants_weight:
                scaled_CH = (hidden_TH[chunk] * factor_T1[chunk]).to(hidden_TH.dtype)
                grad_weight_VH = _add_product(grad_weight_VH, pulls_CV.T, scaled_CH)
            pulls_CV = None
        if wants_weight:
            grad_weight_VH = torch.zeros_like(weight_VH) if grad_weight_VH is None else grad_weight_VH
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        if grad_bias_V is not None:
            grad_bias_V = grad_bias_V.to(bias_V.dtype)
        return grad_hidden_TH, grad_weight_VH, grad_bias_V, None, None, None, None, None


def _kept_logits(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    temperature: float,
    kept_TK: Tensor | None,
    part: slice,
) -> Tensor:
    """The logits of a slice, of which those that were not kept are `IMPOSSIBLE`."""
    logits_SV = project(hidden_TH[part], weight_VH, bias_V, temperature)
    if kept_TK is None:
        return logits_SV
    return logits_SV.masked_fill_(not_kept(kept_TK[part], targets_T[part], len(weight_VH)), IMPOSSIBLE)


def _stats(logits_SV: Tensor, targets_S: Tensor, pulls_SV: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of each target, the entropy and the logarithm of the sum of exponentials. Overwrites the
    logits, and writes p − 1[target] to `pulls` if given."""
    highest_S = logits_SV.amax(-1)
    logits_SV.sub_(highest_S[:, None])
    at_target_S = logits_SV.gather(-1, targets_S[:, None]).squeeze(-1)
    exps_SV = logits_SV.exp()
    sums_S = exps_SV.sum(-1)
    log_sums_S = sums_S.log()
    logps_S = at_target_S - log_sums_S
    # −Σ p·log p, where p = e / Σe and log p = logit − log Σe.
    entropy_S = log_sums_S - torch.linalg.vecdot(exps_SV, logits_SV) / sums_S
    if pulls_SV is not None:
        pulls_SV.copy_(_pulls(exps_SV.div_(sums_S[:, None]), targets_S, logps_S))
    return logps_S, entropy_S, log_sums_S + highest_S


def _fused_stats(logits_SV: Tensor, targets_S: Tensor, pulls_SV: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`_stats`, which leaves the logits as they are."""
    from dapo_rl.models.kernels.softmax import softmax_stats

    logps_S, entropy_S, log_sums_S = softmax_stats(logits_SV, targets_S)
    if pulls_SV is not None:
        _fused_pulls(logits_SV, targets_S, logps_S, log_sums_S, pulls_SV)
    return logps_S, entropy_S, log_sums_S


def _fused_pulls(logits_SV: Tensor, targets_S: Tensor, logps_S: Tensor, log_sums_S: Tensor, out_SV: Tensor) -> None:
    from dapo_rl.models.kernels.softmax import softmax_pulls

    softmax_pulls(logits_SV, targets_S, logps_S, log_sums_S, out_SV)


def _pulls(probs_SV: Tensor, targets_S: Tensor, logps_S: Tensor) -> Tensor:
    """p − 1[target], computed from log p at the target: close to p = 1 the subtraction would lose all digits."""
    return probs_SV.scatter_(-1, targets_S[:, None], torch.expm1(logps_S[:, None]))


def _add_product(total_VH: Tensor | None, a_VC: Tensor, b_CH: Tensor) -> Tensor:
    """`total + a @ b` in float32, whatever the type of a and b; in place if there is a total."""
    if a_VC.is_cuda and a_VC.dtype != torch.float32:
        if total_VH is None:
            return torch.mm(a_VC, b_CH, out_dtype=torch.float32)
        return torch.addmm(total_VH, a_VC, b_CH, out_dtype=torch.float32, out=total_VH)
    if total_VH is None:
        return (a_VC @ b_CH).float()
    return total_VH.addmm_(a_VC, b_CH) if a_VC.dtype == torch.float32 else total_VH.add_(a_VC @ b_CH)


def _chunks(start: int, stop: int, rows: int) -> Iterator[slice]:
    return (slice(first, min(first + rows, stop)) for first in range(start, stop, rows))


def _slices(chunk: slice, weight_VH: Tensor) -> Iterator[slice]:
    elements = SLICE_ELEMENTS.get(weight_VH.device.type)
    rows = chunk.stop - chunk.start if elements is None else max(1, elements // len(weight_VH))
    return _chunks(chunk.start, chunk.stop, rows)
