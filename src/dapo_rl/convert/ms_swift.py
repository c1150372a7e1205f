"""ms-swift's settings that only convert together; most are those of TRL."""

from __future__ import annotations

import re
from typing import Any

from dapo_rl.config.peers import reason
from dapo_rl.convert import shared
from dapo_rl.convert.draft import Draft
from dapo_rl.convert.teacher import swift_teacher
from dapo_rl.convert.trl import ask_for_reward, derive_evaluation, derive_rewards, derive_updates, trl_importance
from dapo_rl.convert.turns import swift_turns
from dapo_rl.errors import UserError


def derive_swift(draft: Draft) -> None:
    if draft.value("rlhf_type") not in (None, "grpo"):
        raise UserError(f"rlhf_type {draft.value('rlhf_type')}: only grpo has a recipe here")
    uses_lora = draft.value("train_type" if draft.has("train_type") else "tuner_type") == "lora"
    if not draft.has("learning_rate", "lr"):
        draft.always("train.lr", 1e-4 if uses_lora else 1e-5, "learns at 1e-4 with LoRA and at 1e-5 without")
    _sources(draft)
    if not draft.value("dynamic_sample"):
        if draft.has("dynamic_sample"):
            draft.put("sampling.dynamic", False, "dynamic_sample")
        draft.always("sampling.dynamic", False, "dynamic_sample is not set")
        draft.unused("without dynamic_sample it does nothing", "max_resample_times")
    trl_importance(draft)
    _importance(draft)
    derive_updates(draft)
    shared.min_lr_share(draft, "min_lr")  # Megatron's names for the schedule
    if (share := draft.number("lr_warmup_fraction")) is not None:
        shared.warmup_from_share(draft, share, "lr_warmup_fraction")
    derive_evaluation(draft)
    derive_rewards(draft, draft.count("soft_cache_length"), draft.count("soft_max_length"))
    for key, ours in (("soft_max_length", "overlong.max_length"), ("soft_cache_length", "overlong.cache_length")):
        if draft.settings.get("overlong.shape") == "soft":
            draft.explain(key, "same", f"{ours}: {draft.settings.get(ours)}")
        else:
            draft.unused("without soft_overlong in reward_funcs it does nothing", key)
    if draft.value("dynamic_sample"):
        _dynamic_sampling(draft)
    _advantages(draft)
    _tuner(draft, uses_lora)
    _prompts(draft)
    swift_teacher(draft)
    swift_turns(draft)
    ask_for_reward(draft)
    shared.limit_prompts(draft)


def _dynamic_sampling(draft: Draft) -> None:
    tries, prompts = draft.count("max_resample_times"), draft.settings["sampling.prompts_per_step"]
    tries = 3 if tries is None else tries
    shaped = draft.settings.get("overlong.shape") == "soft"
    note = "drops groups whose scores are equal"
    if shaped:
        note += "; theirs compares rewards with the length penalty, so groups that differ in length alone stay"
    draft.put("sampling.metric", "score")
    draft.put("sampling.dynamic", True, "dynamic_sample", note=note, differs=shaped, learns=shaped)
    draft.put("sampling.surplus", "drop")
    draft.put("sampling.on_cap", "fill")
    note = f"1 + {tries} batches of {prompts}, then fill up"
    draft.put("sampling.cap", (1 + tries) * prompts, "max_resample_times", note=note)


def _advantages(draft: Draft) -> None:
    key, in_reward = "advantage_estimator", "kl_in_reward"
    unset = draft.value(in_reward) is None and not draft.has("global_batch_size")  # Megatron's default is false
    if unset and draft.value(key) in ("rloo", "reinforce_plus_plus") and draft.value("beta"):
        draft.add_row(f"({in_reward})", True, "no counterpart", "", reason("KL_IN_LOSS"), True)
    if draft.value(key) in (None, "grpo"):
        draft.explain(key, "default here", "algo.normalize", "relative to the group, by scale_rewards")
    elif draft.value(key) == "rloo" and draft.settings.get("algo.normalize", "none") == "none":
        draft.put("algo.normalize", "leave-one-out", key)
    else:
        draft.no_counterpart("write it as algo.advantage=file.py:name", key)


def _sources(draft: Draft) -> None:
    """One data set or several, each `NAME` or `NAME#ROWS`. Samples of so many rows of each become weights."""
    for key, ours in (("dataset", "data.train"), ("val_dataset", "data.eval")):
        value = draft.value(key)
        parts = [_split(str(name)) for name in (value if isinstance(value, list) else [value])]
        counts, trains = [rows for _, rows in parts if rows is not None], key == "dataset"
        if value is None or not parts:
            draft.unused("no source", key)
            continue
        entries: list[Any] = [_named(source) for source, _ in parts]
        note = "from all rows; theirs are samples. Write shorter files" if any(counts) else ""
        if len(parts) == 1 and counts:
            note = f"all of its rows; theirs is a sample of {counts[0]}. Write a shorter file"
        elif len(parts) > 1 and trains and all(rows for _, rows in parts):
            note = f"mixed by the numbers of rows, {note}"
            named = [entry if isinstance(entry, dict) else {"source": entry} for entry in entries]
            entries = [entry | {"weight": float(rows or 0)} for entry, (_, rows) in zip(named, parts, strict=True)]
        chosen = entries if len(parts) > 1 else entries[0]
        draft.put(ours, chosen, key, note=note, differs=bool(note), learns=bool(note) and trains)
        if trains and len(counts) == len(parts):
            draft.prompts = draft.prompts or sum(counts)


def _named(source: str) -> str | dict[str, str]:
    """`NAME:SUBSET`, a data set of a hub and its configuration."""
    path, _, subset = source.partition(":")
    return {"source": path, "name": subset} if re.fullmatch(r"[\w.-]+", subset) and subset != "all" else source


def _split(name: str) -> tuple[str, int | None]:
    source, _, rows = name.partition("#")
    return source, int(rows) if rows.isdigit() and len(rows) < 16 else None


def _tuner(draft: Draft, uses_lora: bool) -> None:
    key = "train_type" if draft.has("train_type") else "tuner_type"
    shared.lora(draft, uses_lora, ("lora_rank",), "lora_alpha", "target_modules", 8)
    if uses_lora:
        draft.explain(key, "same", f"model.lora.rank: {draft.settings['model.lora.rank']}")
    elif draft.value(key) == "full":
        draft.unused("the weights are trained", key)
    else:
        draft.no_counterpart("the weights or LoRA adapters are trained", key)


def _prompts(draft: Draft) -> None:
    system = draft.value("system")
    if isinstance(system, str) and system.endswith(".txt"):
        note = "copy the text of the file into data.system_prompt"
        draft.explain("system", "differs", "data.system_prompt", note, True)
    elif isinstance(system, str):
        draft.put("data.system_prompt", system, "system")
    else:
        draft.unused("the template's own system message, if it has one", "system")
    key = "truncation_strategy"
    if draft.value(key) == "delete":
        draft.unused("longer prompts are dropped and counted", key)
    else:
        draft.explain(key, "differs", "data.max_prompt_tokens", "longer prompts are dropped; theirs are cut", True)


def _importance(draft: Draft) -> None:
    mode, bound = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"
    if draft.value(mode) is None:
        draft.unused("without rollout_importance_sampling_mode it does nothing", mode, bound)
    else:
        shared.put_mode(draft, mode, draft.number_or(2.0, bound), None, mode, bound)
