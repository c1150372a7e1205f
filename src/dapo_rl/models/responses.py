"""Log-probabilities of responses under a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dapo_rl.models.attention import UnsupportedAttentionError, attending, depends_on_neighbours
from dapo_rl.models.forward import TokenStats, response_logps
from dapo_rl.models.gather import Reads
from dapo_rl.models.logprobs import token_logps
from dapo_rl.models.packed import Packed, pack
from dapo_rl.models.response_pass import ResponsePass, in_rows, plain_sample, predicting_states
from dapo_rl.models.transfer import to_device
from dapo_rl.types import Trajectory

_TOLERANCE = 1e-2
"""Well above float32 rounding; a different scale, cap or state changes log-probabilities by more."""


class ResponseLogps(ResponsePass[TokenStats]):
    """Computes log-probabilities and entropies of response tokens."""

    def __init__(self, model: Any, *, temperature: float, **how: Any) -> None:
        """The others are the arguments of `ResponsePass`."""
        self._temperature = temperature
        super().__init__(model, **how)

    def _packed(self, row: Packed, predictors: Reads, samples: Sequence[Trajectory]) -> TokenStats:
        return packed_logps(self._model, row, predictors, samples, self._temperature, self._fusion is not None)

    def _padded(self, samples: Sequence[Trajectory]) -> TokenStats:
        return response_logps(self._model, samples, self._temperature, self._pad_id, self.device)

    def _why_not_packed(self, longest: int) -> str | None:
        return why_not_packed(self._model, longest)


def packed_logps(
    model: Any,
    row: Packed,
    predictors: Reads,
    samples: Sequence[Trajectory],
    temperature: float,
    fused: bool = False,
) -> TokenStats:
    """`response_logps` for packed samples; called while `row` is the model's attention."""
    predicting_TH = predicting_states(model, row, predictors)
    responses = np.concatenate([sample.token_ids for sample in samples])
    targets = to_device(responses.astype(np.int64), predicting_TH.device)
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    logps, entropy = token_logps(predicting_TH, head.weight, bias, targets, temperature, fused=fused)
    return TokenStats(*in_rows(samples, logps, entropy))


def why_not_packed(model: Any, longest: int = 0) -> str | None:
    """Why samples cannot be packed, if so: compares the packed result with the model's own on a few tokens."""
    try:
        config = model.config.get_text_config()
        if getattr(config, "final_logit_softcapping", None):  # small logits would not show it
            return "caps its logits"
        if reason := depends_on_neighbours(model, longest):
            return f"has {reason}"
        vocabulary = len(model.get_input_embeddings().weight)
        ids = torch.randint(vocabulary, (24,), generator=torch.Generator().manual_seed(0)).tolist()
        split = [(ids[:5], ids[5:9]), (ids[:5], ids[9:15]), (ids[15:18], ids[18:24])]
        samples = [plain_sample(prompt, response) for prompt, response in split]
        with torch.no_grad():
            plain = response_logps(model, samples, 1.0, pad_id=0)
            row, predictors = pack(split, plain.logps.device)
            with attending(model, row, max(longest, row.longest)):
                packed = packed_logps(model, row, predictors, samples, 1.0)
    except UnsupportedAttentionError as error:
        return f"has {error}"
    except Exception as error:  # an architecture may fail in any way
        return f"does not run on packed samples ({type(error).__name__})"
    difference = (packed.logps - plain.logps)[plain.mask].abs().max().item()
    if not difference < _TOLERANCE:
        return f"gives different results for packed samples (log-probabilities differ by {difference:.2g})"
    return None
