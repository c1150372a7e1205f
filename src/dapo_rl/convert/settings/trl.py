"""TRL's settings (`GRPOConfig`, on top of transformers' `TrainingArguments`, and the options of `trl grpo`)."""

from __future__ import annotations

from typing import Any

from dapo_rl.convert.settings import reasons
from dapo_rl.convert.settings.setting import (
    Near,
    NoCounterpartError,
    Setting,
    each,
    ignored,
    joint,
    mapping,
    to,
    unsupported,
)
from dapo_rl.convert.settings.values import (
    as_is,
    choice,
    dtype_here,
    loss_of_level,
    off_at_most,
    same,
    sources,
    trackers,
    unless_null,
)
from dapo_rl.objectives.losses import losses_by

BATCH = "batch sizes count completions; prompts per step = generation batch / num_generations"
UPDATES = "counts updates; train.steps counts steps of several updates"
SCHEDULES = same("constant", "linear", "cosine") | {
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw_8bit"),
}
_HUB = "nothing is uploaded; DIR/model is in Hugging Face format"
_LIMITS = "a run evaluates and saves by eval.every and checkpoint.every"


def aggregation(value: Any) -> Any:
    """`loss_type`, in TRL and ms-swift."""
    if (loss := losses_by(lambda entry: entry.trl).get(value)) is not None:
        return Near("token-mean", f"with algo.loss={loss}", False)
    if value == "bnpo":
        return Near("token-mean", "averages over the tokens of the update, not of each micro-batch")
    names = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
    if value not in names:
        raise NoCounterpartError(reasons.OTHER_LOSS)
    return names[value]


def _fp16(value: Any) -> Any:
    if value:
        raise NoCounterpartError("float16 is not supported; model.dtype is bfloat16 or float32")
    return "auto"


TRAINER: dict[str, Setting] = {
    # transformers' TrainingArguments, which ms-swift shares.
    **each(ignored(reasons.RUN_DIR), "output_dir overwrite_output_dir logging_dir"),
    **each(
        joint("sampling.prompts_per_step", BATCH),
        "per_device_train_batch_size gradient_accumulation_steps num_processes",
    ),
    "num_train_epochs": joint("train.steps", reasons.EPOCHS),
    "max_steps": joint("train.steps", UPDATES),
    "learning_rate": to("train.lr"),
    "lr_scheduler_type": to("train.lr_schedule", choice(SCHEDULES, reasons.SCHEDULES)),
    "lr_scheduler_kwargs.min_lr_rate": to("train.min_lr_share"),
    "lr_scheduler_kwargs.min_lr": joint("train.min_lr_share", "as a share of learning_rate"),
    "lr_scheduler_kwargs*": unsupported("not an option of the schedules here", {}),
    "warmup_ratio": joint("train.warmup_steps", "a share of the updates; here a number of steps"),
    "warmup_steps": joint("train.warmup_steps", "counts updates; here steps of several updates"),
    "weight_decay": to("train.weight_decay"),
    **each(joint("train.betas"), "adam_beta1 adam_beta2"),
    "adam_epsilon": unsupported(reasons.EPSILON, 1e-8),
    "max_grad_norm": to("train.max_grad_norm"),
    "optim": to("train.optimizer", choice(_OPTIMIZERS, reasons.ADAMW)),
    **each(unsupported(reasons.ADAMW_ALONE), "optim_args optim_target_modules"),
    "bf16": to("model.dtype", lambda value: "bfloat16" if value else "auto"),
    "fp16": to("model.dtype", _fp16),
    **each(to("model.dtype", dtype_here), "torch_dtype dtype"),
    "gradient_checkpointing": to("train.gradient_checkpointing"),
    **each(
        ignored(reasons.SPEED),
        "gradient_checkpointing_kwargs* use_liger_kernel liger_kernel_config* use_liger_loss tf32 jit_mode_eval",
        "use_cache torch_compile* torch_empty_cache_steps torchdynamo debug",
    ),
    "seed": to("seed"),
    "data_seed": ignored("seed is the seed of everything"),
    "report_to": to("log.trackers", trackers),
    **each(ignored(reasons.NAMES), "run_name project trackio_*"),
    "save_steps": joint("checkpoint.every", "counts updates"),
    "save_total_limit": to("checkpoint.keep", unless_null(2)),
    "save_strategy": ignored("checkpoints are written by checkpoint.every, and at the last step"),
    "eval_steps": joint("eval.every", "counts updates"),
    **each(joint("eval.every"), "eval_strategy evaluation_strategy"),
    "eval_on_start": Setting(note=reasons.EVALUATED_FIRST, off=(True,)),
    "resume_from_checkpoint": ignored(reasons.RESUME),
    "neftune_noise_alpha": unsupported("no noise is added to embeddings"),
    "label_smoothing_factor": unsupported("there are no labels to smooth", 0, 0.0),
    "train_sampling_strategy": unsupported(reasons.SHUFFLED, "random"),
    "full_determinism": ignored("a seed always gives the same run"),
    "ignore_data_skip": ignored("a resumed run continues with the next prompt"),
    **each(to("model.device", lambda value: "cpu" if value else "auto"), "use_cpu no_cuda"),
    "auto_find_batch_size": ignored("micro-batches are packed up to train.token_budget tokens"),
    **each(
        ignored(reasons.ONE_PROCESS),
        "average_tokens_across_devices accelerator_config* parallelism_config* fsdp* deepspeed* ddp_* ds3_* local_rank",
        "launcher.*",
    ),
    **each(ignored(_LIMITS), "bf16_full_eval fp16_full_eval eval_* prediction_loss_only batch_eval_metrics"),
    "per_device_eval_batch_size": ignored("held-out prompts are batched like the others"),
    **each(ignored(reasons.LOGS), "include_* skip_memory_metrics"),
    "load_best_model_at_end": unsupported("DIR/model is the model after the last step", False),
    **each(
        ignored("DIR/model is the model after the last step; checkpoints are kept as well"),
        "metric_for_best_model greater_is_better",
    ),
    **each(
        ignored("checkpoints are complete, in safetensors"),
        "save_* enable_jit_checkpoint restore_callback_states_from_checkpoint",
    ),
    **each(ignored("one line of metrics.jsonl per step"), "logging_* log_level* log_on_each_node"),
    "disable_tqdm": ignored("one line per step, on a terminal a live table"),
    **each(ignored(_HUB), "push_to_hub* hub_*"),
    **each(ignored(reasons.LOADING), "dataloader_* length_column_name group_by_length label_names past_index"),
    "remove_unused_columns": ignored("verifiers see every column"),
    **each(ignored("`dapo train` trains, `dapo eval` evaluates"), "do_train do_eval do_predict"),
}

