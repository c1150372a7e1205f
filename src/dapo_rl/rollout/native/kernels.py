"""Triton kernels for a decode step on a GPU: attention over the KV cache, token sampling, and the element-wise
operations between matrix products.

Each kernel runs on the current stream with fixed block sizes and reads no device values on the host, so a CUDA graph
can capture it. Shapes: B rows of a step, S slots of the cache with capacity C; H query heads of dimension D, R of which
share one of K key-value heads (H = R·K); V vocabulary size; T tokens; N hidden size.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from dapo_rl.rollout.native.state import SlotState

CHUNK = 1024
"""Logits whose mass is summed into one number; the inverse CDF then rereads one chunk. In bf16 this is 16 bytes for
each of 128 threads."""
CHUNKS_AT_ONCE = 4
"""Chunks that one program sums, which gives it as many independent loads in flight."""


# --- Attention ---------------------------------------------------------------------------------------------------


def splits_for(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """How many parts to split each row's keys into: several programs per multiprocessor, and no split (so no merge) if
    there are enough rows."""
    programs = rows * kv_heads
    if programs >= 2 * multiprocessors:
        return 1
    return min(-(-3 * multiprocessors // programs), 16)


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
    slots_B: Tensor,
    positions_B: Tensor,
    scale: float,
    splits: int,
) -> Tensor:
    """Row b attends to the first `positions_B[b]` keys of its slot and to its new key, and writes the new key and value
    to the cache.

    The caches are `[S, K, C, D]` with D contiguous. A row whose position is beyond the capacity writes nothing.
    """
    B, H, D = q_BHD.shape
    K, C = k_cache.shape[1:3]
    R = H // K
    for x in (q_BHD, k_new_BKD, v_new_BKD, k_cache, v_cache):
        assert x.stride(-1) == 1
        assert x.shape[-1] == D
        assert x.dtype == q_BHD.dtype
    assert H == R * K
    assert all(K * x.stride(1) + C * x.stride(2) < 2**31 for x in (k_cache, v_cache))  # Offsets in a slot are int32.
    out_BHD = q_BHD.new_empty(B, H, D)
    DP = max(next_power_of_2(D), 16)
    if splits == 1:
        parts, stats = out_BHD, out_BHD
    else:
        parts = q_BHD.new_empty(B, H, splits, D, dtype=torch.float32)
        stats = q_BHD.new_empty(B, H, splits, 2, dtype=torch.float32)
    _attention_kernel[(B, K, splits)](
        q_BHD, k_new_BKD, v_new_BKD, k_cache, v_cache, slots_B, positions_B, parts, stats,
        float(scale) * math.log2(math.e), C,
        *q_BHD.stride()[:2], *k_new_BKD.stride()[:2], *v_new_BKD.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        R=R, D=D, RP=max(next_power_of_2(R), 16), DP=DP, SPLITS=splits, **attention_config(D, q_BHD.element_size()),
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(B * H,)](
            parts, stats, out_BHD, D=D, DP=DP, SPLITS=splits, SP=next_power_of_2(splits), num_warps=2
        )
    return out_BHD


@triton.jit
def _attention_kernel(
    q, k_new, v_new, k_cache, v_cache, slots, positions, parts, stats,
    scale, capacity,
    q_b, q_h, k_new_b, k_new_h, v_new_b, v_new_h,
    k_s, k_h, k_n, v_s, v_h, v_n,
    R: tl.constexpr, D: tl.constexpr, RP: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row, one key-value head, one part of its keys; scores are base-2 logarithms.

    The R query heads are padded to the 16 rows of a tensor-core product; the padding is free, as memory is the limit.
    """
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(slots + b).to(tl.int64)
    position = tl.load(positions + b).to(tl.int32)
    length = tl.minimum(position, capacity)
    k_base = k_cache + slot * k_s + head * k_h
    v_base = v_cache + slot * v_s + head * v_h

    r = tl.arange(0, RP)
    d = tl.arange(0, DP)
    inside = d < D
    real = (r < R)[:, None] & inside[None, :]
    q_RD = tl.load(q + b * q_b + (head * R + r)[:, None] * q_h + d[None, :], mask=real, other=0.0)

    # The last part also handles the new key, from registers: the value stored here is not read back.
    last = split == SPLITS - 1
    k_D = tl.load(k_new + b * k_new_b + head * k_new_h + d, mask=inside & last, other=0.0)
    v_D = tl.load(v_new + b * v_new_b + head * v_new_h + d, mask=inside & last, other=0.0)
    room = inside & last & (position < capacity)
    tl.store(k_base + position * k_n + d, k_D, mask=room)
    tl.store(v_base + position * v_n + d, v_D, mask=room)
    score_R = tl.sum(q_RD.to(tl.float32) * k_D.to(tl.float32)[None, :], axis=1) * scale
    top_R = tl.where(last, score_R, float("-inf"))
    total_R = tl.where(last, tl.full([RP], 1.0, tl.float32), tl.zeros([RP], tl.float32))
    sum_RD = tl.zeros([RP, DP], tl.float32) + v_D.to(tl.float32)[None, :]

    span = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    start = split * span
    end = tl.minimum(start + span, length)
    for n_0 in range(start, end, BLOCK_N):
        n = n_0 + tl.arange(0, BLOCK_N)
        cached = n < end
        tile = cached[:, None] & inside[None, :]
        k_ND = tl.load(k_base + n[:, None] * k_n + d[None, :], mask=tile, other=0.0)
        score_RN = tl.dot(q_RD, tl.trans(k_ND), input_precision="ieee") * scale
        score_RN = tl.where(cached[None, :], score_RN, float("-inf"))
        new_top_R = tl.maximum(top_R, tl.max(score_RN, axis=1))
        shrink_R = tl.exp2(top_R - new_top_R)
        weight_RN = tl.exp2(score_RN - new_top_R[:, None])
        total_R = total_R * shrink_R + tl.sum(weight_RN, axis=1)
        v_ND = tl.load(v_base + n[:, None] * v_n + d[None, :], mask=tile, other=0.0)
        sum_RD = tl.dot(weight_RN.to(v_ND.dtype), v_ND, sum_RD * shrink_R[:, None], input_precision="ieee")
        top_R = new_top_R

    row_R = b * (tl.num_programs(1) * R) + head * R + r
    if SPLITS == 1:
        out_RD = sum_RD / total_R[:, None]
        tl.store(parts + row_R[:, None] * D + d[None, :], out_RD.to(parts.dtype.element_ty), mask=real)
    else:
        part_R = row_R * SPLITS + split
        tl.store(parts + part_R[:, None] * D + d[None, :], sum_RD, mask=real)
        tl.store(stats + part_R * 2, top_R, mask=r < R)
        tl.store(stats + part_R * 2 + 1, total_R, mask=r < R)


