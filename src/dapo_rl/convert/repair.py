"""Makes a recipe valid where other libraries ask for less: names, whole mini-batches, room for one sample, groups."""

from __future__ import annotations

from dapo_rl.convert.draft import Draft
from dapo_rl.convert.shared import nearest_divisor
from dapo_rl.objectives import ADVANTAGES

NO_SOURCE = "TRAIN_DATA.parquet"
"""`data.train` of a run whose data are not known: a file that does not exist, so that nothing else is trained on."""
NO_MODEL = "path/to/the/model"
_ALONE = "reinforce++"
_GROUP_KEYS = ("actor_rollout_ref.rollout.n", "gconfig.n_samples", "num_generations")


def repair(draft: Draft) -> None:
    _name(draft, "model.name", NO_MODEL, "model")
    _name(draft, "data.train", NO_SOURCE, "data set")
    _divide_step(draft)
    _hold_one_sample(draft)
    _compare_one_sample(draft)


def _name(draft: Draft, ours: str, placeholder: str, kind: str) -> None:
    """A recipe without a model or data would train the demo's."""
    if not draft.settings.get(ours):
        draft.settings[ours] = placeholder
        note = f"no {kind} is known: write its name there; the run does not start without it"
        draft.add_row(f"({ours})", "", "differs", f"{ours}: {placeholder}", note, True)


def _divide_step(draft: Draft) -> None:
    """The updates of a step have equally many prompts here."""
    ours = "train.mini_batches"
    prompts, updates = draft.setting("sampling.prompts_per_step"), draft.setting(ours)
    if prompts % updates == 0:
        return
    draft.settings[ours] = nearest = nearest_divisor(prompts, updates)
    here, note = f"{ours}: {nearest}", f"{updates} updates do not divide {prompts} prompts"
    if ours in draft.sources:
        draft.explain_again(draft.sources[ours], "differs", here, note, True)
    else:
        draft.add_row(f"({ours})", updates, "differs", here, note, True)


def _hold_one_sample(draft: Draft) -> None:
    """Micro-batches have room for one sample here, where other libraries split it between GPUs."""
    budget = draft.settings.get(ours := "train.token_budget")
    longest = draft.setting("data.max_prompt_tokens") + draft.setting("sampling.max_new_tokens")
    if budget is None or budget >= longest:
        return
    draft.settings[ours] = longest
    if ours in draft.sources:
        note = f"{budget} tokens do not hold one sample of up to {longest}; affects memory only"
        draft.explain_again(draft.sources[ours], "differs", f"{ours}: {longest}", note)


def _compare_one_sample(draft: Draft) -> None:
    """One sample per prompt has no group: other libraries then take the reward itself as its advantage."""
    estimator = draft.settings.get("algo.advantage", "group")
    if draft.setting("sampling.group_size") != 1 or (estimator in ADVANTAGES and ADVANTAGES[estimator].alone):
        return
    draft.settings |= {"algo.advantage": _ALONE, "sampling.dynamic": False}
    for ours in ("algo.normalize", "sampling.dynamic_batch", "sampling.metric", "sampling.cap"):
        draft.settings.pop(ours, None)
    here = f"sampling.group_size: 1, algo.advantage: {_ALONE}"
    note = "one sample has no group; it is compared with the other prompts, where theirs takes its reward as it is"
    for key in _GROUP_KEYS:
        draft.explain_again(key, "differs", here, note, True)
