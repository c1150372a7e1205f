"""The family around DAPO: the losses and advantages that `algo.loss` and `algo.advantage` name.

A member is one function with one entry, in `losses` or `advantages`. Settings, `dapo check`, `dapo convert`, shell
completion and the tables of docs/losses.md read the entries. Nothing here imports torch when it runs, because settings
do not: the functions use the methods of the tensors that they are given.
"""

from dapo_rl.family.advantages import ADVANTAGES, GAE, AdvantageEntry
from dapo_rl.family.losses import LOSSES, LossEntry, RatioOf

__all__ = ["ADVANTAGES", "GAE", "LOSSES", "AdvantageEntry", "LossEntry", "RatioOf"]
