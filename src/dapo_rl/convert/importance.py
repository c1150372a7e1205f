"""The correction of off-policy tokens by importance weights, under the names of other libraries."""

from __future__ import annotations

import re
from typing import Any

from dapo_rl.convert.draft import Draft
from dapo_rl.convert.settings.reasons import PER_TOKEN
from dapo_rl.convert.settings.verl import ACTOR
from dapo_rl.objectives import LOSSES

_TOKEN_MODES = {"token_truncate": "truncate", "token_mask": "mask"}
"""Their modes with a weight for each token."""
UNCAPPED = 1e9
"""The cap for weights without one: ratios are at most exp(20)."""


def verl_importance(draft: Draft) -> None:
    """`tis_imp_ratio_cap`, later `algorithm.rollout_is…`, now `algorithm.rollout_correction.…`."""
    cap = draft.number(key := f"{ACTOR}.tis_imp_ratio_cap")
    if cap is not None and cap > 0:
        _put(draft, cap, "truncate", key)
    else:
        draft.explain(key, "default here", note="no importance weights")
    for prefix, level in (("algorithm.rollout_correction", "rollout_is"), ("algorithm", "rollout_is_level")):
        used, bound, mode = f"{prefix}.rollout_is", f"{prefix}.rollout_is_threshold", f"{prefix}.rollout_is_mode"
        keys = (used, bound, f"{prefix}.{level}", mode)
        if draft.value(used) in (None, False, "null"):
            for name in keys:
                draft.explain(name, "default here", note="no importance weights")
        elif draft.value(f"{prefix}.bypass_mode") is True:
            for name in keys:
                draft.explain(name, "default here", note="with bypass_mode the ratio of the loss contains them")
        elif (bounds := _two_sided(draft.value(bound))) is not None:
            _put(draft, bounds[1], "mask", used, f"{prefix}.{level}", mode)
            note = f"IcePop masks ratios outside [{bounds[0]:g}, {bounds[1]:g}]; the two-sided bound is not supported: "
            draft.explain(bound, "differs", f"algo.importance_cap: {bounds[1]:g}", f"{note}none is masked below", True)
        elif draft.value(f"{prefix}.{level}") in ("token", None):
            threshold = draft.number(bound)
            how = "mask" if draft.value(mode) == "mask" else "truncate"
            _put(draft, 2.0 if threshold is None else threshold, how, *keys)
        else:
            for name in keys:
                draft.explain(name, "no counterpart", note=PER_TOKEN, learns=True)
    _bypass(draft)


def _bypass(draft: Draft) -> None:
    """`bypass_mode`: the ratio is relative to the policy that sampled, by the engine's log-probabilities."""
    key, loss = "algorithm.rollout_correction.bypass_mode", "algorithm.rollout_correction.loss_type"
    used = draft.value(key)
    if used is True and draft.value(loss) not in (None, "ppo_clip"):
        draft.explain(loss, "no counterpart", note="with bypass_mode, the loss is the clipped one", learns=True)
    draft.explain(loss, "default here", note="the clipped loss, or without bypass_mode nothing")
    if used is True and draft.settings.get("algo.proximal") != "recomputed":
        draft.put("algo.proximal", "behaviour", key)
    elif used is False or draft.settings.get("algo.proximal") == "recomputed":
        draft.explain(key, "default here", note="without it, log-probabilities are recomputed")


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
    switch, mode, cap, high = (f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "cap", "clip_max"))
    keys = (switch, mode, cap, high)
    if not draft.value("use_vllm") or not draft.value(switch):
        for name in keys:
            draft.explain(name, "default here", note="without use_vllm and the correction it does nothing")
    elif (how := _TOKEN_MODES.get(_word(draft.value(mode)))) is None:
        draft.explain(switch, "no counterpart", note=PER_TOKEN, learns=True)
        for name in keys[1:]:
            draft.explain(name, "no counterpart", note=PER_TOKEN)
    else:
        bound = draft.number(cap if draft.value(cap) is not None else high)
        unset = UNCAPPED if draft.has(high) else 3.0
        _put(draft, unset if bound is None else bound, how, *keys)


