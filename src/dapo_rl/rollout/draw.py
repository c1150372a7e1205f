"""Drawing a token: temperature, top-k, top-p, an inverse CDF, and random numbers that belong to a position.

The random number of a token is a function of (request seed, sample index, position) alone, so that what is sampled
does not depend on which requests share a batch. Shapes: B rows × V tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dapo_rl.rollout.engine import SamplingParams

# splitmix64 (Steele, Lea, Flood 2014), in int64 arithmetic that wraps around.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from anything that identifies a draw, the same on every machine."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def row_keys(seeds_and_indices: Sequence[tuple[int, int]]) -> Tensor:
    """One 63-bit key for each row, from its request's seed and its index in the group."""
    return torch.tensor([derive_seed(seed, index) for seed, index in seeds_and_indices], dtype=torch.int64)


def uniforms(keys_B: Tensor, position: int) -> Tensor:
    """One number in [0, 1) for each row, float64, for a token at a position of the response."""
    offset = ((position + 1) * _GOLDEN + 2**63) % 2**64 - 2**63
    z = keys_B + offset
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11).double() * 2.0**-53


def draw_tokens(logits_BV: Tensor, uniforms_B: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Tokens, and their log-probabilities at the temperature *before* any truncation by top-k or top-p.

    Those are the ones that the trainer recomputes; the truncated distribution's would put a constant factor into
    every ratio. Greedy (temperature 0) keeps the log-probability at temperature 1.
    """
    scaled_BV = logits_BV.float() / (params.temperature or 1.0)
    logps_BV = torch.log_softmax(scaled_BV, dim=-1)
    if params.temperature == 0:
        tokens_B = logps_BV.argmax(-1)
    else:
        probabilities_BV = truncate(logps_BV, params).exp()
        cdf_BV = probabilities_BV.double().cumsum(-1)
        target_B1 = (uniforms_B.to(cdf_BV.device) * cdf_BV[:, -1])[:, None]
        # The first token whose cumulative mass exceeds the target: never one of no mass.
        tokens_B = torch.searchsorted(cdf_BV, target_B1, right=True).squeeze(-1)
        tokens_B = torch.minimum(tokens_B, (cdf_BV < cdf_BV[:, -1:]).sum(-1))
    return tokens_B, logps_BV.gather(-1, tokens_B[:, None]).squeeze(-1)


def truncate(logps_BV: Tensor, params: SamplingParams) -> Tensor:
    """−inf for tokens that top-k, then top-p, leave out; the likeliest token always stays."""
    if params.top_k:
        k = min(params.top_k, logps_BV.shape[-1])
        kth_B1 = logps_BV.topk(k, dim=-1).values[:, -1:]
        logps_BV = logps_BV.masked_fill(logps_BV < kth_B1, -torch.inf)
    if params.top_p < 1:
        sorted_BV, order_BV = torch.log_softmax(logps_BV, dim=-1).sort(dim=-1, descending=True, stable=True)
        mass_BV = sorted_BV.exp()
        outside_BV = mass_BV.cumsum(-1) - mass_BV >= params.top_p
        outside_BV[:, 0] = False
        logps_BV = logps_BV.masked_fill(outside_BV.scatter(-1, order_BV, outside_BV), -torch.inf)
    return logps_BV


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """A logical shift: int64's own copies the sign bit in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
