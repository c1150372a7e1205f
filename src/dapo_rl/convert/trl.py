"""TRL's settings that only convert together, shared by ms-swift: batches of completions, updates, reward functions."""

from __future__ import annotations

import math
from typing import Any

from dapo_rl.base.format import counted
from dapo_rl.base.quote import shown
from dapo_rl.choices import REWARD_MODEL, is_reward_model
from dapo_rl.config.peers.values import is_number, written
from dapo_rl.convert import shared
from dapo_rl.convert.draft import Draft
from dapo_rl.convert.hydra import UnknownValue
from dapo_rl.errors import UserError
from dapo_rl.objectives import GDPO
from dapo_rl.objectives.losses import LOSSES, losses_by

_BATCH_KEYS = (
    "global_batch_size",
    *("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation"),
    *("num_processes", "NPROC_PER_NODE", "NNODES"),
)
_PER_DEVICE = "per_device_train_batch_size"
_MATH_REWARDS = ("accuracy", "accuracy_reward", "math", "gsm8k")
"""Their reward functions for mathematics, which give 1 and 0."""
_OF_TRL = ("reasoning_accuracy_reward", "think_format_reward")
"""Functions of TRL that run here as they are, where TRL is installed."""
_NEVER = (None, False, "no")
"""No evaluation; YAML reads `no` as false."""
_OVERLONG = ("soft_overlong", "get_soft_overlong_punishment")


def derive_trl(draft: Draft) -> None:
    draft.always("sampling.dynamic", False, "has no Dynamic Sampling")
    trl_importance(draft)
    derive_updates(draft)
    derive_evaluation(draft)
    derive_rewards(draft, cache=256, longest=1280)
    _source(draft)
    ask_for_reward(draft)
    shared.limit_prompts(draft)
    uses_lora = bool(draft.value("use_peft"))
    shared.lora(draft, uses_lora, ("lora_r", "lora_rank"), "lora_alpha", "lora_target_modules", 16, switch="use_peft")


def derive_evaluation(draft: Draft) -> None:
    """Held-out prompts are sampled like the training prompts, as often as `num_generations_eval` says."""
    samples = draft.size("num_generations_eval")
    if samples is None and draft.value("eval_strategy", "evaluation_strategy") in _NEVER:
        draft.unused("null, and nothing is evaluated", "num_generations_eval")
        return
    draft.put("eval.samples", samples or draft.settings["sampling.group_size"], "num_generations_eval")
    for name in ("temperature", "top_p"):
        if f"sampling.{name}" in draft.settings:
            draft.put(f"eval.{name}", draft.settings[f"sampling.{name}"])


def derive_updates(draft: Draft) -> None:
    """Settings that count completions or updates."""
    draft.always("algo.advantage_eps", 1e-4, "adds 1e-4 to the standard deviation")
    if not draft.has("epsilon_high") or draft.value("epsilon_high") is None:
        draft.always("algo.clip_high", draft.settings.get("algo.clip_low", 0.2), "epsilon_high is epsilon unless set")
        draft.explain("epsilon_high", "same", "algo.clip_high = algo.clip_low", "null: the same as epsilon")
    _loss(draft)
    _entropy(draft)
    _rewards_apart(draft)
    if draft.settings.get("train.lr_schedule") in ("linear", "cosine"):
        _final_rate(draft)
    _batch(draft)
    _kl(draft)
    _lengths(draft)
    shared.adam_betas(draft, "adam_beta1", "adam_beta2")
    for key, ours in (("save_steps", "checkpoint.every"), ("eval_steps", "eval.every")):
        _interval(draft, key, ours)
    for key in ("eval_strategy", "evaluation_strategy"):
        if draft.value(key) == "epoch":
            draft.explain(key, "differs", "eval.every", "epoch: set it to the steps of a pass")
        note = "no: only before the first step and after the last" if draft.value(key) in _NEVER else ""
        draft.explain(key, "default here" if note else "same", "eval.every", note)


