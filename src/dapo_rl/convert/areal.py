"""AReaL's settings that only convert together: data, rewards, advantages, clipping."""

from __future__ import annotations

from dapo_rl.convert import shared
from dapo_rl.convert.critic import areal_critic, areal_kl, has_areal_critic
from dapo_rl.convert.draft import Draft
from dapo_rl.convert.importance_sampling import areal_importance
from dapo_rl.convert.settings import reason
from dapo_rl.convert.settings.values import written

_NORM, OPTIMIZER = "actor.reward_norm", "actor.optimizer"
OWN_REWARD = "its script passes the reward function, which is not part of the file: check reward.verifier"


def derive_areal(draft: Draft) -> None:
    if not draft.has("actor.eps_clip_higher") or draft.value("actor.eps_clip_higher") is None:
        bound = draft.settings.get("algo.clip_low", 0.2)
        draft.settings.pop("algo.clip_high", None)
        draft.always("algo.clip_high", bound, "eps_clip_higher is eps_clip unless set")
        draft.explain_again("actor.eps_clip_higher", "same", f"algo.clip_high: {bound}", "null: the same as eps_clip")
    shared.without_dual_clip(draft, "actor.c_clip", applies=True)
    _splits(draft)
    _dynamic_sampling(draft)
    _rewards(draft)
    has_critic = has_areal_critic(draft)
    if has_critic:
        areal_critic(draft)
        _leave_rewards(draft)
    else:
        _advantages(draft)
    areal_kl(draft, has_critic)
    areal_importance(draft)
    if "train.steps" in draft.settings:
        draft.unused("total_train_steps is given, and is what counts", "total_train_epochs")
    else:
        shared.steps_from_epochs(draft, "total_train_epochs")
    share = f"{OPTIMIZER}.warmup_steps_proportion"
    shared.warmup_from_share(draft, draft.number_or(0.0, share), share)
    shared.adam_betas(draft, f"{OPTIMIZER}.beta1", f"{OPTIMIZER}.beta2")
    switch, rank, alpha, targets = (
        f"actor.{name}" for name in ("use_lora", "lora_rank", "lora_alpha", "target_modules")
    )
    shared.lora(draft, bool(draft.value(switch)), (rank,), alpha, targets, 32, switch)
    mode = draft.value("stats_logger.wandb.mode")
    draft.put("log.trackers", ["wandb"] if mode in ("online", "offline") else [], "stats_logger.wandb.mode")


def _splits(draft: Draft) -> None:
    """AReaL reads a data set of the Hub by its split train for training, and by test for evaluation."""
    for key, ours, split in (
        ("train_dataset.path", "data.train", "train"),
        ("valid_dataset.path", "data.eval", "test"),
    ):
        name = draft.settings.get(ours)
        if not isinstance(name, str) or name.endswith((".parquet", ".json", ".jsonl")):
            continue
        entry = {"source": name, **({"name": "main"} if name == "openai/gsm8k" else {})}
        if split == "test" and name == draft.value("train_dataset.path"):
            entry["split"] = split
        if len(entry) > 1:
            draft.settings[ours] = entry
            draft.explain_again(key, "same", f"{ours}: {written(entry)}", f"its script reads the split {split}")


def _dynamic_sampling(draft: Draft) -> None:
    if draft.value("dynamic_bs"):
        draft.put("sampling.dynamic", True)
        draft.put("sampling.dynamic_batch", True, "dynamic_bs", note="the filter is dynamic_filter_fn of its script")
    else:
        draft.put("sampling.dynamic_batch", False, "dynamic_bs")
        draft.always("sampling.dynamic", False, "filters only if its script passes dynamic_filter_fn")


def _rewards(draft: Draft) -> None:
    keys = ("actor.reward_scaling", "actor.reward_bias", "actor.reward_clip")
    scale, bias, limit = (draft.number_or(default, key) for key, default in zip(keys, (1.0, 0.0, 20.0), strict=True))
    correct, wrong = (max(-limit, min(limit, (score + bias) * scale)) for score in (1.0, 0.0))
    draft.put("reward.wrong", wrong)
    draft.put("reward.boxed", True)
    draft.add_row("(reward function)", "", "differs", "reward.verifier: math, reward.boxed: true", OWN_REWARD, True)
    draft.put("reward.correct", correct, *keys, note=f"scores 1 and 0 become {correct:g} and {wrong:g}")
    if draft.value("actor.overlong_reward_penalty"):
        factor = draft.number_or(1.0, "actor.overlong_penalty_factor") * scale
        shared.soft_overlong(draft, draft.count("actor.overlong_tokens"), factor, None)
    elif draft.has("actor.overlong_reward_penalty"):
        draft.put("overlong.shape", "off", "actor.overlong_reward_penalty")
    else:
        draft.always("overlong.shape", "off", "overlong_reward_penalty is not set")


def _leave_rewards(draft: Draft) -> None:
    """With a critic, rewards are not normalised."""
    for key in [key for key in draft.keys if key == _NORM or key.startswith(f"{_NORM}.")]:
        off = draft.value(key) in (None, "none") or not key.endswith("_level")
        draft.explain_again(key, "no counterpart", note="with a critic, rewards are not normalised", learns=not off)
    for ours, key in (("algo.ddof", f"{_NORM}.std_unbiased"), ("algo.advantage_eps", f"{_NORM}.eps")):
        draft.settings.pop(ours, None)
        if key not in draft.keys:
            draft.rows.pop(key, None)


def _advantages(draft: Draft) -> None:
    for key in ("actor.adv_norm", "actor.adv_norm.mean_level", "actor.adv_norm.std_level"):
        off = draft.value(key) in (None, "none")
        draft.explain(key, "default here" if off else "no counterpart", note=reason("ADV_NORM"), learns=not off)
    draft.unused("without a critic it does nothing", "actor.gae_lambda")
    names = ("mean_level", "std_level", "mean_leave1out")
    mean, std, leaves_one_out = (draft.value(f"{_NORM}.{name}") for name in names)
    keys = (*(f"{_NORM}.{name}" for name in names), _NORM)
    if mean != "group" or std not in ("group", "batch", "none", None):
        note = "the baseline is always the mean of the group"
        for key in keys:
            draft.explain(key, "no counterpart", "algo.normalize: group, the default", note, True)
        if not draft.has(*keys):
            draft.always("algo.normalize", "none", "normalises rewards only if reward_norm is set")
    elif std in ("group", "batch"):
        draft.put("algo.normalize", std, *keys)
    else:
        draft.put("algo.normalize", "leave-one-out" if leaves_one_out else "none", *keys)
