"""AReaL's settings that only convert together: data, rewards, advantages, clipping, the critic, importance weights."""

from __future__ import annotations

from dapo_rl.config.peers import reason
from dapo_rl.config.peers.values import written
from dapo_rl.convert import shared
from dapo_rl.convert.draft import Draft
from dapo_rl.convert.turns import areal_turns
from dapo_rl.objectives import GAE

_NORM, OPTIMIZER = "actor.reward_norm", "actor.optimizer"
OWN_REWARD = "its script passes the reward function, which is not part of the file: check reward.verifier"
_BOOTSTRAP = (
    "truncated responses end with their reward here, and with the critic's value there; same if none is truncated"
)


def derive_areal(draft: Draft) -> None:
    if not draft.has("actor.eps_clip_higher") or draft.value("actor.eps_clip_higher") is None:
        bound = draft.settings.get("algo.clip_low", 0.2)
        draft.settings.pop("algo.clip_high", None)
        draft.always("algo.clip_high", bound, "eps_clip_higher is eps_clip unless set")
        draft.explain_again("actor.eps_clip_higher", "same", f"algo.clip_high: {bound}", "null: the same as eps_clip")
    if draft.value(key := "actor.use_sapo_loss"):
        draft.put("algo.loss", "sapo", key)
    else:
        draft.unused("the loss is not sapo", key)
    shared.loss_options(draft)
    shared.without_dual_clip(draft, "actor.c_clip", applies=True)
    _splits(draft)
    _dynamic_sampling(draft)
    _rewards(draft)
    has_critic = _has_critic(draft)
    if has_critic:
        _critic(draft)
        _leave_rewards(draft)
    else:
        _advantages(draft)
    _kl(draft, has_critic)
    _importance(draft)
    if "train.steps" in draft.settings:
        draft.unused("total_train_steps is given, and is what counts", "total_train_epochs")
    else:
        shared.steps_from_epochs(draft, "total_train_epochs")
    share = f"{OPTIMIZER}.warmup_steps_proportion"
    shared.warmup_from_share(draft, draft.number_or(0.0, share), share, whole=int)
    shared.adam_betas(draft, f"{OPTIMIZER}.beta1", f"{OPTIMIZER}.beta2")
    switch, rank, alpha, targets = (
        f"actor.{name}" for name in ("use_lora", "lora_rank", "lora_alpha", "target_modules")
    )
    shared.lora(draft, bool(draft.value(switch)), (rank,), alpha, targets, 32, switch)
    shared.limit_prompts(draft)
    mode = draft.value("stats_logger.wandb.mode")
    areal_turns(draft)
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


def _has_critic(draft: Draft) -> bool:
    """AReaL has a critic if its file has a section of it."""
    return any(key.startswith("critic.") and draft.value(key) is not None for key in draft.keys)


def _critic(draft: Draft) -> None:
    shared.refuse_discount(draft, "actor.discount")
    draft.always("algo.advantage", GAE, "has a critic")
    shared.one_lambda(draft, "actor.gae_lambda", differs=_BOOTSTRAP)
    draft.always("critic.pretrain_steps", 0, "trains the policy from the first step")
    if (lr := draft.number(key := "critic.optimizer.lr")) is not None:
        draft.put("critic.lr", lr, key)
    draft.put("critic.value_clip", draft.number("critic.eps_clip"), "critic.eps_clip")
    shared.critic_start(draft, "critic.path", "actor.path")
    shared.share_with_policy(draft, "actor")
    keys = ("actor.adv_norm", "actor.adv_norm.mean_level", "actor.adv_norm.std_level")
    levels = [draft.name(key) for key in keys[1:]]
    if set(levels) <= {None, "none"}:
        draft.put("critic.whiten", False, *keys)
    elif levels == ["batch", "batch"]:
        draft.put("critic.whiten", True, *keys)
    else:
        draft.no_counterpart("advantages are normalised over the step, or not", *keys)


