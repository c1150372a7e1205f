"""The correction of off-policy tokens by importance weights, under the names of other libraries."""

from __future__ import annotations

import re
from typing import Any

from dapo_rl.convert.draft import Draft
from dapo_rl.convert.settings import reason
from dapo_rl.convert.shared import ACTOR
from dapo_rl.objectives import LOSSES

_TOKEN_MODES: dict[str | None, str] = {"token_truncate": "truncate", "token_mask": "mask"}
"""Their modes with a weight for each token."""
UNCAPPED = 1e9
"""The cap for weights without one: ratios are at most exp(20)."""


def verl_importance(draft: Draft) -> None:
    """`tis_imp_ratio_cap`, later `algorithm.rollout_is…`, now `algorithm.rollout_correction.…`."""
    cap = draft.number(key := f"{ACTOR}.tis_imp_ratio_cap")
    if cap is not None and cap > 0:
        _put(draft, cap, "truncate", key)
    else:
        draft.unused("no importance weights", key)
    for prefix, level_name in (("algorithm.rollout_correction", "rollout_is"), ("algorithm", "rollout_is_level")):
        names = ("rollout_is", "rollout_is_threshold", level_name, "rollout_is_mode")
        used, bound, level, mode = keys = tuple(f"{prefix}.{name}" for name in names)
        if draft.value(used) in (None, False, "null"):
            draft.unused("no importance weights", *keys)
        elif draft.value(f"{prefix}.bypass_mode") is True:
            draft.unused("with bypass_mode the ratio of the loss contains them", *keys)
        elif (bounds := _two_sided(draft.value(bound))) is not None:
            _put(draft, bounds[1], "mask", used, level, mode)
            note = f"IcePop masks ratios outside [{bounds[0]:g}, {bounds[1]:g}]; the two-sided bound is not supported: "
            draft.explain(bound, "differs", f"algo.importance_cap: {bounds[1]:g}", f"{note}none is masked below", True)
        elif draft.value(level) in ("token", None):
            _put(draft, draft.number_or(2.0, bound), "mask" if draft.value(mode) == "mask" else "truncate", *keys)
        else:
            draft.no_counterpart(reason("PER_TOKEN"), *keys)
    _bypass(draft)


def _bypass(draft: Draft) -> None:
    """`bypass_mode`: the ratio is relative to the policy that sampled, by the engine's log-probabilities."""
    key, loss = "algorithm.rollout_correction.bypass_mode", "algorithm.rollout_correction.loss_type"
    used = draft.value(key)
    if used is True and draft.value(loss) not in (None, "ppo_clip"):
        draft.no_counterpart("with bypass_mode, the loss is the clipped one", loss)
    draft.unused("the clipped loss, or without bypass_mode nothing", loss)
    recomputed = draft.settings.get("algo.proximal") == "recomputed"
    if used is True and not recomputed:
        draft.put("algo.proximal", "behaviour", key)
    elif used is False or recomputed:
        draft.unused("without it, log-probabilities are recomputed", key)


def recompute_for_sequences(draft: Draft) -> None:
    """The bounds of a sequence's ratio are narrower than the difference between the engine and the trainer."""
    entry = LOSSES.get(draft.settings.get("algo.loss", "dapo"))
    if entry is not None and entry.ratio is not None and "algo.proximal" not in draft.settings:
        why = "bounds of a sequence's ratio are below the difference between engine and trainer"
        draft.put("algo.proximal", "recomputed")
        draft.add_row("(algo.proximal)", "", "same", "algo.proximal: recomputed", why)


def _two_sided(value: Any) -> tuple[float, float] | None:
    """IcePop's bounds, written `0.5_4.0`."""
    match = re.fullmatch(r"([\d.]{1,20})_([\d.]{1,20})", value) if isinstance(value, str) else None
    try:
        bounds = (float(match[1]), float(match[2])) if match else None
    except ValueError:
        return None
    return bounds if bounds and bounds[1] > 0 else None


def trl_importance(draft: Draft) -> None:
    """`vllm_importance_sampling_…`, whose default has one weight for a sequence."""
    names = ("correction", "mode", "cap", "clip_max")
    switch, mode, cap, high = keys = tuple(f"vllm_importance_sampling_{name}" for name in names)
    if not draft.value("use_vllm") or not draft.value(switch):
        draft.unused("without use_vllm and the correction it does nothing", *keys)
    elif how := _token_mode(draft, mode, *keys):
        unset = UNCAPPED if draft.has(high) else 3.0
        _put(draft, draft.number_or(unset, cap if draft.value(cap) is not None else high), how, *keys)


def swift_importance(draft: Draft) -> None:
    mode, bound = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"
    if draft.value(mode) is None:
        draft.unused("without rollout_importance_sampling_mode it does nothing", mode, bound)
    elif how := _token_mode(draft, mode, mode, bound):
        _put(draft, draft.number_or(2.0, bound), how, mode, bound)


def _token_mode(draft: Draft, mode: str, switch: str, *options: str) -> str | None:
    """How weights are bounded here, if there is one for each token; otherwise explains that there is no counterpart."""
    how = _TOKEN_MODES.get(draft.name(mode))
    if how is None:
        draft.no_counterpart(reason("PER_TOKEN"), switch)
        draft.no_counterpart(reason("PER_TOKEN"), *options, learns=False)
    return how


def areal_importance(draft: Draft) -> None:
    """`use_decoupled_loss`; AReaL masks tokens above the cap, now `rejection_sampling`."""
    decoupled, recompute, mode = "actor.use_decoupled_loss", "actor.recompute_logprob", "actor.behave_imp_weight_mode"
    caps = ("actor.behav_imp_weight_cap", "actor.behave_imp_weight_cap")
    cap = next((value for key in caps if (value := draft.number(key)) is not None), UNCAPPED)
    if draft.value(decoupled):
        if not _areal_rejection(draft):
            if (how := (_TOKEN_MODES | {None: "mask"}).get(draft.name(mode))) is not None:
                _put(draft, cap, how, decoupled, *caps, mode)
            else:
                draft.no_counterpart(reason("PER_TOKEN"), decoupled, *caps, mode)
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


def _areal_rejection(draft: Draft) -> bool:
    """`rejection_sampling` by the ratio of a token is a cap of its weight. Tells whether it is one."""
    prefix = "actor.rejection_sampling"
    metric, level, action, upper, agg, lower = (
        f"{prefix}.{name}" for name in ("metric", "level", "action", "upper", "agg", "lower")
    )
    per_token = draft.value(metric) in (None, "ratio") and draft.value(level) in (None, "token")
    cap = draft.number(upper)
    if not per_token or cap is None or cap <= 0:
        return False
    keys = (metric, level, action, upper, agg, prefix)
    for key in keys:
        draft.rows.pop(key, None)
    _put(draft, cap, "truncate" if draft.value(action) == "clamp" else "mask", *keys)
    if draft.number(lower):
        draft.explain_again(lower, "differs", note="importance weights have no lower bound", learns=True)
    else:
        draft.explain_again(lower, "default here", note="no lower bound")
    return True


def _put(draft: Draft, cap: float, mode: str, *keys: str) -> None:
    draft.put("algo.proximal", "recomputed")
    draft.put("algo.importance_mode", mode)
    draft.put("algo.importance_cap", cap, *keys, note="with algo.proximal: recomputed")
