"""Teachers of other libraries: on-policy distillation whose estimate of the KL divergence is part of the advantages."""

from __future__ import annotations

from fnmatch import fnmatchcase

from dapo_rl.convert.draft import Draft
from dapo_rl.convert.shared import ACTOR
from dapo_rl.convert.unsupported import why_unsupported
from dapo_rl.errors import UserError
from dapo_rl.objectives import DISTILL

LOSS = "distillation.distillation_loss"
PATHS = "distillation.teacher_model*.model_path"
_CLAMPS = ("loss_max_clamp", "log_prob_min_clamp")


def verl_teacher(draft: Draft) -> None:
    """`distillation.*`. A loss that is not a policy gradient, or several teachers, have no counterpart."""
    options = [key for key in draft.keys if key.startswith("distillation.")]
    if draft.value("distillation.enabled") is not True:
        draft.unused("without distillation.enabled it does nothing", *options)
        return
    keys = [key for key in options if fnmatchcase(key, PATHS)]
    names = list(dict.fromkeys(str(draft.value(key)) for key in keys if draft.value(key) is not None))
    if len(names) != 1:
        what = "several teachers" if names else "no model_path of a teacher"
        raise UserError(why_unsupported("TEACHER", f"distillation with {what}"))
    mode, by_gradient = draft.value(key := f"{LOSS}.loss_mode") or "k3", f"{LOSS}.use_policy_gradient"
    if draft.value(by_gradient) is False:
        raise UserError(why_unsupported("TEACHER", f"{by_gradient}=False, {key}={mode}"))
    draft.put("teacher.name", names[0], "distillation.enabled", *keys)
    _without_kl(draft, f"{ACTOR}.kl_loss_coef", f"{ACTOR}.use_kl_loss", "algorithm.kl_ctrl.kl_coef")
    draft.explain(by_gradient, "same", note="the estimate of the KL divergence is part of the advantages")
    same = mode in ("k1", "kl")
    note = "the estimate is log π − log π_teacher, which verl calls k1"
    draft.explain(key, "same" if same else "differs", "teacher.weight", note, not same)
    if not draft.has(key):
        draft.add_row(f"({key})", mode, "differs", "teacher.weight", note, learns=True)
    coef = draft.number_or(1.0, f"{LOSS}.distillation_loss_coef")
    draft.put("teacher.weight", coef, f"{LOSS}.distillation_loss_coef")
    alone = draft.value(rewards := f"{LOSS}.use_task_rewards") is False
    if alone:
        draft.put("algo.advantage", DISTILL, rewards, note="rewards are only logged")
        draft.settings.pop("algo.normalize", None)
        draft.put("sampling.dynamic", False)
    else:
        draft.explain(rewards, "same", note="the teacher's part is added to the advantages of the rewards")
    for name in _CLAMPS:
        clamp = draft.value(f"{LOSS}.{name}")
        draft.explain(f"{LOSS}.{name}", "differs", "teacher.weight", "the estimate is not clamped", clamp is not None)


def swift_teacher(draft: Draft) -> None:
    """`teacher_model`, or a server of it, with rlhf_type grpo."""
    name, server = draft.name("teacher_model"), draft.name("teacher_model_server")
    if name is None and server is None:
        names = ("teacher_model", "teacher_model_server", "teacher_kl_coef")
        for name in names:
            draft.explain_again(name, "default here", note="without a teacher it does nothing")
        draft.settings.pop("teacher.weight", None)
    elif server is not None:
        url = f"{server.rstrip('/').removesuffix('/v1')}/v1"
        draft.put("teacher.name", url, "teacher_model_server", note="the server must be vLLM's")
        draft.unused("the server's model counts", "teacher_model")
    else:
        draft.put("teacher.name", name, "teacher_model")
        _without_kl(draft, "beta")


def _without_kl(draft: Draft, *keys: str) -> None:
    """A teacher that is loaded takes the place of the reference model."""
    if not draft.settings.get("algo.kl_coef"):
        return
    draft.put("algo.kl_coef", 0.0)
    for key in keys:
        note = "the reference model is the teacher; serve it (teacher.name=http://…) to have both"
        draft.explain_again(key, "no counterpart", note=note, learns=True)
