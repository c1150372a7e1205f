"""The value that each setting has by default, which recipes rely on that leave it out, and the values it may have."""

import pytest
from pydantic import BaseModel, ValidationError

from dapo_rl.config import Config, SourceSettings
from dapo_rl.errors import UserError

DEFAULTS = {
    "preset": "dapo",
    "seed": 0,
    "engine": "native",
    "engine_options": {},
    "model": {"name": "tiny", "dtype": "auto", "save_dtype": "auto", "device": "auto", "lora": None},
    "data": {
        **{"train": "arithmetic", "eval": None, "prompt_key": "prompt", "answer_key": None, "system_prompt": None},
        **{"chat_template": "auto", "chat_template_kwargs": {}, "max_prompt_tokens": 1024, "pass_rate": None},
        "pass_rate_key": "pass_rate",
    },
    "reward": {
        **{"verifier": "math", "boxed": False, "form": "any", "correct": 1.0, "wrong": -1.0, "threshold": None},
        **{"timeout_s": 5.0, "memory_mb": 2048, "workers": None, "max_error_share": 0.5},
    },
    "env": {
        **{"name": None, "options": {}, "tools": (), "mcp": (), "agent": None, "tool_format": "auto", "max_turns": 8},
        **{"max_turn_tokens": None, "max_observation_tokens": 2048, "reward_weight": 1.0, "turn_discount": None},
        **{"timeout_s": 30.0, "memory_mb": 1024, "workers": None, "max_error_share": 0.5, "host": "127.0.0.1"},
        **{"port": 0, "tls": None, "workers_per_node": None},
    },
    "sampling": {
        **{"prompts_per_step": 16, "group_size": 16, "max_new_tokens": 1024, "temperature": 1.0, "top_p": 1.0},
        **{"top_k": 0, "min_p": 0.0, "stop": (), "ignore_eos": False, "dynamic": True, "metric": "auto"},
        **{"filter": None, "cap": None, "on_cap": "error", "surplus": "carry", "max_staleness": 1, "ahead": 0.0},
        "keep_mask": False,
        **{
            "dynamic_batch": False,
            "wait_for_verdicts": True,
            "skip_solved_epochs": 0,
            "selection": "uniform",
            "source_weights": "fixed",
            "length_stages": {},
            "replay_hard": 0.0,
            "replay_pass_rate": 0.25,
            "max_batch": None,
            "kv_memory_gib": None,
        },
    },
    "algo": {
        **{"loss": "dapo", "clip_low": 0.2, "clip_high": 0.28, "clip_ratio_c": None, "proximal": "auto"},
        **{"importance_cap": None, "importance_mode": "truncate", "aggregation": "token-mean", "norm_length": None},
        **{"importance_floor": None, "importance_level": "token", "importance_normalize": False, "reject": {}},
        **{"off_policy_mask_threshold": None, "max_token_staleness": None},
        **{"advantage": "group", "normalize": "group", "ddof": 1, "advantage_eps": 1e-6, "kl_coef": 0.0},
        **{
            "kl_kind": "k3",
            "kl_in": "loss",
            "positive_lm_coef": 0.0,
            "kl_target": None,
            "kl_unbiased": False,
            "ref_sync_steps": None,
            "ref_mixup_alpha": 1.0,
            "kl_horizon": 10000.0,
        },
        **{"entropy_coef": 0.0, "entropy_target": None, "entropy_coef_delta": 0.005, "entropy_coef_max": 1.0},
        **{"top_entropy_quantile": 1.0, "cov_share": 0.0002, "clip_cov_low": 1.0, "clip_cov_high": 5.0},
        **{"kl_cov_coef": 1.0, "tau_pos": 1.0, "tau_neg": 1.05},
    },
    "overlong": {
        **{"shape": "soft", "max_length": None, "cache_length": None, "factor": 1.0, "mask_truncated": False},
        **{"masked_in_baseline": True},
    },
    "train": {
        **{"steps": 100, "mini_batches": 1, "epochs_per_step": 1, "lr": 1e-6, "lr_schedule": "constant"},
        **{"min_lr_share": 0.1, "warmup_steps": 20, "weight_decay": 0.1, "betas": (0.9, 0.999), "max_grad_norm": 1.0},
        **{
            "optimizer": "adamw",
            "transforms": (),
            "token_budget": None,
            "packed": True,
            "gradient_checkpointing": "auto",
        },
        **{"memory": "auto", "fused": True},
    },
    "critic": {
        **{"model": None, "pretrain_until": None},
        **{"lr": None, "pretrain_steps": None, "lambda_policy": "adaptive", "lambda_critic": 1.0},
        **{"length_alpha": 0.05, "lambda_lowest": 0.0, "value_clip": None, "whiten": False},
    },
    "teacher": {
        **{"name": None, "weight": 1.0, "prompt": None},
        **{"model": None, "api_key_env": None, "timeout_s": 60.0, "retries": 4},
    },
    "eval": {"every": None, "prompts": None, "samples": 1, "temperature": 1.0, "top_p": 1.0},
    "checkpoint": {"every": None, "save_final": True, "keep": 2},
    "log": {"rollouts": True, "keep_rollouts": None, "report": True, "trackers": ()},
    "cluster": {
        **{"backend": None, "address": None, "engines": 1, "engine_gpus": 1, "ranks": 1, "placement": "colocated"},
        **{"weights": "store", "offload": False, "restarts": 3, "timeout_s": 60.0},
    },
}
LORA = {"rank": 16, "alpha": 32.0, "dropout": 0.0}

