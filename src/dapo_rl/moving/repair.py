"""What a recipe needs that another library does without: a data set, room for one sample, something to compare with."""

from __future__ import annotations

from dapo_rl.family import ADVANTAGES
from dapo_rl.moving.draft import Draft, default_of

NO_SOURCE = "TRAIN_DATA.parquet"
"""`data.train` of a run whose data are not known: a file that does not exist, so that nothing else is trained on."""
_ALONE = "reinforce++"
_GROUP_KEYS = ("actor_rollout_ref.rollout.n", "gconfig.n_samples", "num_generations")


def repair(draft: Draft) -> None:
    _name_data(draft)
    _hold_one_sample(draft)
    _compare_one_sample(draft)


def _name_data(draft: Draft) -> None:
    """A recipe without data.train would train on the demo's data."""
    if not draft.settings.get("data.train"):
        draft.settings["data.train"] = NO_SOURCE
        note = "no data set is known: write its name there; the run does not start without it"
        draft.add_row("(data.train)", "", "differs", f"data.train: {NO_SOURCE}", note, True)


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