def _loss(draft: Draft) -> None:
    """A `loss_type` that is another loss here. If its bounds are wide, the upper one is `epsilon_high` itself, and it
    has no lower one."""
    name = losses_by(lambda entry: entry.trl).get(draft.value("loss_type"))
    if name is not None:
        if draft.value("importance_sampling_level") not in (None, "token"):
            raise UserError(f"loss_type {name} with importance_sampling_level: {name} has a ratio for each token here")
        entry = LOSSES[name]
        draft.put("algo.loss", name)
        draft.settings["algo.aggregation"] = entry.trl_aggregation
        here = f"algo.loss: {name}, algo.aggregation: {entry.trl_aggregation}"
        draft.explain_again("loss_type", "same", here)
        bound = draft.number("epsilon_high")
        if not entry.wide_bounds:
            for key in ("epsilon", "epsilon_high"):
                draft.explain_again(key, "default here", note=f"{name} has no bounds")
        elif bound is None or bound < 1:
            raise UserError(f"loss_type {name}: epsilon_high is the upper bound of the ratio, 1 or more; 5 is usual")
        else:
            draft.explain_again("epsilon", "default here", "algo.clip_low: 1", f"{name} has no lower bound")
            draft.settings["algo.clip_low"] = 1.0
            where = f"algo.clip_high: {bound - 1:g}"
            draft.explain_again("epsilon_high", "same", where, "the bound is 1 + algo.clip_high")
            draft.settings["algo.clip_high"] = bound - 1
    shared.loss_options(draft)
    shared.without_dual_clip(draft, "delta", applies=name is None)


def _entropy(draft: Draft) -> None:
    """The adaptive entropy bonus. Without it, `entropy_coef` is constant."""
    options = ("entropy_target", "entropy_coef_delta", "entropy_coef_max")
    if not draft.value("use_adaptive_entropy"):
        draft.unused("the weight of the entropy bonus is constant", "use_adaptive_entropy", *options)
        draft.explain_again("entropy_coef_min", "default here", note="without use_adaptive_entropy it does nothing")
        return
    for name, default in zip(options, (0.2, 0.005, 1.0), strict=True):
        set_by = ("use_adaptive_entropy",) if name == "entropy_target" else ()
        draft.put(f"algo.{name}", draft.number_or(default, name), name, *set_by)


def _kl(draft: Draft) -> None:
    unbiased = "use_bias_correction_kl"
    if not draft.value("beta"):
        draft.unused("without beta it does nothing", unbiased)
    else:
        used = bool(draft.value(unbiased))
        differs = used and draft.value("importance_sampling_level") == "sequence"
        note = "by the ratio of each token; theirs is that of its sequence" if differs else ""
        draft.put("algo.kl_unbiased", used, unbiased, note=note, learns=differs)
    _reference(draft)


def _reference(draft: Draft) -> None:
    """A reference policy that follows the policy; they count updates."""
    switch, every, alpha = "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"
    uses_lora = draft.value("use_peft") or draft.value("train_type", "tuner_type") == "lora"
    if not draft.value(switch) or not draft.value("beta") or uses_lora:
        draft.unused("the reference of the KL penalty stays the initial model", every, alpha)
        if draft.value(switch) and draft.value("beta"):
            draft.no_counterpart("with adapters, the reference is the model without them", switch)
        else:
            draft.unused("the reference of the KL penalty stays the initial model", switch)
        return
    updates, per_step = draft.number_or(512, every), _updates_per_step(draft)
    note = f"{updates:g} updates / {per_step} per step"
    draft.put("algo.ref_sync_steps", max(1, round(updates / per_step)), switch, every, note=note)
    draft.put("algo.ref_mixup_alpha", draft.number_or(0.6, alpha), alpha)


def _rewards_apart(draft: Draft) -> None:
    """GDPO: TRL's `multi_objective_aggregation`, which ignores `scale_rewards`, and a value of it in ms-swift."""
    aggregation, scale = "multi_objective_aggregation", "scale_rewards"
    apart = draft.value(aggregation) == "normalize_then_sum"
    if not apart and draft.value(scale) != GDPO:
        draft.unused("rewards are summed, then normalised", aggregation)
        return
    draft.put("algo.advantage", GDPO, aggregation)
    if apart:
        draft.settings["algo.normalize"] = "group"
        draft.explain_again(
            scale, "default here", note="each reward is scaled by its std in the group, whatever is set"
        )
    else:
        draft.explain_again(scale, "same", f"algo.advantage: {GDPO}")


