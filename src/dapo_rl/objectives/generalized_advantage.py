"""Generalised advantage estimation over the values of tokens. Shapes: B samples × T positions.

A mask is True where the policy wrote a token. Tokens that it did not write (padding, or text of an environment) are
skipped: the token after a written token is the next written one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LENGTH_ALPHA = 0.05
"""α of the length-adaptive λ, in VAPO."""


class Estimates(NamedTuple):
    """What the two models learn from, `[B, T]`; 0 where masked."""

    advantages: Tensor
    """For the policy."""
    targets: Tensor
    """For the critic: estimates of the return."""


def decoupled_gae(
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    *,
    policy_lambda: float | Tensor,
    critic_lambda: float | Tensor = 1.0,
    gamma: float | Tensor = 1.0,
) -> Estimates:
    """Advantages with `policy_lambda`, and targets of the critic, advantages + values, with `critic_lambda`.

    With one λ for both, this is PPO. With `critic_lambda` 1 and γ 1, the target of every token is the reward (VAPO).
    """
    advantages = gae(values, rewards, mask, policy_lambda, gamma)
    of_critic = gae(values, rewards, mask, critic_lambda, gamma)
    return Estimates(advantages, torch.where(mask, of_critic + values.float(), 0.0))


def gae(values: Tensor, rewards: Tensor, mask: Tensor, lambda_: float | Tensor, gamma: float | Tensor = 1.0) -> Tensor:
    """`A_t = δ_t + γ λ A_{t+1}` with `δ_t = r_t + γ V_{t+1} − V_t`, for `values[B, T]`; 0 where masked.

    `rewards` are `[B]`, given at the last written token, or `[B, T]`. `lambda_` is one number or one per sample, `[B]`.
    `gamma` is one number, or the discount after each token, `[B, T]`.
    V after the last token is 0: a truncated response is treated as finished.
    """
    mask = mask.bool()
    values_BT = torch.where(mask, values.float(), 0.0)
    rewards_BT = rewards.float() if rewards.dim() == 2 else token_rewards(rewards, mask)
    errors_BT = rewards_BT + gamma * _next_written(values_BT, mask) - values_BT
    lambda_B1 = torch.as_tensor(lambda_, dtype=torch.float32, device=values_BT.device).reshape(-1, 1)
    # A skipped token passes on what comes after it.
    decay_BT = torch.where(mask, (gamma * lambda_B1).expand_as(values_BT), 1.0)
    return torch.where(mask, _scan(torch.where(mask, errors_BT, 0.0), decay_BT), 0.0)


def token_rewards(rewards: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """`rewards[B]` at the last written token of each sample, or `rewards[B, T]` of each token, less `kl_coef` times the
    KL estimate of the token, which is how PPO has KL in the reward; 0 where masked."""
    is_last_BT = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    given_BT = rewards.float() if rewards.dim() == 2 else torch.where(is_last_BT, rewards.float()[:, None], 0.0)
    rewards_BT = torch.where(mask, given_BT, 0.0)
    return rewards_BT if kl is None else torch.where(mask, rewards_BT - kl_coef * kl.float(), 0.0)


def adaptive_lambda(lengths: Tensor, alpha: float = LENGTH_ALPHA, lowest: float = 0.0) -> Tensor:
    """VAPO's `λ = 1 − 1 / (α l)` for responses of `lengths[B]` tokens.

    The weights λ^t of the errors then add up to about α l: a share of the response, however long it is. The formula is
    negative for l < 1 / α (20 tokens, with α 0.05); λ is at least `lowest`. At 0, only the critic assigns credit.
    """
    return (1 - 1 / (alpha * lengths.float().clamp(min=1))).clamp(min=lowest)


def whitened(advantages: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Advantages with mean 0 and variance 1 over all tokens of the mask; 0 where masked. Pass the whole step."""
    count = mask.sum().clamp(min=1)
    values = torch.where(mask, advantages.float(), 0.0)
    centred = torch.where(mask, values - values.sum() / count, 0.0)
    return centred / (centred.square().sum() / (count - 1).clamp(min=1) + eps).sqrt()


def _next_written(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The value of the next written token; 0 after the last one."""
    width = mask_BT.shape[-1]
    places_BT = torch.where(mask_BT, torch.arange(width, device=mask_BT.device), width)
    # The nearest written place at or after each position, then moved by one; `width` means none.
    nearest_BT = places_BT.flip(-1).cummin(-1).values.flip(-1)
    following_BT = torch.nn.functional.pad(nearest_BT[:, 1:], (0, 1), value=width)
    return torch.nn.functional.pad(values_BT, (0, 1)).gather(-1, following_BT)


def _scan(errors_BT: Tensor, decay_BT: Tensor) -> Tensor:
    """`A_t = errors_t + decay_t A_{t+1}`, by doubling: after n rounds, A_t has the errors of 2^n tokens.

    20,000 tokens take 15 rounds over the batch, and rounding errors add up as in a pairwise sum.
    """
    step = 1
    while step < errors_BT.shape[-1]:
        ahead_BT = torch.nn.functional.pad(errors_BT[:, step:], (0, step))
        errors_BT = errors_BT + decay_BT * ahead_BT
        decay_BT = decay_BT * torch.nn.functional.pad(decay_BT[:, step:], (0, step))
        step *= 2
    return errors_BT
