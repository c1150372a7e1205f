"""Triton kernels for a decode step on a GPU."""

from dapo_rl.engines.native.kernels.attention import decode_attention, splits_for
from dapo_rl.engines.native.kernels.elementwise import add_rms_norm, gated, rms_norm, rotary
from dapo_rl.engines.native.kernels.products import gated_linear
from dapo_rl.engines.native.kernels.sampling import advance, draw, draw_and_advance

__all__ = [
    "add_rms_norm",
    "advance",
    "decode_attention",
    "draw",
    "draw_and_advance",
    "gated",
    "gated_linear",
    "rms_norm",
    "rotary",
    "splits_for",
]
