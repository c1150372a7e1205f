"""verl's settings (`verl.trainer.main_ppo`, `recipe.dapo.main_dapo`)."""

from __future__ import annotations

from typing import Any

from dapo_rl.convert.settings.critics import VERL_CRITIC, VERL_CRITIC_DEFAULTS
from dapo_rl.convert.settings.setting import (
    CORRECTIONS,
    EPOCHS,
    LOADING,
    LOGS,
    MEMORY,
    NAMES,
    NO_VISION,
    ONE_PROCESS,
    OTHER_LOSS,
    REMOTE_CODE,
    SEVERAL_TURNS,
    SPEED,
    VLLM,
    NoCounterpartError,
    Setting,
    as_is,
    changes,
    choice,
    joint,
    none,
    off_at_most,
    soft_or_off,
    sources,
    to,
    to_each,
    trackers,
)
from dapo_rl.convert.settings.verl_actor import ACTOR, MODEL, ROLLOUT, VERL_TRAINING
from dapo_rl.objectives.losses import losses_by

VAL = f"{ROLLOUT}.val_kwargs"
OVERLONG = "reward_kwargs.overlong_buffer_cfg"
ROUNDS = "with filter_groups.max_num_gen_batches, the cap: verl samples rounds of this many prompts"
BUFFER = "the overlong buffer is Soft Overlong Punishment"

ASYNC = "prompts per step: ppo_mini_batch_size × require_batches × trigger_parameter_sync_step"
ROUTER_REPLAY = "router replay: the update chooses experts anew, and does not replay those of sampling"
_OWN_FILES = tuple(
    f"{prefix}{kind}_{engine}trainer{suffix}"
    for prefix in ("", "fully_async_", "one_step_off_")
    for kind in ("ppo", "dapo")
    for engine in ("", "megatron_", "veomni_", "torchtitan_")
    for suffix in ("", ".yaml")
)
"""verl's own files of defaults."""
REWARD_MODEL = "an option of reward models and sandboxes"
_AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum-norm": "seq-mean-token-sum-norm",
    "seq-mean-token-sum": "seq-mean-token-sum-norm",
}


def _engine(value: Any) -> Any:
    if value in ("vllm", "hf"):
        return value
    raise NoCounterpartError("the engines are native, hf and vllm; samples come from the same distribution", False)


