"""Held-out prompts that are training prompts: their accuracy says nothing about other problems."""

from __future__ import annotations

import os
from typing import Any

from dapo_rl.base.home import expanded
from dapo_rl.config import SourceSettings
from dapo_rl.data import arithmetic, tasks
from dapo_rl.data.files import SUFFIXES
from dapo_rl.data.gym import PREFIX as GYM
from dapo_rl.data.prompts import PromptSet
from dapo_rl.data.sources import IN_MEMORY, as_sources
from dapo_rl.errors import UserError

_REMEDY = "give other prompts, or data.eval=none eval.every=none for no evaluation"


def check_apart(train: Any, held_out: Any) -> None:
    """Raises a UserError if `data.eval` is the file, or the split of a hub data set, that `data.train` is, or if the
    two lists share one."""
    trained = [_place(source) for source in _entries(train, "data.train")]
    for source in _entries(held_out, "data.eval"):
        if (place := _place(source)) is not None and place in trained:
            raise UserError(
                f"data.eval: {_name(source)} is data.train: the run would be evaluated on its training prompts; "
                f"{_REMEDY}"
            )


def shared_prompts(train: PromptSet, held_out: PromptSet | None, sources: tuple[Any, Any]) -> str | None:
    """A note on held-out prompts that are training prompts too. If all of a file's or a hub data set's are, they are a
    copy of training data: raises a UserError."""
    if held_out is None or train.is_stream:
        return None
    trained = {prompt.token_ids.tobytes() for prompt in train.prompts}
    shared = sum(prompt.token_ids.tobytes() in trained for prompt in held_out.prompts)
    if not shared:
        return None
    what = f"data.eval: {shared:,} of {len(held_out.prompts):,} prompts are training prompts too"
    entries = [*_entries(sources[0], "data.train"), *_entries(sources[1], "data.eval")]
    are_stored = all(_place(source) is not None for source in entries)
    if shared == len(held_out.prompts) and are_stored:
        raise UserError(f"{what}; {_REMEDY}")
    return f"{what}; their accuracy includes what was memorized"


def _entries(sources: Any, key: str) -> tuple[Any, ...]:
    sources = as_sources(sources, key)
    return sources if isinstance(sources, tuple) else (sources,)


def _place(source: Any) -> tuple[Any, ...] | None:
    """Where a file or a hub data set is; None for prompts that are generated, or that are in memory."""
    name = _name(source)
    if name is None or name in (arithmetic.NAME, tasks.NAME, IN_MEMORY) or name.startswith(GYM):
        return None
    if name.lower().endswith(SUFFIXES):
        return (os.path.realpath(expanded(name)),)
    parameters = (source.model_extra or {}) if isinstance(source, SourceSettings) else {}
    return name, *sorted(({"split": "train"} | parameters).items())


def _name(source: Any) -> str | None:
    if isinstance(source, SourceSettings):
        return source.source
    return os.fspath(source) if isinstance(source, str | os.PathLike) else None