GRPO: dict[str, Setting] = {
    # GRPO's settings, in TRL and ms-swift.
    "num_generations": to("sampling.group_size"),
    "num_generations_eval": joint("eval.samples", "the same as num_generations unless set", alone=as_is),
    "max_completion_length": to("sampling.max_new_tokens"),
    "max_prompt_length": to("data.max_prompt_tokens", note="longer prompts are dropped and counted"),
    "generation_batch_size": joint("sampling.prompts_per_step", BATCH),
    "steps_per_generation": joint("train.mini_batches", "updates per step: it / gradient_accumulation_steps"),
    "num_iterations": to("train.epochs_per_step"),
    "beta": to("algo.kl_coef", note="estimator k3 of the KL penalty"),
    "epsilon": to("algo.clip_low"),
    "epsilon_high": to("algo.clip_high"),
    "delta": to("algo.clip_ratio_c", note="bound of the ratio; applied for negative advantages only"),
    "loss_type": to("algo.aggregation", aggregation),
    "importance_sampling_level": to("algo.loss", loss_of_level, "sequence: gspo"),
    "scale_rewards": to(
        "algo.normalize",
        choice(
            {True: "group", "group": "group", "batch": "batch", False: "none", "none": "none", None: "none"},
            "not one of the normalisations here; write it as algo.advantage=file.py:name",
        ),
    ),
    "mask_truncated_completions": to("overlong.mask_truncated"),
    "reward_funcs": joint("reward.verifier"),
    "reward_weights": joint("reward.verifier", "a list of {verifier: NAME, weight: 0.5}"),
    "reward_model_name_or_path": unsupported(reasons.NO_REWARD_MODEL),
    "multi_objective_aggregation": unsupported("rewards are summed, then normalised", "sum_then_normalize"),
    "temperature": to("sampling.temperature"),
    "top_p": to("sampling.top_p", unless_null(1.0)),
    "top_k": to("sampling.top_k", off_at_most(0, 0)),
    "min_p": to("sampling.min_p", lambda value: value or 0.0),
    "repetition_penalty": unsupported("there is no repetition penalty", 1, 1.0),
    "generation_kwargs.stop": to("sampling.stop"),
    "generation_kwargs*": unsupported("not an option of the engines here", {}),
    "chat_template_kwargs*": mapping("data.chat_template_kwargs"),
    "use_vllm": to("engine", lambda value: "vllm" if value else "native"),
    "vllm_importance_sampling_correction": joint("algo.importance_cap", "with the modes token_truncate and token_mask"),
    "vllm_importance_sampling_mode": joint("algo.importance_mode", "one weight for a sequence has no counterpart"),
    **each(
        joint("algo.importance_cap", alone=as_is),
        "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
    ),
    "vllm_importance_sampling_clip_min": unsupported("importance weights have no lower bound"),
    "off_policy_mask_threshold": unsupported("samples are not masked by their divergence"),
    "use_bias_correction_kl": unsupported("the KL penalty is not weighted by the ratio", False),
    **each(unsupported("responses are not constrained"), "vllm_structured_outputs_regex vllm_guided_decoding_regex"),
    "vllm_*": ignored(reasons.VLLM),
    "sync_ref_model": unsupported(reasons.REFERENCE, False),
    "ref_model_*": ignored(reasons.REFERENCE),
    "entropy_coef": unsupported(reasons.NO_ENTROPY, 0, 0.0),
    "top_entropy_quantile": unsupported("every token of a response is trained on", 1, 1.0),
    "use_adaptive_entropy": unsupported(reasons.NO_ENTROPY, False),
    **each(ignored("an option of the entropy bonus"), "entropy_coef_* entropy_target"),
    "sapo_*": ignored(reasons.SAPO),
    "vespo_*": ignored("an option of the loss vespo"),
    "router_aux_loss_coef": unsupported("experts are trained without a load-balancing loss", 0, 0.0),
    "disable_dropout": Setting(note="the model runs without dropout", off=(None, False, True)),
    "cast_lm_head_to_fp32": ignored("the loss is computed in float32"),
    "shuffle_dataset": unsupported(reasons.SHUFFLED, True),
    **each(
        ignored(reasons.LOGS),
        "log_completions* log_unique_prompts log_multimodal num_completions_to_print wandb_log_unique_prompts",
    ),
    **each(
        ignored("engine=native batches continuously"),
        "use_transformers_* transformers_continuous_batching_config*",
    ),
    **each(ignored(reasons.SPEED), "pad_to_multiple_of cache_implementation"),
    "max_tool_calling_iterations": unsupported(reasons.SEVERAL_TURNS),
    **each(to("model.dtype", dtype_here), "model_init_kwargs.dtype model_init_kwargs.torch_dtype"),
    "model_init_kwargs.revision": unsupported("give a directory as the model for another revision", "main"),
    "model_init_kwargs.trust_remote_code": ignored(reasons.REMOTE_CODE),
    "model_init_kwargs.quantization_config*": unsupported("weights are stored in float32"),
    **each(
        unsupported("weights are stored in float32", False),
        "model_init_kwargs.load_in_4bit model_init_kwargs.load_in_8bit",
    ),
    "model_init_kwargs*": ignored("the model is loaded as its files say"),
    "use_peft": joint("model.lora.rank", reasons.LORA_SWITCH),
    "lora_rank": joint("model.lora.rank", alone=as_is),
    "lora_alpha": joint("model.lora.alpha", alone=as_is),
    "lora_dropout": joint("model.lora.dropout", alone=as_is),
    "use_dora": joint("model.lora.use_dora", alone=as_is),
    "use_rslora": joint("model.lora.use_rslora", alone=as_is),
}

