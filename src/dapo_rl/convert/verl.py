"""verl: what several of its settings give together."""

from __future__ import annotations

from dapo_rl.convert.critic import KL_NAMES, VERL_KL_KINDS, verl_critic, verl_kl_in_reward
from dapo_rl.convert.draft import Draft
from dapo_rl.convert.importance import verl_importance
from dapo_rl.convert.settings.verl import ACTOR, MODEL, OVERLONG, VAL
from dapo_rl.convert.shared import (
    lora,
    nearest_divisor,
    soft_overlong,
    steps_from_epochs,
    warmup_from_share,
    without_dual_clip,
)
from dapo_rl.convert.verl_async import async_batches, async_steps, async_warmup, explain_one_step_off, is_fully_async
from dapo_rl.convert.verl_scoring import data_sources, score_by_source
from dapo_rl.objectives import ADVANTAGES, LOSSES

NO_CAP = 1_000_000
"""The cap for a run without one: more groups than a step ever draws."""
_OLD_BUFFERS = ("reward_model.overlong_buffer", "custom_reward_function.overlong_buffer")
_BUFFERS = (f"reward.{OVERLONG}", f"reward_model.{OVERLONG}", *_OLD_BUFFERS)


def derive_verl(draft: Draft) -> None:
    draft.always("model.dtype", "bfloat16", "computes in bfloat16")
    _batches(draft)
    _long_prompts(draft)
    _dynamic_sampling(draft)
    _advantages(draft)
    verl_critic(draft)
    _kl(draft)
    _clipping(draft)
    _loss(draft)
    verl_importance(draft)
    _reward(draft)
    _overlong(draft)
    _schedule(draft)
    _evaluation(draft)
    _lora(draft)
    sums = draft.settings.get("algo.aggregation") == "seq-mean-token-sum-norm"
    if sums and draft.value(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum":
        draft.put("algo.norm_length", 1)


def _lora(draft: Draft) -> None:
    """`model.lora_rank`, or with Megatron `model.lora.rank`."""
    nested = (draft.count(f"{MODEL}.lora.rank") or 0) > 0
    names = (
        ("lora.rank", "lora.alpha", "lora.target_modules") if nested else ("lora_rank", "lora_alpha", "target_modules")
    )
    rank, alpha, targets = (f"{MODEL}.{name}" for name in names)
    lora(draft, nested or (draft.count(rank) or 0) > 0, (rank,), alpha, targets, 16)
    for name in ("lora.rank", "lora.alpha", "lora.target_modules", "lora_rank", "lora_alpha", "target_modules"):
        draft.explain(f"{MODEL}.{name}", "default here", note="without LoRA it does nothing")
    if "model.lora.rank" not in draft.settings:
        for key in [key for key in draft.given if key.startswith(f"{MODEL}.lora.")]:
            draft.explain_again(key, "default here", note="without LoRA it does nothing")


def _batches(draft: Draft) -> None:
    if is_fully_async(draft):
        async_batches(draft)
        return
    explain_one_step_off(draft)
    prompts, mini = draft.needed("data.train_batch_size"), draft.needed(f"{ACTOR}.ppo_mini_batch_size")
    draft.put("sampling.prompts_per_step", prompts, "data.train_batch_size")
    updates, rest = divmod(prompts, mini)
    key, note = f"{ACTOR}.ppo_mini_batch_size", f"{prompts} prompts / {mini} per update"
    if rest or not updates:
        updates = nearest_divisor(prompts, prompts / mini)
        draft.put("train.mini_batches", updates, key, note=f"{note} is not a whole number", learns=True)
    else:
        draft.put("train.mini_batches", updates, key, note=note)


def _long_prompts(draft: Draft) -> None:
    key, why = "data.truncation", "prompts over data.max_prompt_tokens are dropped and counted; verl "
    if draft.value("data.filter_overlong_prompts"):
        draft.explain("data.filter_overlong_prompts", "default here", note="longer prompts are dropped and counted")
        draft.explain(key, "default here", note="longer prompts are dropped, so none is truncated")
    elif draft.value(key) == "error":
        draft.explain(key, "differs", note=f"{why}stops with an error")
    elif draft.value(key) is not None:
        draft.explain(key, "differs", note=f"{why}trains on them cut. Same if no prompt is that long", learns=True)


def _dynamic_sampling(draft: Draft) -> None:
    prefix = "algorithm.filter_groups"
    rounds, gen = f"{prefix}.max_num_gen_batches", "data.gen_batch_size"
    if not draft.value(f"{prefix}.enable"):
        if draft.has(f"{prefix}.enable"):
            draft.put("sampling.dynamic", False, f"{prefix}.enable")
        draft.always("sampling.dynamic", False, "filter_groups.enable is not set")
        for key in (rounds, gen):
            draft.explain(key, "default here", note="without filter_groups it does nothing")
        return
    note = "surplus groups are dropped, and at the cap the run stops (sampling.surplus, sampling.on_cap)"
    draft.put("sampling.dynamic", True, f"{prefix}.enable", note=note)
    if draft.settings.get("sampling.metric") == "score" and draft.value(f"{prefix}.metric") != "score":
        _warn_of_shaped_rewards(draft, f"{prefix}.metric")
    draft.put("sampling.surplus", "drop")
    draft.put("sampling.on_cap", "error")
    prompts = draft.settings["sampling.prompts_per_step"]
    size, most = draft.count(gen) or prompts, draft.count(rounds) or 0
    if most > 0:
        draft.put("sampling.cap", size * most, rounds, gen, note=f"{most} rounds of {size} prompts; no rounds here")
    else:
        draft.put("sampling.cap", NO_CAP, rounds, gen, note="no cap there; a step that never fills stops here")


def _warn_of_shaped_rewards(draft: Draft, key: str) -> None:
    if any(draft.value(f"{prefix}.enable") for prefix in _BUFFERS):
        note = "scores without the length penalty; theirs include it, so groups that differ in length alone stay"
        draft.explain_again(key, "differs", "sampling.metric: score", note, True)


def _advantages(draft: Draft) -> None:
    key, by_std = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    estimator = draft.value(key)
    if estimator in ("rloo", "rloo_vectorized"):
        draft.put("algo.normalize", "leave-one-out", key)
        draft.explain(by_std, "default here", note="without grpo it does nothing")
    elif estimator in ("grpo", "grpo_vectorized"):
        divides = draft.value(by_std) is not False
        draft.put("algo.normalize", "group" if divides else "none", key, by_std)
    elif ours := next((name for name, entry in ADVANTAGES.items() if estimator in entry.verl), None):
        draft.put("algo.advantage", ours, key)
        draft.explain(by_std, "default here", note="without grpo it does nothing")
    else:
        why = "write it as algo.advantage=file.py:name"
        draft.explain(key, "no counterpart", "algo.normalize: group, the default", why, True)


def _kl(draft: Draft) -> None:
    used, coef, kind = (f"{ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
    weight = draft.number(coef)
    if not draft.value(used):
        for key in (used, coef, kind):
            draft.explain(key, "default here", "algo.kl_coef: 0.0", "no KL penalty in the loss")
    else:
        draft.put("algo.kl_coef", 0.001 if weight is None else weight, used, coef)
        ours = VERL_KL_KINDS.get(draft.value(kind))
        if ours == "k1":
            note = "k1 in the loss has no gradient in expectation; k1+ has the same value, and that of the KL"
            draft.put("algo.kl_kind", "k1+", kind, note=note, learns=True)
        elif ours is not None:
            draft.put("algo.kl_kind", ours, kind)
        else:
            draft.explain(kind, "no counterpart", "algo.kl_kind: k3", KL_NAMES, True)
    verl_kl_in_reward(draft)


def _clipping(draft: Draft) -> None:
    both, low, high = f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"
    bound = draft.number(both)
    missing = [key for key in (low, high) if draft.number(key) is None]
    for key in missing:
        draft.put("algo.clip_low" if key == low else "algo.clip_high", 0.2 if bound is None else bound)
    if not missing:
        draft.explain(both, "default here", note="clip_ratio_low and clip_ratio_high are given instead")
    elif bound is None:
        draft.settings.pop("algo.clip_high", None) if high in missing else None
        draft.always("algo.clip_high", 0.2, "clip_ratio_high is 0.2 unless set")
    elif bound == 0.2:
        draft.put("algo.clip_low" if low in missing else "algo.clip_high", bound, both)
    else:
        note = "both bounds; some versions of verl ignore it in favour of clip_ratio_low=clip_ratio_high=0.2"
        draft.explain(both, "differs", f"algo.clip_low, algo.clip_high: {bound:g}", note, True)


def _loss(draft: Draft) -> None:
    without_dual_clip(draft, f"{ACTOR}.clip_ratio_c")
    name, key = draft.settings.get("algo.loss", "dapo"), f"{ACTOR}.loss_agg_mode"
    if (fixed := LOSSES[name].verl_aggregation) is not None:
        draft.explained.pop(key, None)
        draft.put("algo.aggregation", fixed, key, note=f"{name} always averages so, whatever is set")


def _reward(draft: Draft) -> None:
    for root in ("custom_reward_function", "reward.custom_reward_function"):
        path, name = draft.value(f"{root}.path"), draft.value(f"{root}.name")
        if path:
            draft.put("reward.verifier", f"{path}:{name or 'compute_score'}", f"{root}.path", f"{root}.name")
        else:
            for key in (f"{root}.path", f"{root}.name"):
                draft.explain(key, "default here", note="without a path it does nothing")
    own = "reward.verifier" in draft.settings
    for key in ("reward.reward_manager.name", "reward_model.reward_manager"):
        manager = draft.value(key)
        if own:
            draft.explain(key, "same", note="scores come from the function of your own")
        elif manager is None:
            draft.explain(key, "default here", note="null: scores each row by its data_source")
        elif manager == "dapo" and not {*data_sources(draft)} - {"math_dapo", None}:
            draft.put("reward.verifier", "math", key, note="±1 by the last Answer: line, as verl scores DAPO-Math-17K")
            draft.put("reward.correct", 1.0)
            draft.put("reward.wrong", -1.0)
        elif manager == "dapo" or manager in ("naive", "batch"):
            draft.explain(key, "same", note="scores each row by its data_source")
        else:
            draft.explain(key, "differs", "reward.verifier", "another reward manager; check reward.verifier", True)
    if "reward.verifier" not in draft.settings:
        score_by_source(draft)


def _overlong(draft: Draft) -> None:
    for prefix in _BUFFERS:
        length = f"{prefix}.len"
        longest = "" if prefix in _OLD_BUFFERS else f"{prefix.split('.')[0]}.reward_kwargs.max_resp_len"
        keys = [key for key in (f"{prefix}.enable", length, f"{prefix}.penalty_factor", longest) if key in draft.given]
        if not keys:
            continue
        if not draft.value(f"{prefix}.enable"):
            draft.put("overlong.shape", "off", f"{prefix}.enable", note="no overlong buffer")
            for key in keys:
                draft.explain(key, "default here", note="without the overlong buffer it does nothing")
            return
        factor = draft.number(f"{prefix}.penalty_factor")
        soft_overlong(draft, draft.count(length), 1.0 if factor is None else factor, draft.count(longest))
        return
    draft.always("overlong.shape", "off", "no overlong buffer is set")


def _schedule(draft: Draft) -> None:
    steps, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    if (total := draft.count(steps)) is not None:
        draft.put("train.steps", total, steps)
        draft.explain(epochs, "default here", note="total_training_steps is given, and is what counts")
    elif not (is_fully_async(draft) and async_steps(draft)):
        steps_from_epochs(draft, epochs)
    lowest, rate = draft.number(key := f"{ACTOR}.optim.min_lr"), draft.settings.get("train.lr")
    if draft.settings.get("train.lr_schedule", "constant") == "constant" or not lowest or not rate:
        draft.explain(key, "default here", note="the learning rate does not decay, or decays to 0")
    else:
        draft.put("train.min_lr_share", min(max(lowest / rate, 0.0), 1.0), key, note=f"{lowest:g} / {rate:g}")
    fixed, share = f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio"
    warmup = draft.count(fixed)
    if warmup is not None and warmup >= 0:
        if is_fully_async(draft):
            draft.put("train.warmup_steps", async_warmup(draft, warmup), fixed, note=f"{warmup} rounds of its trainer")
        else:
            draft.put("train.warmup_steps", warmup, fixed, note="steps, here as there")
        draft.explain(share, "default here", note="lr_warmup_steps is given, and is what counts")
    elif draft.has(share):
        warmup_from_share(draft, share)
        draft.explain(fixed, "default here", note="-1: lr_warmup_steps_ratio counts")
    else:
        draft.always("train.warmup_steps", 0, "no warm-up unless set")
        draft.explain(fixed, "same", "train.warmup_steps: 0", "no warm-up")


def _evaluation(draft: Draft) -> None:
    sampled, temperature = draft.value(f"{VAL}.do_sample"), draft.number(f"{VAL}.temperature")
    if not draft.has("data.val_files"):
        return
    if sampled:
        draft.put(
            "eval.temperature", 1.0 if temperature is None else temperature, f"{VAL}.do_sample", f"{VAL}.temperature"
        )
    else:
        draft.put(
            "eval.temperature", 0, f"{VAL}.do_sample", f"{VAL}.temperature", note="greedy unless do_sample is true"
        )
