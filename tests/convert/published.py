"""The peers' published DAPO runs, written again from their settings: every key and value that they set."""

VERL_32B = """#!/usr/bin/env bash
set -euxo pipefail

project_name='DAPO'
exp_name='DAPO-Qwen2.5-32B'
clip_ratio_low=0.2
clip_ratio_high=0.28
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
overlong_buffer_len=$((1024 * 4))
train_prompt_bsz=512
gen_prompt_bsz=$((train_prompt_bsz * 3))
n_resp_per_prompt=16
WORKING_DIR=${WORKING_DIR:-"${PWD}"}
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"Qwen/Qwen2.5-32B"}
TRAIN_FILE=${TRAIN_FILE:-"${RAY_DATA_HOME}/data/dapo-math-17k.parquet"}
top_k=-1 # 0 for HF rollout, -1 for vLLM rollout
offload=True

ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" \\
    --working-dir "${WORKING_DIR}" \\
    -- python3 -m recipe.dapo.main_dapo \\
    data.train_files="${TRAIN_FILE}" \\
    data.val_files="${TEST_FILE:-${RAY_DATA_HOME}/data/aime-2024.parquet}" \\
    data.prompt_key=prompt \\
    data.truncation='left' \\
    data.max_prompt_length=${max_prompt_length} \\
    data.max_response_length=${max_response_length} \\
    data.gen_batch_size=${gen_prompt_bsz} \\
    data.train_batch_size=${train_prompt_bsz} \\
    actor_rollout_ref.rollout.n=${n_resp_per_prompt} \\
    algorithm.adv_estimator=grpo \\
    algorithm.norm_adv_by_std_in_grpo=True \\
    algorithm.use_kl_in_reward=False \\
    algorithm.kl_ctrl.kl_coef=0.0 \\
    actor_rollout_ref.actor.use_kl_loss=False \\
    actor_rollout_ref.actor.kl_loss_coef=0.0 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low} \\
    actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high} \\
    actor_rollout_ref.actor.clip_ratio_c=10.0 \\
    algorithm.filter_groups.enable=True \\
    algorithm.filter_groups.max_num_gen_batches=10 \\
    algorithm.filter_groups.metric=acc \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \\
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length + max_response_length)) \\
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=$((max_prompt_length + max_response_length)) \\
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 3)) \\
    actor_rollout_ref.model.path="${MODEL_PATH}" \\
    +actor_rollout_ref.model.override_config.attention_dropout=0. \\
    +actor_rollout_ref.model.override_config.max_position_embeddings=32768 \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.optim.weight_decay=0.1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.ppo_epochs=1 \\
    actor_rollout_ref.actor.fsdp_config.strategy=fsdp2 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=${offload} \\
    actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 \\
    actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.actor.grad_clip=1.0 \\
    actor_rollout_ref.actor.loss_agg_mode=token-mean \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.enable_chunked_prefill=True \\
    actor_rollout_ref.rollout.max_num_batched_tokens=$((max_prompt_length + max_response_length)) \\
    actor_rollout_ref.rollout.temperature=1.0 \\
    actor_rollout_ref.rollout.top_p=1.0 \\
    actor_rollout_ref.rollout.top_k="${top_k}" \\
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \\
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \\
    actor_rollout_ref.rollout.val_kwargs.top_k=${top_k} \\
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \\
    actor_rollout_ref.rollout.val_kwargs.n=32 \\
    actor_rollout_ref.ref.fsdp_config.param_offload=${offload} \\
    actor_rollout_ref.ref.ulysses_sequence_parallel_size=8 \\
    reward_model.reward_manager=dapo \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=${overlong_buffer_len} \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.log=False \\
    +reward_model.reward_kwargs.max_resp_len=${max_response_length} \\
    trainer.logger=['console','wandb'] \\
    trainer.project_name="${project_name}" \\
    trainer.experiment_name="${exp_name}-$(date +%s)" \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes="${NNODES:-16}" \\
    +trainer.val_before_train=True \\
    trainer.test_freq=5 \\
    trainer.save_freq=5 \\
    trainer.total_epochs=1 \\
    trainer.total_training_steps=10000 \\
    trainer.default_local_dir="${RAY_DATA_HOME}/ckpts/${project_name}/${exp_name}" \\
    trainer.resume_mode=auto \\
    trainer.log_val_generations=10 "$@" 2>&1 | tee dapo.log
"""

