"""Packed sequences: one row of tokens without padding, in which samples of the same prompt share its tokens.

Queries come from a sequence's own tokens, keys and values from all of its tokens, including a shared prompt.

Shapes: T tokens in the row, R reads of them, N sequences, L tokens of a padded sequence, H query heads, K key-value
heads, D the width of a head.
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

from dapo_rl.models.device import to_device
from dapo_rl.types import IntArray


class Reads:
    """`reads.of(x)` is `x[indices]`, with a backward pass that is deterministic on every device.

    On a GPU, the reads of each row are listed once on the host, and each row's gradient is the sum over its list. The
    backward pass of `torch.embedding` would sort the indices in every layer, and that of `index_select` adds in the
    order in which threads arrive.
    """

    def __init__(self, indices_R: npt.NDArray[np.int64], rows: int, device: torch.device) -> None:
        self._on_host, self._rows, self._device = indices_R, rows, device
        self.indices = to_device(indices_R, device)

    def of(self, x: Tensor) -> Tensor:
        flat_TN = x.flatten(1)
        if x.is_cuda and x.requires_grad and torch.is_grad_enabled() and (lists := self._lists) is not None:
            from dapo_rl.models.kernels.gather import read_rows

            read_RN = read_rows(flat_TN, self.indices, *lists)
        else:
            read_RN = torch.embedding(flat_TN, self.indices)
        return read_RN.view(-1, *x.shape[1:])

    @cached_property
    def _lists(self) -> tuple[Tensor, Tensor] | None:
        """The reads of row 0, of row 1 and so on, and where each row's begin; None without Triton."""
        try:
            import triton  # noqa: F401
        except ImportError:
            return None
        order_R, starts_T = reads_by_row(self._on_host, self._rows)
        return to_device(order_R, self._device), to_device(starts_T, self._device)


