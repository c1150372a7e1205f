"""Token sampling: temperature, top-k, top-p and min-p, then an inverse CDF with a random number for each position.

A token's random number is a function of (request seed, sample index, position) alone, so the samples do not depend on
which requests share a batch. The inverse CDF needs one random number per row; drawing one per vocabulary entry would
cost more than the model itself. Shapes: B rows × V tokens, of which at most K are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dapo_rl.engines.protocol import SamplingParams

# splitmix64 (Steele, Lea, Flood 2014), in wrapping int64 arithmetic.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64

_CHUNK = 1024
"""The inverse CDF first finds a chunk of this many tokens, then the token inside it."""


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the parts that identify a draw, the same on every machine."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def row_keys(seeds_and_indices: Sequence[tuple[int, int]]) -> Tensor:
    """One 63-bit key for each row, from its request's seed and its index in the group."""
    return torch.tensor([derive_seed(seed, index) for seed, index in seeds_and_indices], dtype=torch.int64)


def uniforms(keys_B: Tensor, positions_B: Tensor | int) -> Tensor:
    """One float64 in [0, 1) for each row, for the token at its position in the response."""
    if isinstance(positions_B, int):
        positions_B = torch.full((), positions_B, device=keys_B.device)
    z = keys_B + (positions_B.long() + 1) * _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11).double() * 2.0**-53


@dataclass(frozen=True, slots=True)
class DrawParams:
    """The sampling parameters of B rows, as tensors."""

    temperature_B: Tensor
    """0 is greedy."""
    top_p_B: Tensor
    top_k_B: Tensor
    """0 is off."""
    min_p_B: Tensor
    truncates: bool
    """Whether any row truncates its distribution; if none does, nothing is sorted."""
    keeps_B: Tensor
    """Whether the tokens that truncation keeps are recorded."""
    most_kept: int
    """K, the most tokens that are recorded for a row; 0 if none are for any."""

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], device: torch.device | str = "cpu") -> DrawParams:
        return cls(
            temperature_B=torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
            top_p_B=torch.tensor([row.top_p for row in rows], dtype=torch.float32, device=device),
            top_k_B=torch.tensor([row.top_k for row in rows], dtype=torch.int64, device=device),
            min_p_B=torch.tensor([row.min_p for row in rows], dtype=torch.float32, device=device),
            truncates=any(row.truncates for row in rows),
            keeps_B=torch.tensor([row.keep_mask for row in rows], dtype=torch.bool, device=device),
            most_kept=max((row.most_kept for row in rows), default=0),
        )


class Drawn(NamedTuple):
    tokens_B: Tensor
    logps_B: Tensor
    kept_BK: Tensor
    """The tokens that truncation kept, the most likely first, then −1; int32. Only −1 in rows that do not record
    them."""


def draw_tokens(logits_BV: Tensor, uniforms_B: Tensor, how: DrawParams) -> Drawn:
    """Tokens, and their log-probabilities at the sampling temperature *before* any truncation; or after it, in rows
    whose kept tokens are recorded.

    The trainer recomputes these: without the kept tokens it knows no truncation, and log-probabilities of the truncated
    distribution would put another factor into every ratio. Greedy rows (temperature 0) get the log-probability at
    temperature 1.
    """
    logits_BV = logits_BV.float()
    best_B1, argmax_B1 = logits_BV.max(-1, keepdim=True)
    greedy_B1 = how.temperature_B[:, None] == 0
    scale_B1 = 1 / how.temperature_B[:, None].masked_fill(greedy_B1, 1.0)
    mass_BV = ((logits_BV - best_B1).mul_(scale_B1)).exp_()
    log_total_B1 = mass_BV.sum(-1, keepdim=True).log_()
    kept_BK = torch.empty(len(logits_BV), 0, dtype=torch.int32, device=logits_BV.device)
    if how.truncates:
        sorted_BV, order_BV = _sort_and_cut(mass_BV, how)
        mass_BV = torch.zeros_like(mass_BV).scatter_(-1, order_BV, sorted_BV)
        if how.most_kept:
            keeps_B1, first_BK = how.keeps_B[:, None], sorted_BV[:, : how.most_kept]
            kept_BK = order_BV[:, : how.most_kept].int().masked_fill_((first_BK == 0) | ~keeps_B1, -1)
            kept_BK = F.pad(kept_BK, (0, how.most_kept - kept_BK.shape[1]), value=-1)
            log_total_B1 = torch.where(keeps_B1, first_BK.sum(-1, keepdim=True).log_(), log_total_B1)
    drawn_B1 = _invert(mass_BV, uniforms_B.to(mass_BV.device)[:, None])
    tokens_B1 = torch.where(greedy_B1, argmax_B1, drawn_B1)
    logps_B1 = (logits_BV.gather(-1, tokens_B1) - best_B1) * scale_B1 - log_total_B1
    return Drawn(tokens_B1.squeeze(-1), logps_B1.squeeze(-1), kept_BK)


