"""Which tokens learn, and how: selected by their entropy, or by the covariance of log-probability and advantage.

Shapes: T tokens of a whole mini-batch; a mask is True where a token is in the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top_entropy_mask(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """True for the `share` of the tokens with the highest entropy: those at or above the quantile 1 − `share`, which is
    interpolated between neighbours."""
    among = entropy[mask].double().sort().values
    if not len(among):
        return mask
    place = (len(among) - 1) * (1 - share)
    low = int(place)
    high = min(low + 1, len(among) - 1)
    threshold = among[low] + (place - low) * (among[high] - among[low])
    return mask & (entropy.double() >= threshold)


def token_covariances(logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """`(log π − mean)·(A − mean)` of each token, whose mean is the covariance; 0 where masked.

    Entropy falls by about the covariance in an update (arXiv 2505.22617), so few tokens account for most of its fall.
    """
    deviations = []
    for values in (logps, advantages):
        kept = values.double().where(mask, 0.0)
        deviations.append((kept - kept.sum() / mask.sum().clamp(min=1)).where(mask, 0.0))
    return deviations[0] * deviations[1]


def clip_cov_mask(covariances: Tensor, mask: Tensor, order: Tensor, *, share: float, low: float, high: float) -> Tensor:
    """The tokens that Clip-Cov leaves out: `share` of all tokens, at least one, of those with a covariance between
    `low` and `high`; the first by `order`, which are random numbers."""
    among = mask & (covariances > low) & (covariances < high)
    return _first(order.where(among, torch.inf), among, share, int(mask.sum()))


def kl_cov_mask(covariances: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """The tokens that KL-Cov holds back: the `share` with the largest covariances, at least one."""
    return _first((-covariances).where(mask, torch.inf), mask, share, int(mask.sum()))


def _first(order: Tensor, among: Tensor, share: float, tokens: int) -> Tensor:
    count = min(max(int(share * tokens), 1), int(among.sum()))
    chosen = torch.zeros_like(among)
    chosen[order.argsort(stable=True)[:count]] = True
    return chosen
