"""TRL's settings (`GRPOConfig`, on top of transformers' `TrainingArguments`, and the options of `trl grpo`)."""

from __future__ import annotations

from typing import Any

from dapo_rl.convert.settings.setting import (
    EPOCHS,
    LOADING,
    LOGS,
    NAMES,
    ONE_PROCESS,
    OTHER_LOSS,
    REMOTE_CODE,
    SEVERAL_TURNS,
    SPEED,
    VLLM,
    Near,
    NoCounterpartError,
    Setting,
    as_is,
    changes,
    choice,
    dtype_here,
    joint,
    loss_of_level,
    none,
    off_at_most,
    sources,
    to,
    to_each,
    trackers,
)
from dapo_rl.objectives.losses import losses_by

BATCH = "batch sizes count completions; prompts per step = generation batch / num_generations"
UPDATES = "counts updates; train.steps counts steps of several updates"
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
HUB = "nothing is uploaded; DIR/model is in Hugging Face format"
LIMITS = "a run evaluates and saves by eval.every and checkpoint.every"


def aggregation(value: Any) -> Any:
    """`loss_type`, in TRL and ms-swift."""
    if (loss := losses_by(lambda entry: entry.trl).get(value)) is not None:
        return Near("token-mean", f"with algo.loss={loss}", False)
    if value == "bnpo":
        return Near("token-mean", "averages over the tokens of the update, not of each micro-batch")
    names = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
    if value not in names:
        raise NoCounterpartError(OTHER_LOSS)
    return names[value]


def _bf16(value: Any) -> Any:
    return "bfloat16" if value else "auto"


def _fp16(value: Any) -> Any:
    if value:
        raise NoCounterpartError("float16 is not supported; model.dtype is bfloat16 or float32")
    return "auto"


def _device(value: Any) -> Any:
    return "cpu" if value else "auto"


def _optimizer(value: Any) -> Any:
    names = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused"), "adamw")
    names |= dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw_8bit")
    if str(value) not in names:
        raise NoCounterpartError("the optimizer is AdamW")
    return names[str(value)]


