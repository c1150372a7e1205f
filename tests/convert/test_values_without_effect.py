"""Settings without a counterpart change what is learned, except for the values with which they do nothing."""

import published
import pytest
import yaml

VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=m "
    "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 "
)
TRL = "trl grpo --model_name_or_path m --num_processes 1 --num_generations 8 --per_device_train_batch_size 16 "
SWIFT = "swift rlhf --rlhf_type grpo --model m --dataset d.jsonl --num_generations 8 --per_device_train_batch_size 8 "

VALUES = {
    "verl": {
        "data.shuffle": ("True", "False"),
        "data.train_max_samples": ("-1", "1"),
        "actor_rollout_ref.rollout.do_sample": ("True", "False"),
        "actor_rollout_ref.rollout.repetition_penalty": ("1.0", "1.1"),
        "actor_rollout_ref.rollout.over_sample_rate": ("0", "0.1"),
        "actor_rollout_ref.actor.optim.num_cycles": ("0.5", "1"),
        "actor_rollout_ref.actor.optim.lr_warmup_init": ("0.0", "1e-7"),
        "actor_rollout_ref.actor.optim.eps": ("1e-8", "1e-7"),
        "actor_rollout_ref.actor.optim.lr_min": ("0", "1e-7"),
        "actor_rollout_ref.actor.qat.enable": ("False", "True"),
        "actor_rollout_ref.model.override_config.attention_dropout": ("0.0", "0.1"),
        "algorithm.use_pf_ppo": ("False", "True"),
    },
    "trl": {
        "adam_epsilon": ("1e-8", "1e-7"),
        "label_smoothing_factor": ("0.0", "0.1"),
        "load_best_model_at_end": ("false", "true"),
        "repetition_penalty": ("1.0", "2.0"),
        "router_aux_loss_coef": ("0", "1"),
        "shuffle_dataset": ("true", "false"),
        "load_in_4bit": ("false", "true"),
        "load_in_8bit": ("false", "true"),
    },
    "swift": {
        "adam_epsilon": ("1e-8", "1e-7"),
        "repetition_penalty": ("1", "1.1"),
        "sync_ref_model": ("false", "true"),  # with adapters, which ms-swift trains by default
        "dataset_shuffle": ("true", "false"),
        "train_dataloader_shuffle": ("true", "false"),
        "kl_in_reward": ("false", "true"),
        "async_generate": ("false", "true"),
        "lora_bias": ("none", "all"),
    },
    "areal": {
        "train_dataset.shuffle": (True, False),
        "gconfig.min_new_tokens": (0, 1),
        "gconfig.greedy": (False, True),
        "gconfig.frequency_penalty": (0.0, 1.0),
        "gconfig.use_beam_search": (False, True),
        "rollout.max_head_offpolicyness": (0, 1),
        "actor.init_from_scratch": (False, True),
        "actor.use_m2po_loss": (False, True),
        "actor.discount": (1.0, 0.99),
        "actor.optimizer.eps": (1e-8, 1e-7),
    },
}


def written(library, settings):
    """A run with these settings: its text, and the name of its file."""
    if library == "verl":
        return VERL + " ".join(f"+{key}={value}" for key, value in settings.items()), "run.sh"
    if library == "areal":
        run = yaml.safe_load(published.AREAL)
        for key, value in settings.items():
            *sections, last = key.split(".")
            level = run
            for section in sections:
                level = level.setdefault(section, {})
            level[last] = value
        return yaml.safe_dump(run), "areal.yaml"
    start = TRL if library == "trl" else SWIFT
    return start + " ".join(f"--{key} {value}" for key, value in settings.items()), "run.sh"


@pytest.mark.parametrize("library", VALUES)
def test_a_setting_is_told_of_only_where_it_does_something(converted, library):
    told = []
    for place in (0, 1):
        result, _, _ = converted(*written(library, {key: pair[place] for key, pair in VALUES[library].items()}))
        told.append({row.key for row in result.changes} & VALUES[library].keys())
    assert told == [set(), VALUES[library].keys()]
