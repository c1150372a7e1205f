"""The NumPy counterparts under their public name: `from dapo_rl.algo import reference`."""

from dapo_rl.objectives.numpy_twin import *  # noqa: F403
from dapo_rl.objectives.numpy_twin import __all__ as __all__
