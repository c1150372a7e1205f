"""The mathematics under its public name: `from dapo_rl.algo import dapo_policy_loss`."""

from dapo_rl.objectives.advantages import dynamic_sampling_filter, group_advantages
from dapo_rl.objectives.aggregation import ClipFractions, aggregate, clip_fractions, dapo_policy_loss
from dapo_rl.objectives.critic import explained_variance, positive_lm_loss, value_loss
from dapo_rl.objectives.generalized_advantage import adaptive_lambda, decoupled_gae, gae, token_rewards, whitened
from dapo_rl.objectives.importance import importance_weights
from dapo_rl.objectives.kl import entropy_from_logits, kl_penalty
from dapo_rl.objectives.overlong import overlong_reward_shaping, soft_overlong_punishment
from dapo_rl.objectives.pass_at_k import pass_at_k

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
