"""The memory budget of the KV cache: how many pages and sequences fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dapo_rl.base.host_memory import host_memory
from dapo_rl.errors import UserError

PAGE_TOKENS = 64
"""Tokens of a page: as many as an attention kernel reads at a time."""
ENOUGH_ROWS = 64
"""On a CPU, more sequences at a time than this are hardly faster."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    page_tokens: int
    pages: int
    slots: int
    """Sequences at a time."""
    whole: bool = False
    """Whether a page holds a whole sequence; then page i belongs to slot i."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    bytes: int
    token_bytes: int
    """Bytes per token, over all layers."""
    max_batch: int
    device: torch.device

    def capacity(self, tokens: int) -> int:
        """The tokens of the pages that hold this many."""
        return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS

    def slots(self, capacity: int) -> int:
        """The number of sequences that fit if all are of this length; a GPU needs one page for padding rows."""
        spare = PAGE_TOKENS * self.token_bytes if self.device.type == "cuda" else 0
        return min(self.max_batch, max(self.bytes - spare, 0) // (capacity * self.token_bytes))

    def layout(self, longest: int, page_tokens: int | None = None) -> CacheLayout:
        """How to divide the memory for contexts of at most `longest` tokens.

        On a CPU a page holds a whole sequence if enough of them fit: torch's attention reads contiguous memory.
        """
        if not longest:
            return CacheLayout(PAGE_TOKENS, 0, 0, whole=True)
        capacity = self.capacity(longest)
        if page_tokens is None and self.device.type == "cpu":
            slots = self.slots(capacity)
            if capacity <= PAGE_TOKENS or slots >= min(self.max_batch, ENOUGH_ROWS):
                return CacheLayout(capacity, slots, slots, whole=True)
        tokens = page_tokens or PAGE_TOKENS
        most = self.max_batch * -(-longest // tokens)
        fit = self.bytes // (tokens * self.token_bytes) + (self.device.type == "cpu")
        pages = min(fit, most + 1)
        return CacheLayout(tokens, pages, min(self.max_batch, pages - 1))

    def check(self, tokens: int) -> None:
        """Raises if not even one sequence of this many tokens fits."""
        needs = self.capacity(tokens)
        if tokens and self.slots(needs) < 1:
            raise UserError(
                f"sampling.kv_memory_gib: one sequence of {needs} tokens takes "
                f"{needs * self.token_bytes / 2**30:.2g} GiB, but only {self.bytes / 2**30:.2g} are allowed; "
                "raise it, or lower sampling.max_new_tokens"
            )


def memory_share(device: torch.device) -> int:
    """A third of a GPU's free memory, or a quarter of the host's total: a run must not depend on what else is
    running."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 3
    return host_memory() // 4
