"""The mathematics of DAPO: tensors and numbers in, tensors out; no settings, no I/O.

`dapo_rl.algo.reference` has the same functions in plain NumPy.
"""

from dapo_rl.algo.advantage import group_advantages
from dapo_rl.algo.filter import dynamic_sampling_filter
from dapo_rl.algo.importance import importance_weights
from dapo_rl.algo.kl import entropy_from_logits, kl_penalty
from dapo_rl.algo.loss import ClipFractions, aggregate, clip_fractions, dapo_policy_loss
from dapo_rl.algo.overlong import overlong_reward_shaping, soft_overlong_punishment
from dapo_rl.algo.pass_at_k import pass_at_k

__all__ = [
    "ClipFractions",
    "aggregate",
    "clip_fractions",
    "dapo_policy_loss",
    "dynamic_sampling_filter",
    "entropy_from_logits",
    "group_advantages",
    "importance_weights",
    "kl_penalty",
    "overlong_reward_shaping",
    "pass_at_k",
    "soft_overlong_punishment",
]
