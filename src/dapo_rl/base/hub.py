"""Asks once whether the Hugging Face hub can be reached: its library retries every request for half a minute."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dapo_rl.base.quote import one_line

PATIENCE_S = 5.0


def hub_problem() -> str | None:
    """Why the hub cannot be reached, or None if it can."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:  # by the library's own client, which knows about proxies and certificates
        get_session().head(constants.ENDPOINT, timeout=PATIENCE_S)
    except Exception as error:  # of the HTTP library in use
        return f"{constants.ENDPOINT}: {one_line(error) or type(error).__name__}"
    return None


@contextmanager
def cache_only() -> Iterator[None]:
    """Inside, the hub's libraries use their cache, and fail at once if it lacks a file."""
    from huggingface_hub import constants

    datasets = sys.modules.get("datasets")
    holders = [constants, *([datasets.config] if datasets else [])]
    before = [holder.HF_HUB_OFFLINE for holder in holders]
    try:
        for holder in holders:
            holder.HF_HUB_OFFLINE = True
        yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.HF_HUB_OFFLINE = value