def reads_by_row(indices_R: npt.NDArray[np.int64], rows: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The reads in the order of their rows, and the number of reads of earlier rows, for each row and the end."""
    order_R = np.argsort(indices_R, kind="stable").astype(np.int32)
    starts_T = np.zeros(rows + 1, np.int32)
    np.cumsum(np.bincount(indices_R, minlength=rows), out=starts_T[1:])
    return order_R, starts_T


PADDING_SHARE = 0.25
"""Without a kernel for ragged sequences, sequences of similar length are padded together, up to this share."""

_Indices = npt.NDArray[np.int64]


class Packed:
    """A row of tokens and the sequences in it. `packed(layer, q, k, v, scale)` is causal attention within each."""

    def __init__(
        self,
        input_ids: Sequence[IntArray],
        positions: Sequence[_Indices],
        sequences: Sequence[_Indices],
        own: Sequence[int],
        device: torch.device,
        cached: int = 0,
    ) -> None:
        """`sequences` has the indices of each sequence's tokens in the row; `own` counts those at its end that no
        earlier sequence contains. Keys and values of `cached` more tokens, which are not computed, follow the row's."""
        self.input_ids_T = to_device(np.concatenate(input_ids).astype(np.int64), device)
        self.position_ids_T = to_device(np.concatenate(positions), device)
        self.longest = max(len(sequence) for sequence in sequences)
        self.sequences, self._own, self._device, self._cached = sequences, own, device, cached

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
        """The kernel aligns the queries with the end of the keys: a sequence's own tokens are its last ones."""
        r = self._ragged
        k, v = (x if r.keys is None else r.keys.of(x) for x in (k_TKD, v_TKD))
        extra: dict[str, Any] = {"enable_gqa": True} if _HAS_GQA_OPTION else {}
        out = varlen_attn(
            q_THD, k, v, r.starts_q, r.starts_k, r.longest_q, self.longest, scale=scale, window_size=(-1, 0), **extra
        )
        assert isinstance(out, Tensor)
        return out

    def _in_float32(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        """On a CPU, torch's attention is several times slower in bfloat16, above all in the backward pass."""
        with torch.autocast("cpu", enabled=False):
            return self._in_blocks(q_THD.float(), k_TKD.float(), v_TKD.float(), scale).to(q_THD.dtype)

    def _in_blocks(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        outs = []
        blocks, positions = self._blocks
        for block in blocks:
            q = _rows(q_THD, block.queries).transpose(1, 2)
            k, v = (_rows(x, block.keys).transpose(1, 2) for x in (k_TKD, v_TKD))
            grouped = q.shape[1] != k.shape[1]
            if grouped and q.is_cuda:  # no fused kernel supports grouped heads here
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
                grouped = False
            mask = None if block.mask is None else block.mask.to(q.dtype)
            out_NHLD = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
            outs.append(out_NHLD.transpose(1, 2).flatten(0, 1))
        return _rows(torch.cat(outs), positions)

    @cached_property
    def _ragged(self) -> _Ragged:
        counts = [(n, len(s)) for n, s in zip(self._own, self.sequences, strict=True) if n]
        keys = np.concatenate([s for n, s in zip(self._own, self.sequences, strict=True) if n])
        starts_q, starts_k = (
            to_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), self._device)
            for lengths in zip(*counts, strict=True)
        )
        whole = len(keys) == self.tokens and not self._cached
        reads = None if whole else Reads(keys, self.tokens + self._cached, self._device)
        return _Ragged(reads, starts_q, starts_k, longest_q=max(self._own))

    @cached_property
    def _blocks(self) -> tuple[list[_Block], Tensor]:
        """Blocks, and the position of each token of the row among the queries of all of them. Sequences that share no
        tokens have a query for every token, the others for their own tokens at the end."""
        lengths = [len(sequence) for sequence in self.sequences]
        shares = [
            own < length and (own * length <= _MASK_ELEMENTS or int(sequence.max()) >= self.tokens)
            for own, length, sequence in zip(self._own, lengths, self.sequences, strict=True)
        ]
        blocks: list[_Block] = []
        queries: list[_Indices] = []
        for sharing in (False, True):
            members = [i for i, s in enumerate(shares) if s == sharing and self._own[i]]
            for group in _group_by_length([lengths[i] for i in members]):
                chosen = [members[j] for j in group]
                if sharing:
                    block, tokens = self._tails(chosen)
                else:
                    tokens = _rectangle([self.sequences[i] for i in chosen])
                    whole = to_device(np.maximum(tokens, 0), self._device)
                    block = _Block(whole, whole, None)
                blocks.append(block)
                queries.append(tokens.ravel())
        everything = np.concatenate(queries)
        places = np.flatnonzero(everything >= 0)
        positions = np.empty(self.tokens, dtype=np.int64)
        positions[everything[places]] = places
        return blocks, to_device(positions, self._device)

    def _tails(self, members: Sequence[int]) -> tuple[_Block, _Indices]:
        """A block of sequences aligned at their ends, so that one causal mask fits all; and the query tokens."""
        keys = _rectangle([self.sequences[i][::-1] for i in members])[:, ::-1]
        tails = [self.sequences[i][len(self.sequences[i]) - self._own[i] :] for i in members]
        queries = _rectangle([tail[::-1] for tail in tails])[:, ::-1]
        width_q, width_k = queries.shape[1], keys.shape[1]
        is_causal = np.arange(width_k) <= np.arange(width_q)[:, None] + width_k - width_q
        # Finite, because a padding query may have no key at all.
        mask = np.where(is_causal & (keys >= 0)[:, None], 0.0, -1e9).astype(np.float32)
        q, k = (to_device(np.maximum(x, 0), self._device) for x in (queries, keys))
        return _Block(q, k, to_device(mask[:, None], self._device)), queries


@dataclass(frozen=True, slots=True)
class _Ragged:
    """Sequences for a kernel that takes them concatenated."""

    keys: Reads | None
    """The keys and values of all sequences; None if no token is shared."""
    starts_q: Tensor
    """Cumulative lengths of the queries, from 0, int32."""
    starts_k: Tensor
    longest_q: int


@dataclass(frozen=True, slots=True)
class _Block:
    """Sequences of similar length, padded for the attention only: indices of their tokens in the row."""

    queries: Tensor
    keys: Tensor
    mask: Tensor | None
    """None if queries and keys are the same tokens: the causal mask hides padding, which comes last."""


_MASK_ELEMENTS = 2**22
"""Maximum size of a sequence's mask. A larger sequence has a query for every token, which needs no mask, unless some of
its tokens are cached."""


def _rectangle(rows: Sequence[_Indices]) -> _Indices:
    """Rows padded on the right with −1."""
    lengths = np.array([len(row) for row in rows])
    is_real = np.arange(lengths.max()) < lengths[:, None]
    rectangle = np.full(is_real.shape, -1, dtype=np.int64)
    rectangle[is_real] = np.concatenate(rows)
    return rectangle


_HAS_GQA_OPTION = "enable_gqa" in varlen_attn.__code__.co_varnames


def pack(
    sequences: Sequence[tuple[Sequence[int] | IntArray, Sequence[int] | IntArray]],
    device: torch.device,
    share_prompts: bool = True,
) -> tuple[Packed, Reads]:
    """Packs pairs of prompt and response into one row; also returns which token predicts each response token.

    Responses to the same prompt share its tokens, which are computed once.
    """
    input_ids: list[IntArray] = []
    total = 0
    positions: list[_Indices] = []
    rows: list[_Indices] = []
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
        # The last response token predicts nothing that is needed, so it is not computed.
        own = np.arange(total, total + max(len(response) - 1, 0))
        input_ids.append(response[:-1])
        total += len(own)
        positions.append(np.arange(len(prompt), len(prompt) + len(own)))
        rows.append(np.concatenate([place, own]))
        own_tokens.append(total - start)
        if len(response):
            predictors += [place[-1:], own]
    flat = np.concatenate(predictors) if predictors else np.empty(0, dtype=np.int64)
    return Packed(input_ids, positions, rows, own_tokens, device), Reads(flat, total, device)


def _rows(x_TKD: Tensor, places: Tensor) -> Tensor:
    """`x[places]` as an embedding lookup, the form of indexing with a fast backward pass."""
    return torch.embedding(x_TKD.flatten(1), places).view(*places.shape, *x_TKD.shape[1:])


def _group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Groups sequences by length, so that padding stays within the share."""
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