def _final_rate(draft: Draft) -> None:
    lowest, rate = draft.number("lr_scheduler_kwargs.min_lr"), draft.settings.get("train.lr")
    if lowest is not None and rate:
        draft.put("train.min_lr_share", lowest / rate, "lr_scheduler_kwargs.min_lr")
    elif "train.min_lr_share" not in draft.settings:
        draft.always("train.min_lr_share", 0.0, "decays to 0")


def _batch(draft: Draft) -> None:
    """Prompts per step and updates per step, from batch sizes that count completions."""
    group = draft.settings["sampling.group_size"]
    processes, known = _processes(draft)
    if not known and not _whole_groups(*_completions(draft, processes), group):
        processes = next((n for n in range(2, 1025) if _whole_groups(*_completions(draft, n), group)), processes)
    step, update = _completions(draft, processes)
    arithmetic = f"{step} completions per step / {group} per prompt, {update} completions per update"
    note = f"{arithmetic}, on {processes} process{'es' if processes > 1 else ''}"
    if not _whole_groups(step, update, group):
        keys = "per_device_train_batch_size, gradient_accumulation_steps, steps_per_generation and num_generations"
        remedy = "raise gradient_accumulation_steps" if known else "--processes sets the number of processes"
        raise UserError(f"{keys} give {note}: not whole groups in an update; {remedy}")
    if not known:
        note += "; --processes N says otherwise" if processes == 1 else ", the fewest that fit; --processes sets them"
    draft.put("sampling.prompts_per_step", step // group)
    draft.put("train.mini_batches", step // update)
    here = f"sampling.prompts_per_step: {step // group}, train.mini_batches: {step // update}"
    unset = () if draft.has("global_batch_size") else (_PER_DEVICE, "gradient_accumulation_steps")
    for key in _BATCH_KEYS:
        if key in draft.keys or key in unset:
            draft.explain(key, "same" if known else "differs", here, note, not known and key == _PER_DEVICE)


def _completions(draft: Draft, processes: int) -> tuple[int, int]:
    per_generation = draft.size("steps_per_generation")
    if (update := draft.size("global_batch_size")) is not None:  # ms-swift with Megatron
        batch = draft.size("generation_batch_size") or update * (per_generation or 1)
    else:
        device, accumulated = draft.size(_PER_DEVICE) or 1, draft.size("gradient_accumulation_steps") or 1
        update = device * accumulated * processes
        batch = draft.size("generation_batch_size") or device * processes * (per_generation or accumulated)
    # A generation batch that is smaller than an update is sampled several times with the same weights.
    return max(batch, update), update


def _whole_groups(step: int, update: int, group: int) -> bool:
    """Whether a step has whole groups, and each of its updates the same number of them."""
    return not (step % group or step % update or (step // group) % (step // update))


def _processes(draft: Draft) -> tuple[int, bool]:
    if draft.processes is not None:
        return draft.processes, True
    unknown = {name for name, value in draft.keys.items() if isinstance(value, UnknownValue)}
    if draft.has("global_batch_size") or (draft.has("num_processes") and "num_processes" not in unknown):
        return draft.size("num_processes") or 1, True
    if draft.has("NPROC_PER_NODE") and not unknown & {"NPROC_PER_NODE", "NNODES"}:
        return (draft.size("NPROC_PER_NODE") or 1) * (draft.size("NNODES") or 1), True
    return 1, False


def _updates_per_step(draft: Draft) -> int:
    return int(draft.settings["train.mini_batches"]) * int(draft.settings.get("train.epochs_per_step", 1))


def _lengths(draft: Draft) -> None:
    """Steps and warm-up, which they count in updates."""
    per_step = _updates_per_step(draft)
    updates = draft.count("max_steps", "train_iters")
    if updates is not None and updates > 0:
        steps = math.ceil(updates / per_step)
        draft.put("train.steps", steps, "max_steps", "train_iters", note=f"{updates} updates / {per_step} per step")
        draft.unused("max_steps is given, and is what counts", "num_train_epochs")
    else:
        draft.unused("-1: num_train_epochs counts", "max_steps")
        shared.steps_from_epochs(draft, "num_train_epochs")
    ratio, warmup = draft.number("warmup_ratio"), draft.number("lr_warmup_iters", "warmup_steps") or 0
    share = warmup if 0 < warmup < 1 else ratio if ratio and not warmup else None
    if share is None:
        steps = math.ceil(warmup / per_step)
        note = f"{warmup:g} updates / {per_step} per step"
        draft.put("train.warmup_steps", steps, "warmup_steps", "lr_warmup_iters", note=note)
        draft.unused("warmup_steps counts" if warmup else "no warm-up", "warmup_ratio")
        return
    note = f"{share:g} of {draft.settings.get('train.steps')} steps"
    shared.warmup_from_share(draft, share, "warmup_ratio", "warmup_steps", note=note)


def _interval(draft: Draft, key: str, ours: str) -> None:
    """A number of updates between evaluations or checkpoints."""
    updates = draft.number(key)
    if updates is None:
        draft.unused("null: the default", key)
    elif updates < 1 and "train.steps" in draft.settings:
        steps = max(1, math.ceil(updates * draft.settings["train.steps"]))
        draft.put(ours, steps, key, note=f"{updates:g} of {draft.settings['train.steps']} steps")
    elif updates < 1:
        draft.explain(key, "differs", ours, "a share of the run; set a number of steps")
    else:
        steps = max(1, round(updates / _updates_per_step(draft)))
        draft.put(ours, steps, key, note=f"{updates:g} updates / {_updates_per_step(draft)} per step")


def derive_rewards(draft: Draft, cache: int | None, longest: int | None) -> None:
    """The verifiers with their weights and the overlong punishment, from the names of reward functions."""
    names = _rewards(draft)
    weights: dict[str, float] = {}
    for name, weight in zip(names, _weights(draft, names), strict=True):
        weights[name] = weights.get(name, 0.0) + weight
    overlong = [weights.pop(name) for name in _OVERLONG if name in weights]
    if overlong:
        limit = draft.settings.get("sampling.max_new_tokens", 1024)
        shared.soft_overlong(
            draft, min(cache or limit // 5, limit - 1), max(sum(overlong), 0.0), min(longest or limit, limit)
        )
    else:
        draft.always("overlong.shape", "off", "has no overlong punishment unless a reward function is one")
    _verifier(draft, weights)


_MODELS = ("reward_model_name_or_path", "reward_model")
"""The settings of reward models: TRL's, whose score comes first, and ms-swift's, whose scores come last."""


def _rewards(draft: Draft) -> list[str]:
    """The names of reward functions, and reward models as they are named here."""
    first, last = ([f"{REWARD_MODEL}{name}" for name in _listed(draft.value(key))] for key in _MODELS)
    for key, names in zip(_MODELS, (first, last), strict=True):
        if names:
            draft.explain(key, "same", f"reward.verifier: {', '.join(names)}", "its score is the reward")
        else:
            draft.unused("no reward model", key)
    return [*first, *_listed(draft.value("reward_funcs")), *last]


def _listed(value: Any) -> list[str]:
    return [] if value is None else [str(name) for name in (value if isinstance(value, list) else [value])]


def _verifier(draft: Draft, weights: dict[str, float]) -> None:
    """`reward.verifier` from the functions and their weights, without the overlong punishment."""
    key, plugin = "reward_funcs", ", ".join(_listed(draft.value("external_plugins")))
    known: dict[str, float] = {}
    unknown = []
    for name, weight in weights.items():
        if ours := _here(name, draft.library.name):
            known[ours] = known.get(ours, 0.0) + weight
        else:
            unknown.append(name if weight == 1 else f"{name} (weight {weight:g})")
    here, theirs = "reward.verifier", _OWN
    if "math" in known:
        theirs = _MATH
        draft.put("reward.boxed", True)
        draft.put("reward.wrong", 0.0)
    elif all(map(is_reward_model, known)):
        theirs = "a reward model"
    if known:
        entries = [ours if weight == 1 else {"verifier": ours, "weight": weight} for ours, weight in known.items()]
        verifier = entries[0] if list(known.values()) == [1.0] else entries
        draft.put("reward.verifier", verifier)
        here = f"reward.verifier: {written(verifier)}"
    if unknown:
        where = f" (from {plugin})" if plugin else ""
        what = f"{', '.join(unknown)}: add your own function to reward.verifier, file.py:name{where}"
        draft.explain(key, "differs", here, what, True)
    elif known:
        several = sum(_here(name, draft.library.name) is not None for name in weights) > 1
        draft.explain(key, "same", here, f"the first one decides what is right; {theirs}" if several else theirs)
    else:
        note = "no reward but the length penalty; set reward.verifier"
        draft.explain(key, "differs", "overlong.shape: soft", note, True)
    draft.explain("external_plugins", "differs", "reward.verifier", "name your function as file.py:name", bool(unknown))


def ask_for_reward(draft: Draft) -> None:
    """A script can pass its reward functions to the trainer. An environment gives the rewards."""
    given = ("reward.verifier", "env.name", "env.agent")
    if not draft.has("reward_funcs") and not any(draft.settings.get(ours) for ours in given):
        note = "none is named: a script passes it to its trainer; set reward.verifier"
        draft.add_row("(reward function)", "", "differs", "reward.verifier: math, the default", note, True)


_MATH = "1 and 0, by the last Answer: line or \\boxed{}; theirs compares with math-verify"
_OWN = "a function with TRL's signature"


def _here(name: str, library: str) -> str | None:
    """The verifier for one of their reward functions, if there is one."""
    if name in _MATH_REWARDS:
        return "math"
    if name in _OF_TRL and library == "TRL":
        return f"trl.rewards:{name}"
    if is_reward_model(name) or "/" in name:
        return REWARD_MODEL + name.removeprefix(REWARD_MODEL)
    module, dot, function = name.rpartition(".")
    return f"{module}:{function}" if dot else None


def _weights(draft: Draft, names: list[str]) -> list[float]:
    key = "reward_weights"
    weights = draft.value(key)
    listed = weights if isinstance(weights, list) else [weights]
    if weights is None or all(weight == 1 for weight in listed):
        draft.unused("every reward has the weight 1", key)
        return [1.0] * len(names)
    if len(listed) != len(names) or not all(is_number(weight) and math.isfinite(weight) for weight in listed):
        raise UserError(f"{key}: expected {counted(len(names), 'number')}, one for each of reward_funcs")
    draft.explain(key, "same", "reward.verifier", "the weights of its entries")
    return [float(weight) for weight in listed]


def _part(entry: Any) -> dict[str, Any]:
    name = entry.get("path") if isinstance(entry, dict) else None
    if not isinstance(name, str):
        raise UserError(f"datasets: expected entries with a path, got {shown(entry)}")
    unread = sorted(set(entry) - {"path", "name", "split"} - {key for key, value in entry.items() if value is None})
    if unread:
        raise UserError(f"datasets: {unread[0]} of {shown(name)} has no counterpart; write its rows to a file")
    return {"source": name} | {key: entry[key] for key in ("name", "split") if entry.get(key) is not None}


def _source(draft: Draft) -> None:
    """A Hub data set with its configuration and splits, or a mixture of several."""
    name = draft.settings.pop("data.train", None)
    if isinstance(mixture := draft.value("datasets"), list) and mixture:
        draft.put("data.train", [_part(entry) for entry in mixture], "datasets")
        name = None
    if name is None:
        return
    parameters = {"name": draft.value("dataset_config"), "split": draft.value("dataset_train_split")}
    given = {key: value for key, value in parameters.items() if value is not None}
    draft.put("data.train", {"source": name, **given} if given else name)
    for key in ("dataset_config", "dataset_train_split"):
        draft.explain(key, "same", "data.train")
    split = draft.value("dataset_test_split")
    if draft.has("dataset_test_split") and draft.value("eval_strategy", "evaluation_strategy") not in _NEVER:
        config = {"name": parameters["name"]} if parameters["name"] else {}
        draft.put("data.eval", {"source": name, **config, "split": split}, "dataset_test_split")
    else:
        draft.unused("without eval_strategy it does nothing", "dataset_test_split")


def trl_importance(draft: Draft) -> None:
    names = ("correction", "mode", "cap", "clip_max", "clip_min")
    switch, mode, cap, high, low = keys = tuple(f"vllm_importance_sampling_{name}" for name in names)
    if not draft.value("use_vllm") or not draft.value(switch):
        draft.unused("without use_vllm and the correction it does nothing", *keys)
        return
    unset = shared.UNCAPPED if draft.has(high) else 3.0
    most = draft.number_or(unset, cap if draft.value(cap) is not None else high)
    shared.put_mode(draft, mode, most, draft.number(low), *keys, name=draft.name(mode) or "sequence_mask")
