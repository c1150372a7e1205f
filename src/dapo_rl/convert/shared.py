"""Conversions that several libraries need: steps, warm-up, LoRA, Adam's betas, clipping, overlong punishment,
importance weights, the critic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

from dapo_rl.choices import KL_KINDS, ImportanceLevel, ImportanceMode
from dapo_rl.config.peers import reason
from dapo_rl.config.peers.values import written
from dapo_rl.convert.draft import Draft, Status
from dapo_rl.errors import UserError
from dapo_rl.objectives import LOSSES

MODES = {f"{level}_{mode}": (level, mode) for level in get_args(ImportanceLevel) for mode in get_args(ImportanceMode)}
"""Their names of modes, such as `token_mask`: the level of the weights, and what bounds do."""
UNCAPPED = 1e9
"""The cap for weights without one: ratios are at most exp(20)."""


def steps_from_epochs(draft: Draft, key: str) -> None:
    """`train.steps` from passes over the data, which needs the number of rows."""
    epochs, prompts = draft.number(key), draft.settings.get("sampling.prompts_per_step", 16)
    if epochs is None:
        return
    if draft.prompts is None:
        note = f"{epochs:g} passes over the data; --prompts N (the number of training prompts) gives train.steps"
        draft.explain(key, "differs", "train.steps: 100, the default", note, True)
        return
    whole = draft.prompts // prompts  # their loaders leave out the rows of a pass that do not fill a batch
    steps = max(1, math.floor(whole * epochs if whole else draft.prompts * epochs / prompts))
    note = f"{draft.prompts} rows / {prompts} prompts" + (f" = {whole} per pass × {epochs:g}" if whole else "")
    if draft.settings.get("sampling.dynamic", True) and not draft.settings.get("sampling.dynamic_batch"):
        note += "; groups that the filter drops count as well there, so its steps are fewer"
        draft.put("train.steps", steps, key, note=note, differs=True, learns=True)
    else:
        draft.put("train.steps", steps, key, note=note)


def limit_prompts(draft: Draft) -> None:
    """Other libraries take prompts of any length unless they are given a limit."""
    if (ours := "data.max_prompt_tokens") not in draft.settings:
        note = "longer prompts are dropped and counted, and there none is; same if no prompt is that long"
        here = f"{ours}: {draft.setting(ours)}, the default"
        draft.add_row("(prompt length)", "no limit", "differs", here, note)


def warmup_from_share(
    draft: Draft, share: float, *keys: str, whole: Callable[[float], int] = math.ceil, note: str = ""
) -> None:
    """`train.warmup_steps` from a share of all steps, which needs their number; `whole` rounds as the library does."""
    steps = draft.settings.get("train.steps")
    if share == 0:
        draft.put("train.warmup_steps", 0, *keys)
    elif steps is not None:
        draft.put("train.warmup_steps", whole(share * steps), *keys, note=note)
    else:
        note = f"{share:g} of the steps, whose number is not known"
        draft.put("train.warmup_steps", whole(share * 100), *keys, note=note, learns=True)


def min_lr_share(draft: Draft, key: str) -> None:
    lowest, rate = draft.number(key), draft.settings.get("train.lr")
    if lowest is not None and rate:
        draft.put("train.min_lr_share", min(max(lowest / rate, 0.0), 1.0), key, note=f"{lowest:g} / {rate:g}")


def loss_options(draft: Draft) -> None:
    for key, entry in draft.library.settings.items():
        if entry.loss and draft.setting("algo.loss") != entry.loss:
            draft.unused(f"an option of the loss {entry.loss}", key)
        elif entry.loss and entry.ours and (value := draft.number(key)) is not None:
            draft.put(entry.ours, value, key)


def without_dual_clip(draft: Draft, key: str, applies: bool = False) -> None:
    """Drops `algo.clip_ratio_c`, which follows from `key`, if the loss has none; `applies` says that theirs has."""
    name = draft.settings.get("algo.loss", "dapo")
    if not LOSSES[name].dual_clip and draft.settings.pop("algo.clip_ratio_c", None) is not None:
        status: Status = "no counterpart" if applies else "default here"
        draft.explain_again(key, status, note=f"{name} has no dual clip", learns=applies)


ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
"""Sections of verl."""
_OF_ADAPTERS = {
    "lora_dropout": "model.lora.dropout",
    "use_rslora": "model.lora.use_rslora",
    "use_dora": "model.lora.use_dora",
}
"""The names of peft, in TRL and ms-swift."""


def lora(
    draft: Draft, is_used: bool, rank: tuple[str, ...], alpha: str, targets: str, default: int, switch: str = ""
) -> None:
    """`model.lora`, if the run trains adapters."""
    if not is_used:
        draft.unused("without LoRA it does nothing", *rank, alpha, targets, *_OF_ADAPTERS)
        draft.unused("the weights are trained", switch)
        return
    draft.put("model.lora.rank", draft.count(*rank) or default, *rank)
    if (scale := draft.number(alpha)) is not None:
        draft.put("model.lora.alpha", scale, alpha)
    for key, ours in _OF_ADAPTERS.items():
        if draft.has(key) or key in draft.library.defaults:
            draft.put(ours, draft.value(key), key)
    chosen = draft.value(targets)
    if chosen not in (None, "all-linear", ["all-linear"]):
        draft.put("model.lora.targets", chosen if isinstance(chosen, list) else [chosen], targets)


def adam_betas(draft: Draft, first: str, second: str) -> None:
    if draft.has(first, second) or second in draft.library.defaults:
        betas = [draft.number_or(0.9, first), draft.number_or(0.999, second)]
        draft.put("train.betas", betas, first, second)


def soft_overlong(draft: Draft, cache: int | None, factor: float, longest: int | None) -> None:
    """Soft Overlong Punishment; its limits follow the length of responses if they are left out."""
    draft.put("overlong.shape", "soft")
    draft.put("overlong.factor", factor)
    limit = draft.settings.get("sampling.max_new_tokens", 1024)
    draft.put("overlong.max_length", longest or limit)
    if cache is not None:
        draft.put("overlong.cache_length", cache)


def recompute_for_sequences(draft: Draft) -> None:
    """The bounds of a sequence's ratio are narrower than the difference between the engine and the trainer."""
    entry = LOSSES.get(draft.settings.get("algo.loss", "dapo"))
    if entry is not None and entry.per_sequence and "algo.proximal" not in draft.settings:
        why = "bounds of a sequence's ratio are below the difference between engine and trainer"
        draft.put("algo.proximal", "recomputed")
        draft.add_row("(algo.proximal)", "", "same", "algo.proximal: recomputed", why)


