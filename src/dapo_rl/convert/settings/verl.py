"""verl's settings (`verl.trainer.main_ppo`, `recipe.dapo.main_dapo`)."""

from __future__ import annotations

from typing import Any

from dapo_rl.convert.settings import reasons
from dapo_rl.convert.settings.setting import Setting, each, ignored, joint, mapping, sections, to, unsupported
from dapo_rl.convert.settings.values import (
    as_is,
    choice,
    dtype_here,
    off_at_most,
    same,
    soft_or_off,
    sources,
    trackers,
    unless_null,
)
from dapo_rl.objectives.losses import losses_by

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
VAL = f"{ROLLOUT}.val_kwargs"
OVERLONG = "reward_kwargs.overlong_buffer_cfg"

_ASYNC = "prompts per step: ppo_mini_batch_size × require_batches × trigger_parameter_sync_step"
_IN_CONFIG = "set it in the model's config.json, the only place it is read from"
_MINI_BATCH = "updates per step: train_batch_size / ppo_mini_batch_size, both in prompts"
_NOT_READ = "an option of Hydra; the file that it names is not read: convert it on its own"
_ROUNDS = "with filter_groups.max_num_gen_batches, the cap: verl samples rounds of this many prompts"
_ROUTER_REPLAY = "router replay: the update chooses experts anew, and does not replay those of sampling"
_REWARD_MODEL = "an option of reward models and sandboxes"
_VERIFIER = "the verifier is reward.verifier"

_OWN_FILES = tuple(
    f"{prefix}{kind}_{engine}trainer{suffix}"
    for prefix in ("", "fully_async_", "one_step_off_")
    for kind in ("ppo", "dapo")
    for engine in ("", "megatron_", "veomni_", "torchtitan_")
    for suffix in ("", ".yaml")
)
"""verl's own files of defaults."""
_AGGREGATIONS = same("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm") | {
    "seq-mean-token-sum": "seq-mean-token-sum-norm"
}
_METRICS = {"acc": "correct", None: "correct"} | dict.fromkeys(
    ("score", "reward", "seq_reward", "seq_final_reward"), "score"
)
_SCHEDULES = same("constant", "linear", "cosine") | {None: "constant"}

_IMPORTANCE = {
    "rollout_is": joint("algo.importance_cap", "with rollout_is_threshold, per token"),
    "rollout_is_threshold": joint("algo.importance_cap", alone=as_is),
    "rollout_is_mode": joint("algo.importance_mode"),
}
_BUFFER = {
    "enable": joint("overlong.shape", "the overlong buffer is Soft Overlong Punishment", alone=soft_or_off),
    "len": joint("overlong.cache_length", alone=as_is),
    "penalty_factor": joint("overlong.factor", alone=as_is),
    "log": ignored("rollouts/ has the penalty of every sample"),
}
_REWARD_FUNCTION = each(joint("reward.verifier", "file.py:name"), "path name")
_REWARD_KWARGS = {
    "reward_kwargs.max_resp_len": joint("overlong.max_length", alone=as_is),
    "reward_kwargs*": unsupported("an argument of verl's reward manager"),
}

