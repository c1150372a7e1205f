"""The NumPy counterparts under their public name: `from dapo_rl.algo import reference`."""

# ruff: noqa: F403
from dapo_rl.objectives.numpy_twin import *
from dapo_rl.objectives.numpy_twin_credit import *
from dapo_rl.objectives.numpy_twin_kl import *
from dapo_rl.objectives.numpy_twin_off_policy import *
from dapo_rl.objectives.numpy_twin_tokens import *