def swift_importance(draft: Draft) -> None:
    mode, bound = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"
    if draft.value(mode) is None:
        for name in (mode, bound):
            draft.explain(name, "default here", note="without rollout_importance_sampling_mode it does nothing")
    elif (how := _TOKEN_MODES.get(_word(draft.value(mode)))) is None:
        draft.explain(mode, "no counterpart", note=PER_TOKEN, learns=True)
        draft.explain(bound, "no counterpart", note=PER_TOKEN)
    else:
        cap = draft.number(bound)
        _put(draft, 2.0 if cap is None else cap, how, mode, bound)


def areal_importance(draft: Draft) -> None:
    """`use_decoupled_loss`; AReaL masks tokens above the cap, now `rejection_sampling`."""
    keys = ("actor.behav_imp_weight_cap", "actor.behave_imp_weight_cap")
    cap = next((value for key in keys if (value := draft.number(key)) is not None), None)
    mode = draft.value("actor.behave_imp_weight_mode")
    if not draft.value("actor.use_decoupled_loss"):
        for key in [key for key in draft.given if key.startswith("actor.rejection_sampling")]:
            draft.explain_again(key, "default here", note="without use_decoupled_loss it does nothing")
    elif _areal_rejection(draft):
        draft.explain("actor.use_decoupled_loss", "same", "algo.proximal: recomputed")
        draft.explain("actor.recompute_logprob", "same", "algo.proximal: recomputed")
        return
    if draft.value("actor.use_decoupled_loss"):
        explained = ("actor.use_decoupled_loss", *keys, "actor.behave_imp_weight_mode")
        if mode is None or _word(mode) in _TOKEN_MODES:
            how = _TOKEN_MODES.get(_word(mode), "mask")
            _put(draft, UNCAPPED if cap is None else cap, how, *explained)
        else:
            for name in explained:
                draft.explain(name, "no counterpart", note=PER_TOKEN, learns=True)
        draft.explain("actor.recompute_logprob", "same", "algo.proximal: recomputed")
        return
    for name in (*keys, "actor.use_decoupled_loss", "actor.behave_imp_weight_mode"):
        draft.explain(name, "default here", note="without use_decoupled_loss it does nothing")
    if draft.value("actor.recompute_logprob"):
        draft.put("algo.proximal", "recomputed", "actor.recompute_logprob")
    elif draft.value("actor.importance_sampling_level") == "sequence":
        note = "the engine's log-probabilities would use up the clip bounds of a sequence's ratio"
        draft.explain("actor.recompute_logprob", "differs", "algo.proximal: auto, recomputed", note, True)


def _areal_rejection(draft: Draft) -> bool:
    """`rejection_sampling` by the ratio of a token is a cap of its weight. Tells whether it is one."""
    prefix = "actor.rejection_sampling"
    metric, level, action, upper, lower, agg = (
        f"{prefix}.{name}" for name in ("metric", "level", "action", "upper", "lower", "agg")
    )
    per_token = draft.value(metric) in (None, "ratio") and draft.value(level) in (None, "token")
    cap = draft.number(upper)
    if not per_token or cap is None or cap <= 0:
        return False
    how = "truncate" if draft.value(action) == "clamp" else "mask"
    for key in (metric, level, action, upper, agg, prefix):
        draft.explained.pop(key, None)
    _put(draft, cap, how, metric, level, action, upper, agg, prefix)
    if draft.number(lower):
        draft.explain_again(lower, "differs", note="importance weights have no lower bound", learns=True)
    else:
        draft.explain_again(lower, "default here", note="no lower bound")
    return True


def _put(draft: Draft, cap: float, mode: str, *keys: str) -> None:
    draft.put("algo.proximal", "recomputed")
    draft.put("algo.importance_mode", mode)
    draft.put("algo.importance_cap", cap, *keys, note="with algo.proximal: recomputed")


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""
