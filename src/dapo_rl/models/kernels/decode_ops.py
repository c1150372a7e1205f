"""The Triton kernels that `fuse` puts into a model on a GPU."""

from dapo_rl.models.kernels.gated_mlp import gated_linear
from dapo_rl.models.kernels.norm import add_rms_norm, rms_norm
from dapo_rl.models.kernels.rotary import rotary

__all__ = ["add_rms_norm", "gated_linear", "rms_norm", "rotary"]
