"""Scores of whole sequences by a model with a classification head of one label: packed, if the model supports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dapo_rl.models.attention import depends_on_neighbours
from dapo_rl.models.device import to_device
from dapo_rl.models.packing import Packed, Reads
from dapo_rl.models.response_logps import ResponsePass, pad, predicting_states
from dapo_rl.types import IntArray, Trajectory


class Scored(NamedTuple):
    scores: Tensor
    """`[B]`, in float32."""


class SequenceScores(ResponsePass[Scored]):
    """Computes the scores of samples that `sample_to_score` makes."""

    def __init__(self, model: Any, *, pad_id: int, packed: bool = True) -> None:
        """Computes in the dtype of the model's weights. Padded samples go through the model's own forward pass, without
        fused kernels."""
        super().__init__(model, pad_id=pad_id, dtype=next(model.parameters()).dtype, packed=packed, fused=packed)

    def of(self, samples: Sequence[Trajectory]) -> Tensor:
        with self.compute(samples) as found:
            return found.scores

    def _packed(self, row: Packed, predictors: Reads, samples: Sequence[Trajectory]) -> Scored:
        states_TH = predicting_states(self._model, row, predictors)
        ends = np.cumsum([len(sample.token_ids) for sample in samples]) - 1
        return Scored(self._model.score(states_TH[to_device(ends, self.device)])[:, 0].float())

    def _padded(self, samples: Sequence[Trajectory]) -> Scored:
        """By the model's own forward pass, which finds the last token of a row by the padding."""
        rows = [np.concatenate([sample.prompt_ids, sample.token_ids[:-1]]) for sample in samples]
        ids_BT, mask_BT = pad(rows, self._pad_id, side="right")
        inputs = {"input_ids": ids_BT.to(self.device), "attention_mask": mask_BT.long().to(self.device)}
        return Scored(self._model(**inputs).logits[:, 0].float())

    @torch.no_grad()
    def _why_not_packed(self, longest: int) -> str | None:
        """Compares packed scores with the model's own on a few tokens."""
        own = SequenceScores(self._model, pad_id=self._pad_id, packed=False)
        self.packed = True
        try:
            vocabulary = len(self._model.get_input_embeddings().weight)
            ids = np.random.default_rng(0).integers(vocabulary, size=24).astype(np.int32)
            rows = [ids[:9], np.append(ids[:5], ids[9:15]), ids[15:]]
            samples = [sample_to_score(row, n, self._pad_id) for row, n in zip(rows, (5, 5, 1), strict=True)]
            packed, padded = self.of(samples), own.of(samples)
            difference = (packed - padded).abs().max().item()
        except Exception as error:  # an architecture may fail in any way
            return f"does not run on packed samples ({type(error).__name__})"
        # Another kind of attention changes scores by more than rounding does.
        rounding = 1e-3 if self._dtype == torch.float32 else 0.05
        if not difference < rounding * max(1.0, padded.abs().max().item()):
            return f"gives different scores for packed samples (they differ by {difference:.2g})"
        return None


def sample_to_score(row: IntArray, shared: int, pad_id: int) -> Trajectory:
    """A row up to its last token that is no padding; transformers takes the first token if there is none. Its first
    `shared` tokens are computed once for all rows that begin with them."""
    found = np.flatnonzero(row != pad_id)
    length = int(found[-1]) + 1 if len(found) else 1
    cut = min(shared, length)
    # The score is in the state that would predict one more token.
    return Trajectory(np.append(row[cut:length], pad_id), prompt_ids=row[:cut])


def can_pack_length(model: Any, longest: int) -> bool:
    """Whether rows of this length can be packed, if short ones can."""
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    return depends_on_neighbours(model, longest) is None and (window is None or longest <= window)