def put_importance(
    draft: Draft, cap: float, mode: str, *keys: str, level: str = "token", floor: float | None = None
) -> None:
    """Importance weights, whose settings there are `keys`."""
    draft.put("algo.proximal", "recomputed")
    draft.put("algo.importance_mode", mode)
    draft.put("algo.importance_level", level)
    if floor is not None:
        draft.put("algo.importance_floor", floor)
    note = f"one weight for a {level}, with algo.proximal: recomputed" if level == "sequence" else ""
    draft.put("algo.importance_cap", cap, *keys, note=note or "with algo.proximal: recomputed")


def put_mode(draft: Draft, mode: str, cap: float, floor: float | None, *keys: str, name: str | None = None) -> None:
    """The same by the name of a mode; the setting `mode` is among `keys`."""
    known = MODES.get(name or draft.name(mode) or "")
    if known is None:
        draft.no_counterpart(reason("MODES"), *keys)
    else:
        level, how = known
        put_importance(draft, cap, how, *keys, level=level, floor=floor)


def refuse_discount(draft: Draft, key: str) -> None:
    """GAE with another γ has other targets for the critic and other advantages."""
    if (gamma := draft.number(key)) not in (None, 1):
        raise UserError(f"{key}: {reason('NO_DISCOUNT')} here, got {gamma:g}; set it to 1")


def one_lambda(draft: Draft, key: str, differs: str = "") -> None:
    value = draft.number(key)
    draft.put("critic.lambda_critic", value)
    note = "; ".join(part for part in (reason("ONE_LAMBDA"), differs) if part)
    draft.put("critic.lambda_policy", value, key, note=note, learns=bool(differs))


def kl_kind(draft: Draft, key: str, names: dict[Any, str]) -> None:
    if (ours := names.get(draft.name(key))) is not None:
        draft.put("algo.kl_kind", ours, key)
    else:
        draft.explain(key, "no counterpart", "algo.kl_kind: k3", f"the estimators are {', '.join(KL_KINDS)}", True)


def critic_start(draft: Draft, key: str, policy: str) -> None:
    if (name := draft.value(key)) in (None, draft.value(policy)):
        draft.explain(key, "same", note=reason("STARTS"))
    else:
        draft.put("critic.model", name, key, note="a reward model of the policy's architecture, with its tokenizer")


def share_with_policy(draft: Draft, policy: str) -> None:
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
    """-1, 0, null and `constant` all mean no warm-up or schedule."""
    value = _UNSET.get(name) if value is None else value
    return None if value in (0, -1, "constant") else value
