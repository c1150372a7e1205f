"""Conversions that every library needs: steps, warm-up, LoRA, Adam's betas, dual clip, overlong punishment."""

from __future__ import annotations

import math

from dapo_rl.convert.draft import Draft, Status
from dapo_rl.objectives import LOSSES


def nearest_divisor(number: int, wanted: float) -> int:
    """The divisor of a number, up to 10,000, that is nearest to another number."""
    divisors = [n for n in range(1, min(number, 10_000) + 1) if number % n == 0]
    return min(divisors, key=lambda n: abs(n - wanted))


def steps_from_epochs(draft: Draft, key: str) -> None:
    """`train.steps` from passes over the data, which needs the number of rows."""
    epochs, prompts = draft.number(key), draft.settings.get("sampling.prompts_per_step", 16)
    if epochs is None:
        return
    if draft.prompts is None:
        note = f"{epochs:g} passes over the data; --prompts N (the number of training prompts) gives train.steps"
        draft.explain(key, "differs", "train.steps: 100, the default", note, True)
        return
    steps = max(1, math.floor(draft.prompts * epochs / prompts))
    note = f"{draft.prompts} rows × {epochs:g} / {prompts} prompts"
    if draft.settings.get("sampling.dynamic", True) and not draft.settings.get("sampling.dynamic_batch"):
        note += "; groups that the filter drops count as well there, so its steps are fewer"
        draft.put("train.steps", steps, key, note=note, differs=True, learns=True)
    else:
        draft.put("train.steps", steps, key, note=note)


def warmup_from_share(draft: Draft, share: float, *keys: str, note: str = "") -> None:
    """`train.warmup_steps` from a share of all steps, which needs their number."""
    steps = draft.settings.get("train.steps")
    if share == 0:
        draft.put("train.warmup_steps", 0, *keys)
    elif steps is not None:
        draft.put("train.warmup_steps", math.ceil(share * steps), *keys, note=note)
    else:
        note = f"{share:g} of the steps, whose number is not known"
        draft.put("train.warmup_steps", math.ceil(share * 100), *keys, note=note, learns=True)


def min_lr_share(draft: Draft, key: str) -> None:
    """`train.min_lr_share` from the lowest learning rate."""
    lowest, rate = draft.number(key), draft.settings.get("train.lr")
    if lowest is not None and rate:
        draft.put("train.min_lr_share", min(max(lowest / rate, 0.0), 1.0), key, note=f"{lowest:g} / {rate:g}")


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
    if chosen is not None and chosen != "all-linear":
        draft.put("model.lora.targets", chosen if isinstance(chosen, list) else [chosen], targets)


def adam_betas(draft: Draft, first: str, second: str) -> None:
    """`train.betas` from two settings."""
    if draft.has(first, second) or second in draft.library.defaults:
        betas = [draft.number(first) or 0.9, draft.number(second) or 0.999]
        draft.put("train.betas", betas, first, second)


def soft_overlong(draft: Draft, cache: int | None, factor: float, longest: int | None) -> None:
    """Soft Overlong Punishment; its limits follow the length of responses if they are left out."""
    draft.put("overlong.shape", "soft")
    draft.put("overlong.factor", factor)
    limit = draft.settings.get("sampling.max_new_tokens", 1024)
    draft.put("overlong.max_length", longest or limit)
    if cache is not None:
        draft.put("overlong.cache_length", cache)
