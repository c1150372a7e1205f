"""What a run optimises: losses, advantages, KL, GAE and their relatives, as functions of tensors and numbers.

`LOSSES` and `ADVANTAGES` are the tables of names behind `algo.loss` and `algo.advantage`: a new one is one function
with one entry. Settings, `dapo check`, `dapo convert`, shell completion and docs/losses.md read the tables. Settings
import no torch, so the functions in the tables use only the methods of the tensors that they are given.

`dapo_rl.algo` exports the functions; the modules `numpy_twin*` have each of them again in plain NumPy.
"""

from dapo_rl.objectives.advantages import ADVANTAGES, DISTILL, GAE, GDPO, AdvantageEntry
from dapo_rl.objectives.losses import LOSSES, LossEntry, RatioOf

__all__ = ["ADVANTAGES", "DISTILL", "GAE", "GDPO", "LOSSES", "AdvantageEntry", "LossEntry", "RatioOf"]