def _invert(mass_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """The first token whose cumulative mass exceeds the uniform number times the total; never a token without mass."""
    rows, vocabulary = mass_BV.shape
    if vocabulary < _CHUNK:  # the same as below, without the padding to a chunk
        return _first_above(mass_BV.double().cumsum(-1), uniforms_B1 * mass_BV.sum(-1, keepdim=True).double())
    chunks = -(-vocabulary // _CHUNK)
    whole = vocabulary // _CHUNK
    sums_BC = mass_BV[:, : whole * _CHUNK].view(rows, whole, _CHUNK).sum(-1)
    if chunks > whole:
        sums_BC = torch.cat([sums_BC, mass_BV[:, whole * _CHUNK :].sum(-1, keepdim=True)], dim=-1)
    cdf_BC = sums_BC.double().cumsum(-1)
    target_B1 = uniforms_B1 * cdf_BC[:, -1:]
    chunk_B1 = _first_above(cdf_BC, target_B1)
    before_B1 = cdf_BC.gather(-1, chunk_B1) - sums_BC.double().gather(-1, chunk_B1)
    places = chunk_B1 * _CHUNK + torch.arange(_CHUNK, device=mass_BV.device)
    inside_BK = mass_BV.gather(-1, places.clamp(max=vocabulary - 1)).masked_fill_(places >= vocabulary, 0.0)
    return chunk_B1 * _CHUNK + _first_above(inside_BK.double().cumsum(-1), (target_B1 - before_B1).clamp_(min=0))


def _first_above(cdf_BN: Tensor, target_B1: Tensor) -> Tensor:
    """The first index above the target, or, if rounding leaves none, the last index that adds mass."""
    place_B1 = (cdf_BN <= target_B1).sum(-1, keepdim=True)
    return torch.minimum(place_B1, (cdf_BN < cdf_BN[:, -1:]).sum(-1, keepdim=True))


def truncate(mass_BV: Tensor, how: DrawParams) -> Tensor:
    """Zeroes the mass of tokens cut by top-k, then top-p, then min-p; the most likely token always stays."""
    sorted_BV, order_BV = _sort_and_cut(mass_BV, how)
    return torch.zeros_like(mass_BV).scatter_(-1, order_BV, sorted_BV)


def _sort_and_cut(mass_BV: Tensor, how: DrawParams) -> tuple[Tensor, Tensor]:
    """The truncated mass from the most to the least likely token, and the tokens in this order."""
    sorted_BV, order_BV = mass_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(mass_BV.shape[-1], device=mass_BV.device)
    top_k_B1 = how.top_k_B[:, None]
    kth_B1 = sorted_BV.gather(-1, (top_k_B1 - 1).clamp(0, mass_BV.shape[-1] - 1))
    beyond_BV = sorted_BV < kth_B1  # tokens equal to the kth stay, unless there is room for k alone
    if how.most_kept:
        beyond_BV |= how.keeps_B[:, None] & (rank_V >= top_k_B1)
    sorted_BV = sorted_BV.masked_fill((top_k_B1 > 0) & beyond_BV, 0.0)
    top_p_B1 = how.top_p_B[:, None]
    share_BV = sorted_BV / sorted_BV.sum(-1, keepdim=True)
    before_BV = share_BV.cumsum(-1) - share_BV
    sorted_BV = sorted_BV.masked_fill((top_p_B1 < 1) & (before_BV >= top_p_B1) & (rank_V > 0), 0.0)
    return sorted_BV.masked_fill(sorted_BV < how.min_p_B[:, None] * sorted_BV[:, :1], 0.0), order_BV


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """A logical right shift; `>>` on int64 copies the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
