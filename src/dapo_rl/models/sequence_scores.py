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
from dapo_rl.types import IntArray

TOLERANCE = {torch.float32: 1e-3}
"""Relative, of packed scores; 5 % in types with fewer digits. Attention of another kind changes them by more."""


def packed_scores(model: Any, rows: Sequence[IntArray], shared: Sequence[int], pad_id: int) -> Tensor:
    """The scores of rows, `[B]`. As many of a row's first tokens as `shared` says are computed once for all rows that
    begin with the same."""
    pairs = []
    for row, count in zip(rows, shared, strict=True):
        length = _last(row, pad_id) + 1
        cut = min(count, length)
        # The score is in the state that would predict one more token.
        pairs.append((row[:cut], np.append(row[cut:length], pad_id)))
    device = next(model.parameters()).device
    packed, predictors = pack(pairs, device)
    with attending(model, packed, packed.longest):
        hidden_TH = model.base_model(
            input_ids=packed.input_ids_T[None], position_ids=packed.position_ids_T[None], use_cache=False
        ).last_hidden_state[0]
    ends = np.cumsum([len(rest) for _, rest in pairs]) - 1
    scores_B: Tensor = model.score(hidden_TH[predictors.indices[to_device(ends, device)]])[:, 0]
    return scores_B.float()


def padded_scores(model: Any, rows: Sequence[IntArray], pad_id: int) -> Tensor:
    """The same by the model's own forward pass. It finds the last token of a row by the padding."""
    device = next(model.parameters()).device
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = np.concatenate(rows)
    given = {"input_ids": to_device(ids, device), "attention_mask": to_device(mask.astype(np.int64), device)}
    scores_B: Tensor = model(**given).logits[:, 0]
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
    tolerance = TOLERANCE.get(next(model.parameters()).dtype, 0.05) * max(1.0, own.abs().max().item())
    return bool((packed - own).abs().max().item() < tolerance)


def can_pack_length(model: Any, longest: int) -> bool:
    """Whether rows of this length can be packed, if short ones can."""
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    return depends_on_neighbours(model, longest) is None and (window is None or longest <= window)


def _last(row: IntArray, pad_id: int) -> int:
    """The place of a row's last token that is no padding; transformers takes the first if there is none."""
    found = np.flatnonzero(row != pad_id)
    return int(found[-1]) if len(found) else 0