VERL_YAML = """
defaults: [ppo_trainer, _self_]
data:
  train_files: [dapo-math-17k.parquet]
  train_batch_size: 512
  gen_batch_size: ${data.train_batch_size}
  max_prompt_length: 2048
  max_response_length: 8192
  filter_overlong_prompts: true
  truncation: error
algorithm:
  adv_estimator: grpo
  filter_groups: {enable: true, metric: seq_reward, max_num_gen_batches: 0}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-Math-7B}
  actor:
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
    ppo_mini_batch_size: 32
    optim: {lr: 1e-6, lr_warmup_steps: -1, lr_warmup_steps_ratio: 0.05}
  rollout:
    name: sglang
    'n': 12
    response_length: ${oc.select:data.max_response_length,512}
reward:
  reward_manager: {name: dapo}
  reward_kwargs:
    overlong_buffer_cfg: {enable: true, len: 4096, penalty_factor: 1.0, log: false}
    max_resp_len: ${data.max_response_length}
trainer: {total_training_steps: 200, total_epochs: 10, test_freq: -1, save_freq: -1}
"""

SWIFT = """
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \\
NPROC_PER_NODE=8 \\
swift rlhf \\
    --rlhf_type grpo \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --reward_funcs accuracy soft_overlong \\
    --soft_max_length 2048 \\
    --soft_cache_length 512 \\
    --loss_type dapo \\
    --epsilon 0.2 --epsilon_high 0.28 \\
    --dynamic_sample true --max_resample_times 3 \\
    --overlong_filter true \\
    --num_generations 8 --max_completion_length 2048 --max_length 1024 \\
    --beta 0.0 --num_iterations 1 --steps_per_generation 4 \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --per_device_eval_batch_size 4 \\
    --learning_rate 1e-6 --warmup_ratio 0.05 --num_train_epochs 1 --max_steps 400 \\
    --temperature 1.0 --top_p 0.9 --top_k 50 \\
    --scale_rewards group --advantage_estimator grpo --importance_sampling_level token \\
    --use_vllm true --vllm_mode colocate --vllm_server_host 127.0.0.1 --vllm_gpu_memory_utilization 0.4 \\
    --sleep_level 1 --tuner_type full --lora_rank 8 --lora_alpha 32 --torch_dtype bfloat16 \\
    --dataset AI-MO/NuminaMath-TIR#1000 --system 'Reason, then answer.' --external_plugins plugin.py \\
    --deepspeed zero2 --log_completions true --report_to tensorboard wandb \\
    --save_steps 100 --save_total_limit 2 --eval_steps 100 --delta 4 --reward_weights 1 1 \\
    --vllm_importance_sampling_correction false --truncation_strategy delete \\
    --dataloader_num_workers 4 --dataset_num_proc 4 --logging_steps 1
"""

AREAL = """
experiment_name: gsm8k-dapo
trial_name: trial0
seed: 1
dynamic_bs: true
total_train_epochs: 10
tokenizer_path: ${actor.path}
cluster: {n_nodes: 1, n_gpus_per_node: 8, fileroot: /tmp/areal, name_resolve: {type: nfs}}
allocation_mode: sglang:d4+fsdp:d4
rollout:
  max_concurrent_rollouts: 256
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 2
  backend: "sglang:d4"
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 4096, greedy: false, temperature: 1.0}
actor:
  experiment_name: ${experiment_name}
  path: Qwen/Qwen2.5-1.5B
  disable_dropout: true
  gradient_checkpointing: true
  dtype: bfloat16
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer:
    type: adam
    lr: 1.70e-5
    weight_decay: 0.017
    beta1: 0.9
    beta2: 0.999
    eps: 1e-8
    lr_scheduler_type: constant
    gradient_clipping: 1.0
    warmup_steps_proportion: 0.001
  eps_clip: 0.2
  eps_clip_higher: 0.28
  c_clip: 3.0
  reward_scaling: 10.0
  reward_bias: -0.5
  overlong_reward_penalty: true
  overlong_tokens: 512
  overlong_penalty_factor: 1.0
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
  rejection_sampling: {metric: ratio, upper: 5.0}
  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}
  adv_norm: {mean_level: batch, std_level: batch}
  max_new_tokens: ${gconfig.max_new_tokens}
  scheduling_spec: [{task_type: worker, gpu: 1}]
ref: {path: "${actor.path}", dtype: "${actor.dtype}"}
sglang: {model_path: "${actor.path}", context_length: 32768}
vllm: {model: "${actor.path}", max_model_len: 32768}
train_dataset: {batch_size: 256, shuffle: true, path: openai/gsm8k, type: rl, max_length: 1024, num_workers: 4}
valid_dataset: {batch_size: 256, path: openai/gsm8k, type: rl}
saver: {freq_epochs: 1, freq_steps: null}
recover: {mode: disabled, freq_secs: 3600}
evaluator: {freq_epochs: 1, freq_steps: null}
stats_logger: {wandb: {mode: disabled}}
"""

