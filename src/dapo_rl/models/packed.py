"""Sequences without padding: one row of tokens, where samples of one prompt share the prompt's tokens.

Shapes: T tokens that are computed, N sequences, E their tokens written out one sequence after the other (E > T where
prompts are shared), H query heads, K key-value heads, D the width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from dapo_rl.types import IntArray

PADDING_SHARE = 0.25
"""Without a kernel for ragged sequences, those of like length are padded together, up to this share."""

_Indices = npt.NDArray[np.int64]


class Packed:
    """A row of tokens and which of them form sequences. `packed(layer, q, k, v, scale)` is causal attention in them."""

    def __init__(
        self,
        input_ids: Sequence[IntArray],
        positions: Sequence[_Indices],
        sequences: Sequence[_Indices],
        own: Sequence[int],
        device: torch.device,
    ) -> None:
        """`sequences`: which of the T tokens each is made of; `own`: how many of them, its last, no earlier one has."""
        self.input_ids_T = torch.from_numpy(np.concatenate(input_ids).astype(np.int64)).to(device)
        self.position_ids_T = torch.from_numpy(np.concatenate(positions)).to(device)
        self.longest = max(len(sequence) for sequence in sequences)
        self.sequences, self._own, self._device = sequences, own, device

    @property
    def tokens(self) -> int:
        return len(self.input_ids_T)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        if q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16) and q_THD.shape[-1] <= 256:
            return self._in_ragged(q_THD, k_TKD, v_TKD, scale)
        if not q_THD.is_cuda:
            return self._in_float32(q_THD, k_TKD, v_TKD, scale)
        return self._in_blocks(q_THD, k_TKD, v_TKD, scale)

    def _in_ragged(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        """A sequence's own tokens ask, all its tokens answer: the kernel takes the queries to be its last ones."""
        r = self._ragged
        k, v = (x if r.written_out is None else _rows(x, r.written_out) for x in (k_TKD, v_TKD))
        extra: dict[str, Any] = {"enable_gqa": True} if _GQA_IS_ASKED_FOR else {}
        out = varlen_attn(
            q_THD, k, v, r.starts_q, r.starts_k, r.longest_q, self.longest, scale=scale, window_size=(-1, 0), **extra
        )
        assert isinstance(out, Tensor)
        return out

    def _in_float32(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        """On a CPU, where torch's attention in bfloat16 takes several times as long, above all its backward pass."""
        with torch.autocast("cpu", enabled=False):
            return self._in_blocks(q_THD.float(), k_TKD.float(), v_TKD.float(), scale).to(q_THD.dtype)

    def _in_blocks(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        outs = []
        for block in self._blocks.blocks:
            q = _rows(q_THD, block.asking).transpose(1, 2)
            k, v = (_rows(x, block.answering).transpose(1, 2) for x in (k_TKD, v_TKD))
            grouped = q.shape[1] != k.shape[1]
            if grouped and q.is_cuda:  # where no fused kernel takes grouped heads
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
                grouped = False
            mask = None if block.mask is None else block.mask.to(q.dtype)
            out_NHLD = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
            outs.append(out_NHLD.transpose(1, 2).flatten(0, 1))
        return _rows(torch.cat(outs), self._blocks.back)

    @cached_property
    def _ragged(self) -> _Ragged:
        asking = [(n, len(s)) for n, s in zip(self._own, self.sequences, strict=True) if n]
        places = np.concatenate([s for n, s in zip(self._own, self.sequences, strict=True) if n])
        starts_q, starts_k = (
            torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=self._device)
            for lengths in zip(*asking, strict=True)
        )
        return _Ragged(
            written_out=None if len(places) == self.tokens else torch.from_numpy(places).to(self._device),
            starts_q=starts_q,
            starts_k=starts_k,
            longest_q=max(self._own),
        )

    @cached_property
    def _blocks(self) -> _Blocks:
        """Sequences that share nothing ask with all their tokens, the others with their own: their last ones."""
        lengths = [len(sequence) for sequence in self.sequences]
        shares = [
            own < length and own * length <= _MASK_ELEMENTS for own, length in zip(self._own, lengths, strict=True)
        ]
        blocks: list[_Block] = []
        asked: list[_Indices] = []
        for sharing in (False, True):
            members = [i for i, s in enumerate(shares) if s == sharing and self._own[i]]
            for group in _like_lengths([lengths[i] for i in members]):
                chosen = [members[j] for j in group]
                if sharing:
                    block, tokens = self._tails(chosen)
                else:
                    tokens = _rectangle([self.sequences[i] for i in chosen])
                    whole = torch.from_numpy(np.maximum(tokens, 0)).to(self._device)
                    block = _Block(whole, whole, None)
                blocks.append(block)
                asked.append(tokens.ravel())
        everything = np.concatenate(asked)
        places = np.flatnonzero(everything >= 0)
        back = np.empty(self.tokens, dtype=np.int64)
        back[everything[places]] = places
        return _Blocks(tuple(blocks), torch.from_numpy(back).to(self._device))

    def _tails(self, members: Sequence[int]) -> tuple[_Block, _Indices]:
        """Sequences that end in the same column, so that one mask says who is before whom; and which tokens ask."""
        answering = _rectangle([self.sequences[i][::-1] for i in members])[:, ::-1]
        asking = _rectangle([self.sequences[i][len(self.sequences[i]) - self._own[i] :][::-1] for i in members])[
            :, ::-1
        ]
        asks, answers = asking.shape[1], answering.shape[1]
        earlier = np.arange(answers) <= np.arange(asks)[:, None] + answers - asks
        # Finite, because a place that only fills up may see nothing at all.
        hidden = np.where(earlier & (answering >= 0)[:, None], 0.0, -1e9).astype(np.float32)
        q, k = (torch.from_numpy(np.maximum(x, 0)).to(self._device) for x in (asking, answering))
        return _Block(q, k, torch.from_numpy(hidden[:, None]).to(self._device)), asking


@dataclass(frozen=True, slots=True)
class _Ragged:
    """Sequences for a kernel that takes them one after the other."""

    written_out: Tensor | None
    """Which of the T tokens each place of the sequences is; none where no token is shared."""
    starts_q: Tensor
    """Cumulative numbers of own tokens, from 0, int32."""
    starts_k: Tensor
    longest_q: int


@dataclass(frozen=True, slots=True)
class _Block:
    """Sequences of like length as rectangles, for attention alone: which of the T tokens stand where."""

    asking: Tensor
    answering: Tensor
    mask: Tensor | None
    """None where both are the same: padding is behind everything that may look at it."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    blocks: tuple[_Block, ...]
    back: Tensor
    """Where each of the T tokens stands among the places that ask."""


_MASK_ELEMENTS = 2**22
"""Of a sequence: longer ones ask with all their tokens, which needs no mask."""


def _rectangle(rows: Sequence[_Indices]) -> _Indices:
    """Rows from the left, −1 behind them."""
    lengths = np.array([len(row) for row in rows])
    is_real = np.arange(lengths.max()) < lengths[:, None]
    rectangle = np.full(is_real.shape, -1, dtype=np.int64)
    rectangle[is_real] = np.concatenate(rows)
    return rectangle


_GQA_IS_ASKED_FOR = "enable_gqa" in varlen_attn.__code__.co_varnames


def pack(
    sequences: Sequence[tuple[Sequence[int] | IntArray, Sequence[int] | IntArray]],
    device: torch.device,
    share_prompts: bool = True,
) -> tuple[Packed, Tensor]:
    """Pairs of prompt and response as one row; and, for each response token in turn, the token that predicts it.

    Responses to the same prompt share its tokens: whatever the model computes for them it computes once.
    """
    input_ids: list[IntArray] = []
    total = 0
    positions: list[_Indices] = []
    written_out: list[_Indices] = []
    own_tokens: list[int] = []
    predictors: list[_Indices] = []
    prompts: dict[bytes, _Indices] = {}
    for pair in sequences:
        prompt, response = (np.asarray(ids, np.int32) for ids in pair)
        key = prompt.tobytes()
        start = total
        place = prompts.get(key) if share_prompts else None
        if place is None:
            place = prompts[key] = np.arange(start, start + len(prompt))
            input_ids.append(prompt)
            total += len(prompt)
            positions.append(np.arange(len(prompt)))
        # The last response token predicts nothing that is asked for, so nothing is computed for it.
        own = np.arange(total, total + max(len(response) - 1, 0))
        input_ids.append(response[:-1])
        total += len(own)
        positions.append(np.arange(len(prompt), len(prompt) + len(own)))
        written_out.append(np.concatenate([place, own]))
        own_tokens.append(total - start)
        if len(response):
            predictors += [place[-1:], own]
    flat = np.concatenate(predictors) if predictors else np.empty(0, dtype=np.int64)
    return Packed(input_ids, positions, written_out, own_tokens, device), torch.from_numpy(flat).to(device)


def _rows(x_TKD: Tensor, places: Tensor) -> Tensor:
    """`x[places]`, by the one way of indexing whose backward pass is fast: a token's places are added up in one go."""
    return torch.embedding(x_TKD.flatten(1), places).view(*places.shape, *x_TKD.shape[1:])


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