TRAINER: dict[str, Setting] = {
    # transformers' TrainingArguments, which ms-swift shares.
    "output_dir": none("name the run directory with --run DIR"),
    "overwrite_output_dir": none("name the run directory with --run DIR"),
    "logging_dir": none("name the run directory with --run DIR"),
    "per_device_train_batch_size": joint("sampling.prompts_per_step", BATCH),
    "gradient_accumulation_steps": joint("sampling.prompts_per_step", BATCH),
    "num_train_epochs": joint("train.steps", EPOCHS),
    "max_steps": joint("train.steps", UPDATES),
    "learning_rate": to("train.lr"),
    "lr_scheduler_type": to("train.lr_schedule", choice(SCHEDULES, "not one of the schedules here")),
    "lr_scheduler_kwargs.min_lr_rate": to("train.min_lr_share"),
    "lr_scheduler_kwargs.min_lr": joint("train.min_lr_share", "as a share of learning_rate"),
    "lr_scheduler_kwargs*": changes("not an option of the schedules here", {}),
    "warmup_ratio": joint("train.warmup_steps", "a share of the updates; here a number of steps"),
    "warmup_steps": joint("train.warmup_steps", "counts updates; here steps of several updates"),
    "weight_decay": to("train.weight_decay"),
    "adam_beta1": joint("train.betas"),
    "adam_beta2": joint("train.betas"),
    "adam_epsilon": changes("AdamW's epsilon is 1e-8", 1e-8),
    "max_grad_norm": to("train.max_grad_norm"),
    "optim": to("train.optimizer", _optimizer),
    "optim_args": changes("the optimizer is AdamW, without further options"),
    "optim_target_modules": changes("the optimizer is AdamW, without further options"),
    "bf16": to("model.dtype", _bf16),
    "fp16": to("model.dtype", _fp16),
    "torch_dtype": to("model.dtype", dtype_here),
    "dtype": to("model.dtype", dtype_here),
    "gradient_checkpointing": to("train.gradient_checkpointing"),
    "gradient_checkpointing_kwargs*": none(SPEED),
    "seed": to("seed"),
    "data_seed": none("seed is the seed of everything"),
    "report_to": to("log.to", trackers),
    "run_name": none(NAMES),
    "project": none(NAMES),
    "save_steps": joint("checkpoint.every", "counts updates"),
    "save_total_limit": to("checkpoint.keep", lambda value: 2 if value is None else value),
    "save_strategy": none("checkpoints are written by checkpoint.every, and at the last step"),
    "eval_steps": joint("eval.every", "counts updates"),
    "eval_strategy": joint("eval.every"),
    "evaluation_strategy": joint("eval.every"),
    "eval_on_start": Setting(note="an evaluation always precedes the first step", off=(True,)),
    "resume_from_checkpoint": none("`dapo train --run DIR --resume` resumes a run"),
    "neftune_noise_alpha": changes("no noise is added to embeddings"),
    "label_smoothing_factor": changes("there are no labels to smooth", 0, 0.0),
    "train_sampling_strategy": changes("prompts are always shuffled", "random"),
    "full_determinism": none("a seed always gives the same run"),
    "ignore_data_skip": none("a resumed run continues with the next prompt"),
    "use_cpu": to("model.device", _device),
    "no_cuda": to("model.device", _device),
    "use_liger_kernel": none(SPEED),
    "liger_kernel_config*": none(SPEED),
    "use_liger_loss": none(SPEED),
    "tf32": none(SPEED),
    "jit_mode_eval": none(SPEED),
    "use_cache": none(SPEED),
    "auto_find_batch_size": none("micro-batches are packed up to train.token_budget tokens"),
    "average_tokens_across_devices": none(ONE_PROCESS),
    "accelerator_config*": none(ONE_PROCESS),
    "parallelism_config*": none(ONE_PROCESS),
    "fsdp*": none(ONE_PROCESS),
    "deepspeed*": none(ONE_PROCESS),
    "ddp_*": none(ONE_PROCESS),
    "ds3_*": none(ONE_PROCESS),
    "local_rank": none(ONE_PROCESS),
    "num_processes": joint("sampling.prompts_per_step", BATCH),
    "torch_compile*": none(SPEED),
    "torch_empty_cache_steps": none(SPEED),
    "torchdynamo": none(SPEED),
    "bf16_full_eval": none(LIMITS),
    "fp16_full_eval": none(LIMITS),
    "eval_*": none(LIMITS),
    "per_device_eval_batch_size": none("held-out prompts are batched like the others"),
    "prediction_loss_only": none(LIMITS),
    "batch_eval_metrics": none(LIMITS),
    "include_*": none(LOGS),
    "load_best_model_at_end": changes("DIR/model is the model after the last step", False),
    "metric_for_best_model": none("DIR/model is the model after the last step; checkpoints are kept as well"),
    "greater_is_better": none("DIR/model is the model after the last step; checkpoints are kept as well"),
    "save_*": none("checkpoints are complete, in safetensors"),
    "enable_jit_checkpoint": none("checkpoints are complete, in safetensors"),
    "restore_callback_states_from_checkpoint": none("checkpoints are complete, in safetensors"),
    "logging_*": none("one line of metrics.jsonl per step"),
    "log_level*": none("one line of metrics.jsonl per step"),
    "log_on_each_node": none("one line of metrics.jsonl per step"),
    "disable_tqdm": none("one line per step, on a terminal a live table"),
    "push_to_hub*": none(HUB),
    "hub_*": none(HUB),
    "trackio_*": none(NAMES),
    "dataloader_*": none(LOADING),
    "length_column_name": none(LOADING),
    "group_by_length": none(LOADING),
    "label_names": none(LOADING),
    "remove_unused_columns": none("verifiers see every column"),
    "skip_memory_metrics": none(LOGS),
    "past_index": none(LOADING),
    "debug": none(SPEED),
    "do_train": none("`dapo train` trains, `dapo eval` evaluates"),
    "do_eval": none("`dapo train` trains, `dapo eval` evaluates"),
    "do_predict": none("`dapo train` trains, `dapo eval` evaluates"),
    "launcher.*": none(ONE_PROCESS),
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
    "reward_model_name_or_path": changes("rewards come from a verifier, not from a model"),
    "multi_objective_aggregation": changes("rewards are summed, then normalised", "sum_then_normalize"),
    "temperature": to("sampling.temperature"),
    "top_p": to("sampling.top_p", lambda value: 1.0 if value is None else value),
    "top_k": to("sampling.top_k", off_at_most(0, 0)),
    "min_p": to("sampling.min_p", lambda value: value or 0.0),
    "repetition_penalty": changes("there is no repetition penalty", 1, 1.0),
    "generation_kwargs.stop": to("sampling.stop"),
    "generation_kwargs*": changes("not an option of the engines here", {}),
    "chat_template_kwargs*": to_each("data.chat_template_kwargs"),
    "use_vllm": to("engine", lambda value: "vllm" if value else "native"),
    "vllm_importance_sampling_correction": joint("algo.importance_cap", "with the modes token_truncate and token_mask"),
    "vllm_importance_sampling_mode": joint("algo.importance_mode", "one weight for a sequence has no counterpart"),
    "vllm_importance_sampling_clip_max": joint("algo.importance_cap", alone=as_is),
    "vllm_importance_sampling_cap": joint("algo.importance_cap", alone=as_is),
    "vllm_importance_sampling_clip_min": changes("importance weights have no lower bound"),
    "off_policy_mask_threshold": changes("samples are not masked by their divergence"),
    "use_bias_correction_kl": changes("the KL penalty is not weighted by the ratio", False),
    "vllm_structured_outputs_regex": changes("responses are not constrained"),
    "vllm_guided_decoding_regex": changes("responses are not constrained"),
    "vllm_*": none(VLLM),
    "sync_ref_model": changes("the reference model of the KL penalty is the initial model", False),
    "ref_model_*": none("the reference model of the KL penalty is the initial model"),
    "entropy_coef": changes("there is no entropy bonus in the loss", 0, 0.0),
    "top_entropy_quantile": changes("every token of a response is trained on", 1, 1.0),
    "use_adaptive_entropy": changes("there is no entropy bonus in the loss", False),
    "entropy_coef_*": none("an option of the entropy bonus"),
    "entropy_target": none("an option of the entropy bonus"),
    "sapo_*": none("an option of the loss sapo"),
    "vespo_*": none("an option of the loss vespo"),
    "router_aux_loss_coef": changes("experts are trained without a load-balancing loss", 0, 0.0),
    "disable_dropout": Setting(note="the model runs without dropout", off=(None, False, True)),
    "cast_lm_head_to_fp32": none("the loss is computed in float32"),
    "shuffle_dataset": changes("prompts are always shuffled", True),
    "log_completions*": none(LOGS),
    "log_unique_prompts": none(LOGS),
    "log_multimodal": none(LOGS),
    "num_completions_to_print": none(LOGS),
    "wandb_log_unique_prompts": none(LOGS),
    "use_transformers_*": none("engine=native batches continuously"),
    "transformers_continuous_batching_config*": none("engine=native batches continuously"),
    "pad_to_multiple_of": none(SPEED),
    "cache_implementation": none(SPEED),
    "max_tool_calling_iterations": changes(SEVERAL_TURNS),
    "model_init_kwargs.dtype": to("model.dtype", dtype_here),
    "model_init_kwargs.torch_dtype": to("model.dtype", dtype_here),
    "model_init_kwargs.revision": changes("give a directory as the model for another revision", "main"),
    "model_init_kwargs.trust_remote_code": none(REMOTE_CODE),
    "model_init_kwargs.quantization_config*": changes("weights are stored in float32"),
    "model_init_kwargs.load_in_4bit": changes("weights are stored in float32", False),
    "model_init_kwargs.load_in_8bit": changes("weights are stored in float32", False),
    "model_init_kwargs*": none("the model is loaded as its files say"),
    "use_peft": joint("model.lora.rank", "true: train adapters (model.lora); false: train the weights"),
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
    "model_revision": none("give a directory as model.name for another revision"),
    "trust_remote_code": none(REMOTE_CODE),
    "attn_implementation": none(SPEED),
    "dataset_name": to("data.train", sources),
    "dataset_config": joint("data.train.name"),
    "dataset_train_split": joint("data.train.split"),
    "dataset_test_split": joint("data.eval.split"),
    "dataset_streaming": none(LOADING),
    "datasets": joint("data.train", "a list of {source: NAME}"),
    "lora_r": joint("model.lora.rank", alone=as_is),
    "lora_target_modules": joint("model.lora.targets", alone=as_is),
    "lora_task_type": none("causal language models only"),
    "lora_target_parameters": changes("model.lora.targets lists layers"),
    "lora_modules_to_save": changes("adapters are all that is trained"),
    "load_in_4bit": changes("weights are stored in float32", False),
    "load_in_8bit": changes("weights are stored in float32", False),
    "bnb_*": none("weights are not quantised"),
    "use_bnb_nested_quant": none("weights are not quantised"),
    "system_prompt": to("data.system_prompt"),
    "dataset_prompt_column": to("data.prompt_key"),
    "gradient_checkpointing_use_reentrant": none(SPEED),
    "config": none("the file was read"),
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
