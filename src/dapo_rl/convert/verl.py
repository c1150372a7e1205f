"""verl's settings that only convert together: batches, rewards, KL, clipping, the critic, importance weights."""

from __future__ import annotations

import math
import re
from typing import Any

from dapo_rl.config.conflicts import nearest_divisor
from dapo_rl.config.peers import reason
from dapo_rl.convert import shared
from dapo_rl.convert.draft import Draft
from dapo_rl.convert.shared import ACTOR, MODEL, ROLLOUT
from dapo_rl.convert.teacher import verl_teacher
from dapo_rl.convert.turns import verl_turns
from dapo_rl.convert.verl_off_policy import verl_off_policy
from dapo_rl.objectives import ADVANTAGES, GAE, GDPO, LOSSES

NO_CAP = 1_000_000
"""The cap for a run without one: more groups than a step ever draws."""
_OLD_BUFFERS = ("reward_model.overlong_buffer", "custom_reward_function.overlong_buffer")
_OVERLONG = "reward_kwargs.overlong_buffer_cfg"
_BUFFERS = (f"reward.{_OVERLONG}", f"reward_model.{_OVERLONG}", *_OLD_BUFFERS)

_REQUIRED, _ROUNDS = "async_training.require_batches", "async_training.trigger_parameter_sync_step"
_STALE, _SAMPLES = "async_training.staleness_threshold", "rollout.total_rollout_steps"
_FRESH = "samples come from the weights of the step; asynchronous sampling is cluster.placement=separate"

_OWN_FILES = re.compile(r"((fully_async|one_step_off)_)?(ppo|dapo)_((megatron|veomni|torchtitan)_)?trainer(\.yaml)?")
"""verl's own files of defaults."""
BY_SOURCE = "dapo_rl.rewards.by_source:by_source"
_SOURCES = {
    "openai/gsm8k": (r"gsm8k", "1 or 0 by the number after ####"),
    "math_dapo": (r"dapo[-_]?math|math[-_]?dapo|aime", "1 or -1 by the last Answer: line"),
    "lighteval/MATH": (
        r"(^|[/_-])math([/_.-]|$)|math[-_]?(lighteval|500|dataset)",
        "1 or 0 by the last \\boxed{}",
    ),
}
"""By data source: what the names of files with its rows contain, and how they are scored."""
_VERL_KINDS = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
_STRAIGHT_THROUGH = {"low_var_kl+": "k3+", "k3+": "k3+", "kl+": "k1+", "k1+": "k1+", "mse+": "k2", "k2+": "k2"}
_KL_KINDS: dict[Any, str] = {None: "k3", **_VERL_KINDS, **_STRAIGHT_THROUGH}
"""verl's names of the KL estimators, in the loss and in the reward."""


