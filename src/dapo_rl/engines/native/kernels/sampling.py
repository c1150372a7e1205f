"""Token sampling, and the update of the slots' state with the drawn tokens.

Each kernel runs on the current stream with fixed block sizes and reads no device values on the host, so a CUDA graph
can capture it. Shapes: B rows of a step, V vocabulary size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from dapo_rl.engines.native.slots import SlotState

CHUNK = 1024
"""Logits whose mass is summed into one number; the inverse CDF then rereads one chunk. In bf16 this is 16 bytes for
each of 128 threads."""
CHUNKS_AT_ONCE = 4
"""Chunks that one program sums, which gives it as many independent loads in flight."""


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


@triton.jit(do_not_specialize=["rows"])
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