TRL: dict[str, Setting] = {
    **TRAINER,
    **GRPO,
    # The options of `trl grpo`.
    "model_name_or_path": to("model.name"),
    "model_revision": ignored("give a directory as model.name for another revision"),
    "trust_remote_code": ignored(reasons.REMOTE_CODE),
    **each(ignored(reasons.SPEED), "attn_implementation gradient_checkpointing_use_reentrant"),
    "dataset_name": to("data.train", sources),
    "dataset_config": joint("data.train.name"),
    "dataset_train_split": joint("data.train.split"),
    "dataset_test_split": joint("data.eval.split"),
    "dataset_streaming": ignored(reasons.LOADING),
    "datasets": joint("data.train", "a list of {source: NAME}"),
    "lora_r": joint("model.lora.rank", alone=as_is),
    "lora_target_modules": joint("model.lora.targets", alone=as_is),
    "lora_task_type": ignored("causal language models only"),
    "lora_target_parameters": unsupported("model.lora.targets lists layers"),
    "lora_modules_to_save": unsupported("adapters are all that is trained"),
    **each(unsupported("weights are stored in float32", False), "load_in_4bit load_in_8bit"),
    **each(ignored("weights are not quantised"), "bnb_* use_bnb_nested_quant"),
    "system_prompt": to("data.system_prompt"),
    "dataset_prompt_column": to("data.prompt_key"),
    "config": ignored("the file was read"),
}

TRL_DEFAULTS: dict[str, Any] = {
    "num_generations": 8,
    "max_completion_length": 512,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "gradient_checkpointing": True,
    "vllm_importance_sampling_correction": True,
    "use_bias_correction_kl": True,
    "seed": 42,
}
"""TRL's values of settings that its user leaves out, where learning or memory depends on them."""
