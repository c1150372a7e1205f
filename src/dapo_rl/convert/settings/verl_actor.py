"""verl's settings of updates and models."""

from __future__ import annotations

from dapo_rl.convert.settings.setting import (
    MEMORY,
    NO_VISION,
    ONE_PROCESS,
    REMOTE_CODE,
    SPEED,
    Setting,
    as_is,
    changes,
    choice,
    dtype_here,
    joint,
    none,
    to,
)

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MINI_BATCH = "updates per step: train_batch_size / ppo_mini_batch_size, both in prompts"
OTHER_SCHEDULE = "not one of the schedules here"
_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", None: "constant"}

VERL_TRAINING: dict[str, Setting] = {
    # Updates.
    f"{ACTOR}.ppo_mini_batch_size": joint("train.mini_batches", MINI_BATCH),
    f"{ACTOR}.ppo_epochs": to("train.epochs_per_step"),
    f"{ACTOR}.shuffle": none("the groups of a step are trained on in the order drawn"),
    f"{ACTOR}.grad_clip": to("train.max_grad_norm"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": to("train.token_budget"),
    f"{ACTOR}.use_dynamic_bsz": none("micro-batches are always packed up to train.token_budget tokens"),
    f"{ACTOR}.ppo_micro_batch_size*": none(
        "micro-batches are packed by tokens (train.token_budget), with equal gradients"
    ),
    f"{ACTOR}.optim.lr": to("train.lr"),
    f"{ACTOR}.optim.lr_warmup_steps": joint("train.warmup_steps", "in steps; -1: lr_warmup_steps_ratio"),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": joint("train.warmup_steps", "a share of the steps"),
    f"{ACTOR}.optim.weight_decay": to(
        "train.weight_decay", note="applied to matrices only; verl also decays norms and biases"
    ),
    f"{ACTOR}.optim.betas": to("train.betas"),
    f"{ACTOR}.optim.min_lr_ratio": to("train.min_lr_share", lambda value: value or 0.0),
    f"{ACTOR}.optim.warmup_style": to("train.lr_schedule", choice(_SCHEDULES, OTHER_SCHEDULE)),
    f"{ACTOR}.optim.lr_scheduler_type": to("train.lr_schedule", choice(_SCHEDULES, OTHER_SCHEDULE)),
    f"{ACTOR}.optim.num_cycles": Setting(note="a cosine decays once", learns=True, off=(None, 0.5)),
    f"{ACTOR}.optim.total_training_steps": none("train.steps sets the length of the schedule"),
    f"{ACTOR}.optim.optimizer": to(
        "train.optimizer", choice({"AdamW": "adamw", "adamw": "adamw", "adam": "adamw"}, "the optimizer is AdamW")
    ),
    f"{ACTOR}.optim.lr_decay_style": to("train.lr_schedule", choice(_SCHEDULES, OTHER_SCHEDULE)),
    f"{ACTOR}.optim.lr_warmup_init": changes("the warm-up starts at 0", 0, 0.0),
    f"{ACTOR}.optim.min_lr": joint("train.min_lr_share", "as a share of lr"),
    f"{ACTOR}.optim.clip_grad": to("train.max_grad_norm"),
    f"{ACTOR}.optim.override_optimizer_config*": changes("the optimizer is AdamW, without further options", {}),
    f"{ACTOR}.optim.muon_*": none("an option of Muon; the optimizer is AdamW"),
    f"{ACTOR}.optim.name": to("train.optimizer", choice({"AdamW": "adamw", "Adam": "adamw"}, "the optimizer is AdamW")),
    f"{ACTOR}.optim.eps": changes("AdamW's epsilon is 1e-8", 1e-8),
    f"{ACTOR}.optim.decay_type": to("train.lr_schedule", choice(_SCHEDULES, OTHER_SCHEDULE)),
    f"{ACTOR}.optim.lr_min": changes("give it as train.min_lr_share", 0, 0.0),
    f"{ACTOR}.optim.lr_start": changes("the warm-up starts at 0", 0, 0.0),
    f"{ACTOR}.optim.*_dtype": none(MEMORY),
    f"{ACTOR}.optim.use_layer_wise_distributed_optimizer": none(MEMORY),
    f"{ACTOR}.optim.override_optimizer_config.*offload*": none(MEMORY),
    f"{ACTOR}.optim.override_optimizer_config.overlap_*": none(MEMORY),
    f"{ACTOR}.optim.override_optimizer_config.use_precision_aware_optimizer": none(MEMORY),
    f"{ACTOR}.optim.min_lr_factor": to("train.min_lr_share", lambda value: value or 0.0),
    **{
        f"{ACTOR}.optim.{name}": none(MEMORY)
        for name in (
            "optimizer_impl",
            "zero_indexed_step",
            "lr_decay_steps",
            "lr_decay_ratio",
            "lr_wsd_*",
            "weight_decay_incr_style",
            "use_checkpoint_opt_param_scheduler",
        )
    },
    **{
        f"{ACTOR}.{name}": none(ONE_PROCESS)
        for name in (
            "strategy",
            "fsdp_config.*",
            "megatron.*",
            "veomni.*",
            "torchtitan.*",
            "checkpoint.*",
            "profiler.*",
            "ulysses_sequence_parallel_size",
            "use_torch_compile",
            "use_fused_kernels",
            "entropy_from_logits_with_chunking",
            "entropy_checkpointing",
            "use_remove_padding",
            "rollout_n",
            "data_loader_seed",
            "calculate_entropy",
            "calculate_sum_pi_squared",
            "sum_pi_squared_checkpointing",
            "engine.*",
            "profile.*",
            "pad_to_length",
            "entropy_from_logits_chunk_size",
            "optim.use_precision_aware_optimizer",
            "model_engine",
            "load_weight",
            "use_prefix_grouper",
        )
    },
    f"{ACTOR}.tau_*": none("an option of the loss sapo"),
    f"{ACTOR}.qat.enable": changes("weights are trained without quantisation", False),
    f"{ACTOR}.qat.*": none("an option of quantisation"),
    f"{ACTOR}.freeze_vision_tower": none(NO_VISION),
    # The model.
    f"{MODEL}.path": to("model.name"),
    f"{MODEL}.enable_gradient_checkpointing": to("train.gradient_checkpointing"),
    f"{MODEL}.use_remove_padding": to("train.packed"),
    f"{MODEL}.lora_rank": joint("model.lora.rank", "0: train the weights", alone=as_is),
    f"{MODEL}.lora_alpha": joint("model.lora.alpha", alone=as_is),
    f"{MODEL}.target_modules": joint("model.lora.targets"),
    f"{MODEL}.exclude_modules": changes("model.lora.targets lists the layers to adapt"),
    f"{MODEL}.custom_chat_template": changes("the chat template is that of tokenizer_config.json"),
    f"{MODEL}.override_config.*drop*": changes("the model runs without dropout", 0, 0.0),
    f"{MODEL}.override_config.*max_position_embeddings": none(
        "set it in the model's config.json, the only place it is read from"
    ),
    f"{MODEL}.override_config.moe_config.freeze_moe_router": changes("every weight is trained", False),
    f"{MODEL}.override_config*": changes("set it in the model's config.json, the only place it is read from", {}),
    f"{MODEL}.external_lib": changes("no module of your own is imported"),
    f"{MODEL}.trust_remote_code": none(REMOTE_CODE),
    f"{MODEL}.tokenizer_path": changes("the tokenizer is that of the model"),
    f"{MODEL}.lora_adapter_path": changes("adapters start from zero"),
    f"{MODEL}.lora.rank": joint("model.lora.rank", alone=as_is),
    f"{MODEL}.lora.alpha": joint("model.lora.alpha", alone=as_is),
    f"{MODEL}.lora.target_modules": joint("model.lora.targets"),
    f"{MODEL}.lora.dropout": changes("adapters have no dropout", 0, 0.0),
    f"{MODEL}.lora.merge": none("how adapters reach the engine"),
    f"{MODEL}.lora.type": changes("adapters are plain LoRA", "lora"),
    f"{MODEL}.lora.*_init_method": changes("A starts from Kaiming's distribution, B from 0", "kaiming", "zero"),
    f"{MODEL}.lora.exclude_modules": changes("model.lora.targets lists the layers to adapt", []),
    f"{MODEL}.lora.freeze_*": none(NO_VISION),
    f"{MODEL}.lora.a2a_experimental": none(SPEED),
    f"{MODEL}.lora.dropout_position": none("adapters have no dropout"),
    f"{MODEL}.lora.fully_sharded_loras": none(SPEED),
    f"{MODEL}.lora.*": changes("adapters are set by model.lora"),
    f"{MODEL}.torch_dtype": to("model.dtype", dtype_here),
    **{
        f"{MODEL}.{name}": none(SPEED)
        for name in (
            "use_shm",
            "enable_activation_offload",
            "use_liger",
            "use_fused_kernels",
            "fused_kernel_options.*",
            "hf_config_path",
            "load_tokenizer",
            "tiled_mlp.*",
            "mtp.*",
        )
    },
}
