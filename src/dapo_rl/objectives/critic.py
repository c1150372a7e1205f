"""The loss of the critic, how well it predicts, and VAPO's loss of correct samples. Shapes: B samples × T tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_rl.choices import Aggregation
from dapo_rl.objectives.aggregation import aggregate


def value_loss(
    values: Tensor,
    old_values: Tensor,
    targets: Tensor,
    mask: Tensor,
    *,
    clip: float | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: float | Tensor | None = None,
) -> Tensor:
    """`max((V − R)², (V_clip − R)²) / 2` over tokens: a scalar to minimise. `V_clip` is V within `old_values` ± `clip`.

    Without `clip` it is half the squared error. `denominator` is that of `aggregate`.
    """
    # Masked positions are zeroed before the square: 0 × NaN is NaN, in the gradient too.
    new, old, target = (torch.where(mask, tensor.float(), 0.0) for tensor in (values, old_values, targets))
    squares = (new - target).square()
    if clip is not None:
        squares = torch.maximum(squares, (old + (new - old).clamp(-clip, clip) - target).square())
    return aggregate(squares / 2, mask, aggregation, denominator)


def explained_variance(values: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """`1 − Var(R − V) / Var(R)` over the tokens of the mask: 1 is perfect, 0 is no better than a constant.

    NaN if all targets are equal, because there is nothing to explain.
    """
    predicted, wanted = values[mask].double(), targets[mask].double()
    if len(wanted) == 0 or bool((wanted == wanted[0]).all()):
        return torch.full((), torch.nan, device=values.device)
    return (1 - (wanted - predicted).var(correction=0) / wanted.var(correction=0)).float()


def positive_lm_loss(
    logps: Tensor,
    correct: Tensor,
    mask: Tensor,
    *,
    weight: float = 0.1,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """`weight` (μ) times the mean negative log-likelihood over the tokens of the samples that are `correct[B]`.

    `denominator` is the number of such tokens in the optimizer step, so that micro-batches and ranks add up. Without
    correct samples the loss is 0.
    """
    return weight * aggregate(-logps, mask & correct.bool()[:, None], "token-mean", denominator)
