"""What a recipe needs that another library does without: a data set, room for one sample, something to compare with."""

from __future__ import annotations

from dapo_rl.convert.draft import Draft, default_of
from dapo_rl.convert.shared import nearest_divisor
from dapo_rl.objectives import ADVANTAGES

NO_SOURCE = "TRAIN_DATA.parquet"
"""`data.train` of a run whose data are not known: a file that does not exist, so that nothing else is trained on."""
NO_MODEL = "path/to/the/model"
_ALONE = "reinforce++"
_GROUP_KEYS = ("actor_rollout_ref.rollout.n", "gconfig.n_samples", "num_generations")


def repair(draft: Draft) -> None:
    _name_model(draft)
    _name_data(draft)
    _divide_step(draft)
    _hold_one_sample(draft)
    _compare_one_sample(draft)


def _name_model(draft: Draft) -> None:
    """A recipe without model.name would train the demo's model."""
    if not draft.settings.get("model.name"):
        draft.settings["model.name"] = NO_MODEL
        note = "no model is known: write its name there; the run does not start without it"
        draft.add_row("(model.name)", "", "differs", f"model.name: {NO_MODEL}", note, True)


def _name_data(draft: Draft) -> None:
    """A recipe without data.train would train on the demo's data."""
    if not draft.settings.get("data.train"):
        draft.settings["data.train"] = NO_SOURCE
        note = "no data set is known: write its name there; the run does not start without it"
        draft.add_row("(data.train)", "", "differs", f"data.train: {NO_SOURCE}", note, True)


def _divide_step(draft: Draft) -> None:
    """The updates of a step have equally many prompts here."""
    prompts, updates = (
        draft.settings.get(ours, default_of(ours)) for ours in ("sampling.prompts_per_step", "train.mini_batches")
    )
    if prompts % updates == 0:
        return
    nearest = nearest_divisor(prompts, updates)
    draft.settings["train.mini_batches"] = nearest
    here, note = f"train.mini_batches: {nearest}", f"{updates} updates do not divide {prompts} prompts"
    if (key := draft.source_of("train.mini_batches")) is not None:
        draft.explain_again(key, "differs", here, note, True)
    else:
        draft.add_row("(train.mini_batches)", updates, "differs", here, note, True)


def _hold_one_sample(draft: Draft) -> None:
    """Micro-batches have room for one sample here, where other libraries split it between GPUs."""
    budget = draft.settings.get("train.token_budget")
    parts = ("data.max_prompt_tokens", "sampling.max_new_tokens")
    longest = sum(draft.settings.get(ours, default_of(ours)) for ours in parts)
    if budget is None or budget >= longest:
        return
    draft.settings["train.token_budget"] = longest
    if (key := draft.source_of("train.token_budget")) is not None:
        note = f"{budget} tokens do not hold one sample of up to {longest}; affects memory only"
        draft.explain_again(key, "differs", f"train.token_budget: {longest}", note)


def _compare_one_sample(draft: Draft) -> None:
    """One sample per prompt has no group: other libraries then take the reward itself as its advantage."""
    group = draft.settings.get("sampling.group_size", default_of("sampling.group_size"))
    estimator = draft.settings.get("algo.advantage", "group")
    if group != 1 or (estimator in ADVANTAGES and ADVANTAGES[estimator].alone):
        return
    draft.settings |= {"algo.advantage": _ALONE, "sampling.dynamic": False}
    for ours in ("algo.normalize", "sampling.dynamic_batch", "sampling.metric", "sampling.cap"):
        draft.settings.pop(ours, None)
    here = f"sampling.group_size: 1, algo.advantage: {_ALONE}"
    note = "one sample has no group; it is compared with the other prompts, where theirs takes its reward as it is"
    for key in _GROUP_KEYS:
        draft.explain_again(key, "differs", here, note, True)
