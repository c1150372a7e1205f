"""DAPO's paper. Where it says nothing, the values are those of the authors' published script for verl."""

from __future__ import annotations

from functools import partial

from dapo_rl.lab.papers import credit, losses, rewards, sampling, training
from dapo_rl.lab.papers.record import Component, Paper
from dapo_rl.lab.papers.unused import UNUSED

_technique, _value, _evaluation = (partial(Component, kind) for kind in ("algorithm", "settings", "evaluation"))
_SCRIPT = "verl script"

DAPO = Paper(
    "DAPO",
    "2503.14476",
    50,
    (
        _technique(
            "Objective", "Eq. 8", "min(r A, clip(r) A)", losses.compare_objective, "algo.loss algo.clip_ratio_c"
        ),
        _technique("LM loss of correct samples", "Eq. 8", "none", losses.compare_no_imitation, "algo.positive_lm_coef"),
        _technique(
            "Ratio",
            "Eq. 9",
            "to the policy that sampled the token",
            losses.compare_ratio,
            "algo.proximal algo.importance_cap algo.importance_mode",
        ),
        _technique(
            "Advantage",
            "Eq. 9",
            "group mean and std",
            credit.compare_advantage,
            "algo.advantage algo.normalize algo.ddof algo.advantage_eps",
        ),
        _technique(
            "Clip-Higher", "Eq. 10", "upper bound wider", losses.compare_clip_higher, "algo.clip_low algo.clip_high"
        ),
        _technique(
            "Dynamic Sampling",
            "Eq. 11",
            "0 < correct < G",
            sampling.compare_dynamic,
            "sampling.dynamic sampling.metric sampling.filter",
        ),
        _technique(
            "Batch filling",
            "Algorithm 1",
            "sample until N groups are kept",
            sampling.compare_filling,
            "sampling.dynamic_batch",
        ),
        _technique(
            "Token-level loss", "Eq. 12", "token-mean", losses.compare_token_level, "algo.aggregation algo.norm_length"
        ),
        _technique("Soft Overlong Punishment", "Eq. 13", "soft", rewards.compare_soft_punishment, "overlong.shape"),
        _value(
            "Overlong Filtering",
            "Sec. 3.4",
            "off (best run)",
            rewards.compare_filtering,
            "overlong.mask_truncated overlong.masked_in_baseline",
        ),
        _technique("KL term", "Sec. 2.3", "none", losses.compare_kl, "algo.kl_coef algo.kl_kind algo.kl_in"),
        _value(
            "Clip bounds", "Eq. 10", "low 0.2, high 0.28", losses.compare_clip_bounds, "algo.clip_low algo.clip_high"
        ),
        _value(
            "Punishment interval",
            "Eq. 13",
            "L_max 20,480, L_cache 4,096, factor 1",
            rewards.compare_interval,
            "overlong.max_length overlong.cache_length overlong.factor",
        ),
        _value(
            "Rule-based reward",
            "Eq. 7",
            "right +1, wrong -1",
            rewards.compare_reward,
            "reward.correct reward.wrong reward.verifier reward.threshold",
        ),
        _value(
            "Prompts per step",
            "Sec. 4.1",
            "512",
            partial(sampling.compare_prompts, paper=512),
            "sampling.prompts_per_step",
        ),
        _value("Group size", "Sec. 4.1", "16", sampling.compare_group_size, "sampling.group_size"),
        _value(
            "Updates per step",
            "Sec. 4.1",
            "16, of 512 responses",
            training.compare_updates,
            "train.mini_batches train.epochs_per_step",
        ),
        _value(
            "Length of the run",
            "Fig. 1",
            "10,000 updates",
            partial(training.compare_length, paper=10_000),
            "train.steps",
        ),
        _value(
            "Learning rate",
            "Sec. 4.1",
            "1e-06, constant",
            training.compare_rate,
            "train.lr train.lr_schedule train.min_lr_share",
        ),
        _value(
            "Warm-up", "Sec. 4.1", "20 rollout steps", partial(training.compare_warmup, paper=20), "train.warmup_steps"
        ),
        _value(
            "Optimizer",
            _SCRIPT,
            "AdamW, decay 0.1, betas 0.9 0.999, clip 1",
            training.compare_optimizer,
            "train.optimizer train.weight_decay train.betas train.max_grad_norm",
        ),
        _value("Precision", _SCRIPT, "bfloat16, float32 weights", training.compare_precision, "model.dtype"),
        _value(
            "Prompt tokens",
            _SCRIPT,
            "2,048 at most",
            partial(sampling.compare_prompt_tokens, paper=2048),
            "data.max_prompt_tokens",
        ),
        _value("New tokens", "Sec. 4.1", "20,480 at most", sampling.compare_new_tokens, "sampling.max_new_tokens"),
        _value("Temperature", "Sec. 4.1", "1", sampling.compare_temperature, "sampling.temperature"),
        _value(
            "Truncated sampling",
            "Sec. 4.1",
            "none",
            sampling.compare_truncation,
            "sampling.top_p sampling.top_k sampling.min_p",
        ),
        _value("Cap on draws", _SCRIPT, "stop with an error", sampling.compare_cap, "sampling.cap sampling.on_cap"),
        _value(
            "Surplus groups",
            _SCRIPT,
            "drop",
            sampling.compare_surplus,
            "sampling.surplus sampling.max_staleness sampling.ahead cluster.placement",
        ),
        _value("Model", "Sec. 4.1", "Qwen2.5-32B", training.compare_model, "model.name"),
        _value("Training prompts", "Sec. 3.5", "DAPO-Math-17K", training.compare_training_prompts, "data.train"),
        _evaluation(
            "Held-out prompts", "Sec. 4.1", "AIME 2024", training.compare_heldout_prompts, "data.eval eval.prompts"
        ),
        _evaluation("Held-out samples", "Sec. 4.1", "avg@32", training.compare_heldout_samples, "eval.samples"),
        _evaluation(
            "Held-out sampling",
            "Sec. 4.1",
            "temperature 1, top_p 0.7",
            training.compare_heldout_sampling,
            "eval.temperature eval.top_p",
        ),
        *UNUSED,
    ),
    """
    critic.lr critic.pretrain_steps critic.lambda_policy critic.lambda_critic critic.length_alpha critic.lambda_lowest
    critic.value_clip critic.whiten""",
)