@triton.jit
def _merge_kernel(
    parts, stats, out, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr
):  # fmt: skip
    """One head of one row. A part without keys has maximum −inf and weight 0; the last part always has a key."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SP)
    d = tl.arange(0, DP)
    part_S = row * SPLITS + s
    top_S = tl.load(stats + part_S * 2, mask=s < SPLITS, other=float("-inf"))
    total_S = tl.load(stats + part_S * 2 + 1, mask=s < SPLITS, other=0.0)
    weight_S = tl.exp2(top_S - tl.max(top_S, axis=0))
    tile = (s < SPLITS)[:, None] & (d < D)[None, :]
    sum_SD = tl.load(parts + part_S[:, None] * D + d[None, :], mask=tile, other=0.0)
    out_D = tl.sum(sum_SD * weight_S[:, None], axis=0) / tl.sum(total_S * weight_S, axis=0)
    tl.store(out + row * D + d, out_D.to(out.dtype.element_ty), mask=d < D)


# --- Token sampling ------------------------------------------------------------------------------------------------


def draw(
    logits_BV: Tensor, temperature_B: Tensor, keys_B: Tensor, generated_B: Tensor, tokens_B: Tensor, logps_B: Tensor
) -> None:
    """`draw.draw_tokens` without truncation: writes tokens (int64) and their log-probabilities (float32).

    A row's random number is `draw.uniforms(key, generated)`; temperature 0 is greedy.
    """
    _draw(logits_BV, temperature_B, keys_B, generated_B, tokens_B, logps_B, None, 0)


def draw_and_advance(
    logits_BV: Tensor, slots_B: Tensor, state: SlotState, is_stop_V: Tensor, cached: int = 1
) -> tuple[Tensor, Tensor]:
    """`draw` with the state of each row's slot, followed by `advance`, in the same two launches."""
    tokens_B = torch.empty(len(logits_BV), dtype=torch.int64, device=logits_BV.device)
    logps_B = torch.empty(len(logits_BV), dtype=torch.float32, device=logits_BV.device)
    further = (slots_B, *_state_pointers(state, is_stop_V))
    _draw(logits_BV, state.temperature, state.key, state.generated, tokens_B, logps_B, further, cached)
    return tokens_B, logps_B


