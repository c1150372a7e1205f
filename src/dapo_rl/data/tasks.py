"""The source `tasks`: numbered rows without content, for environments that make their tasks themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dapo_rl.data.rows import BadRow, Row, make_row
from dapo_rl.data.source_parameters import check_names, whole
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

NAME = "tasks"
SPLITS = ("train", "heldout")
SIZE = 1000


def read_tasks(parameters: Mapping[str, Any], key: str) -> Iterator[Row | BadRow]:
    check_names(parameters, ["size", "split"], key, NAME)
    size, split = whole(parameters, "size", SIZE, key, least=1), parameters.get("split", "train")
    if split not in SPLITS:
        raise UserError(f"{key}.split: {split!r} is not one of {', '.join(SPLITS)}")
    for number in range(size):
        text = f"{'' if split == 'train' else '-'}{number}"  # of a few tokens, for any tokenizer
        yield make_row(number, f"{NAME}:{number}", {"prompt": text, "task": number, "split": split})


def is_task(prompt: Prompt) -> bool:
    """Whether a prompt says nothing: its environment does."""
    number = prompt.columns.get("task")
    return "split" in prompt.columns and prompt.text.strip() in (f"{number}", f"-{number}")
