"""verl's asynchronous trainers: prompts between two synchronisations of the weights, and the age of samples."""

from __future__ import annotations

import math

from dapo_rl.convert.draft import Draft
from dapo_rl.convert.settings.verl import ACTOR

_REQUIRED, _ROUNDS = "async_training.require_batches", "async_training.trigger_parameter_sync_step"
_STALE, _SAMPLES = "async_training.staleness_threshold", "rollout.total_rollout_steps"
_FRESH = "samples come from the weights of the step; asynchronous sampling is cluster.placement=separate"


def is_fully_async(draft: Draft) -> bool:
    return draft.value("(trainer)") == "fully_async" or draft.has(_REQUIRED, _ROUNDS, _STALE)


def async_batches(draft: Draft) -> None:
    """A step is what its trainer learns from between two synchronisations of the weights."""
    mini, required = draft.needed(f"{ACTOR}.ppo_mini_batch_size"), draft.size(_REQUIRED) or 1
    rounds = draft.size(_ROUNDS) or 4
    updates = required * rounds
    note = f"{rounds} rounds of {required} × {mini} prompts between two synchronisations of the weights"
    draft.put("train.mini_batches", updates, f"{ACTOR}.ppo_mini_batch_size", note=note)
    draft.put("sampling.prompts_per_step", mini * updates, "data.train_batch_size", _REQUIRED, _ROUNDS, note=note)
    stale = draft.number(_STALE)
    if stale == 0:
        draft.explain(_STALE, "default here", note="every sample comes from the weights of the step")
    else:
        share = f"up to {0.1 if stale is None else stale:g} × the prompts of a step come from older weights; "
        key = _STALE if draft.has(_STALE) else "(trainer)"
        draft.explain(key, "differs", note=share + _FRESH, learns=True)
    draft.explain("(trainer)", "same", note="synchronous here, with the prompts per step of its synchronisations")


def async_steps(draft: Draft) -> bool:
    """`train.steps` from the number of prompts; false if it is not known."""
    total, prompts = draft.count(_SAMPLES), draft.settings["sampling.prompts_per_step"]
    if total is None or total < 1:
        return False
    draft.put("train.steps", max(1, total // prompts), _SAMPLES, note=f"{total} prompts / {prompts} per step")
    draft.explain("trainer.total_epochs", "default here", note="total_rollout_steps is given, and is what counts")
    return True


def async_warmup(draft: Draft, rounds: int) -> int:
    """Steps of warm-up, which its trainer counts in rounds."""
    return math.ceil(rounds / (draft.size(_ROUNDS) or 4))


def explain_one_step_off(draft: Draft) -> None:
    if draft.value("(trainer)") == "one_step_off":
        note = f"its samples come from the weights one step before; {_FRESH}, sampling.surplus=carry"
        draft.explain("(trainer)", "differs", note=note, learns=True)