def advance(
    tokens_B: Tensor, logps_B: Tensor, slots_B: Tensor, state: SlotState, is_stop_V: Tensor, cached: int = 1
) -> None:
    """Appends the drawn tokens to their slots. A finished slot does not change; only a finished slot may occur twice.

    `cached` is the number of keys per row that the preceding forward pass wrote to the cache: 0 after a prefill, when
    the position is already the length of the prompt.
    """
    rows = len(slots_B)
    _advance_kernel[(cdiv(rows, 128),)](
        tokens_B, logps_B, slots_B, *_state_pointers(state, is_stop_V), rows, CACHED=cached, BLOCK=128, num_warps=4
    )


def _state_pointers(state: SlotState, is_stop_V: Tensor) -> tuple[Any, ...]:
    assert state.tokens.stride(-1) == 1
    assert state.logps.stride() == state.tokens.stride()
    return (
        state.last_token, state.position, state.generated, state.limit,
        state.done.view(torch.uint8), state.heeds_stop.view(torch.uint8), is_stop_V.view(torch.uint8),
        state.tokens, state.logps,
        len(is_stop_V), state.tokens.shape[1], state.tokens.stride(0),
    )  # fmt: skip


def _draw(
    logits_BV: Tensor, temperature: Tensor, keys: Tensor, generated: Tensor, tokens_B: Tensor, logps_B: Tensor,
    further: tuple[Any, ...] | None, cached: int,
) -> None:  # fmt: skip
    B, V = logits_BV.shape
    assert logits_BV.stride(1) == 1
    chunks = cdiv(V, CHUNK)
    mass = torch.empty(B, 2, chunks, dtype=torch.float32, device=logits_BV.device)
    slots, *others = further or (tokens_B, *[tokens_B] * 9, 0, 0, 0)
    by_slot = further is not None
    _mass_kernel[(B, cdiv(chunks, CHUNKS_AT_ONCE))](
        logits_BV, temperature, slots, mass, logits_BV.stride(0), V, chunks,
        BY_SLOT=by_slot, CHUNK=CHUNK, AT_ONCE=CHUNKS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    _draw_kernel[(B,)](
        logits_BV, temperature, keys, mass, logits_BV.stride(0), V, chunks, tokens_B, logps_B, generated,
        slots, *others, BY_SLOT=by_slot, CACHED=cached, CHUNK=CHUNK, CHUNKS=next_power_of_2(chunks), num_warps=4,
    )  # fmt: skip


@triton.jit
def _mass_kernel(
    logits, temperature, slots, mass, row_stride, V, chunks,
    BY_SLOT: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The largest logit of each chunk, and the chunk's sum of exponentials relative to it."""
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    v_CV = c[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x_CV = tl.load(logits + b * row_stride + v_CV, mask=v_CV < V, other=float("-inf")).to(tl.float32)
    top_C = tl.max(x_CV, axis=1)
    weight_CV = _weights(x_CV, top_C[:, None], _sharpness(temperature, slots, b, BY_SLOT))
    tl.store(mass + b * 2 * chunks + c, top_C, mask=c < chunks)
    tl.store(mass + (b * 2 + 1) * chunks + c, tl.sum(weight_CV, axis=1), mask=c < chunks)


@triton.jit
def _draw_kernel(
    logits, temperature, keys, mass, row_stride, V, chunks, tokens, logps, generated,
    slots, last_token, position, generated_again, limit, done, heeds_stop, is_stop, out_tokens, out_logps,
    stops, columns, out_stride,
    BY_SLOT: tl.constexpr, CACHED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One row: finds the chunk that the inverse CDF falls into, then the token in it.

    Entries without mass are excluded explicitly, because a parallel floating-point prefix sum need not be monotone.
    """
    b = tl.program_id(0).to(tl.int64)
    owner = _owner(slots, b, BY_SLOT)
    sharpness = _sharpness(temperature, slots, b, BY_SLOT)
    greedy = tl.load(temperature + owner) <= 0.0
    count = tl.load(generated + owner)
    uniform = _uniform(tl.load(keys + owner), count)

    c = tl.arange(0, CHUNKS)
    top_C = tl.load(mass + b * 2 * chunks + c, mask=c < chunks, other=float("-inf"))
    sum_C = tl.load(mass + (b * 2 + 1) * chunks + c, mask=c < chunks, other=0.0)
    top = tl.max(top_C, axis=0)
    mass_C = sum_C.to(tl.float64) * _weights(top_C, top, sharpness).to(tl.float64)
    total = tl.sum(mass_C, axis=0)
    target = uniform * total
    drawn = _first_above(tl.cumsum(mass_C, axis=0), mass_C, target, c, CHUNKS)
    likeliest = tl.min(tl.where(top_C == top, c, CHUNKS), axis=0)
    chunk = tl.minimum(tl.where(greedy, likeliest, drawn), chunks - 1)
    here = tl.sum(tl.where(c == chunk, mass_C, 0.0), axis=0)
    before = tl.sum(tl.where(c < chunk, mass_C, 0.0), axis=0)
    share = (target - before) / tl.where(here > 0.0, here, 1.0)
    chunk_top = tl.max(tl.where(c == chunk, top_C, float("-inf")), axis=0)

    v = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + v < V
    x_V = tl.load(logits + b * row_stride + chunk * CHUNK + v, mask=inside, other=float("-inf")).to(tl.float32)
    mass_V = _weights(x_V, chunk_top, sharpness).to(tl.float64)
    drawn_v = _first_above(tl.cumsum(mass_V, axis=0), mass_V, share * tl.sum(mass_V, axis=0), v, CHUNK)
    likeliest_v = tl.min(tl.where(x_V == top, v, CHUNK), axis=0)
    token = tl.minimum(chunk * CHUNK + tl.where(greedy, likeliest_v, drawn_v), V - 1)
    x = tl.max(tl.where(chunk * CHUNK + v == token, x_V, float("-inf")), axis=0)
    logp = (x - top) * sharpness - tl.log(total.to(tl.float32))
    tl.store(tokens + b, token.to(tl.int64))
    tl.store(logps + b, logp)
    if BY_SLOT:
        _advance(
            token, logp, owner, b >= 0, last_token, position, generated_again, limit, done, heeds_stop, is_stop,
            out_tokens, out_logps, stops, columns, out_stride, CACHED,
        )  # fmt: skip


@triton.jit
def _advance_kernel(
    tokens, logps, slots, last_token, position, generated, limit, done, heeds_stop, is_stop, out_tokens, out_logps,
    stops, columns, out_stride, rows, CACHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = b < rows
    token = tl.load(tokens + b, mask=exists, other=0)
    logp = tl.load(logps + b, mask=exists, other=0.0)
    slot = tl.load(slots + b, mask=exists, other=0).to(tl.int64)
    _advance(
        token, logp, slot, exists, last_token, position, generated, limit, done, heeds_stop, is_stop,
        out_tokens, out_logps, stops, columns, out_stride, CACHED,
    )  # fmt: skip


@triton.jit
def _advance(
    token, logp, slot, exists, last_token, position, generated, limit, done, heeds_stop, is_stop,
    out_tokens, out_logps, stops, columns, out_stride, CACHED: tl.constexpr,
):  # fmt: skip
    live = exists & (tl.load(done + slot) == 0)
    count = tl.load(generated + slot)
    written = live & (count < columns)
    tl.store(out_tokens + slot * out_stride + count, token.to(out_tokens.dtype.element_ty), mask=written)
    tl.store(out_logps + slot * out_stride + count, logp, mask=written)
    tl.store(generated + slot, count + 1, mask=live)
    tl.store(position + slot, tl.load(position + slot) + CACHED, mask=live)
    tl.store(last_token + slot, token.to(last_token.dtype.element_ty), mask=live)
    ends = tl.load(is_stop + token, mask=token < stops, other=0) != 0
    stopped = ends & (tl.load(heeds_stop + slot) != 0)
    full = count + 1 >= tl.load(limit + slot)
    tl.store(done + slot, (stopped | full).to(tl.uint8), mask=live)


@triton.jit
def _owner(slots, b, BY_SLOT: tl.constexpr):
    return tl.load(slots + b).to(tl.int64) if BY_SLOT else b


@triton.jit
def _sharpness(temperature, slots, b, BY_SLOT: tl.constexpr):
    """1 / temperature; 1 for a greedy row, whose log-probability is taken at temperature 1."""
    t = tl.load(temperature + _owner(slots, b, BY_SLOT))
    return 1.0 / tl.where(t > 0.0, t, 1.0)


@triton.jit
def _weights(x, top, sharpness):
    """exp of logits minus the largest; all 0 if all logits are −inf."""
    return tl.exp((x - tl.where(top == float("-inf"), 0.0, top)) * sharpness)


@triton.jit
def _first_above(cdf, mass, target, index, size):
    """The first index with mass whose cumulative mass exceeds the target, otherwise the last index with mass."""
    first = tl.min(tl.where((mass > 0.0) & (cdf > target), index, size), axis=0)
    return tl.minimum(first, tl.max(tl.where(mass > 0.0, index, 0), axis=0))


@triton.jit
def _uniform(key, count):
    """`draw.uniforms`, bit for bit: the upper 53 bits of splitmix64 as a fraction."""
    z = key.to(tl.uint64) + (count.to(tl.int64) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.float64) * 1.1102230246251565e-16


# --- Between matrix products -----------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """RMS norm over the last dimension, rounded where Llama's module rounds; `plus_one` is for Gemma's norm, which
    multiplies by 1 + weight."""
    return _rms_norm(x, None, weight, eps, plus_one)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """The norm of `residual + x`, and the sum itself."""
    return _rms_norm(x, residual.contiguous(), weight, eps, plus_one)


def _rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    N = x.shape[-1]
    assert weight.shape == (N,)
    assert weight.dtype == x.dtype
    assert weight.is_contiguous()
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
    x_3 = _rows_in_two_strides(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    rows = out.numel() // N
    BLOCK = next_power_of_2(N)
    ROWS = max(1, 1024 // BLOCK)
    _rms_norm_kernel[(cdiv(rows, ROWS),)](
        x_3, x if residual is None else residual, weight, out, total,
        rows, x_3.shape[1], N, x_3.stride(0), x_3.stride(1), float(eps),
        ADD=residual is not None, PLUS_ONE=plus_one, ROWS=ROWS, BLOCK=BLOCK, num_warps=4 if BLOCK <= 2048 else 8,
    )  # fmt: skip
    return out, total


def _rows_in_two_strides(x: Tensor) -> Tensor:
    """`x` as `[outer, inner, N]`, usually tokens × heads; the rows of a slice of a joint projection are not
    contiguous."""
    if x.dim() == 3 and x.stride(-1) == 1:
        return x
    rows = x.shape[-2] if x.dim() > 1 else 1
    try:
        x_3 = x.view(-1, rows, x.shape[-1])
    except RuntimeError:
        x_3 = x.contiguous().view(-1, rows, x.shape[-1])
    return x_3 if x_3.stride(-1) == 1 else x_3.contiguous()


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, total, rows, inner, N, x_outer, x_inner, eps,
    ADD: tl.constexpr, PLUS_ONE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK)
    tile = (row < rows)[:, None] & (n < N)[None, :]
    there = (row * N)[:, None] + n[None, :]
    start = (row // inner) * x_outer + (row % inner) * x_inner
    x_RN = tl.load(x + start[:, None] + n[None, :], mask=tile, other=0.0).to(tl.float32)
    if ADD:
        x_RN += tl.load(residual + there, mask=tile, other=0.0).to(tl.float32)
        sum_RN = x_RN.to(dtype)
        tl.store(total + there, sum_RN, mask=tile)
        x_RN = sum_RN.to(tl.float32)
    w_N = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    mean_R = tl.sum(x_RN * x_RN, axis=1) / N
    norm_RN = x_RN * tl.rsqrt(mean_R + eps)[:, None]
    out_RN = norm_RN * (1.0 + w_N)[None, :] if PLUS_ONE else norm_RN.to(dtype).to(tl.float32) * w_N[None, :]
    tl.store(out + there, out_RN.to(dtype), mask=tile)


Activation = Literal["silu", "gelu_tanh"]


def gated(gate_up: Tensor, kind: Activation) -> Tensor:
    """`act(gate) * up` of the two halves of the last dimension, the activation rounded before the product."""
    inner = gate_up.shape[-1] // 2
    gate_up_T2I = gate_up.reshape(-1, 2 * inner)
    assert gate_up_T2I.stride(1) == 1
    out = torch.empty(*gate_up.shape[:-1], inner, dtype=gate_up.dtype, device=gate_up.device)
    _gated_kernel[(len(gate_up_T2I), cdiv(inner, 1024))](
        gate_up_T2I, out, gate_up_T2I.stride(0), inner, SILU=kind == "silu", BLOCK=1024, num_warps=4
    )
    return out


@triton.jit
def _gated_kernel(gate_up, out, stride, inner, SILU: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < inner
    g = tl.load(gate_up + t * stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * stride + inner + i, mask=inside, other=0.0).to(tl.float32)
    # The tanh form of GELU is also a product with a logistic function: 0.5·(1 + tanh y) = 1 / (1 + exp(−2y)).
    slope = g if SILU else 1.5957691216057308 * (g + 0.044715 * g * g * g)
    act = g / (1.0 + tl.exp(-slope))
    dtype = out.dtype.element_ty
    tl.store(out + t * inner + i, (act.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` in one launch, for `[1, H, T, D]` and `[1, K, T, D]`, stored as `[T, H, D]`.

    cos and sin are `[1, T, W]`; dimensions beyond W are copied unchanged.
    """
    _, H, T, D = q.shape
    K, W = k.shape[1], cos.shape[-1]
    assert q.shape[0] == 1
    assert cos.shape == sin.shape == (1, T, W)
    q_out, k_out = q.new_empty(1, T, H, D), k.new_empty(1, T, K, D)
    for x in (q, k, cos, sin):
        assert x.stride(-1) == 1
        assert x.dtype == q.dtype
    _rotary_kernel[(T,)](
        q, k, cos, sin, q_out, k_out, q.stride(2), q.stride(1), k.stride(2), k.stride(1), cos.stride(1), sin.stride(1),
        H=H, HP=next_power_of_2(H), K=K, KP=next_power_of_2(K),
        D=D, HALF=W // 2, HALF_P=next_power_of_2(W // 2), REST_P=next_power_of_2(D - W), num_warps=4,
    )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


@triton.jit
def _rotary_kernel(
    q, k, cos, sin, q_out, k_out, q_t, q_h, k_t, k_h, cos_t, sin_t,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    _turn(q + t * q_t, q_out + t * H * D, cos + t * cos_t, sin + t * sin_t, q_h, H, HP, D, HALF, HALF_P, REST_P)
    _turn(k + t * k_t, k_out + t * K * D, cos + t * cos_t, sin + t * sin_t, k_h, K, KP, D, HALF, HALF_P, REST_P)


@triton.jit
def _turn(
    x, out, cos, sin, stride, H: tl.constexpr, HP: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr,
):  # fmt: skip
    """Rotates all heads of one token; each product is rounded before the sum, as in the module."""
    dtype = out.dtype.element_ty
    h = tl.arange(0, HP)
    i = tl.arange(0, HALF_P)
    tile = (h < H)[:, None] & (i < HALF)[None, :]
    there = h[:, None] * stride + i[None, :]
    into = h[:, None] * D + i[None, :]
    x_1 = tl.load(x + there, mask=tile, other=0.0).to(tl.float32)
    x_2 = tl.load(x + there + HALF, mask=tile, other=0.0).to(tl.float32)
    c_1 = tl.load(cos + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    c_2 = tl.load(cos + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    s_1 = tl.load(sin + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    s_2 = tl.load(sin + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    turned_1 = (x_1 * c_1).to(dtype).to(tl.float32) - (x_2 * s_1).to(dtype).to(tl.float32)
    turned_2 = (x_2 * c_2).to(dtype).to(tl.float32) + (x_1 * s_2).to(dtype).to(tl.float32)
    tl.store(out + into, turned_1.to(dtype), mask=tile)
    tl.store(out + into + HALF, turned_2.to(dtype), mask=tile)
    if D > 2 * HALF:
        j = 2 * HALF + tl.arange(0, REST_P)
        rest = (h < H)[:, None] & (j < D)[None, :]
        passed = tl.load(x + h[:, None] * stride + j[None, :], mask=rest, other=0.0)
        tl.store(out + h[:, None] * D + j[None, :], passed, mask=rest)
