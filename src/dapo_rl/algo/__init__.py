"""The mathematics of DAPO: tensors and numbers in, tensors out; no settings, no I/O.

Token losses and advantages are in `dapo_rl.family`. `dapo_rl.algo.reference` has the same functions in plain NumPy.
"""

from dapo_rl.algo.filter import dynamic_sampling_filter
from dapo_rl.algo.gae import adaptive_lambda, decoupled_gae, gae, token_rewards, whitened
from dapo_rl.algo.importance import importance_weights
from dapo_rl.algo.kl import entropy_from_logits, kl_penalty
from dapo_rl.algo.loss import ClipFractions, aggregate, clip_fractions, dapo_policy_loss
from dapo_rl.algo.overlong import overlong_reward_shaping, soft_overlong_punishment
from dapo_rl.algo.pass_at_k import pass_at_k
from dapo_rl.algo.value import explained_variance, positive_lm_loss, value_loss
from dapo_rl.family.advantages import group_advantages

__all__ = [
    "ClipFractions",
    "adaptive_lambda",
    "aggregate",
    "clip_fractions",
    "dapo_policy_loss",
    "decoupled_gae",
    "dynamic_sampling_filter",
    "entropy_from_logits",
    "explained_variance",
    "gae",
    "group_advantages",
    "importance_weights",
    "kl_penalty",
    "overlong_reward_shaping",
    "pass_at_k",
    "positive_lm_loss",
    "soft_overlong_punishment",
    "token_rewards",
    "value_loss",
    "whitened",
]
