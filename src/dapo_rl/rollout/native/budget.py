"""How many sequences the cache's memory holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dapo_rl.base.memory import host_memory
from dapo_rl.errors import UserError

CAPACITY_STEP = {"cpu": 64, "cuda": 256}
"""Slots are a multiple of so many tokens long."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    bytes: int
    token_bytes: int
    """What a token takes in all layers."""
    max_batch: int
    device: torch.device

    def capacity(self, tokens: int) -> int:
        """The length of a slot that holds so many tokens."""
        step = CAPACITY_STEP[self.device.type]
        return -(-tokens // step) * step

    def slots(self, capacity: int) -> int:
        """Sequences that memory holds, beside one slot on a GPU for rows that only fill up a batch."""
        spare = int(self.device.type == "cuda")
        return min(self.max_batch, self.bytes // (capacity * self.token_bytes) - spare)

    def check(self, tokens: int) -> None:
        """That there is room for one sequence of so many tokens."""
        needs = self.capacity(tokens)
        if tokens and self.slots(needs) < 1:
            raise UserError(
                f"sampling.kv_memory_gib: one sequence of {needs} tokens takes "
                f"{needs * self.token_bytes / 2**30:.2g} GiB, and {self.bytes / 2**30:.2g} are allowed; "
                "raise it, or lower sampling.max_new_tokens"
            )


def memory_share(device: torch.device) -> int:
    """A third of a GPU's free memory; a quarter of the host's, whoever uses the rest: a run must not depend on that."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 3
    return host_memory() // 4