TRL = """
model_name_or_path: Qwen/Qwen2.5-7B
dataset_name: BytedTsinghua-SIA/DAPO-Math-17k
dataset_train_split: train
output_dir: out
num_generations: 16
max_completion_length: 4096
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
steps_per_generation: 16
num_iterations: 1
num_processes: 4
beta: 0.0
epsilon: 0.2
epsilon_high: 0.28
delta: null
importance_sampling_level: token
loss_type: dapo
scale_rewards: group
reward_weights: null
multi_objective_aggregation: sum_then_normalize
mask_truncated_completions: true
temperature: 1.0
top_p: 1.0
top_k: 0
min_p: null
repetition_penalty: 1.0
generation_kwargs: null
chat_template_kwargs: null
use_vllm: true
vllm_mode: colocate
vllm_gpu_memory_utilization: 0.3
vllm_tensor_parallel_size: 1
vllm_importance_sampling_correction: true
vllm_importance_sampling_mode: sequence_mask
vllm_importance_sampling_clip_max: 3.0
vllm_importance_sampling_clip_min: null
sync_ref_model: false
entropy_coef: 0.0
top_entropy_quantile: 1.0
disable_dropout: false
shuffle_dataset: true
log_completions: true
num_completions_to_print: 1
use_transformers_continuous_batching: false
learning_rate: 1e-6
lr_scheduler_type: constant_with_warmup
warmup_ratio: 0.1
warmup_steps: 0
weight_decay: 0.1
adam_beta1: 0.9
adam_beta2: 0.999
max_grad_norm: 1.0
num_train_epochs: 1
max_steps: 400
logging_steps: 1
save_steps: 40
save_total_limit: 2
eval_strategy: "no"
eval_steps: null
bf16: true
fp16: false
gradient_checkpointing: true
seed: 42
report_to: [wandb]
run_name: dapo
push_to_hub: false
optim: adamw_torch_fused
reward_funcs: [accuracy_reward]
"""

VERL_PPO = """
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=gae \\
    data.train_files="$HOME/data/gsm8k/train.parquet" \\
    data.val_files="$HOME/data/gsm8k/test.parquet" \\
    data.return_raw_chat=True \\
    data.train_batch_size=4096 \\
    data.max_prompt_length=4096 \\
    data.max_response_length=4096 \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=512 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.actor.use_kl_loss=False \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \\
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24000 \\
    critic.optim.lr=1e-5 \\
    critic.model.use_remove_padding=True \\
    critic.model.path=Qwen/Qwen2-7B-Instruct \\
    critic.model.enable_gradient_checkpointing=True \\
    critic.ppo_max_token_len_per_gpu=98304 \\
    critic.model.fsdp_config.param_offload=False \\
    critic.model.fsdp_config.optimizer_offload=False \\
    algorithm.use_kl_in_reward=False \\
    trainer.critic_warmup=0 \\
    trainer.logger='["console","wandb"]' \\
    trainer.project_name='verl_example_gsm8k' \\
    trainer.n_gpus_per_node=8 \\
    trainer.val_before_train=False \\
    trainer.nnodes=1 \\
    trainer.save_freq=20 \\
    trainer.test_freq=5 \\
    trainer.total_epochs=15 $@
"""

AREAL_PPO = """
experiment_name: gsm8k-ppo
trial_name: trial0
seed: 1
total_train_epochs: 10
tokenizer_path: ${actor.path}
cluster: {n_nodes: 1, n_gpus_per_node: 8}
allocation_mode: sglang:d4p1t1+d4p1t1
rollout: {max_concurrent_rollouts: 256, max_head_offpolicyness: 2, scheduling_spec: "${actor.scheduling_spec}"}
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 1024, greedy: false, temperature: 1.0}
actor:
  path: Qwen/Qwen2.5-1.5B-Instruct
  init_from_scratch: false
  disable_dropout: true
  gradient_checkpointing: true
  dtype: bfloat16
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer:
    type: adam
    lr: 1.70e-5
    weight_decay: 0.017
    beta1: 0.9
    beta2: 0.999
    eps: 1e-8
    lr_scheduler_type: constant
    gradient_clipping: 1.0
    warmup_steps_proportion: 0.001
  eps_clip: 0.4
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
  adv_norm: {mean_level: batch, std_level: batch}
  max_new_tokens: ${gconfig.max_new_tokens}
  scheduling_spec: [{task_type: worker, gpu: 1}]
critic:
  is_critic: true
  path: ${actor.path}
  init_from_scratch: false
  disable_dropout: true
  dtype: ${actor.dtype}
  eps_clip: 0.5
  ppo_n_minibatches: ${actor.ppo_n_minibatches}
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer: ${actor.optimizer}
  scheduling_strategy: {type: colocation, target: actor}
  scheduling_spec: ${actor.scheduling_spec}
ref: {path: "${actor.path}", dtype: "${actor.dtype}"}
train_dataset: {batch_size: 256, shuffle: true, path: openai/gsm8k, type: rl, max_length: 1024}
"""
