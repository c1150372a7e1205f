"""The policy's forward pass over whole samples: log-probability and entropy of each response token.

Shapes: B samples, P prompt columns (padded on the left), R response columns (padded on the right), V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dapo_rl.objectives.kl import entropy_from_logits
from dapo_rl.types import IntArray, Trajectory


class TokenStats(NamedTuple):
    logps: Tensor
    """`[B, R]`, differentiable."""
    entropy: Tensor
    """`[B, R]`, without gradient."""
    mask: Tensor
    """`[B, R]`: True for response tokens."""


def response_logps(
    model: Any, samples: Sequence[Trajectory], temperature: float, pad_id: int, device: torch.device | None = None
) -> TokenStats:
    """Log-probabilities of the responses under the model at a temperature; it computes on the device of its weights
    unless another is given."""
    device = device or next(model.parameters()).device
    inputs, mask_BR = padded_inputs(samples, pad_id, device)
    tokens_BR = inputs["input_ids"][:, -mask_BR.shape[1] :]
    # The logits at a position predict the next token: keep the last prompt position up to the last but one.
    logits_BRV = model(**inputs, use_cache=False, logits_to_keep=tokens_BR.shape[1] + 1).logits[:, :-1]
    logits_BRV = logits_BRV.float() / temperature
    logps_BR = torch.log_softmax(logits_BRV, dim=-1).gather(-1, tokens_BR[..., None]).squeeze(-1)
    with torch.no_grad():
        entropy_BR = entropy_from_logits(logits_BRV)
    return TokenStats(logps_BR, entropy_BR, mask_BR)


def padded_inputs(samples: Sequence[Trajectory], pad_id: int, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """A model's arguments for samples, and the mask of their response tokens, which are the last columns."""
    prompts_BP, prompt_mask_BP = pad([s.prompt_ids for s in samples], pad_id, side="left")
    tokens_BR, mask_BR = pad([s.token_ids for s in samples], pad_id, side="right")
    attention_mask = torch.cat([prompt_mask_BP, mask_BR], dim=1).long().to(device)
    inputs = {
        "input_ids": torch.cat([prompts_BP, tokens_BR], dim=1).to(device),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
    }
    return inputs, mask_BR.to(device)


def pad(rows: Sequence[Sequence[int] | IntArray], value: int, side: str) -> tuple[Tensor, Tensor]:
    """Pads rows of ids to one tensor, with a mask that is True for ids."""
    lengths = np.array([len(row) for row in rows])
    width = lengths.max()
    columns = np.arange(width)
    mask = columns >= width - lengths[:, None] if side == "left" else columns < lengths[:, None]
    ids = np.full(mask.shape, value, dtype=np.int64)
    ids[mask] = np.concatenate(rows)
    return torch.from_numpy(ids), torch.from_numpy(mask)
