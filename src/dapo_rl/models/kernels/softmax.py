"""Log-probabilities and entropies from a slice of float32 logits, which is read once and never written.

Shapes: S rows of a slice, V tokens of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2


def softmax_stats(logits_SV: Tensor, targets_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of each target, the entropy, and the logarithm of the sum of exponentials."""
    S, V = logits_SV.shape
    logps_S, entropy_S, log_sums_S = (logits_SV.new_empty(S, dtype=torch.float32) for _ in range(3))
    _stats_kernel[(S,)](
        logits_SV, targets_S, logps_S, entropy_S, log_sums_S, V, logits_SV.stride(0),
        BLOCK=min(next_power_of_2(V), 4096), num_warps=8,
    )  # fmt: skip
    return logps_S, entropy_S, log_sums_S


def softmax_pulls(logits_SV: Tensor, targets_S: Tensor, logps_S: Tensor, log_sums_S: Tensor, out_SV: Tensor) -> None:
    """Writes p − 1[target] in the type of `out`; at the target from log p, which keeps the digits close to p = 1."""
    S, V = logits_SV.shape
    BLOCK = min(next_power_of_2(V), 2048)
    _pulls_kernel[(S, cdiv(V, BLOCK))](
        logits_SV, targets_S, torch.expm1(logps_S), log_sums_S, out_SV, V, logits_SV.stride(0), out_SV.stride(0),
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _stats_kernel(logits, targets, logps, entropy, log_sums, V, logits_s, BLOCK: tl.constexpr):
    """Each lane keeps the largest of its logits, and Σe and Σe·x of x = logit − largest; they are joined at the end.

    −Σ p·log p = log Σe − Σe·x / Σe. An infinite or missing number spoils the sums, as it must.
    """
    s = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    row = logits + s * logits_s
    top_V = tl.full([BLOCK], -1e30, tl.float32)
    sum_V = tl.zeros([BLOCK], tl.float32)
    dot_V = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        x_V = tl.load(row + first + lane, mask=first + lane < V, other=float("-inf"))
        higher_V = tl.maximum(top_V, x_V)
        gap_V = top_V - higher_V
        shrink_V = tl.exp(gap_V)
        e_V = tl.exp(x_V - higher_V)
        dot_V = shrink_V * (dot_V + sum_V * gap_V) + tl.where(e_V == 0.0, 0.0, e_V * (x_V - higher_V))
        sum_V = shrink_V * sum_V + e_V
        top_V = higher_V
    top = tl.max(top_V, axis=0)
    gap_V = top_V - top
    shrink_V = tl.exp(gap_V)
    dot = tl.sum(tl.where(shrink_V == 0.0, 0.0, shrink_V * (dot_V + sum_V * gap_V)), axis=0)
    total = tl.sum(shrink_V * sum_V, axis=0)
    log_sum = tl.log(total)
    at_target = tl.load(row + tl.load(targets + s))
    tl.store(logps + s, (at_target - top) - log_sum)
    tl.store(entropy + s, log_sum - dot / total)
    tl.store(log_sums + s, log_sum + top)


@triton.jit
def _pulls_kernel(logits, targets, at_target, log_sums, out, V, logits_s, out_s, BLOCK: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_V = tl.load(logits + s * logits_s + v, mask=v < V, other=0.0)
    p_V = tl.exp(x_V - tl.load(log_sums + s))
    p_V = tl.where(v == tl.load(targets + s), tl.load(at_target + s), p_V)
    tl.store(out + s * out_s + v, p_V.to(out.dtype.element_ty), mask=v < V)
