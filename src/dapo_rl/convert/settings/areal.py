"""AReaL's settings (the YAML of its launchers)."""

from __future__ import annotations

from typing import Any

from dapo_rl.convert.settings import reasons
from dapo_rl.convert.settings.setting import Setting, each, ignored, joint, sections, to, unsupported
from dapo_rl.convert.settings.values import as_is, choice, dtype_here, loss_of_level, off_at_most, soft_or_off, sources

OPTIMIZER = "actor.optimizer"
_SHIFT = "rewards are (score + reward_bias) × reward_scaling, for scores 1 and 0"
ADV_NORM = "advantages are normalised once, by their group; AReaL normalises them again over the tokens of the batch"
_STALENESS = "samples come from the current weights, or with sampling.surplus=carry from those one step older"
_DECOUPLED = "with use_decoupled_loss, the ratio is relative to the policy at the beginning of the step"
_OTHER_LOSS = "another policy loss; write it as algo.loss=file.py:name"

CRITIC_SHARED = {
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

_SECTIONS: dict[str, dict[str, Setting]] = {
    "": {
        **each(ignored(reasons.NAMES), "experiment_name trial_name"),
        "seed": to("seed"),
        "total_train_epochs": joint("train.steps", reasons.EPOCHS),
        "total_train_steps": to("train.steps"),
        "total_train_n_seqs": ignored("train.steps sets the length of the run"),
        "tokenizer_path": ignored("the tokenizer is that of the model"),
        "dynamic_bs": joint("sampling.dynamic_batch", alone=as_is),
        "dynamic_filter_fn": joint("sampling.filter", "an argument of the script; file.py:name"),
        "async_training": ignored(_STALENESS),
        **each(
            ignored(reasons.ONE_PROCESS),
            "enable_offload allocation_mode rollout.* cluster.* launcher.* scheduler.* rollout_engine* train_engine*",
        ),
        "rollout.max_head_offpolicyness": unsupported(_STALENESS, 0),
        "rollout.max_concurrent_rollouts": ignored("the engine's batch is sampling.max_batch, in sequences"),
        **each(ignored(reasons.ENGINES), "rollout.backend sglang.*"),
        "ref.*": ignored(reasons.REFERENCE),
        "vllm.*": ignored(reasons.VLLM),
        "saver.freq_steps": to("checkpoint.every", off_at_most(0, None)),
        **each(ignored("checkpoints are written by checkpoint.every, in steps"), "saver.* checkpointer.*"),
        "recover.*": ignored(reasons.RESUME),
        "evaluator.freq_steps": to("eval.every", off_at_most(0, None)),
        "evaluator.*": ignored("held-out prompts are evaluated every eval.every steps"),
        "stats_logger.wandb.mode": joint("log.to", "online: wandb"),
        "stats_logger.*": ignored(reasons.LOGS),
        "perf_tracer.*": ignored(reasons.SPEED),
        "workflow*": unsupported(reasons.SEVERAL_TURNS),
    },
    "train_dataset": {
        "path": to("data.train", sources),
        "batch_size": to("sampling.prompts_per_step"),
        "max_length": to("data.max_prompt_tokens"),
        "shuffle": unsupported(reasons.SHUFFLED, True),
        **each(ignored(reasons.LOADING), "drop_last pin_memory num_workers scheduling_spec*"),
        "type": ignored("the verifier is reward.verifier"),
    },
    "valid_dataset": {
        "path": to("data.eval", sources),
        "*": ignored("held-out prompts are batched like the others"),
    },
    "gconfig": {
        "n_samples": to("sampling.group_size"),
        "max_new_tokens": to("sampling.max_new_tokens"),
        "min_new_tokens": unsupported("responses have no minimum length", 0),
        **each(unsupported("training always samples", False), "greedy use_beam_search"),
        "temperature": to("sampling.temperature"),
        "top_p": to("sampling.top_p"),
        "top_k": to("sampling.top_k", lambda value: 0 if value <= 0 or value >= 100_000_000 else value),
        "stop": to("sampling.stop", lambda value: value or []),
        "stop_token_ids": unsupported("responses end with the tokenizer's end-of-sequence token", []),
        "frequency_penalty": unsupported("there is no frequency penalty", 0, 0.0),
        **each(ignored(reasons.LOADING), "max_tokens skip_special_tokens lora_name spaces_between_special_tokens"),
    },
    "eval_gconfig": {
        "n_samples": to("eval.samples"),
        "temperature": to("eval.temperature"),
        "top_p": to("eval.top_p"),
        "*": ignored("held-out prompts are sampled with max_new_tokens of training"),
    },
    "actor": {
        "path": to("model.name"),
        "dtype": to("model.dtype", dtype_here),
        "gradient_checkpointing": to("train.gradient_checkpointing"),
        "disable_dropout": ignored("the model runs without dropout"),
        "init_from_scratch": unsupported("training starts from the model's weights", False),
        "mb_spec.max_tokens_per_mb": to("train.token_budget"),
        "mb_spec.*": ignored(reasons.MEMORY),
        "eps_clip": to("algo.clip_low"),
        "eps_clip_higher": to("algo.clip_high"),
        "c_clip": to("algo.clip_ratio_c"),
        "overlong_reward_penalty": joint("overlong.shape", alone=soft_or_off),
        "overlong_tokens": joint("overlong.cache_length", alone=as_is),
        "overlong_penalty_factor": joint("overlong.factor", "times reward_scaling, as the penalty is scaled there"),
        **each(joint("reward.correct", _SHIFT), "reward_scaling reward_bias reward_clip"),
        "mask_no_eos_with_zero": to("overlong.mask_truncated"),
        "kl_ctl": joint("algo.kl_coef", "the KL penalty in the reward, with a critic"),
        "kl_estimator": joint("algo.kl_kind", "of the KL penalty in the reward"),
        "ppo_n_minibatches": to("train.mini_batches"),
        "recompute_logprob": joint("algo.proximal"),
        "use_decoupled_loss": joint("algo.proximal", _DECOUPLED),
        **each(joint("algo.importance_cap", _DECOUPLED, alone=as_is), "behav_imp_weight_cap behave_imp_weight_cap"),
        "behave_imp_weight_mode": joint("algo.importance_mode", _DECOUPLED),
        "behave_imp_weight_*": ignored("an option of behave_imp_weight_cap"),
        **each(unsupported("samples are not rejected by their ratio"), "rejection_sampling.* rejection_sampling"),
        "prox_logp_method": unsupported("the trainer scores the batch before the first update", "recompute"),
        "importance_sampling_level": to("algo.loss", loss_of_level, "sequence: gspo"),
        **each(unsupported(_OTHER_LOSS, False), "use_sapo_loss use_m2po_loss"),
        "m2_threshold": unsupported(_OTHER_LOSS),
        "sapo_*": ignored(reasons.SAPO),
        "entropy_coeff": unsupported(reasons.NO_ENTROPY, 0, 0.0),
        **each(
            joint("algo.normalize"),
            "reward_norm.mean_level reward_norm.std_level reward_norm.mean_leave1out reward_norm",
        ),
        "reward_norm.std_unbiased": to("algo.ddof", choice({True: 1, False: 0}, "expected true or false")),
        "reward_norm.eps": to("algo.advantage_eps"),
        "reward_norm.group_size": ignored("a group is the samples of one prompt"),
        "adv_norm": joint("critic.whiten", "with a critic"),
        **each(joint("critic.whiten", "batch, with a critic"), "adv_norm.mean_level adv_norm.std_level"),
        "adv_norm.*": ignored("an option of adv_norm"),
        "gae_lambda": joint("critic.lambda_policy", reasons.ONE_LAMBDA, alone=as_is),
        "discount": unsupported(reasons.NO_DISCOUNT, 1, 1.0),
        "group_size": to("sampling.group_size"),
        "max_new_tokens": to("sampling.max_new_tokens"),
        "temperature": to("sampling.temperature"),
        "log_agent_*": ignored(reasons.SEVERAL_TURNS),
        "use_lora": joint("model.lora.rank", reasons.LORA_SWITCH),
        "lora_rank": joint("model.lora.rank", alone=as_is),
        "lora_alpha": joint("model.lora.alpha", alone=as_is),
        "target_modules": joint("model.lora.targets"),
        "peft_type": ignored(reasons.PLAIN_LORA),
        "attn_impl": ignored(reasons.SPEED),
        **each(
            ignored(reasons.ONE_PROCESS),
            "experiment_name trial_name backend scheduling_spec* scheduling_strategy* fsdp.* megatron.* archon.*",
            "weight_update_mode weight_chunked_mem_mb pad_to_maximum is_critic use_kernel enable_tree_training",
            "grad_reduce_dtype vlm_*",
        ),
    },
    OPTIMIZER: {
        "type": to("train.optimizer", choice({"adam": "adamw", "adamw": "adamw"}, reasons.ADAMW)),
        "lr": to("train.lr"),
        "weight_decay": to("train.weight_decay", note="applied to matrices only"),
        **each(joint("train.betas"), "beta1 beta2"),
        "eps": unsupported(reasons.EPSILON, 1e-8),
        "lr_scheduler_type": to(
            "train.lr_schedule",
            choice({name: name for name in ("constant", "linear", "cosine")}, reasons.SCHEDULES),
        ),
        "min_lr_ratio": to("train.min_lr_share"),
        "gradient_clipping": to("train.max_grad_norm"),
        "warmup_steps_proportion": joint("train.warmup_steps", "a share of the steps"),
        **each(ignored(reasons.MEMORY), "offload initial_loss_scale min_loss_scale loss_scale_window hysteresis*"),
    },
    "critic": {
        "optimizer.lr": joint("critic.lr", alone=as_is),
        "eps_clip": joint("critic.value_clip", alone=as_is),
        "path": joint("model.name", reasons.STARTS),
        **{name: joint(ours, reasons.OF_POLICY) for name, ours in CRITIC_SHARED.items()},
        "init_from_scratch": unsupported(reasons.STARTS, False),
        "optimizer.eps": unsupported(reasons.EPSILON, 1e-8),
        "use_lora": unsupported(reasons.IN_FULL, False),
        "disable_dropout": ignored("the model runs without dropout"),
        **each(ignored(reasons.MEMORY), "mb_spec.* gradient_checkpointing"),
        "*": ignored(reasons.ONE_PROCESS),
    },
}
AREAL = sections(_SECTIONS)

AREAL_DEFAULTS: dict[str, Any] = {
    "gconfig.n_samples": 1,
    "gconfig.max_new_tokens": 16384,
    "actor.eps_clip": 0.2,
    "actor.kl_ctl": 0.1,
    "actor.ppo_n_minibatches": 4,
    "actor.lora_alpha": 16,
    f"{OPTIMIZER}.weight_decay": 0.01,
    f"{OPTIMIZER}.warmup_steps_proportion": 0.001,
    "actor.reward_norm.eps": 1e-5,
    "actor.gae_lambda": 1.0,
    "actor.kl_estimator": "k1",
    "critic.eps_clip": 0.5,
    "critic.ppo_n_minibatches": 4,
}
"""AReaL's values of settings that its user leaves out, where learning or memory depends on them."""
