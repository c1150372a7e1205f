"""Sequences without padding: one row of tokens, where samples of one prompt share the prompt's tokens.

Shapes: T tokens that are computed, N sequences, E their tokens written out one sequence after the other (E > T where
prompts are shared), H query heads, K key-value heads, D the width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

PADDING_SHARE = 0.25
"""Without a kernel for ragged sequences, those of like length are padded together, up to this share."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Sequences of like length as a rectangle, for attention alone."""

    tokens_NL: Tensor
    """Which of the T tokens stands where; padding repeats token 0, behind everything that may look at it."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A row of tokens and which of them form sequences. `packed(layer, q, k, v, scale)` is causal attention in them."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    longest: int
    written_out_E: Tensor | None
    """Which of the T tokens each place of the sequences is; none where no token is shared."""
    back_T: Tensor
    """Where each of the T tokens stands (for a shared one, first stands) among the sequences' places."""
    starts_N: Tensor
    """Cumulative lengths, `[N + 1]`, int32."""
    blocks: tuple[_Block, ...]
    """The same sequences as rectangles, where `ragged` is not to be had."""
    back_from_blocks_T: Tensor

    @property
    def tokens(self) -> int:
        return len(self.input_ids_T)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        if q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16) and q_THD.shape[-1] <= 256:
            return self._ragged(q_THD, k_TKD, v_TKD, scale)
        return self._in_blocks(q_THD, k_TKD, v_TKD, scale)

    def _ragged(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        q, k, v = (x if self.written_out_E is None else x[self.written_out_E] for x in (q_THD, k_TKD, v_TKD))
        extra = {"enable_gqa": True} if _GQA_IS_ASKED_FOR else {}
        out = varlen_attn(
            q, k, v, self.starts_N, self.starts_N, self.longest, self.longest, scale=scale, window_size=(-1, 0), **extra
        )
        assert isinstance(out, Tensor)
        return out if self.written_out_E is None else out[self.back_T]

    def _in_blocks(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        outs = []
        for block in self.blocks:
            q, k, v = (x[block.tokens_NL].transpose(1, 2) for x in (q_THD, k_TKD, v_TKD))
            # The query heads of one key-value head in turn: repeating keys and values would copy them.
            repeats = q.shape[1] // k.shape[1]
            parts = [
                F.scaled_dot_product_attention(q[:, r::repeats], k, v, is_causal=True, scale=scale)
                for r in range(repeats)
            ]
            out_NKRLD = torch.stack(parts, dim=2)
            outs.append(out_NKRLD.flatten(1, 2).transpose(1, 2).flatten(0, 1))
        return torch.cat(outs)[self.back_from_blocks_T]


_GQA_IS_ASKED_FOR = "enable_gqa" in varlen_attn.__code__.co_varnames


def pack(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device, share_prompts: bool = True
) -> tuple[Packed, Tensor]:
    """Pairs of prompt and response as one row; and, for each response token in turn, the token that predicts it.

    Responses to the same prompt share its tokens: whatever the model computes for them it computes once.
    """
    input_ids: list[int] = []
    positions: list[int] = []
    written_out: list[list[int]] = []
    predictors: list[int] = []
    prompts: dict[tuple[int, ...], range] = {}
    for prompt, response in sequences:
        key = tuple(prompt)
        place = prompts.get(key) if share_prompts else None
        if place is None:
            place = range(len(input_ids), len(input_ids) + len(prompt))
            prompts[key] = place
            input_ids += prompt
            positions += range(len(prompt))
        # The last response token predicts nothing that is asked for, so nothing is computed for it.
        own = range(len(input_ids), len(input_ids) + max(len(response) - 1, 0))
        input_ids += response[:-1]
        positions += range(len(prompt), len(prompt) + len(own))
        written_out.append([*place, *own])
        if response:
            predictors += [place[-1], *own]
    return _packed(input_ids, positions, written_out, device), torch.tensor(predictors, device=device)


def _packed(ids: list[int], positions: list[int], sequences: list[list[int]], device: torch.device) -> Packed:
    flat = torch.tensor([token for sequence in sequences for token in sequence])
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    starts = F.pad(lengths.cumsum(0), (1, 0))
    back = _first_places(flat, len(ids))
    blocks: list[_Block] = []
    places: list[Tensor] = []
    for members in _like_lengths([len(sequence) for sequence in sequences]):
        width = max(len(sequences[i]) for i in members)
        rectangle = torch.zeros(len(members), width, dtype=torch.long)
        for row, i in enumerate(members):
            rectangle[row, : len(sequences[i])] = torch.tensor(sequences[i])
        blocks.append(_Block(rectangle.to(device)))
        real = torch.arange(width) < torch.tensor([len(sequences[i]) for i in members])[:, None]
        places.append(torch.where(real, rectangle, -1).flatten())
    return Packed(
        input_ids_T=torch.tensor(ids, device=device),
        position_ids_T=torch.tensor(positions, device=device),
        longest=int(lengths.max()),
        written_out_E=None if len(flat) == len(ids) else flat.to(device),
        back_T=back.to(device),
        starts_N=starts.to(device, torch.int32),
        blocks=tuple(blocks),
        back_from_blocks_T=_first_places(torch.cat(places), len(ids)).to(device),
    )


def _first_places(tokens: Tensor, count: int) -> Tensor:
    """For each of `count` tokens, the first place at which it stands; −1 in `tokens` is nobody."""
    places = torch.full((count + 1,), len(tokens))
    return places.scatter_reduce_(0, tokens % (count + 1), torch.arange(len(tokens)), "amin")[:count]


def _like_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences in groups whose padding stays within the share."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups: list[list[int]] = []
    total = 0
    for i in order:
        total += lengths[i]
        if groups and (len(groups[-1]) + 1) * lengths[i] * (1 - PADDING_SHARE) <= total:
            groups[-1].append(i)
        else:
            groups.append([i])
            total = lengths[i]
    return groups