LEAST = {
    **dict.fromkeys(("data.max_prompt_tokens", "eval.every", "eval.prompts", "eval.samples", "model.lora.rank"), 1),
    **dict.fromkeys(("cluster.engines", "cluster.engine_gpus", "cluster.ranks", "checkpoint.every"), 1),
    **dict.fromkeys(("checkpoint.keep", "log.keep_rollouts", "overlong.max_length", "algo.norm_length"), 1),
    **dict.fromkeys((f"sampling.{name}" for name in ("prompts_per_step", "group_size", "max_new_tokens")), 1),
    **dict.fromkeys(("sampling.cap", "sampling.max_batch", "train.token_budget"), 1),
    **dict.fromkeys((f"train.{name}" for name in ("steps", "mini_batches", "epochs_per_step")), 1),
    **dict.fromkeys((f"sampling.{name}" for name in ("top_k", "max_staleness", "skip_solved_epochs")), 0),
    **dict.fromkeys(("seed", "reward.workers", "overlong.cache_length", "train.warmup_steps"), 0),
    **dict.fromkeys(("critic.pretrain_steps", "cluster.restarts", "algo.max_token_staleness", "teacher.retries"), 0),
    "algo.ref_sync_steps": 1,
    "reward.memory_mb": 64,
    "env.memory_mb": 64,
    **dict.fromkeys(("env.max_turns", "env.max_turn_tokens", "env.max_observation_tokens", "env.workers"), 1),
    **{"env.workers_per_node": 1, "env.port": 0},
}
"""Whole numbers with their smallest values."""
FROM_ZERO = (
    *("sampling.min_p", "sampling.ahead", "algo.advantage_eps", "algo.kl_coef", "algo.positive_lm_coef"),
    *("overlong.factor", "train.min_lr_share", "train.weight_decay", "critic.lambda_critic", "critic.lambda_lowest"),
    *("eval.temperature", "reward.max_error_share", "model.lora.dropout"),
    *("env.max_error_share", "env.turn_discount", "algo.entropy_coef", "algo.kl_cov_coef"),
    *("algo.off_policy_mask_threshold", "sampling.replay_hard"),
)
ABOVE_ZERO = (
    *("reward.timeout_s", "sampling.temperature", "sampling.top_p", "sampling.kv_memory_gib", "algo.importance_cap"),
    *("train.lr", "train.max_grad_norm", "critic.lr", "critic.length_alpha", "critic.value_clip", "eval.top_p"),
    *("critic.pretrain_until", "sampling.replay_pass_rate"),
    *("cluster.timeout_s", "model.lora.alpha", "env.timeout_s", "teacher.weight", "algo.importance_floor"),
    "teacher.timeout_s",
    *(
        "algo.kl_target",
        "algo.kl_horizon",
        "algo.ref_mixup_alpha",
        "algo.entropy_target",
        "algo.entropy_coef_delta",
        "algo.entropy_coef_max",
    ),
    *("algo.top_entropy_quantile", "algo.cov_share", "algo.tau_pos", "algo.tau_neg"),
)
UP_TO_ONE = (
    *("sampling.top_p", "sampling.min_p", "eval.top_p", "train.min_lr_share", "critic.lambda_critic"),
    *("critic.lambda_lowest", "reward.max_error_share", "env.max_error_share", "env.turn_discount"),
    *("critic.pretrain_until", "sampling.replay_pass_rate"),
    *("algo.top_entropy_quantile", "algo.cov_share", "algo.ref_mixup_alpha"),
)