CRITIC_SHARED = {
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

_SECTIONS: dict[str, dict[str, Setting]] = {
    "data": {
        "train_files": to("data.train", sources),
        "val_files": to("data.eval", sources),
        "prompt_key": to("data.prompt_key"),
        "max_prompt_length": to("data.max_prompt_tokens"),
        "max_response_length": to("sampling.max_new_tokens"),
        "truncation": joint("data.max_prompt_tokens", "longer prompts are dropped and counted"),
        "filter_overlong_prompts": joint("data.max_prompt_tokens", "longer prompts are always dropped and counted"),
        "train_batch_size": joint("sampling.prompts_per_step", "groups to train on per step", alone=as_is),
        "gen_batch_size": joint("sampling.cap", _ROUNDS),
        "seed": to("seed"),
        "shuffle": unsupported(reasons.SHUFFLED, True),
        "reward_fn_key": ignored("reward.verifier scores every row; verl picks a function by this column"),
        "custom_cls.*": unsupported("a data set class of your own: write its rows to a .jsonl or .parquet file"),
        "sampler.*": unsupported("a sampler of your own: prompts are drawn in a shuffled order"),
        "apply_chat_template_kwargs*": mapping("data.chat_template_kwargs"),
        "tokenizer": unsupported("the tokenizer is that of the model"),
        "trust_remote_code": ignored(reasons.REMOTE_CODE),
        "train_max_samples": unsupported("every row is used; write a shorter file", -1),
        "val_max_samples": to("eval.prompts", off_at_most(0, None)),
        "datagen.*": unsupported("rows are read from a file"),
        **each(ignored(reasons.NO_VISION), "image_key video_key audio_key mm_*"),
        **each(
            ignored(reasons.LOADING),
            "return_* use_shm val_batch_size dataloader_num_workers validation_shuffle filter_overlong_prompts_workers",
            "need_tools_kwargs tool_config_path image_patch_size",
        ),
    },
    ROLLOUT: {
        "n": to("sampling.group_size"),
        "temperature": to("sampling.temperature"),
        "top_p": to("sampling.top_p"),
        "top_k": to("sampling.top_k", off_at_most(0, 0)),
        "ignore_eos": to("sampling.ignore_eos"),
        "max_num_seqs": to("sampling.max_batch"),
        "name": to(
            "engine",
            choice(same("vllm", "hf"), f"{reasons.ENGINES}; samples come from the same distribution", learns=False),
            "needs dapo-rl[vllm]; the default, native, needs nothing",
        ),
        "do_sample": unsupported("training always samples", True),
        "response_length": to("sampling.max_new_tokens"),
        "prompt_length": to("data.max_prompt_tokens"),
        "calculate_log_probs": ignored("the engine always records the log-probabilities of its tokens"),
        "multi_turn.enable": unsupported(reasons.SEVERAL_TURNS, False),
        **each(ignored(reasons.SEVERAL_TURNS), "multi_turn.* agent.*"),
        "repetition_penalty": unsupported("there is no repetition penalty", 1, 1.0),
        **each(ignored(reasons.ONE_PROCESS), "tensor_model_parallel_size *parallel_size"),
        "log_prob_*": ignored(reasons.MEMORY),
        "gpu_memory_utilization": ignored("memory of the engine: sampling.kv_memory_gib"),
        "enable_rollout_routing_replay": unsupported(_ROUTER_REPLAY, False),
        "over_sample_rate": unsupported("every group is completed", 0, 0.0),
        "quantization*": unsupported("the engine samples with the trained weights, unquantised"),
        **each(
            ignored(reasons.VLLM),
            "mode dtype enforce_eager cudagraph_capture_sizes free_cache_engine max_num_batched_tokens max_model_len",
            "disable_log_stats multi_stage_wake_up engine_kwargs* update_weights_bucket_megabytes trace.* skip_*",
            "profiler.* enable_chunked_prefill enable_prefix_caching load_format layered_summon checkpoint_engine.*",
            "prometheus.* server.* disaggregation.* scheduling_policy logprobs_mode expert_parallel_size nnodes",
            "n_gpus_per_node enable_sleep_mode custom.* mtp.* disable_mm_preprocessor_cache use_inflight_batching",
            "standalone_gpu_memory_utilization moe_load_balance_metrics_interval full_determinism seed layer_name_map*",
        ),
    },
    VAL: {
        "temperature": joint("eval.temperature"),
        "do_sample": joint("eval.temperature", "without sampling, eval.temperature is 0"),
        "top_p": to("eval.top_p"),
        "n": to("eval.samples"),
        "top_k": Setting(note="held-out samples have no top_k", off=(None, -1, 0)),
    },
    "algorithm": {
        "filter_groups.enable": joint("sampling.dynamic", alone=as_is),
        "filter_groups.metric": to("sampling.metric", choice(_METRICS, "the filter compares correctness or scores")),
        "filter_groups.max_inflight_gen_batches": ignored("the groups in flight follow the acceptance rate"),
        "filter_groups.max_num_gen_batches": joint("sampling.cap", "rounds × gen_batch_size prompts; 0: no cap"),
        "adv_estimator": joint("algo.advantage"),
        "norm_adv_by_std_in_grpo": joint("algo.normalize", "false: group mean only"),
        "lam": joint("critic.lambda_policy", reasons.ONE_LAMBDA, alone=as_is),
        "gamma": unsupported(reasons.NO_DISCOUNT, 1, 1.0),
        "use_kl_in_reward": joint("algo.kl_in", "true: reward, with adv_estimator=gae"),
        "kl_ctrl.kl_coef": joint("algo.kl_coef", "the KL penalty in the reward"),
        "kl_ctrl.type": joint("algo.kl_coef", "the weight of the KL penalty is constant"),
        "kl_ctrl.*": ignored("the weight of the KL penalty is constant"),
        "kl_penalty": joint("algo.kl_kind", "of the KL penalty in the reward"),
        "use_pf_ppo": unsupported("samples are not reweighted", False),
        "pf_ppo.*": ignored("without use_pf_ppo it does nothing"),
        "gdpo_*": unsupported("rewards are summed, then normalised"),
        **_IMPORTANCE,
        "rollout_is_level": joint("algo.importance_cap", "token"),
        "rollout_is*": unsupported(reasons.CORRECTIONS, False),
    },
    "algorithm.rollout_correction": {
        **_IMPORTANCE,
        "bypass_mode": joint("algo.proximal", "true: behaviour"),
        "loss_type": joint("algo.loss", "with bypass_mode"),
        "*": unsupported(reasons.CORRECTIONS, False, "null"),
    },
    ACTOR: {
        # The loss.
        "clip_ratio": joint("algo.clip_low", "used if clip_ratio_low or clip_ratio_high is missing"),
        "clip_ratio_low": to("algo.clip_low"),
        "clip_ratio_high": to("algo.clip_high"),
        "clip_ratio_c": to("algo.clip_ratio_c", note="dual clip: off in the paper and here"),
        "loss_agg_mode": to(
            "algo.aggregation",
            choice(_AGGREGATIONS, "not one of the aggregations here"),
            "averages over the whole update; older verl averages each micro-batch",
        ),
        "loss_scale_factor": to("algo.norm_length"),
        "use_token_level_loss": to(
            "algo.aggregation", choice({True: "token-mean", False: "seq-mean-token-mean"}, "expected true or false")
        ),
        "policy_loss.loss_mode": to("algo.loss", choice(losses_by(lambda entry: entry.verl), reasons.OTHER_LOSS)),
        "policy_loss.*": ignored("an option of other losses than the clipped one"),
        "use_kl_loss": joint("algo.kl_coef"),
        "kl_loss_coef": joint("algo.kl_coef", alone=as_is),
        "kl_loss_type": joint("algo.kl_kind"),
        "entropy_coeff": unsupported(reasons.NO_ENTROPY, 0, 0.0),
        "tis_imp_ratio_cap": joint("algo.importance_cap", "-1: off", alone=off_at_most(0, None)),
        "router_replay.mode": unsupported(_ROUTER_REPLAY, "disabled"),
        "router_replay.*": ignored(_ROUTER_REPLAY),
        "tau_*": ignored(reasons.SAPO),
        # Updates.
        "ppo_mini_batch_size": joint("train.mini_batches", _MINI_BATCH),
        "ppo_epochs": to("train.epochs_per_step"),
        "shuffle": ignored("the groups of a step are trained on in the order drawn"),
        "grad_clip": to("train.max_grad_norm"),
        "ppo_max_token_len_per_gpu": to("train.token_budget"),
        "use_dynamic_bsz": ignored("micro-batches are always packed up to train.token_budget tokens"),
        "ppo_micro_batch_size*": ignored(reasons.MICRO_BATCHES),
        "qat.enable": unsupported("weights are trained without quantisation", False),
        "qat.*": ignored("an option of quantisation"),
        "freeze_vision_tower": ignored(reasons.NO_VISION),
        **each(
            ignored(reasons.ONE_PROCESS),
            "strategy fsdp_config.* megatron.* veomni.* torchtitan.* checkpoint.* profiler.*",
            "ulysses_sequence_parallel_size use_torch_compile use_fused_kernels entropy_from_logits_with_chunking",
            "entropy_checkpointing use_remove_padding rollout_n data_loader_seed calculate_entropy pad_to_length",
            "calculate_sum_pi_squared sum_pi_squared_checkpointing engine.* profile.* entropy_from_logits_chunk_size",
            "model_engine load_weight use_prefix_grouper optim.use_precision_aware_optimizer",
        ),
    },
    f"{ACTOR}.optim": {
        "lr": to("train.lr"),
        "lr_warmup_steps": joint("train.warmup_steps", "in steps; -1: lr_warmup_steps_ratio"),
        "lr_warmup_steps_ratio": joint("train.warmup_steps", "a share of the steps"),
        "weight_decay": to("train.weight_decay", note="applied to matrices only; verl also decays norms and biases"),
        "betas": to("train.betas"),
        **each(to("train.min_lr_share", lambda value: value or 0.0), "min_lr_ratio min_lr_factor"),
        **each(
            to("train.lr_schedule", choice(_SCHEDULES, reasons.SCHEDULES)),
            "warmup_style lr_scheduler_type lr_decay_style decay_type",
        ),
        "num_cycles": unsupported("a cosine decays once", 0.5),
        "total_training_steps": ignored("train.steps sets the length of the schedule"),
        "optimizer": to(
            "train.optimizer", choice({"AdamW": "adamw", "adamw": "adamw", "adam": "adamw"}, reasons.ADAMW)
        ),
        "name": to("train.optimizer", choice({"AdamW": "adamw", "Adam": "adamw"}, reasons.ADAMW)),
        "override_optimizer_config*": unsupported(reasons.ADAMW_ALONE, {}),
        "muon_*": ignored("an option of Muon; the optimizer is AdamW"),
        **each(unsupported(reasons.WARMUP_FROM_0, 0, 0.0), "lr_warmup_init lr_start"),
        "min_lr": joint("train.min_lr_share", "as a share of lr"),
        "clip_grad": to("train.max_grad_norm"),
        "eps": unsupported(reasons.EPSILON, 1e-8),
        "lr_min": unsupported("give it as train.min_lr_share", 0, 0.0),
        **each(
            ignored(reasons.MEMORY),
            "*_dtype use_layer_wise_distributed_optimizer override_optimizer_config.*offload*",
            "override_optimizer_config.overlap_* override_optimizer_config.use_precision_aware_optimizer",
            "optimizer_impl zero_indexed_step lr_decay_steps lr_decay_ratio lr_wsd_* weight_decay_incr_style",
            "use_checkpoint_opt_param_scheduler",
        ),
    },
    MODEL: {
        "path": to("model.name"),
        "enable_gradient_checkpointing": to("train.gradient_checkpointing"),
        "use_remove_padding": to("train.packed"),
        "lora_rank": joint("model.lora.rank", "0: train the weights", alone=as_is),
        "lora_alpha": joint("model.lora.alpha", alone=as_is),
        "target_modules": joint("model.lora.targets"),
        "exclude_modules": unsupported("model.lora.targets lists the layers to adapt"),
        "custom_chat_template": unsupported("the chat template is that of tokenizer_config.json"),
        "override_config.*drop*": unsupported("the model runs without dropout", 0, 0.0),
        "override_config.*max_position_embeddings": ignored(_IN_CONFIG),
        "override_config.moe_config.freeze_moe_router": unsupported("every weight is trained", False),
        "override_config*": unsupported(_IN_CONFIG, {}),
        "external_lib": unsupported("no module of your own is imported"),
        "trust_remote_code": ignored(reasons.REMOTE_CODE),
        "tokenizer_path": unsupported("the tokenizer is that of the model"),
        "lora_adapter_path": unsupported("adapters start from zero"),
        "torch_dtype": to("model.dtype", dtype_here),
        **each(
            ignored(reasons.SPEED),
            "use_shm enable_activation_offload use_liger use_fused_kernels fused_kernel_options.* hf_config_path",
            "load_tokenizer tiled_mlp.* mtp.*",
        ),
    },
    f"{MODEL}.lora": {
        "rank": joint("model.lora.rank", alone=as_is),
        "alpha": joint("model.lora.alpha", alone=as_is),
        "target_modules": joint("model.lora.targets"),
        "dropout": unsupported("adapters have no dropout", 0, 0.0),
        "dropout_position": ignored("adapters have no dropout"),
        "merge": ignored("how adapters reach the engine"),
        "type": unsupported(reasons.PLAIN_LORA, "lora"),
        "*_init_method": unsupported("A starts from Kaiming's distribution, B from 0", "kaiming", "zero"),
        "exclude_modules": unsupported("model.lora.targets lists the layers to adapt", []),
        "freeze_*": ignored(reasons.NO_VISION),
        **each(ignored(reasons.SPEED), "a2a_experimental fully_sharded_loras"),
        "*": unsupported("adapters are set by model.lora"),
    },
    "critic": {
        "optim.lr": joint("critic.lr", alone=as_is),
        "cliprange_value": joint("critic.value_clip", alone=as_is),
        "model.path": joint("model.name", reasons.STARTS),
        "loss_agg_mode": joint("algo.aggregation", "the critic's loss averages over tokens"),
        **{name: joint(ours, reasons.OF_POLICY) for name, ours in CRITIC_SHARED.items()},
        "optim.optimizer": joint("train.optimizer", reasons.OF_POLICY),
        "enable": ignored("the critic exists if adv_estimator is gae"),
        "model.lora_rank": unsupported(reasons.IN_FULL, 0),
        "model.override_config.moe_config.freeze_moe_router": unsupported("every weight is trained", False),
        "model.override_config*": unsupported("the critic has the policy's config", {}),
        "model.trust_remote_code": ignored(reasons.REMOTE_CODE),
        **each(ignored(reasons.MEMORY), "model.* *micro_batch_size* *token_len*"),
        "*": ignored(reasons.ONE_PROCESS),
    },
    "reward": {
        "reward_manager.name": joint("reward.verifier"),
        "reward_manager.*": ignored(_VERIFIER),
        **_REWARD_KWARGS,
        "reward_model.enable": unsupported(reasons.NO_REWARD_MODEL, False),
        "num_workers": to("reward.workers"),
        **each(ignored(_REWARD_MODEL), "reward_model.* sandbox_fusion.*"),
    },
    "reward_model": {
        "reward_manager": joint("reward.verifier"),
        **_REWARD_KWARGS,
        "enable": unsupported(reasons.NO_REWARD_MODEL, False),
        **each(
            ignored(_REWARD_MODEL),
            "strategy model.* micro_batch_size* max_length use_dynamic_bsz forward_* launch_reward_fn_async",
            "sandbox_fusion.* profiler.* ulysses_sequence_parallel_size num_workers enable_resource_pool",
            "n_gpus_per_node nnodes use_reward_loop reward_loop_* rollout.* input_tokenizer megatron.* nccl_timeout",
            "load_weight",
        ),
    },
    f"reward.{OVERLONG}": _BUFFER,
    f"reward_model.{OVERLONG}": _BUFFER,
    "custom_reward_function.overlong_buffer": _BUFFER,
    "reward_model.overlong_buffer": _BUFFER,
    "custom_reward_function": _REWARD_FUNCTION,
    "reward.custom_reward_function": _REWARD_FUNCTION,
    "trainer": {
        "total_epochs": joint("train.steps", reasons.EPOCHS),
        "total_training_steps": joint("train.steps", alone=as_is),
        "critic_warmup": joint(
            "critic.pretrain_steps", "one less: critic_warmup is the first step that updates the policy"
        ),
        "test_freq": to("eval.every", off_at_most(0, None)),
        "save_freq": to("checkpoint.every", off_at_most(0, None), "the last step writes a checkpoint too"),
        "max_actor_ckpt_to_keep": to("checkpoint.keep", unless_null(2)),
        "val_before_train": Setting(note=reasons.EVALUATED_FIRST, off=(True,)),
        "val_only": Setting(note="`dapo eval` evaluates without training", off=(False,)),
        "logger": to("log.trackers", trackers),
        "default_local_dir": ignored("name the run directory with --run"),
        "device": ignored("model.device"),
        **each(ignored(reasons.RESUME), "resume_mode resume_from_path"),
        **each(ignored(reasons.NAMES), "project_name experiment_name"),
        **each(ignored(reasons.LOGS), "log_val_generations rollout_data_dir validation_data_dir"),
        **each(
            ignored(reasons.ONE_PROCESS),
            "nnodes n_gpus_per_node balance_batch default_hdfs_dir del_local_ckpt_after_load max_critic_ckpt_to_keep",
            "ray_wait_register_center_timeout esi_redundant_time use_legacy_worker_impl npu_profile.* profile_steps",
            "worker_env.* *_nsight_options.* use_v1 v1.*",
        ),
    },
    "actor_rollout_ref": {
        "ref.*": ignored(reasons.REFERENCE),
        "profiler.*": ignored(reasons.SPEED),
        **each(ignored(reasons.ONE_PROCESS), "hybrid_engine nccl_timeout"),
    },
    "async_training": {
        **each(joint("sampling.prompts_per_step", _ASYNC), "require_batches trigger_parameter_sync_step"),
        "staleness_threshold": joint("sampling.surplus", "samples come from the weights of the step"),
        "*": ignored("how its trainer and its engines exchange samples"),
    },
    "rollout": {
        "total_rollout_steps": joint("train.steps", "prompts of the whole run"),
        "test_freq": to("eval.every", off_at_most(0, None)),
        "n": ignored("actor_rollout_ref.rollout.n counts"),
        "*": ignored(reasons.ONE_PROCESS),
    },
    "": {
        "(trainer)": joint("sampling.prompts_per_step", "another trainer of verl"),
        "reward_manager.*": ignored(_VERIFIER),
        "skip.*": ignored("samples are not replayed from a dump; every step samples"),
        "distillation.*": ignored("without distillation.enabled it does nothing"),
        "global_profiler.*": ignored(reasons.SPEED),
        "defaults": ignored("an option of Hydra; the files that it names are not read"),
        "--config-name": unsupported(_NOT_READ, *_OWN_FILES),
        "--config-path": ignored(_NOT_READ),
        **each(ignored("an option of Hydra"), "*@* hydra.* hydra *._target_"),
        **each(
            ignored(reasons.ONE_PROCESS),
            "model_engine ray_kwargs.* ray_init.* transfer_queue.* launcher.* num_processes",
        ),
    },
}
VERL = sections(_SECTIONS)

VERL_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ROLLOUT}.n": 1,
    "algorithm.adv_estimator": "gae",
    "trainer.total_epochs": 30,
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{MODEL}.lora_alpha": 16,
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
"""verl's values of settings that its user leaves out, where learning or memory depends on them."""
