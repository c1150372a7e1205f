"""Scores of whole sequences by a model with a classification head of one label: packed, if the model supports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo_rl.models.attention import attending, depends_on_neighbours
from dapo_rl.models.device import to_device
from dapo_rl.models.packing import pack
from dapo_rl.models.response_logps import pad, predicting_states
from dapo_rl.types import IntArray


def packed_scores(model: Any, rows: Sequence[IntArray], shared: Sequence[int], pad_id: int) -> Tensor:
    """The scores of rows, `[B]`. `shared` is the length of each row's prefix that is computed once for all rows that
    begin with it."""
    pairs = []
    for row, count in zip(rows, shared, strict=True):
        length = _last(row, pad_id) + 1
        cut = min(count, length)
        # The score is in the state that would predict one more token.
        pairs.append((row[:cut], np.append(row[cut:length], pad_id)))
    device = next(model.parameters()).device
    packed, predictors = pack(pairs, device)
    with attending(model, packed, packed.longest):
        states_TH = predicting_states(model, packed, predictors)
    ends = np.cumsum([len(rest) for _, rest in pairs]) - 1
    scores_B: Tensor = model.score(states_TH[to_device(ends, device)])[:, 0]
    return scores_B.float()


def padded_scores(model: Any, rows: Sequence[IntArray], pad_id: int) -> Tensor:
    """The same by the model's own forward pass, which finds the last token of a row by the padding."""
    device = next(model.parameters()).device
    ids_BT, mask_BT = pad(rows, pad_id, side="right")
    scores_B: Tensor = model(input_ids=ids_BT.to(device), attention_mask=mask_BT.long().to(device)).logits[:, 0]
    return scores_B.float()


@torch.inference_mode()
def can_pack(model: Any, pad_id: int) -> bool:
    """Whether packed scores are the model's own: compares them on a few tokens."""
    try:
        vocabulary = len(model.get_input_embeddings().weight)
        ids = np.random.default_rng(0).integers(vocabulary, size=24).astype(np.int32)
        rows = [ids[:9], np.append(ids[:5], ids[9:15]), ids[15:]]
        own = torch.cat([padded_scores(model, [row], pad_id) for row in rows])
        packed = packed_scores(model, rows, [5, 5, 1], pad_id)
    except Exception:  # an architecture may fail in any way
        return False
    # Another kind of attention changes scores by more than rounding does.
    rounding = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.05
    return bool((packed - own).abs().max().item() < rounding * max(1.0, own.abs().max().item()))


def can_pack_length(model: Any, longest: int) -> bool:
    """Whether rows of this length can be packed, if short ones can."""
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    return depends_on_neighbours(model, longest) is None and (window is None or longest <= window)


def _last(row: IntArray, pad_id: int) -> int:
    """The place of a row's last token that is no padding; transformers takes the first if there is none."""
    found = np.flatnonzero(row != pad_id)
    return int(found[-1]) if len(found) else 0
