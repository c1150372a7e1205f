"""Scores prompts and responses with a reward model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from dapo_rl.base.quote import one_line
from dapo_rl.config import Config
from dapo_rl.data.template import render
from dapo_rl.errors import UserError
from dapo_rl.models.load import check_one_label, compute_dtype, load_reward_model, load_tokenizer, pad_id
from dapo_rl.rewards.model_verifier import Exchange, GivenModel
from dapo_rl.rewards.pool import VerifierPool

KEY = "reward.verifier"


class RewardModel:
    """A sequence classifier with one label, in the memory of the run's device. A call is computed in micro-batches of
    similar lengths, which depend on nothing but its own samples: the same samples always have the same scores."""

    def __init__(self, model: Any, tokenizer: Any, token_budget: int, name: str) -> None:
        self._model, self._tokenizer, self._budget, self._name = model, tokenizer, token_budget, name
        self._device = next(model.parameters()).device
        self._longest = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
        self._pad = pad_id(tokenizer) if model.config.pad_token_id is None else model.config.pad_token_id
        model.config.pad_token_id = self._pad  # by it the model finds the last token of a row

    def score(self, exchanges: Sequence[Exchange]) -> list[float | str]:
        rows: dict[int, Sequence[int]] = {}
        scores: list[float | str] = []
        for i, row in enumerate(self._tokenized(exchanges)):
            scores.append(row if isinstance(row, str) else f"{len(row)} tokens exceed its context of {self._longest}")
            if not isinstance(row, str) and len(row) <= self._longest:
                rows[i] = row
        self._model.to(self._device)
        for batch in _batches(rows, self._budget):
            for i, score in zip(batch, self._scored([rows[i] for i in batch]), strict=True):
                scores[i] = score
        return scores

    def release_memory(self) -> None:
        """Moves the weights to the host; the next call brings them back."""
        if self._device.type != "cpu":
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def _tokenized(self, exchanges: Sequence[Exchange]) -> Iterator[Sequence[int] | str]:
        """The tokens of each, or why there are none."""
        texts: list[str | Exception] = [each.text for each in exchanges]
        if getattr(self._tokenizer, "chat_template", None):
            texts = list(render(self._tokenizer, [(each.messages, {}) for each in exchanges]))
        good = [text for text in texts if isinstance(text, str)]
        ids = iter(self._tokenizer(good, add_special_tokens=False).input_ids if good else ())
        for text in texts:
            if isinstance(text, str):
                yield next(ids) or [self._pad]
            else:
                yield f"its chat template cannot render a sample: {one_line(text)}"

    @torch.inference_mode()
    def _scored(self, rows: Sequence[Sequence[int]]) -> list[float]:
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[self._pad] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        try:
            given = {"input_ids": ids.to(self._device), "attention_mask": mask.to(self._device)}
            scores: list[float] = self._model(**given).logits[:, 0].float().tolist()
            return scores
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise UserError(
                    f"{KEY}: {self._name} does not fit into the GPU's memory with a sample of {longest} tokens; set "
                    "train.memory=time_share, or a smaller sampling.kv_memory_gib"
                ) from None
        torch.cuda.empty_cache()
        half = len(rows) // 2
        return [*self._scored(rows[:half]), *self._scored(rows[half:])]


def _batches(rows: Mapping[int, Sequence[int]], budget: int) -> list[list[int]]:
    """Micro-batches of at most so many tokens with padding, from the longest row to the shortest."""
    batches: list[list[int]] = []
    for i in sorted(rows, key=lambda i: -len(rows[i])):
        if batches and len(rows[batches[-1][0]]) * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


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