VERL: dict[str, Setting] = {
    # Data.
    "data.train_files": to("data.train", sources),
    "data.val_files": to("data.eval", sources),
    "data.prompt_key": to("data.prompt_key"),
    "data.max_prompt_length": to("data.max_prompt_tokens"),
    "data.max_response_length": to("sampling.max_new_tokens"),
    "data.truncation": joint("data.max_prompt_tokens", "longer prompts are dropped and counted"),
    "data.filter_overlong_prompts": joint("data.max_prompt_tokens", "longer prompts are always dropped and counted"),
    "data.train_batch_size": joint("sampling.prompts_per_step", "groups to train on per step", alone=as_is),
    "data.gen_batch_size": joint("sampling.cap", ROUNDS),
    "data.seed": to("seed"),
    "data.shuffle": changes("prompts are always shuffled", True),
    "data.reward_fn_key": none("reward.verifier scores every row; verl picks a function by this column"),
    "data.custom_cls.*": changes("a data set class of your own: write its rows to a .jsonl or .parquet file"),
    "data.sampler.*": changes("a sampler of your own: prompts are drawn in a shuffled order"),
    "data.apply_chat_template_kwargs*": to_each("data.chat_template_kwargs"),
    "data.tokenizer": changes("the tokenizer is that of the model"),
    "data.image_key": none(NO_VISION),
    "data.video_key": none(NO_VISION),
    "data.audio_key": none(NO_VISION),
    "data.return_*": none(LOADING),
    "data.trust_remote_code": none(REMOTE_CODE),
    "data.train_max_samples": changes("every row is used; write a shorter file", -1),
    "data.val_max_samples": to("eval.prompts", off_at_most(0, None)),
    "data.datagen.*": changes("rows are read from a file"),
    "data.mm_*": none(NO_VISION),
    **{
        f"data.{name}": none(LOADING)
        for name in (
            "use_shm",
            "val_batch_size",
            "dataloader_num_workers",
            "validation_shuffle",
            "filter_overlong_prompts_workers",
            "need_tools_kwargs",
            "tool_config_path",
            "image_patch_size",
        )
    },
    # Sampling.
    f"{ROLLOUT}.n": to("sampling.group_size"),
    f"{ROLLOUT}.temperature": to("sampling.temperature"),
    f"{ROLLOUT}.top_p": to("sampling.top_p"),
    f"{ROLLOUT}.top_k": to("sampling.top_k", off_at_most(0, 0)),
    f"{ROLLOUT}.ignore_eos": to("sampling.ignore_eos"),
    f"{ROLLOUT}.max_num_seqs": to("sampling.max_batch"),
    f"{ROLLOUT}.name": to("engine", _engine, "needs dapo-rl[vllm]; the default, native, needs nothing"),
    f"{ROLLOUT}.do_sample": changes("training always samples", True),
    f"{ROLLOUT}.response_length": to("sampling.max_new_tokens"),
    f"{ROLLOUT}.prompt_length": to("data.max_prompt_tokens"),
    f"{ROLLOUT}.calculate_log_probs": none("the engine always records the log-probabilities of its tokens"),
    f"{ROLLOUT}.multi_turn.enable": changes(SEVERAL_TURNS, False),
    f"{ROLLOUT}.multi_turn.*": none(SEVERAL_TURNS),
    f"{ROLLOUT}.agent.*": none(SEVERAL_TURNS),
    f"{ROLLOUT}.repetition_penalty": changes("there is no repetition penalty", 1, 1.0),
    f"{ROLLOUT}.tensor_model_parallel_size": none(ONE_PROCESS),
    f"{ROLLOUT}.*parallel_size": none(ONE_PROCESS),
    f"{ROLLOUT}.log_prob_*": none(MEMORY),
    f"{ROLLOUT}.gpu_memory_utilization": none("memory of the engine: sampling.kv_memory_gib"),
    f"{ROLLOUT}.enable_rollout_routing_replay": changes(ROUTER_REPLAY, False),
    f"{ACTOR}.router_replay.mode": changes(ROUTER_REPLAY, "disabled"),
    f"{ACTOR}.router_replay.*": none(ROUTER_REPLAY),
    f"{ROLLOUT}.over_sample_rate": changes("every group is completed", 0, 0.0),
    f"{ROLLOUT}.quantization*": changes("the engine samples with the trained weights, unquantised"),
    **{
        f"{ROLLOUT}.{name}": none(VLLM)
        for name in (
            "mode",
            "dtype",
            "enforce_eager",
            "cudagraph_capture_sizes",
            "free_cache_engine",
            "max_num_batched_tokens",
            "max_model_len",
            "disable_log_stats",
            "multi_stage_wake_up",
            "engine_kwargs*",
            "update_weights_bucket_megabytes",
            "trace.*",
            "skip_*",
            "profiler.*",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "load_format",
            "layered_summon",
            "checkpoint_engine.*",
            "prometheus.*",
            "server.*",
            "disaggregation.*",
            "scheduling_policy",
            "logprobs_mode",
            "expert_parallel_size",
            "nnodes",
            "n_gpus_per_node",
            "enable_sleep_mode",
            "custom.*",
            "mtp.*",
            "disable_mm_preprocessor_cache",
            "use_inflight_batching",
            "standalone_gpu_memory_utilization",
            "moe_load_balance_metrics_interval",
            "full_determinism",
            "seed",
            "layer_name_map*",
        )
    },
    f"{VAL}.temperature": joint("eval.temperature"),
    f"{VAL}.do_sample": joint("eval.temperature", "without sampling, eval.temperature is 0"),
    f"{VAL}.top_p": to("eval.top_p"),
    f"{VAL}.n": to("eval.samples"),
    f"{VAL}.top_k": Setting(note="held-out samples have no top_k", off=(None, -1, 0)),
    # Dynamic Sampling.
    "algorithm.filter_groups.enable": joint("sampling.dynamic", alone=as_is),
    "algorithm.filter_groups.metric": to(
        "sampling.metric",
        choice(
            {"acc": "correct", None: "correct"}
            | dict.fromkeys(("score", "reward", "seq_reward", "seq_final_reward"), "score"),
            "the filter compares correctness or scores",
        ),
    ),
    "algorithm.filter_groups.max_inflight_gen_batches": none("the groups in flight follow the acceptance rate"),
    "algorithm.filter_groups.max_num_gen_batches": joint("sampling.cap", "rounds × gen_batch_size prompts; 0: no cap"),
    # Advantages and KL.
    "algorithm.adv_estimator": joint("algo.advantage"),
    "algorithm.norm_adv_by_std_in_grpo": joint("algo.normalize", "false: group mean only"),
    **VERL_CRITIC,
    "algorithm.use_kl_in_reward": joint("algo.kl_in", "true: reward, with adv_estimator=gae"),
    "algorithm.kl_ctrl.kl_coef": joint("algo.kl_coef", "the KL penalty in the reward"),
    "algorithm.kl_ctrl.type": joint("algo.kl_coef", "the weight of the KL penalty is constant"),
    "algorithm.kl_ctrl.*": none("the weight of the KL penalty is constant"),
    "algorithm.kl_penalty": joint("algo.kl_kind", "of the KL penalty in the reward"),
    "algorithm.use_pf_ppo": changes("samples are not reweighted", False),
    "algorithm.pf_ppo.*": none("without use_pf_ppo it does nothing"),
    **{
        f"{prefix}.{name}": entry
        for prefix in ("algorithm", "algorithm.rollout_correction")
        for name, entry in {
            "rollout_is": joint("algo.importance_cap", "with rollout_is_threshold, per token"),
            "rollout_is_threshold": joint("algo.importance_cap", alone=as_is),
            "rollout_is_mode": joint("algo.importance_mode"),
        }.items()
    },
    "algorithm.rollout_correction.bypass_mode": joint("algo.proximal", "true: behaviour"),
    "algorithm.rollout_correction.loss_type": joint("algo.loss", "with bypass_mode"),
    "algorithm.rollout_is_level": joint("algo.importance_cap", "token"),
    "algorithm.rollout_correction.*": changes(CORRECTIONS, False, "null"),
    "algorithm.rollout_is*": changes(CORRECTIONS, False),
    # The loss.
    f"{ACTOR}.clip_ratio": joint("algo.clip_low", "used if clip_ratio_low or clip_ratio_high is missing"),
    f"{ACTOR}.clip_ratio_low": to("algo.clip_low"),
    f"{ACTOR}.clip_ratio_high": to("algo.clip_high"),
    f"{ACTOR}.clip_ratio_c": to("algo.clip_ratio_c", note="dual clip: off in the paper and here"),
    f"{ACTOR}.loss_agg_mode": to(
        "algo.aggregation",
        choice(_AGGREGATIONS, "not one of the aggregations here"),
        "averages over the whole update; older verl averages each micro-batch",
    ),
    f"{ACTOR}.loss_scale_factor": to("algo.norm_length"),
    f"{ACTOR}.use_token_level_loss": to(
        "algo.aggregation", choice({True: "token-mean", False: "seq-mean-token-mean"}, "expected true or false")
    ),
    f"{ACTOR}.policy_loss.loss_mode": to("algo.loss", choice(losses_by(lambda entry: entry.verl), OTHER_LOSS)),
    f"{ACTOR}.policy_loss.*": none("an option of other losses than the clipped one"),
    f"{ACTOR}.use_kl_loss": joint("algo.kl_coef"),
    f"{ACTOR}.kl_loss_coef": joint("algo.kl_coef", alone=as_is),
    f"{ACTOR}.kl_loss_type": joint("algo.kl_kind"),
    f"{ACTOR}.entropy_coeff": changes("there is no entropy bonus in the loss", 0, 0.0),
    f"{ACTOR}.tis_imp_ratio_cap": joint("algo.importance_cap", "-1: off", alone=off_at_most(0, None)),
    **VERL_TRAINING,
    # Rewards.
    "reward.reward_manager.name": joint("reward.verifier"),
    "reward_model.reward_manager": joint("reward.verifier"),
    "reward_manager.*": none("the verifier is reward.verifier"),
    "reward.reward_manager.*": none("the verifier is reward.verifier"),
    **{
        f"{root}.{name}": entry
        for root in ("reward", "reward_model")
        for name, entry in {
            f"{OVERLONG}.enable": joint("overlong.shape", BUFFER, alone=soft_or_off),
            f"{OVERLONG}.len": joint("overlong.cache_length", alone=as_is),
            f"{OVERLONG}.penalty_factor": joint("overlong.factor", alone=as_is),
            f"{OVERLONG}.log": none("rollouts/ has the penalty of every sample"),
            "reward_kwargs.max_resp_len": joint("overlong.max_length", alone=as_is),
        }.items()
    },
    **{
        f"{root}.overlong_buffer.{name}": entry
        for root in ("custom_reward_function", "reward_model")
        for name, entry in {
            "enable": joint("overlong.shape", BUFFER, alone=soft_or_off),
            "len": joint("overlong.cache_length", alone=as_is),
            "penalty_factor": joint("overlong.factor", alone=as_is),
            "log": none("rollouts/ has the penalty of every sample"),
        }.items()
    },
    "custom_reward_function.path": joint("reward.verifier", "file.py:name"),
    "custom_reward_function.name": joint("reward.verifier", "file.py:name"),
    "reward.custom_reward_function.path": joint("reward.verifier", "file.py:name"),
    "reward.custom_reward_function.name": joint("reward.verifier", "file.py:name"),
    "reward_model.enable": changes("rewards come from a verifier, not from a model", False),
    "reward.reward_model.enable": changes("rewards come from a verifier, not from a model", False),
    "reward.num_workers": to("reward.workers"),
    "reward.reward_kwargs*": changes("an argument of verl's reward manager"),
    "reward_model.reward_kwargs*": changes("an argument of verl's reward manager"),
    "reward.reward_model.*": none(REWARD_MODEL),
    "reward.sandbox_fusion.*": none(REWARD_MODEL),
    **{
        f"reward_model.{name}": none(REWARD_MODEL)
        for name in (
            "strategy",
            "model.*",
            "micro_batch_size*",
            "max_length",
            "use_dynamic_bsz",
            "forward_*",
            "launch_reward_fn_async",
            "sandbox_fusion.*",
            "profiler.*",
            "ulysses_sequence_parallel_size",
            "num_workers",
            "enable_resource_pool",
            "n_gpus_per_node",
            "nnodes",
            "use_reward_loop",
            "reward_loop_*",
            "rollout.*",
            "input_tokenizer",
            "megatron.*",
            "nccl_timeout",
            "load_weight",
        )
    },
    # The run.
    "trainer.total_epochs": joint("train.steps", EPOCHS),
    "trainer.total_training_steps": joint("train.steps", alone=as_is),
    "trainer.test_freq": to("eval.every", off_at_most(0, None)),
    "trainer.save_freq": to("checkpoint.every", off_at_most(0, None), "the last step writes a checkpoint too"),
    "trainer.max_actor_ckpt_to_keep": to("checkpoint.keep", lambda value: 2 if value is None else value),
    "trainer.val_before_train": Setting(note="an evaluation always precedes the first step", off=(True,)),
    "trainer.val_only": Setting(note="`dapo eval` evaluates without training", off=(False,)),
    "trainer.logger": to("log.to", trackers),
    "trainer.default_local_dir": none("name the run directory with --run"),
    "trainer.resume_mode": none("`dapo train --run DIR --resume` resumes a run"),
    "trainer.resume_from_path": none("`dapo train --run DIR --resume` resumes a run"),
    "trainer.project_name": none(NAMES),
    "trainer.experiment_name": none(NAMES),
    "trainer.log_val_generations": none(LOGS),
    "trainer.rollout_data_dir": none(LOGS),
    "trainer.validation_data_dir": none(LOGS),
    "trainer.nnodes": none(ONE_PROCESS),
    "trainer.n_gpus_per_node": none(ONE_PROCESS),
    "trainer.device": none("model.device"),
    **{
        f"trainer.{name}": none(ONE_PROCESS)
        for name in (
            "balance_batch",
            "default_hdfs_dir",
            "del_local_ckpt_after_load",
            "max_critic_ckpt_to_keep",
            "ray_wait_register_center_timeout",
            "esi_redundant_time",
            "use_legacy_worker_impl",
            "npu_profile.*",
            "profile_steps",
            "worker_env.*",
            "*_nsight_options.*",
            "use_v1",
            "v1.*",
        )
    },
    # Everything else of its file.
    "actor_rollout_ref.ref.*": none("the reference model of the KL penalty is the initial model"),
    "actor_rollout_ref.profiler.*": none(SPEED),
    "actor_rollout_ref.hybrid_engine": none(ONE_PROCESS),
    "actor_rollout_ref.nccl_timeout": none(ONE_PROCESS),
    "(trainer)": joint("sampling.prompts_per_step", "another trainer of verl"),
    "async_training.require_batches": joint("sampling.prompts_per_step", ASYNC),
    "async_training.trigger_parameter_sync_step": joint("sampling.prompts_per_step", ASYNC),
    "async_training.staleness_threshold": joint("sampling.surplus", "samples come from the weights of the step"),
    "async_training.*": none("how its trainer and its engines exchange samples"),
    "rollout.total_rollout_steps": joint("train.steps", "prompts of the whole run"),
    "rollout.test_freq": to("eval.every", off_at_most(0, None)),
    "rollout.n": none("actor_rollout_ref.rollout.n counts"),
    "rollout.*": none(ONE_PROCESS),
    "model_engine": none(ONE_PROCESS),
    "skip.*": none("samples are not replayed from a dump; every step samples"),
    "distillation.*": none("without distillation.enabled it does nothing"),
    "algorithm.gdpo_*": changes("rewards are summed, then normalised"),
    "*@*": none("an option of Hydra"),
    "global_profiler.*": none(SPEED),
    "ray_kwargs.*": none(ONE_PROCESS),
    "ray_init.*": none(ONE_PROCESS),
    "transfer_queue.*": none(ONE_PROCESS),
    "hydra.*": none("an option of Hydra"),
    "hydra": none("an option of Hydra"),
    "defaults": none("an option of Hydra; the files that it names are not read"),
    "--config-name": changes(
        "an option of Hydra; the file that it names is not read: convert it on its own", *_OWN_FILES
    ),
    "--config-path": none("an option of Hydra; the file that it names is not read: convert it on its own"),
    "launcher.*": none(ONE_PROCESS),
    "num_processes": none(ONE_PROCESS),
    "*._target_": none("an option of Hydra"),
}

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
    **VERL_CRITIC_DEFAULTS,
}
"""verl's values of settings that its user leaves out, where learning or memory depends on them."""