def derive_verl(draft: Draft) -> None:
    draft.always("model.dtype", "bfloat16", "computes in bfloat16")
    if _OWN_FILES.fullmatch(str(draft.value("--config-name"))):
        draft.explain_again("--config-name", "default here", note=reason("NOT_READ"))
    _batches(draft)
    _long_prompts(draft)
    _dynamic_sampling(draft)
    _advantages(draft)
    _critic(draft)
    _kl(draft)
    _clipping(draft)
    _loss(draft)
    verl_off_policy(draft)
    _reward(draft)
    _overlong(draft)
    _schedule(draft)
    _evaluation(draft)
    _lora(draft)
    verl_teacher(draft)
    verl_turns(draft)
    sums = draft.settings.get("algo.aggregation") == "seq-mean-token-sum-norm"
    if sums and draft.value(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum":
        draft.put("algo.norm_length", 1)


def _lora(draft: Draft) -> None:
    """`model.lora_rank`, or with Megatron `model.lora.rank`."""
    flat = [f"{MODEL}.{name}" for name in ("lora_rank", "lora_alpha", "target_modules")]
    nested = [f"{MODEL}.lora.{name}" for name in ("rank", "alpha", "target_modules")]
    rank, alpha, targets = nested if (draft.count(nested[0]) or 0) > 0 else flat
    shared.lora(draft, (draft.count(rank) or 0) > 0, (rank,), alpha, targets, 16)
    draft.unused("without LoRA it does nothing", *nested, *flat)
    if "model.lora.rank" not in draft.settings:
        for key in [key for key in draft.keys if key.startswith(f"{MODEL}.lora.")]:
            draft.explain_again(key, "default here", note="without LoRA it does nothing")


def _batches(draft: Draft) -> None:
    mini_batch = f"{ACTOR}.ppo_mini_batch_size"
    if _is_fully_async(draft):
        _async_batches(draft, mini_batch)
        return
    if draft.value("(trainer)") == "one_step_off":
        note = f"its samples come from the weights one step before; {_FRESH}, sampling.surplus=carry"
        draft.explain("(trainer)", "differs", note=note, learns=True)
    prompts, mini = draft.needed("data.train_batch_size"), draft.needed(mini_batch)
    draft.put("sampling.prompts_per_step", prompts, "data.train_batch_size")
    updates, rest = divmod(prompts, mini)
    note = f"{prompts} prompts / {mini} per update"
    if rest or not updates:
        updates = nearest_divisor(prompts, prompts / mini)
        draft.put("train.mini_batches", updates, mini_batch, note=f"{note} is not a whole number", learns=True)
    else:
        draft.put("train.mini_batches", updates, mini_batch, note=note)


def _is_fully_async(draft: Draft) -> bool:
    return draft.value("(trainer)") == "fully_async" or draft.has(_REQUIRED, _ROUNDS, _STALE)


def _async_batches(draft: Draft, mini_batch: str) -> None:
    """A step is what its asynchronous trainer learns from between two synchronisations of the weights."""
    mini, required, rounds = draft.needed(mini_batch), draft.size(_REQUIRED) or 1, draft.size(_ROUNDS) or 4
    updates = required * rounds
    note = f"{rounds} rounds of {required} × {mini} prompts between two synchronisations of the weights"
    draft.put("train.mini_batches", updates, mini_batch, note=note)
    draft.put("sampling.prompts_per_step", mini * updates, "data.train_batch_size", _REQUIRED, _ROUNDS, note=note)
    stale = draft.number(_STALE)
    if stale == 0:
        draft.unused("every sample comes from the weights of the step", _STALE)
    else:
        share = f"up to {0.1 if stale is None else stale:g} × the prompts of a step come from older weights; "
        key = _STALE if draft.has(_STALE) else "(trainer)"
        draft.explain(key, "differs", note=share + _FRESH, learns=True)
    draft.explain("(trainer)", "same", note="synchronous here, with the prompts per step of its synchronisations")


def _async_steps(draft: Draft) -> bool:
    """`train.steps` from the number of prompts; false if it is not known."""
    total, prompts = draft.count(_SAMPLES), draft.settings["sampling.prompts_per_step"]
    if total is None or total < 1:
        return False
    draft.put("train.steps", max(1, total // prompts), _SAMPLES, note=f"{total} prompts / {prompts} per step")
    draft.unused("total_rollout_steps is given, and is what counts", "trainer.total_epochs")
    return True


def _long_prompts(draft: Draft) -> None:
    key, why = "data.truncation", "prompts over data.max_prompt_tokens are dropped and counted; verl "
    if draft.value("data.filter_overlong_prompts"):
        draft.unused("longer prompts are dropped and counted", "data.filter_overlong_prompts")
        draft.unused("longer prompts are dropped, so none is truncated", key)
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
        draft.unused("without filter_groups it does nothing", rounds, gen)
        return
    note = "surplus groups are dropped, and at the cap the run stops (sampling.surplus, sampling.on_cap)"
    draft.put("sampling.dynamic", True, f"{prefix}.enable", note=note)
    shaped = any(draft.value(f"{buffer}.enable") for buffer in _BUFFERS)
    if shaped and draft.settings.get("sampling.metric") == "score" and draft.value(f"{prefix}.metric") != "score":
        note = "scores without the length penalty; theirs include it, so groups that differ in length alone stay"
        draft.explain_again(f"{prefix}.metric", "differs", "sampling.metric: score", note, True)
    draft.put("sampling.surplus", "drop")
    draft.put("sampling.on_cap", "error")
    prompts = draft.settings["sampling.prompts_per_step"]
    size, most = draft.count(gen) or prompts, draft.count(rounds) or 0
    if most > 0:
        draft.put("sampling.cap", size * most, rounds, gen, note=f"{most} rounds of {size} prompts; no rounds here")
    else:
        draft.put("sampling.cap", NO_CAP, rounds, gen, note="no cap there; a step that never fills stops here")


def _advantages(draft: Draft) -> None:
    key, by_std = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    estimator = draft.value(key)
    if estimator in ("grpo", "grpo_vectorized"):
        draft.put("algo.normalize", "none" if draft.value(by_std) is False else "group", key, by_std)
    elif estimator in ("rloo", "rloo_vectorized"):
        draft.put("algo.normalize", "leave-one-out", key)
        draft.unused("without grpo it does nothing", by_std)
    elif ours := next((name for name, entry in ADVANTAGES.items() if estimator in entry.verl), None):
        draft.put("algo.advantage", ours, key)
        draft.unused("without grpo it does nothing", by_std)
    else:
        why = "write it as algo.advantage=file.py:name"
        draft.explain(key, "no counterpart", "algo.normalize: group, the default", why, True)
    _rewards_apart(draft, estimator == GDPO)


def _rewards_apart(draft: Draft, used: bool) -> None:
    """GDPO, whose rewards are entries of what one function returns."""
    keys = [f"algorithm.gdpo_reward_{name}" for name in ("keys", "weights")]
    if not used:
        draft.unused("without gdpo it does nothing", *keys)
        return
    by_std = "algorithm.norm_adv_by_std_in_grpo"
    draft.rows.pop(by_std, None)
    draft.put("algo.normalize", "none" if draft.value(by_std) is False else "group", by_std)
    note = "over the samples of the step; theirs counts a sample as often as it has tokens"
    draft.explain_again("algorithm.adv_estimator", "differs", f"algo.advantage: {GDPO}", note, learns=True)
    entry = draft.library.find(keys[0])
    for key in keys:
        draft.explain(key, "differs", "reward.verifier", "" if entry is None else entry.note, learns=True)


def _kl(draft: Draft) -> None:
    used, coef, kind = (f"{ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
    weight = draft.number_or(0.001, coef)
    if not draft.value(used):
        for key in (used, coef, kind):
            draft.explain(key, "default here", "algo.kl_coef: 0.0", "no KL penalty in the loss")
    else:
        draft.put("algo.kl_coef", weight, used, coef)
        if _KL_KINDS.get(draft.name(kind)) == "k1":
            note = "k1 in the loss has no gradient in expectation; k1+ has the same value, and that of the KL"
            draft.put("algo.kl_kind", "k1+", kind, note=note, learns=True)
        else:
            shared.kl_kind(draft, kind, _KL_KINDS)
    _kl_in_reward(draft)


def _clipping(draft: Draft) -> None:
    both, low, high = f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"
    bound = draft.number(both)
    missing = [key for key in (low, high) if draft.number(key) is None]
    for key in missing:
        draft.put("algo.clip_low" if key == low else "algo.clip_high", 0.2 if bound is None else bound)
    if not missing:
        draft.unused("clip_ratio_low and clip_ratio_high are given instead", both)
    elif bound is None:
        draft.settings.pop("algo.clip_high", None) if high in missing else None
        draft.always("algo.clip_high", 0.2, "clip_ratio_high is 0.2 unless set")
    elif bound == 0.2:
        draft.put("algo.clip_low" if low in missing else "algo.clip_high", bound, both)
    else:
        note = "both bounds; some versions of verl ignore it in favour of clip_ratio_low=clip_ratio_high=0.2"
        draft.explain(both, "differs", f"algo.clip_low, algo.clip_high: {bound:g}", note, True)


def _loss(draft: Draft) -> None:
    shared.without_dual_clip(draft, f"{ACTOR}.clip_ratio_c")
    shared.loss_options(draft)
    name, key = draft.settings.get("algo.loss", "dapo"), f"{ACTOR}.loss_agg_mode"
    if (fixed := LOSSES[name].verl_aggregation) is not None:
        draft.rows.pop(key, None)
        draft.put("algo.aggregation", fixed, key, note=f"{name} always averages so, whatever is set")


def _reward(draft: Draft) -> None:
    for root in ("custom_reward_function", "reward.custom_reward_function"):
        path, name = draft.value(f"{root}.path"), draft.value(f"{root}.name")
        if path:
            draft.put("reward.verifier", f"{path}:{name or 'compute_score'}", f"{root}.path", f"{root}.name")
        else:
            draft.unused("without a path it does nothing", f"{root}.path", f"{root}.name")
    if "reward.verifier" not in draft.settings:
        _reward_model(draft)
    own = "reward.verifier" in draft.settings
    for key in ("reward.reward_manager.name", "reward_model.reward_manager"):
        manager = draft.value(key)
        if own:
            draft.explain(key, "same", note="scores come from the function or model that is set")
        elif manager is None:
            draft.unused("null: scores each row by its data_source", key)
        elif manager == "dapo" and not {*_data_sources(draft)} - {"math_dapo", None}:
            _score_as_dapo(draft, key, note="±1 by the last Answer: line, as verl scores DAPO-Math-17K")
        elif manager == "dapo" or manager in ("naive", "batch"):
            draft.explain(key, "same", note="scores each row by its data_source")
        else:
            draft.explain(key, "differs", "reward.verifier", "another reward manager; check reward.verifier", True)
    if "reward.verifier" not in draft.settings:
        _score_by_source(draft)


def _reward_model(draft: Draft) -> None:
    """The score of a reward model is the reward, unless there is a function."""
    for root in ("reward_model", "reward.reward_model"):
        for key in (f"{root}.model.path", f"{root}.model_path"):
            if draft.value(f"{root}.enable") is True and (path := draft.value(key)):
                draft.put("reward.verifier", f"model:{path}")
                for each in (f"{root}.enable", key):
                    draft.explain_again(each, "same", f"reward.verifier: model:{path}", "its score is the reward")


def _score_as_dapo(draft: Draft, *keys: str, note: str = "") -> None:
    draft.put("reward.verifier", "math", *keys, note=note)
    draft.put("reward.correct", 1.0)
    draft.put("reward.wrong", -1.0)


def _data_sources(draft: Draft) -> list[str | None]:
    """The data source of each training file, by the end of its path; None where its name does not tell."""
    paths = draft.settings.get("data.train")
    ends = ["/".join(str(path).lower().split("/")[-2:]) for path in (paths if isinstance(paths, list) else [paths])]
    found = (next((name for name, (pattern, _) in _SOURCES.items() if re.search(pattern, end)), None) for end in ends)
    return list(found) if paths else []


def _score_by_source(draft: Draft) -> None:
    """The verifier of a run without a reward function. verl chooses one for each row by its column `data_source`."""
    found = _data_sources(draft)
    known = list(dict.fromkeys(source for source in found if source))
    told = "; ".join(f"{source}: {_SOURCES[source][1]}" for source in known)
    here = f"reward.verifier: {BY_SOURCE}"
    if known == ["math_dapo"] and None not in found:
        _score_as_dapo(draft)
        draft.add_row("(data_source)", "math_dapo", "same", "reward.verifier: math", told)
        return
    draft.put("reward.verifier", BY_SOURCE)
    if known and None not in found:
        draft.add_row("(data_source)", ", ".join(known), "same", here, f"as verl scores them: {told}")
        return
    note = "scores GSM8K, MATH and DAPO-Math as verl does; rows of other sources fail: then set reward.verifier"
    draft.add_row("(data_source)", ", ".join([*known, "not known"]), "differs", here, note, True)


def _overlong(draft: Draft) -> None:
    for prefix in _BUFFERS:
        length = f"{prefix}.len"
        longest = "" if prefix in _OLD_BUFFERS else f"{prefix.split('.')[0]}.reward_kwargs.max_resp_len"
        keys = [key for key in (f"{prefix}.enable", length, f"{prefix}.penalty_factor", longest) if key in draft.keys]
        if not keys:
            continue
        if not draft.value(f"{prefix}.enable"):
            draft.put("overlong.shape", "off", f"{prefix}.enable", note="no overlong buffer")
            draft.unused("without the overlong buffer it does nothing", *keys)
        else:
            factor = draft.number_or(1.0, f"{prefix}.penalty_factor")
            shared.soft_overlong(draft, draft.count(length), factor, draft.count(longest))
        return
    draft.always("overlong.shape", "off", "no overlong buffer is set")


def _schedule(draft: Draft) -> None:
    steps, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    if (total := draft.count(steps)) is not None:
        draft.put("train.steps", total, steps)
        draft.unused("total_training_steps is given, and is what counts", epochs)
    elif not (_is_fully_async(draft) and _async_steps(draft)):
        shared.steps_from_epochs(draft, epochs)
    key = f"{ACTOR}.optim.min_lr"
    if not draft.number(key) or draft.settings.get("train.lr_schedule", "constant") == "constant":
        draft.unused("the learning rate does not decay, or decays to 0", key)
    else:
        shared.min_lr_share(draft, key)
    _warmup(draft)


def _warmup(draft: Draft) -> None:
    fixed, share = f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio"
    warmup = draft.count(fixed)
    if warmup is not None and warmup >= 0:
        if _is_fully_async(draft):
            steps = math.ceil(warmup / (draft.size(_ROUNDS) or 4))
            draft.put("train.warmup_steps", steps, fixed, note=f"{warmup} rounds of its trainer")
        else:
            draft.put("train.warmup_steps", warmup, fixed, note="steps, here as there")
        draft.unused("lr_warmup_steps is given, and is what counts", share)
    elif draft.has(share):
        shared.warmup_from_share(draft, draft.number_or(0.0, share), share, whole=int)
        draft.unused("-1: lr_warmup_steps_ratio counts", fixed)
    else:
        draft.always("train.warmup_steps", 0, "no warm-up unless set")
        draft.explain(fixed, "same", "train.warmup_steps: 0", "no warm-up")


def _evaluation(draft: Draft) -> None:
    keys = (f"{ROLLOUT}.val_kwargs.do_sample", f"{ROLLOUT}.val_kwargs.temperature")
    temperature = draft.number_or(1.0, keys[1])
    if draft.has("data.val_files") and draft.value(keys[0]):
        draft.put("eval.temperature", temperature, *keys)
    elif draft.has("data.val_files"):
        draft.put("eval.temperature", 0, *keys, note="greedy unless do_sample is true")


def _critic(draft: Draft) -> None:
    """With `algorithm.adv_estimator=gae`, which is verl's default."""
    if draft.value("algorithm.adv_estimator") != GAE:
        keys = (key for key in draft.keys if key.startswith("critic."))
        draft.unused("without adv_estimator=gae it does nothing", "algorithm.lam", "trainer.critic_warmup", *keys)
        return
    shared.refuse_discount(draft, "algorithm.gamma")
    shared.one_lambda(draft, "algorithm.lam")
    draft.always("critic.whiten", True, "whitens the advantages of GAE")
    draft.put("critic.lr", draft.number("critic.optim.lr"), "critic.optim.lr")
    draft.put("critic.value_clip", draft.number("critic.cliprange_value"), "critic.cliprange_value")
    first = draft.count(key := "trainer.critic_warmup") or 0
    late, early = f"its step {first} is the first to update the policy", "the policy is updated from the start"
    draft.put("critic.pretrain_steps", max(0, first - 1), key, note=late if first > 1 else early)
    if (draft.value("critic.loss_agg_mode") or "token-mean") != "token-mean":
        draft.no_counterpart("its loss averages over tokens", "critic.loss_agg_mode")
    shared.critic_start(draft, "critic.model.path", f"{MODEL}.path")
    shared.share_with_policy(draft, ACTOR)


def _kl_in_reward(draft: Draft) -> None:
    names = ("kl_ctrl.kl_coef", "kl_penalty", "kl_ctrl.type", "kl_ctrl.target_kl", "kl_ctrl.horizon")
    coef, kind, control, target, horizon = keys = tuple(f"algorithm.{name}" for name in names)
    used = "algorithm.use_kl_in_reward"
    if not draft.value(used):
        draft.unused("no KL penalty in the reward", used, *keys)
        return
    if draft.value("algorithm.adv_estimator") != GAE:
        draft.no_counterpart(reason("KL_IN_LOSS"), used)
        draft.no_counterpart(reason("KL_IN_LOSS"), *keys, learns=False)
        return
    if draft.settings.get("algo.kl_coef"):
        for key in (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"):
            draft.explain_again(key, "no counterpart", note="there is one KL penalty, here in the reward", learns=True)
    draft.put("algo.kl_in", "reward", used)
    draft.put("algo.kl_coef", draft.number(coef), coef)
    shared.kl_kind(draft, kind, _KL_KINDS)
    if draft.value(control) != "adaptive":
        draft.unused("the weight of the KL penalty is constant", control, target, horizon)
        return
    draft.put("algo.kl_target", draft.number_or(0.1, target), control, target)
    draft.put("algo.kl_horizon", draft.number_or(10000, horizon), horizon)
