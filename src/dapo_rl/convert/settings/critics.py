"""The critic of verl's and AReaL's PPO, in their settings."""

from __future__ import annotations

from typing import Any

from dapo_rl.convert.settings.setting import MEMORY, ONE_PROCESS, REMOTE_CODE, Setting, as_is, changes, joint, none

OF_POLICY = "the critic has the policy's"
STARTS = "the critic starts from the policy's weights, with a new output layer"
FIRST_STEP = "one less: critic_warmup is the first step that updates the policy"
ONE_LAMBDA = "one λ for both: critic.lambda_policy and critic.lambda_critic"
NO_DISCOUNT = "rewards are not discounted"
IN_FULL = "the critic is trained in full"

VERL_SHARED = {
    "ppo_epochs": "train.epochs_per_step",
    "ppo_mini_batch_size": "train.mini_batches",
    "grad_clip": "train.max_grad_norm",
    "optim.weight_decay": "train.weight_decay",
    "optim.betas": "train.betas",
    "optim.lr_warmup_steps": "train.warmup_steps",
    "optim.lr_warmup_steps_ratio": "train.warmup_steps",
    "optim.warmup_style": "train.lr_schedule",
    "optim.lr_scheduler_type": "train.lr_schedule",
    "optim.min_lr_ratio": "train.min_lr_share",
}
"""Settings that verl has once for the policy (`actor_rollout_ref.actor.`) and once for the critic (`critic.`)."""

VERL_CRITIC: dict[str, Setting] = {
    "algorithm.lam": joint("critic.lambda_policy", ONE_LAMBDA, alone=as_is),
    "algorithm.gamma": changes(NO_DISCOUNT, 1, 1.0),
    "trainer.critic_warmup": joint("critic.pretrain_steps", FIRST_STEP),
    "critic.optim.lr": joint("critic.lr", alone=as_is),
    "critic.cliprange_value": joint("critic.value_clip", alone=as_is),
    "critic.model.path": joint("model.name", STARTS),
    "critic.loss_agg_mode": joint("algo.aggregation", "the critic's loss averages over tokens"),
    **{f"critic.{name}": joint(ours, OF_POLICY) for name, ours in VERL_SHARED.items()},
    "critic.optim.optimizer": joint("train.optimizer", OF_POLICY),
    "critic.enable": none("the critic exists if adv_estimator is gae"),
    "critic.model.lora_rank": changes(IN_FULL, 0),
    "critic.model.override_config.moe_config.freeze_moe_router": changes("every weight is trained", False),
    "critic.model.override_config*": changes("the critic has the policy's config", {}),
    "critic.model.trust_remote_code": none(REMOTE_CODE),
    "critic.model.*": none(MEMORY),
    "critic.*micro_batch_size*": none(MEMORY),
    "critic.*token_len*": none(MEMORY),
    "critic.*": none(ONE_PROCESS),
}

VERL_CRITIC_DEFAULTS: dict[str, Any] = {
    "algorithm.lam": 1.0,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_penalty": "kl",
    "trainer.critic_warmup": 0,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.optim.lr_warmup_steps": -1,
    "critic.grad_clip": 1.0,
    "critic.cliprange_value": 0.5,
}

AREAL_SHARED = {
    "ppo_n_minibatches": "train.mini_batches",
    "dtype": "model.dtype",
    "optimizer.type": "train.optimizer",
    "optimizer.weight_decay": "train.weight_decay",
    "optimizer.beta1": "train.betas",
    "optimizer.beta2": "train.betas",
    "optimizer.lr_scheduler_type": "train.lr_schedule",
    "optimizer.min_lr_ratio": "train.min_lr_share",
    "optimizer.gradient_clipping": "train.max_grad_norm",
    "optimizer.warmup_steps_proportion": "train.warmup_steps",
    "mask_no_eos_with_zero": "overlong.mask_truncated",
}
"""Settings that AReaL has once for the policy (`actor.`) and once for the critic (`critic.`)."""

AREAL_CRITIC: dict[str, Setting] = {
    "actor.gae_lambda": joint("critic.lambda_policy", ONE_LAMBDA, alone=as_is),
    "actor.discount": changes(NO_DISCOUNT, 1, 1.0),
    "critic.optimizer.lr": joint("critic.lr", alone=as_is),
    "critic.eps_clip": joint("critic.value_clip", alone=as_is),
    "critic.path": joint("model.name", STARTS),
    **{f"critic.{name}": joint(ours, OF_POLICY) for name, ours in AREAL_SHARED.items()},
    "critic.init_from_scratch": changes(STARTS, False),
    "critic.optimizer.eps": changes("AdamW's epsilon is 1e-8", 1e-8),
    "critic.use_lora": changes(IN_FULL, False),
    "critic.disable_dropout": none("the model runs without dropout"),
    "critic.mb_spec.*": none(MEMORY),
    "critic.gradient_checkpointing": none(MEMORY),
    "critic.*": none(ONE_PROCESS),
}

AREAL_CRITIC_DEFAULTS: dict[str, Any] = {
    "actor.gae_lambda": 1.0,
    "actor.kl_estimator": "k1",
    "critic.eps_clip": 0.5,
    "critic.ppo_n_minibatches": 4,
}
