"""Data sets that come as a dictionary of splits, as `datasets.load_dataset` returns them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_rl.errors import UserError

_HELD_OUT = ("validation", "test", "eval")


def choose_splits(train: Any, held_out: Any, evaluates: bool) -> tuple[Any, Any, str | None]:
    """The training and the held-out data set, and a note if they were chosen from several.

    `evaluates` says that the run evaluates between steps: only then is a held-out split taken from the training
    data's dictionary.
    """
    if isinstance(held_out, Mapping):
        held_out = _only(held_out)
    if not isinstance(train, Mapping):
        return train, held_out, None
    if "train" not in train:
        raise UserError(
            f"train_dataset: a dictionary of {', '.join(map(str, train))}; give one data set, or a split named train"
        )
    name = next((name for name in _HELD_OUT if name in train), None) if held_out is None and evaluates else None
    chosen = "training on the split train" + (f", evaluating on {name}" if name else "")
    left = [str(other) for other in train if other not in ("train", name)]
    note = f"train_dataset: {chosen}" + (f"; not used: {', '.join(left)}" if left else "")
    return train["train"], train[name] if name else held_out, note


def _only(data_sets: Mapping[Any, Any]) -> Any:
    if len(data_sets) != 1:
        names = ", ".join(map(str, data_sets))
        raise UserError(f"eval_dataset: {names or 'an empty dictionary'}; a run evaluates on one data set: give one")
    return next(iter(data_sets.values()))