def plain(value):
    return (
        {name: plain(getattr(value, name)) for name in type(value).model_fields}
        if isinstance(value, BaseModel)
        else value
    )


def made(key, value):
    """The setting in a section of its own, so that it contradicts no other."""
    *sections, name = key.split(".")
    level = Config(model={"lora": {}})
    for section in sections:
        level = getattr(level, section)
    others = {"name": "m"} if sections == ["model"] else {}
    return getattr(type(level)(**others, **{name: value}), name)


def refuses(key, value):
    with pytest.raises(ValidationError):
        made(key, value)
    return True


def test_the_defaults():
    assert plain(Config()) == DEFAULTS
    lora = plain(Config(model={"lora": {}}).model.lora)
    assert {name: lora[name] for name in LORA} == LORA


@pytest.mark.parametrize(("key", "least"), LEAST.items())
def test_the_smallest_whole_number(key, least):
    assert made(key, least) == least
    assert refuses(key, least - 1)


@pytest.mark.parametrize("key", FROM_ZERO)
def test_numbers_from_zero_on(key):
    assert made(key, 0) == 0
    assert refuses(key, -1e-9)


@pytest.mark.parametrize("key", ABOVE_ZERO)
def test_numbers_above_zero(key):
    assert made(key, 1e-9) == 1e-9
    assert refuses(key, 0)


@pytest.mark.parametrize("key", ["sampling.temperature", "eval.temperature"])
def test_temperatures_that_would_overflow_are_refused(key):
    assert made(key, 1e-30) == 1e-30
    with pytest.raises(UserError, match=f"^{key}: expected 1e-30 or more .*temperature 0.* is greedy.*, got 1e-39$"):
        Config.build({key: 1e-39})


def test_dropout_leaves_something():
    assert made("model.lora.dropout", 0.999) == 0.999
    assert refuses("model.lora.dropout", 1)


def test_lambda_is_a_share_or_adaptive():
    for value in (0, 0.95, 1, "adaptive"):
        assert made("critic.lambda_policy", value) == value
    for value in (-1e-9, 1 + 1e-9, True, False, None, "some", [0.5]):
        assert refuses("critic.lambda_policy", value)


@pytest.mark.parametrize("key", UP_TO_ONE)
def test_shares_end_at_one(key):
    assert made(key, 1) == 1
    assert refuses(key, 1 + 1e-9)


def test_every_number_with_a_bound_is_tested():
    def bounded(value, start=""):
        for name, field in type(value).model_fields.items():
            if isinstance(inner := getattr(value, name), BaseModel):
                yield from bounded(inner, f"{start}{name}.")
            elif field.metadata:
                yield f"{start}{name}"

    assert set(bounded(Config(model={"lora": {}}))) <= {*LEAST, *FROM_ZERO, *ABOVE_ZERO, *UP_TO_ONE}


@pytest.mark.parametrize(
    "settings", [Config(), Config().algo, Config(model={"lora": {}}).model.lora, SourceSettings(source="a.jsonl")]
)
def test_settings_do_not_change(settings):
    """Parts of a run keep them, and the run directory records them."""
    for name in type(settings).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(settings, name, getattr(settings, name))
