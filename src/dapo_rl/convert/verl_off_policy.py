"""verl's corrections of off-policy tokens: importance weights, rejection, and `bypass_mode`."""

from __future__ import annotations

from typing import Any

from dapo_rl.base.quote import shown
from dapo_rl.config.peers import reason
from dapo_rl.config.peers.values import written
from dapo_rl.convert import shared
from dapo_rl.convert.draft import Draft
from dapo_rl.convert.shared import ACTOR
from dapo_rl.errors import UserError

_NOW = "algorithm.rollout_correction"
_OFF = (None, False, "null")
_STATISTICS = {
    **{"token": ("token", False), "sequence": ("product", False), "geometric": ("geometric", False)},
    **{"token_k1": ("token", True), "seq_sum_k1": ("product", True), "seq_mean_k1": ("geometric", True)},
    "seq_mean_k3": ("k3", False),
}
"""What `rollout_rs` names: the statistic here, and whether its bounds are those of the inverse ratio, because k1 is
−log of the ratio."""


def verl_off_policy(draft: Draft) -> None:
    """`tis_imp_ratio_cap`, later `algorithm.rollout_is…`, now `algorithm.rollout_correction.…`."""
    cap = draft.number(key := f"{ACTOR}.tis_imp_ratio_cap")
    if cap is not None and cap > 0:
        shared.put_importance(draft, cap, "truncate", key)
    else:
        draft.unused("no importance weights", key)
    _weights(draft, _NOW, "rollout_is")
    _weights(draft, "algorithm", "rollout_is_level")
    rejects = _rejection(draft)
    if rejects:
        draft.put("algo.reject", rejects)
    _bypass(draft, bool(rejects))


def _weights(draft: Draft, prefix: str, level_name: str) -> None:
    names = ("rollout_is", "rollout_is_threshold", level_name, "rollout_is_mode")
    used, bound, level, mode = keys = tuple(f"{prefix}.{name}" for name in names)
    normalize, low = f"{prefix}.rollout_is_batch_normalize", f"{prefix}.rollout_is_threshold_lower"
    if draft.value(used) in _OFF:
        draft.unused("no importance weights", *keys, normalize, low)
        return
    if draft.value(f"{prefix}.bypass_mode") is True:
        draft.unused("with bypass_mode the ratio of the loss contains them", *keys, normalize, low)
        return
    how = draft.value(level) or "token"
    if how not in ("token", "sequence"):
        draft.no_counterpart(reason("GEOMETRIC"), *keys, normalize, low)
        return
    floor, cap = _bounds(draft, bound)
    cap = 2.0 if cap is None else cap
    masks = draft.value(mode) == "mask"
    if masks and floor is None and draft.has(low):
        floor = draft.number_or(1 / cap, low)
    elif not masks:
        draft.unused("weights that are truncated have no lower bound", low)
    shared.put_importance(draft, cap, "mask" if masks or floor else "truncate", *keys, level=how, floor=floor)
    if floor is not None:
        draft.explain_again(bound, "same", f"algo.importance_floor: {floor:g}, algo.importance_cap: {cap:g}")
        draft.explain(low, "same", f"algo.importance_floor: {floor:g}")
    if draft.has(normalize):
        note = "over each mini-batch; theirs over the step, before tokens are rejected"
        draft.put("algo.importance_normalize", bool(draft.value(normalize)), normalize, note=note)


def _rejection(draft: Draft) -> dict[str, Any]:
    """`algo.reject`, with the rows of the settings that it follows from."""
    names, upper, lower = f"{_NOW}.rollout_rs", f"{_NOW}.rollout_rs_threshold", f"{_NOW}.rollout_rs_threshold_lower"
    rejects: dict[str, Any] = {}
    keys = (names, upper, lower)
    if draft.value(names) in _OFF:
        draft.unused("nothing is rejected by it", *keys)
    elif (found := _statistics(draft, names, upper, lower)) is None:
        draft.no_counterpart(reason("CORRECTIONS"), *keys)
    else:
        rejects |= found
        for key in keys:
            draft.explain(key, "same", f"algo.reject: {written(found)}")
    for veto in (f"{_NOW}.rollout_token_veto_threshold", "algorithm.rollout_is_veto_threshold"):
        if draft.value(veto) in _OFF:
            draft.unused("no veto", veto)
        else:
            rejects["veto"] = draft.number(veto)
            draft.explain(veto, "same", f"algo.reject.veto: {rejects['veto']:g}")
    return rejects


def _statistics(draft: Draft, names: str, upper: str, lower: str) -> dict[str, Any] | None:
    """Those of `rollout_rs` with their bounds; None if one is missing here, or has no bound."""
    listed = _listed(draft.value(names))
    bounds = _listed(draft.value(upper))
    if not listed or not set(listed) <= set(_STATISTICS) or len(bounds) not in (1, len(listed)):
        return None
    found: dict[str, Any] = {}
    for name, text in zip(listed, bounds * len(listed) if len(bounds) == 1 else bounds, strict=True):
        statistic, inverse = _STATISTICS[name]
        low, high = _pair(text, upper)
        if statistic == "k3":
            found[statistic] = high
            continue
        low = low or draft.number_or(1 / high, lower)
        found[statistic] = [round(1 / high, 12), round(1 / low, 12)] if inverse else [low, high]
    return found


def _listed(value: Any) -> list[str]:
    return [] if value is None else [part.strip() for part in str(value).split(",") if part.strip()]


def _bypass(draft: Draft, rejects: bool) -> None:
    """`bypass_mode`: the ratio is relative to the policy that sampled, by the engine's log-probabilities."""
    key, loss = f"{_NOW}.bypass_mode", f"{_NOW}.loss_type"
    used = draft.value(key)
    if used is True and draft.value(loss) not in (None, "ppo_clip"):
        draft.no_counterpart("with bypass_mode, the loss is the clipped one", loss)
    draft.unused("the clipped loss, or without bypass_mode nothing", loss)
    if rejects and used is not True:
        draft.put("algo.proximal", "recomputed")
    recomputed = draft.settings.get("algo.proximal") == "recomputed"
    if used is True and not recomputed:
        draft.put("algo.proximal", "behaviour", key)
    elif used is False or recomputed:
        draft.unused("without it, log-probabilities are recomputed", key)


def _bounds(draft: Draft, key: str) -> tuple[float | None, float | None]:
    """A cap, or IcePop's bounds, written `0.5_5.0`."""
    value = draft.value(key)
    return (None, None) if value in _OFF else _pair(str(value), key)


def _pair(text: str, key: str) -> tuple[float | None, float]:
    """The lower bound, if there is one, and the upper."""
    low, separator, high = text.partition("_")
    try:
        numbers = [float(part) for part in ((low, high) if separator else (text,))]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < 1e30 for number in numbers):
        raise UserError(f"{key}: expected a positive number, or two as in 0.5_2.0, got {shown(text)}")
    return (numbers[0] if separator else None), numbers[-1]
