"""Triton kernels of the engine's own: attention over the pages of the KV cache, and sampling."""

from dapo_rl.engines.native.kernels.attention import decode_attention, splits_for
from dapo_rl.engines.native.kernels.sampling import advance, draw, draw_and_advance

__all__ = ["advance", "decode_attention", "draw", "draw_and_advance", "splits_for"]
