"""Attention of a decode step over the pages of the KV cache.

Each kernel runs on the current stream with fixed block sizes and reads no device values on the host, so a CUDA graph
can capture it. Shapes: B rows of a step, N pages of P tokens; H query heads of dimension D, R of which share one of K
key-value heads (H = R·K).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

MOST_SPLITS = 32


def splits_for(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """How many parts to split each row's keys into: several programs per multiprocessor, and no split (so no merge) if
    there are enough rows."""
    programs = rows * kv_heads
    if programs >= 2 * multiprocessors:
        return 1
    return min(-(-3 * multiprocessors // programs), MOST_SPLITS)


def attention_config(width: int, itemsize: int) -> dict[str, int]:
    """Small tiles, with two loads in flight while one is used: 36 KiB of shared memory for D = 64 in bf16, 70 for 128.

    Several programs then share a multiprocessor and together keep about 100 KiB of reads in flight, four times what
    is needed to hide the memory latency.
    """
    row_bytes = next_power_of_2(width) * itemsize
    return {"BLOCK_N": 64 if row_bytes <= 256 else 32 if row_bytes <= 1024 else 16, "num_warps": 4, "num_stages": 3}


def decode_attention(
    q_BHD: Tensor,
    k_new_BKD: Tensor,
    v_new_BKD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    scale: float,
    splits: int,
) -> Tensor:
    """Row b attends to the first `positions_B[b]` keys of its sequence and to its new key, and writes the new key and
    value to the cache.

    The caches are `[N, K, P, D]` with D contiguous, P a power of two from 16 on. `table[slots_B[b]]` are the pages of
    the row's sequence, int32. A row whose position is beyond its table writes nothing.
    """
    B, H, D = q_BHD.shape
    K, P = k_cache.shape[1:3]
    R = H // K
    for x in (q_BHD, k_new_BKD, v_new_BKD, k_cache, v_cache):
        assert x.stride(-1) == 1
        assert x.shape[-1] == D
        assert x.dtype == q_BHD.dtype
    assert H == R * K
    assert k_cache.stride() == v_cache.stride()
    assert P >= 16
    assert next_power_of_2(P) == P
    assert table.dtype == torch.int32
    assert table.stride(1) == 1
    out_BHD = q_BHD.new_empty(B, H, D)
    DP = max(next_power_of_2(D), 16)
    if splits == 1:
        parts, stats = out_BHD, out_BHD
    else:
        parts = q_BHD.new_empty(B, H, splits, D, dtype=torch.float32)
        stats = q_BHD.new_empty(B, H, splits, 2, dtype=torch.float32)
    config = attention_config(D, q_BHD.element_size())
    config["BLOCK_N"] = min(config["BLOCK_N"], P)
    _attention_kernel[(B, K, splits)](
        q_BHD, k_new_BKD, v_new_BKD, k_cache, v_cache, table, slots_B, positions_B, parts, stats,
        float(scale) * math.log2(math.e), table.stride(0), table.shape[1] * P,
        *q_BHD.stride()[:2], *k_new_BKD.stride()[:2], *v_new_BKD.stride()[:2], *k_cache.stride()[:3],
        splits, R=R, D=D, RP=max(next_power_of_2(R), 16), DP=DP, P=P, WHOLE=splits == 1, **config,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(B * H,)](parts, stats, out_BHD, splits, D=D, DP=DP, SP=next_power_of_2(splits), num_warps=2)
    return out_BHD


@triton.jit(do_not_specialize=["splits"])
def _attention_kernel(
    q, k_new, v_new, k_cache, v_cache, table, slots, positions, parts, stats,
    scale, table_s, capacity,
    q_b, q_h, k_new_b, k_new_h, v_new_b, v_new_h,
    cache_p, cache_h, cache_n, splits,
    R: tl.constexpr, D: tl.constexpr, RP: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row, one key-value head, one part of its keys; scores are base-2 logarithms.

    The R query heads are padded to the 16 rows of a tensor-core product; the padding is free, as memory is the limit.
    A tile of BLOCK_N keys lies in one page.
    """
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(slots + b).to(tl.int64)
    position = tl.load(positions + b).to(tl.int32)
    length = tl.minimum(position, capacity)
    pages = table + slot * table_s
    k_base = k_cache + head * cache_h
    v_base = v_cache + head * cache_h

    r = tl.arange(0, RP)
    d = tl.arange(0, DP)
    inside = d < D
    real = (r < R)[:, None] & inside[None, :]
    q_RD = tl.load(q + b * q_b + (head * R + r)[:, None] * q_h + d[None, :], mask=real, other=0.0)

    # The last part also handles the new key, from registers: the value stored here is not read back.
    last = split == splits - 1
    k_D = tl.load(k_new + b * k_new_b + head * k_new_h + d, mask=inside & last, other=0.0)
    v_D = tl.load(v_new + b * v_new_b + head * v_new_h + d, mask=inside & last, other=0.0)
    room = inside & last & (position < capacity)
    page = tl.load(pages + position // P, mask=position < capacity, other=0).to(tl.int64)
    there = page * cache_p + (position % P) * cache_n + d
    tl.store(k_base + there, k_D, mask=room)
    tl.store(v_base + there, v_D, mask=room)
    score_R = tl.sum(q_RD.to(tl.float32) * k_D.to(tl.float32)[None, :], axis=1) * scale
    top_R = tl.where(last, score_R, float("-inf"))
    total_R = tl.where(last, tl.full([RP], 1.0, tl.float32), tl.zeros([RP], tl.float32))
    sum_RD = tl.zeros([RP, DP], tl.float32) + v_D.to(tl.float32)[None, :]

    span = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    start = split * span
    end = tl.minimum(start + span, length)
    n = tl.arange(0, BLOCK_N)
    for n_0 in range(start, end, BLOCK_N):
        page = tl.load(pages + n_0 // P).to(tl.int64)
        tile_base = page * cache_p + (n_0 % P) * cache_n
        cached = n_0 + n < end
        tile = cached[:, None] & inside[None, :]
        k_ND = tl.load(k_base + tile_base + n[:, None] * cache_n + d[None, :], mask=tile, other=0.0)
        score_RN = tl.dot(q_RD, tl.trans(k_ND), input_precision="ieee") * scale
        score_RN = tl.where(cached[None, :], score_RN, float("-inf"))
        new_top_R = tl.maximum(top_R, tl.max(score_RN, axis=1))
        shrink_R = tl.exp2(top_R - new_top_R)
        weight_RN = tl.exp2(score_RN - new_top_R[:, None])
        total_R = total_R * shrink_R + tl.sum(weight_RN, axis=1)
        v_ND = tl.load(v_base + tile_base + n[:, None] * cache_n + d[None, :], mask=tile, other=0.0)
        sum_RD = tl.dot(weight_RN.to(v_ND.dtype), v_ND, sum_RD * shrink_R[:, None], input_precision="ieee")
        top_R = new_top_R

    row_R = b * (tl.num_programs(1) * R) + head * R + r
    if WHOLE:
        out_RD = sum_RD / total_R[:, None]
        tl.store(parts + row_R[:, None] * D + d[None, :], out_RD.to(parts.dtype.element_ty), mask=real)
    else:
        part_R = row_R * splits + split
        tl.store(parts + part_R[:, None] * D + d[None, :], sum_RD, mask=real)
        tl.store(stats + part_R * 2, top_R, mask=r < R)
        tl.store(stats + part_R * 2 + 1, total_R, mask=r < R)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    parts, stats, out, splits, D: tl.constexpr, DP: tl.constexpr, SP: tl.constexpr
):  # fmt: skip
    """One head of one row. A part without keys has maximum −inf and weight 0; the last part always has a key."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SP)
    d = tl.arange(0, DP)
    part_S = row * splits + s
    top_S = tl.load(stats + part_S * 2, mask=s < splits, other=float("-inf"))
    total_S = tl.load(stats + part_S * 2 + 1, mask=s < splits, other=0.0)
    weight_S = tl.exp2(top_S - tl.max(top_S, axis=0))
    tile = (s < splits)[:, None] & (d < D)[None, :]
    sum_SD = tl.load(parts + part_S[:, None] * D + d[None, :], mask=tile, other=0.0)
    out_D = tl.sum(sum_SD * weight_S[:, None], axis=0) / tl.sum(total_S * weight_S, axis=0)
    tl.store(out + row * D + d, out_D.to(out.dtype.element_ty), mask=d < D)
