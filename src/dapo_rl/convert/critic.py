"""The critic of verl's and AReaL's PPO, and the KL penalty in the reward."""

from __future__ import annotations

from typing import Any

from dapo_rl.choices import KL_KINDS
from dapo_rl.convert.draft import Draft
from dapo_rl.convert.settings import reason
from dapo_rl.convert.settings.values import written
from dapo_rl.convert.shared import ACTOR, MODEL
from dapo_rl.errors import UserError
from dapo_rl.objectives import GAE

_VERL_KINDS = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
_STRAIGHT_THROUGH = {"low_var_kl+": "k3+", "k3+": "k3+", "kl+": "k1+", "k1+": "k1+", "mse+": "k2", "k2+": "k2"}
VERL_KL_KINDS: dict[Any, str] = {None: "k3", **_VERL_KINDS, **_STRAIGHT_THROUGH}
"""verl's names of the KL estimators, in the loss and in the reward."""
KL_NAMES = f"the estimators are {', '.join(KL_KINDS)}"
_BOOTSTRAP = (
    "truncated responses end with their reward here, and with the critic's value there; same if none is truncated"
)


def verl_critic(draft: Draft) -> None:
    """With `algorithm.adv_estimator=gae`, which is verl's default."""
    if draft.value("algorithm.adv_estimator") != GAE:
        keys = (key for key in draft.keys if key.startswith("critic."))
        draft.unused("without adv_estimator=gae it does nothing", "algorithm.lam", "trainer.critic_warmup", *keys)
        return
    _refuse_discount(draft, "algorithm.gamma")
    _one_lambda(draft, "algorithm.lam")
    draft.always("critic.whiten", True, "whitens the advantages of GAE")
    draft.put("critic.lr", draft.number("critic.optim.lr"), "critic.optim.lr")
    draft.put("critic.value_clip", draft.number("critic.cliprange_value"), "critic.cliprange_value")
    first = draft.count(key := "trainer.critic_warmup") or 0
    late, early = f"its step {first} is the first to update the policy", "the policy is updated from the start"
    draft.put("critic.pretrain_steps", max(0, first - 1), key, note=late if first > 1 else early)
    if (draft.value("critic.loss_agg_mode") or "token-mean") != "token-mean":
        draft.no_counterpart("its loss averages over tokens", "critic.loss_agg_mode")
    _start(draft, "critic.model.path", f"{MODEL}.path")
    _share_with_policy(draft, ACTOR)


def verl_kl_in_reward(draft: Draft) -> None:
    """`algorithm.use_kl_in_reward`, with a critic."""
    names = ("use_kl_in_reward", "kl_ctrl.kl_coef", "kl_penalty", "kl_ctrl.type")
    used, coef, kind, control = keys = tuple(f"algorithm.{name}" for name in names)
    if not draft.value(used):
        draft.unused("no KL penalty in the reward", *keys)
        return
    if draft.value("algorithm.adv_estimator") != GAE:
        draft.no_counterpart(reason("KL_IN_LOSS"), used)
        draft.no_counterpart(reason("KL_IN_LOSS"), coef, kind, control, learns=False)
        return
    if draft.settings.get("algo.kl_coef"):
        for key in (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"):
            draft.explain_again(key, "no counterpart", note="there is one KL penalty, here in the reward", learns=True)
    draft.put("algo.kl_in", "reward", used)
    draft.put("algo.kl_coef", draft.number(coef), coef)
    _kl_kind(draft, kind, VERL_KL_KINDS)
    fixed = draft.value(control) in (None, "fixed")
    note = "the weight of the KL penalty is constant"
    draft.explain(control, "same" if fixed else "no counterpart", note=note, learns=not fixed)


def has_areal_critic(draft: Draft) -> bool:
    """AReaL has a critic if its file has a section of it."""
    return any(key.startswith("critic.") and draft.value(key) is not None for key in draft.keys)


def areal_critic(draft: Draft) -> None:
    _refuse_discount(draft, "actor.discount")
    draft.always("algo.advantage", GAE, "has a critic")
    _one_lambda(draft, "actor.gae_lambda", differs=_BOOTSTRAP)
    draft.always("critic.pretrain_steps", 0, "trains the policy from the first step")
    if (lr := draft.number(key := "critic.optimizer.lr")) is not None:
        draft.put("critic.lr", lr, key)
    draft.put("critic.value_clip", draft.number("critic.eps_clip"), "critic.eps_clip")
    _start(draft, "critic.path", "actor.path")
    _share_with_policy(draft, "actor")
    keys = ("actor.adv_norm", "actor.adv_norm.mean_level", "actor.adv_norm.std_level")
    levels = [draft.name(key) for key in keys[1:]]
    if set(levels) <= {None, "none"}:
        draft.put("critic.whiten", False, *keys)
    elif levels == ["batch", "batch"]:
        draft.put("critic.whiten", True, *keys)
    else:
        draft.no_counterpart("advantages are normalised over the step, or not", *keys)


def areal_kl(draft: Draft, has_critic: bool) -> None:
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
        _kl_kind(draft, kind, {"k1": "k1", "k2": "k2", "k3": "k3"})


def _refuse_discount(draft: Draft, key: str) -> None:
    """GAE with another γ has other targets for the critic and other advantages."""
    if (gamma := draft.number(key)) not in (None, 1):
        raise UserError(f"{key}: {reason('NO_DISCOUNT')} here, got {gamma:g}; set it to 1")


def _one_lambda(draft: Draft, key: str, differs: str = "") -> None:
    value = draft.number(key)
    draft.put("critic.lambda_critic", value)
    note = "; ".join(part for part in (reason("ONE_LAMBDA"), differs) if part)
    draft.put("critic.lambda_policy", value, key, note=note, learns=bool(differs))


def _kl_kind(draft: Draft, key: str, names: dict[Any, str]) -> None:
    if (ours := names.get(draft.name(key))) is not None:
        draft.put("algo.kl_kind", ours, key)
    else:
        draft.explain(key, "no counterpart", "algo.kl_kind: k3", KL_NAMES, True)


def _start(draft: Draft, key: str, policy: str) -> None:
    same = draft.value(key) in (None, draft.value(policy))
    draft.explain(key, "same" if same else "no counterpart", note=reason("STARTS"), learns=not same)


def _share_with_policy(draft: Draft, policy: str) -> None:
    """Settings that the critic shares with the policy here, where the other library has two of each."""
    note = reason("OF_POLICY")
    shared = [(key, entry.ours) for key, entry in draft.library.settings.items() if entry.note == note]
    for key, ours in shared:
        assert ours is not None
        name = key.removeprefix("critic.")
        other = f"{policy}.{name}"
        if _effective(name, draft.value(key)) == _effective(name, draft.value(other)):
            draft.explain(key, "same" if draft.has(key) else "default here", note=f"{note} ({ours})")
        else:
            draft.explain(key, "differs", f"{ours}: {written(draft.setting(ours))}", note, True)


_UNSET: dict[str, Any] = {
    "ppo_epochs": 1,
    "grad_clip": 1.0,
    "optim.betas": [0.9, 0.999],
    "optimizer.type": "adam",
    "optimizer.weight_decay": 0.01,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "optimizer.gradient_clipping": 1.0,
    "optimizer.warmup_steps_proportion": 0.001,
}
"""Values of shared settings that are left out."""


def _effective(name: str, value: Any) -> Any:
    """-1, 0, null and `constant` all leave a warm-up or a schedule as it is."""
    value = _UNSET.get(name) if value is None else value
    return None if value in (0, -1, "constant") else value
