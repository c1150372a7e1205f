"""ms-swift: what several of its settings give together."""

from __future__ import annotations

from dapo_rl.convert.draft import Draft
from dapo_rl.convert.importance import swift_importance, trl_importance
from dapo_rl.convert.shared import lora, min_lr_share, warmup_from_share
from dapo_rl.convert.trl import derive_evaluation, derive_rewards, derive_updates
from dapo_rl.errors import UserError


def derive_swift(draft: Draft) -> None:
    if draft.value("rlhf_type") not in (None, "grpo"):
        raise UserError(f"rlhf_type {draft.value('rlhf_type')}: only grpo has a recipe here")
    uses_lora = draft.value("train_type" if draft.has("train_type") else "tuner_type") == "lora"
    if not draft.has("learning_rate", "lr"):
        draft.always("train.lr", 1e-4 if uses_lora else 1e-5, "learns at 1e-4 with LoRA and at 1e-5 without")
    _sources(draft)
    if not draft.value("dynamic_sample"):
        _no_dynamic_sampling(draft)
    trl_importance(draft)
    swift_importance(draft)
    derive_updates(draft)
    _megatron(draft)
    derive_evaluation(draft)
    derive_rewards(draft, draft.count("soft_cache_length"), draft.count("soft_max_length"))
    for key, ours in (("soft_max_length", "overlong.max_length"), ("soft_cache_length", "overlong.cache_length")):
        if draft.settings.get("overlong.shape") == "soft":
            draft.explain(key, "same", f"{ours}: {draft.settings.get(ours)}")
        else:
            draft.explain(key, "default here", note="without soft_overlong in reward_funcs it does nothing")
    if draft.value("dynamic_sample"):
        _dynamic_sampling(draft)
    _advantages(draft)
    _tuner(draft, uses_lora)
    _prompts(draft)


def _megatron(draft: Draft) -> None:
    """The names that Megatron has for the schedule."""
    min_lr_share(draft, "min_lr")
    if draft.number("lr_warmup_fraction") is not None:
        warmup_from_share(draft, "lr_warmup_fraction")


def _no_dynamic_sampling(draft: Draft) -> None:
    if draft.has("dynamic_sample"):
        draft.put("sampling.dynamic", False, "dynamic_sample")
    draft.always("sampling.dynamic", False, "dynamic_sample is not set")
    draft.explain("max_resample_times", "default here", note="without dynamic_sample it does nothing")


def _dynamic_sampling(draft: Draft) -> None:
    times = draft.count("max_resample_times")
    shaped = draft.settings.get("overlong.shape") == "soft"
    note = "drops groups whose scores are equal"
    if shaped:
        note += "; theirs compares rewards with the length penalty, so groups that differ in length alone stay"
    draft.put("sampling.metric", "score")
    draft.put("sampling.dynamic", True, "dynamic_sample", note=note, differs=shaped, learns=shaped)
    draft.put("sampling.surplus", "drop")
    draft.put("sampling.on_cap", "fill")
    tries = 3 if times is None else times
    prompts = draft.settings["sampling.prompts_per_step"]
    cap = (1 + tries) * prompts
    draft.put("sampling.cap", cap, "max_resample_times", note=f"1 + {tries} batches of {prompts}, then fill up")


def _advantages(draft: Draft) -> None:
    key = "advantage_estimator"
    if draft.value(key) in (None, "grpo"):
        draft.explain(key, "default here", "algo.normalize", "relative to the group, by scale_rewards")
    elif draft.value(key) == "rloo" and draft.settings.get("algo.normalize", "none") == "none":
        draft.put("algo.normalize", "leave-one-out", key)
    else:
        draft.explain(key, "no counterpart", note="write it as algo.advantage=file.py:name", learns=True)


def _sources(draft: Draft) -> None:
    for key, ours in (("dataset", "data.train"), ("val_dataset", "data.eval")):
        value = draft.value(key)
        names = value if isinstance(value, list) else [value]
        if value is None or names == []:
            draft.explain(key, "default here", note="no source")
        elif len(names) > 1:
            _mixture(draft, key, ours, [str(name) for name in names])
        else:
            name, rows = _split(str(names[0]))
            if rows is not None:
                note = f"all of its rows; theirs is a sample of {rows}. Write a shorter file"
                draft.put(ours, name, key, note=note, learns=key == "dataset", differs=True)
                draft.rows = draft.rows or (rows if key == "dataset" else None)
            else:
                draft.put(ours, name, key)


def _split(name: str) -> tuple[str, int | None]:
    """`NAME#ROWS`"""
    source, _, rows = name.partition("#")
    return source, int(rows) if rows.isdigit() and len(rows) < 16 else None


def _mixture(draft: Draft, key: str, ours: str, names: list[str]) -> None:
    """Several data sets. Samples of so many rows of each become weights."""
    parts = [_split(name) for name in names]
    counts = [rows for _, rows in parts if rows]
    if not counts:
        draft.put(ours, [source for source, _ in parts], key)
        return
    weighs = len(counts) == len(parts) and key == "dataset"
    entries = [{"source": source, "weight": float(rows)} if weighs and rows else source for source, rows in parts]
    note = "mixed by the numbers of rows, " if weighs else ""
    note += "from all rows; theirs are samples. Write shorter files"
    draft.put(ours, entries, key, note=note, differs=True, learns=key == "dataset")
    if len(counts) == len(parts) and key == "dataset":
        draft.rows = draft.rows or sum(counts)


def _tuner(draft: Draft, uses_lora: bool) -> None:
    key = "train_type" if draft.has("train_type") else "tuner_type"
    lora(draft, uses_lora, ("lora_rank",), "lora_alpha", "target_modules", 8)
    if uses_lora:
        draft.explain(key, "same", f"model.lora.rank: {draft.settings['model.lora.rank']}")
    elif draft.value(key) == "full":
        draft.explain(key, "default here", note="the weights are trained")
    else:
        draft.explain(key, "no counterpart", note="the weights or LoRA adapters are trained", learns=True)


def _prompts(draft: Draft) -> None:
    system = draft.value("system")
    if isinstance(system, str) and system.endswith(".txt"):
        note = "copy the text of the file into data.system_prompt"
        draft.explain("system", "differs", "data.system_prompt", note, True)
    elif isinstance(system, str):
        draft.put("data.system_prompt", system, "system")
    else:
        draft.explain("system", "default here", note="the template's own system message, if it has one")
    key = "truncation_strategy"
    if draft.value(key) == "delete":
        draft.explain(key, "default here", note="longer prompts are dropped and counted")
    else:
        draft.explain(key, "differs", "data.max_prompt_tokens", "longer prompts are dropped; theirs are cut", True)
