"""The memory budget of the KV cache: how many sequences fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dapo_rl.base.memory import host_memory
from dapo_rl.errors import UserError

CAPACITY_STEP = {"cpu": 64, "cuda": 256}
"""The capacity of a slot is a multiple of this many tokens."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    bytes: int
    token_bytes: int
    """Bytes per token, over all layers."""
    max_batch: int
    device: torch.device

    def capacity(self, tokens: int) -> int:
        """The capacity of a slot for this many tokens."""
        step = CAPACITY_STEP[self.device.type]
        return -(-tokens // step) * step

    def slots(self, capacity: int) -> int:
        """The number of sequences that fit; a GPU needs one more slot for padding rows."""
        spare = int(self.device.type == "cuda")
        return min(self.max_batch, self.bytes // (capacity * self.token_bytes) - spare)

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
