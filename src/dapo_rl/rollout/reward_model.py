"""Scores prompts and responses with a reward model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo_rl.base.quote import one_line
from dapo_rl.config import Config
from dapo_rl.data.template import render
from dapo_rl.errors import UserError
from dapo_rl.models.load import check_one_label, compute_dtype, load_reward_model, load_tokenizer, pad_id
from dapo_rl.models.sequence_scores import SequenceScores, can_pack_length, sample_to_score
from dapo_rl.rewards.model_verifier import Exchange, GivenModel
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.types import IntArray

KEY = "reward.verifier"


class RewardModel:
    """A sequence classifier with one label, in the memory of the run's device.

    On a CPU, each group is computed on its own, in micro-batches that depend on nothing but its samples: the same
    samples always have the same scores. On a GPU, micro-batches contain samples of many groups.
    """

    def __init__(self, model: Any, tokenizer: Any, token_budget: int, name: str) -> None:
        self._model, self._tokenizer, self._budget, self._name = model, tokenizer, token_budget, name
        self._device = next(model.parameters()).device
        self._longest = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
        self._pad = pad_id(tokenizer) if model.config.pad_token_id is None else model.config.pad_token_id
        model.config.pad_token_id = self._pad  # by it the model finds the last token of a row
        self._scores = SequenceScores(model, pad_id=self._pad)
        self._scores.prepare()
        self._padded_scores = SequenceScores(model, pad_id=self._pad, packed=False)

    def score(self, groups: Sequence[Sequence[Exchange]]) -> list[list[float | str]]:
        scores: list[list[float | str]] = [[] for _ in groups]
        parts: list[list[_Row]] = [[] for _ in groups]
        tokenized = self._tokenized([exchange for group in groups for exchange in group])
        for n, group in enumerate(groups):
            for i, ids in enumerate(islice(tokenized, len(group))):
                fault = ids if isinstance(ids, str) else f"{len(ids)} tokens exceed its context of {self._longest}"
                scores[n].append(fault)
                if not isinstance(ids, str) and len(ids) <= self._longest:
                    parts[n].append(_Row(n, i, ids))
        if self._device.type == "cuda":
            parts = [[row for part in parts for row in part]]
        self._model.to(self._device)
        # Scores are read last: reading one waits for the device, which should have all of its work by then.
        scored = [each for part in parts if part for each in self._scored_part(part)]
        for rows, scores_B in scored:
            for row, score in zip(rows, scores_B.tolist(), strict=True):
                scores[row.group][row.index] = score
        return scores

    def release_memory(self) -> None:
        """Moves the weights to the host; the next call brings them back."""
        if self._device.type != "cpu":
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def _tokenized(self, exchanges: Sequence[Exchange]) -> Iterator[IntArray | str]:
        """The tokens of each, or why there are none."""
        texts: list[str | Exception] = [each.text for each in exchanges]
        if getattr(self._tokenizer, "chat_template", None):
            texts = list(render(self._tokenizer, [(each.messages, {}) for each in exchanges]))
        good = [text for text in texts if isinstance(text, str)]
        ids = iter(self._tokenizer(good, add_special_tokens=False).input_ids if good else ())
        for text in texts:
            if isinstance(text, str):
                yield np.asarray(next(ids) or [self._pad], np.int32)
            else:
                yield f"its chat template cannot render a sample: {one_line(text)}"

    def _scored_part(self, part: Sequence[_Row]) -> Iterator[tuple[Sequence[_Row], Tensor]]:
        packs = self._scores.packed and can_pack_length(self._model, max(len(row.ids) for row in part))
        for batch in _packed_batches(part, self._budget) if packs else _padded_batches(part, self._budget):
            yield from self._scored(batch, self._scores if packs else self._padded_scores)

    @torch.inference_mode()
    def _scored(self, batch: Sequence[_Row], scores: SequenceScores) -> list[tuple[Sequence[_Row], Tensor]]:
        shared = zip(batch, _shared(batch), strict=True)
        try:
            return [(batch, scores.of([sample_to_score(row.ids, count, self._pad) for row, count in shared]))]
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise UserError(
                    f"{KEY}: {self._name} does not fit into the GPU's memory with a sample of {len(batch[0].ids)} "
                    "tokens; set train.memory=time_share, or a smaller sampling.kv_memory_gib"
                ) from None
        torch.cuda.empty_cache()
        half = len(batch) // 2
        return [*self._scored(batch[:half], scores), *self._scored(batch[half:], scores)]


@dataclass(frozen=True, slots=True)
class _Row:
    """The tokens of a sample, and its place among the groups."""

    group: int
    index: int
    ids: IntArray


def _packed_batches(rows: Sequence[_Row], budget: int) -> list[list[_Row]]:
    """Micro-batches of at most so many tokens, in order: the samples of a group are together."""
    batches: list[list[_Row]] = []
    tokens = 0
    for row in rows:
        if not batches or tokens + len(row.ids) > budget:
            batches.append([])
            tokens = 0
        batches[-1].append(row)
        tokens += len(row.ids)
    return batches


def _padded_batches(rows: Sequence[_Row], budget: int) -> list[list[_Row]]:
    """Micro-batches of at most so many tokens with padding, from the longest row to the shortest."""
    batches: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        if batches and len(batches[-1][0].ids) * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _shared(batch: Sequence[_Row]) -> list[int]:
    """The length of the prefix that the rows of each group share, for each row; at least 1."""
    counts: list[int] = []
    for _, group in groupby(batch, lambda row: row.group):
        rows = [row.ids for row in group]
        shortest = min(map(len, rows))
        differ = np.ptp([row[:shortest] for row in rows], axis=0) > 0
        counts += [max(int(differ.argmax()) if differ.any() else shortest, 1)] * len(rows)
    return counts


def load_reward_models(verifier: VerifierPool, config: Config, device: torch.device) -> None:
    """Loads the reward models among the verifiers. Those of a cluster's run are in its driver, on the CPU."""
    where = torch.device("cpu") if config.cluster.backend is not None else device
    verifier.load_models(partial(_load, config=config, device=where))


def _load(given: GivenModel, *, config: Config, device: torch.device) -> RewardModel:
    model, tokenizer, name = given.model, given.processing_class, given.name
    try:
        if isinstance(model, str):
            dtype = compute_dtype(config.model, device)
            model, own = load_reward_model(model, device, dtype)
            tokenizer = tokenizer or own
        else:
            check_one_label(model, name)
            model.eval().to(device)
            if tokenizer is None and not getattr(model, "name_or_path", ""):
                raise UserError(f"{name} has no tokenizer; give it in reward_processing_classes")
            tokenizer = tokenizer or load_tokenizer(model.name_or_path)
    except UserError as error:
        raise UserError(f"{KEY}: {error}", error.more) from None
    return RewardModel(model, tokenizer, config.token_budget, name)