def _kl(draft: Draft, has_critic: bool) -> None:
    """`actor.kl_ctl`, the weight of a penalty in the reward."""
    coef, kind = "actor.kl_ctl", "actor.kl_estimator"
    weight = draft.number(coef) or 0.0
    if weight == 0:
        draft.unused("no KL penalty in the reward", coef, kind)
    elif not has_critic:
        draft.no_counterpart(reason("KL_IN_LOSS"), coef)
        draft.unused("without a critic it does nothing", kind)
    else:
        draft.put("algo.kl_in", "reward")
        draft.put("algo.kl_coef", weight, coef, note="with algo.kl_in: reward")
        shared.kl_kind(draft, kind, {"k1": "k1", "k2": "k2", "k3": "k3"})


def _importance(draft: Draft) -> None:
    """`use_decoupled_loss`; AReaL masks tokens above the cap, now `rejection_sampling`."""
    decoupled, recompute, mode = "actor.use_decoupled_loss", "actor.recompute_logprob", "actor.behave_imp_weight_mode"
    caps = ("actor.behav_imp_weight_cap", "actor.behave_imp_weight_cap")
    cap = next((value for key in caps if (value := draft.number(key)) is not None), shared.UNCAPPED)
    if draft.value(decoupled):
        if not _rejection(draft):
            name = draft.name(mode) or "token_mask"
            if name.startswith("sequence"):
                draft.no_counterpart(reason("GEOMETRIC"), decoupled, *caps, mode)
            else:
                shared.put_mode(draft, mode, cap, None, decoupled, *caps, mode, name=name)
        for key in (decoupled, recompute):
            draft.explain(key, "same", "algo.proximal: recomputed")
        return
    note = "without use_decoupled_loss it does nothing"
    for key in [key for key in draft.keys if key.startswith("actor.rejection_sampling")]:
        draft.explain_again(key, "default here", note=note)
    draft.unused(note, *caps, decoupled, mode)
    if draft.value(recompute):
        draft.put("algo.proximal", "recomputed", recompute)
    elif draft.value("actor.importance_sampling_level") == "sequence":
        note = "the engine's log-probabilities would use up the clip bounds of a sequence's ratio"
        draft.explain(recompute, "differs", "algo.proximal: auto, recomputed", note, True)


def _rejection(draft: Draft) -> bool:
    """`rejection_sampling` by the ratio of a token bounds its weight, and by the mean k3 of a sequence rejects that.
    Tells whether it is one of them."""
    prefix = "actor.rejection_sampling"
    metric, level, action, upper, agg, lower = keys = tuple(
        f"{prefix}.{name}" for name in ("metric", "level", "action", "upper", "agg", "lower")
    )
    per_token = draft.value(level) in (None, "token")
    how = draft.value(metric), "clamp" if draft.value(action) == "clamp" else "mask"
    most, least = draft.number(upper), draft.number(lower) or None
    if most is None or most <= 0:
        return False
    if how[0] in (None, "ratio") and per_token:
        _forget(draft, *keys, prefix)
        mode = "truncate" if how[1] == "clamp" else "mask"
        shared.put_importance(draft, most, mode, *keys[:5], prefix, floor=least)
        note = "no lower bound" if least is None else ""
        draft.explain(
            lower, "same" if least else "default here", f"algo.importance_floor: {least}" if least else "", note
        )
    elif how == ("kl_k3", "mask") and not per_token and draft.value(agg) in (None, "mean"):
        _forget(draft, *keys, prefix)
        shared.put_importance(draft, shared.UNCAPPED, "truncate")
        draft.put("algo.reject", {"k3": most}, *keys[:5], prefix, note="samples by their mean k3")
        draft.explain(lower, "default here", note="k3 has no lower bound")
    else:
        return False
    return True


def _forget(draft: Draft, *keys: str) -> None:
    for key in keys:
        draft.rows.pop(key, None)
