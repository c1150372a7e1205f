"""The policy: forward, backward, step. One optimizer step trains on one mini-batch, split into micro-batches."""

from __future__ import annotations

import gc
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dapo_rl.algo import aggregate, importance_weights, kl_penalty
from dapo_rl.algo.importance import above_cap
from dapo_rl.algo.loss import clipped_tokens
from dapo_rl.algo.registry import TokenLosses
from dapo_rl.base.hashing import Digests, IsCancelled, Rest
from dapo_rl.base.quote import one_line
from dapo_rl.choices import AGGREGATIONS, Aggregation
from dapo_rl.config import AlgoSettings, ModelSettings, TrainSettings
from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.models.host_copy import HostCopy, why_no_copy
from dapo_rl.models.load import save_model
from dapo_rl.models.lora import WithoutAdapter, save_adapter
from dapo_rl.models.responses import ResponseLogps
from dapo_rl.models.stored import StoredModel, done_now, save_hashed, stored_weights, weight_difference
from dapo_rl.models.transfer import to_device
from dapo_rl.models.weights import ModelWeights
from dapo_rl.train.finite import not_finite
from dapo_rl.train.gradients import Gradients
from dapo_rl.train.memory import MOST_TOKENS
from dapo_rl.train.micro_batches import packed_batches, padded_batches
from dapo_rl.train.optimizer import build_optimizer, set_learning_rate
from dapo_rl.train.own import OwnLoss, build_losses, build_ratio
from dapo_rl.types import FloatArray, SeenTokens, TrainSample, Update

OPTIMIZER = "optimizer.pt"

T = TypeVar("T")


class HFPolicy:
    """A Hugging Face causal LM that is trained in this process, with float32 weights and computation in `dtype`."""

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int,
        temperature: float,
        algo: AlgoSettings,
        train: TrainSettings,
        norm_length: int,
        token_budget: int,
        fill_memory: bool = False,
        turns: bool = False,
        longest: int = 0,
        dtype: torch.dtype = torch.float32,
        reference: Any | None = None,
        losses: TokenLosses | None = None,
        tokenizer: Any = None,
        settings: ModelSettings | None = None,
        save_dtype: torch.dtype | None = None,
    ) -> None:
        """`longest` is the longest sample of the run, if known; `fill_memory` raises the token budget to what fits into
        GPU memory. If `turns`, the memory that only updates need is free in between, by `rest`.

        If `reference` is the model itself, the reference policy is the model without its adapters. `losses` is the
        function that `algo.loss` names, if already loaded. The tokenizer is saved with the weights; `settings` say how
        adapters are saved, and `save_dtype` is the type of saved models, by default that of the weights.
        """
        self.model, self._tokenizer, self._settings = model, tokenizer, settings or ModelSettings()
        self._save_dtype = save_dtype
        self._algo, self._train = algo, train
        self._losses = losses or build_losses(algo)
        self._ratio_of = build_ratio(algo)
        self._norm_length, self._token_budget = norm_length, token_budget
        self._lowered_budget: int | None = None
        self._notes: list[str] = []
        """Notes for the user, returned by the next update."""
        # With dropout the trained policy would differ from the policy that sampled.
        model.eval()
        how: dict[str, Any] = {"temperature": temperature, "pad_id": pad_id, "dtype": dtype, "longest": longest}
        how["fused"] = train.fused
        self._recomputes = train.gradient_checkpointing is True
        self._responses = self._logps_of(model, packed=train.packed, recompute=self._recomputes, **how)
        frozen = WithoutAdapter if reference is model else self._logps_of
        self._reference = None if reference is None else frozen(reference, packed=self._responses.packed, **how)
        self._optimizer = build_optimizer(model, train)
        self._gradients = Gradients(model) if turns else None
        reason = self._why_no_copy()
        self._copies = HostCopy() if reason is None else None
        self._stored = StoredModel(model, tokenizer, save_dtype, copied=reason is None)
        self.save_note = reason and f"each checkpoint stops the run until it is written: {reason}"
        """A note for the user if checkpoints are not written in the background."""
        if fill_memory and next(model.parameters()).is_cuda:
            self._token_budget = max(token_budget, self._tokens_that_fit())

    @property
    def note(self) -> str | None:
        """A note for the user on how this model is trained."""
        return self._responses.note

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def weights(self) -> ModelWeights:
        """The current weights, valid until the next update."""
        return ModelWeights(self.model)

    def rest(self) -> None:
        """Frees the memory that only updates need: gradients, and what torch keeps of activations."""
        self._optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()

    @torch.no_grad()
    def score(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        """The log-probability of each response token under the current policy."""

        def compute(micro_batch: Sequence[TrainSample], _count: int) -> list[FloatArray]:
            with self._responses.compute(micro_batch) as stats:
                rows: FloatArray = stats.logps.cpu().numpy()
            return [row[: len(sample.response_ids)] for row, sample in zip(rows, micro_batch, strict=True)]

        result: dict[int, FloatArray] = {}
        for indices, rows in self._in_micro_batches(samples, compute):
            result |= zip(indices, rows, strict=False)  # a rank computes a row for nobody if it has no sample left
        return [result[i] for i in range(len(samples))]

    def update(self, samples: Sequence[TrainSample], lr: float) -> Update:
        """One optimizer step; the result does not depend on the split into micro-batches."""
        counts = self._count(samples)
        seen: list[SeenTokens | None] = [None] * len(samples)
        if counts.tokens == 0:
            return Update({}, tuple(seen))
        places = [i for i, sample in enumerate(samples) if sample.trained_tokens]
        trained = [samples[i] for i in places]
        if self._gradients is None:
            self._optimizer.zero_grad(set_to_none=True)
        else:
            self._gradients.allocate()
        backward = self._in_micro_batches(trained, lambda batch, count: self._backward(batch, counts, count))
        sums = [of_batch for _, (of_batch, _) in backward]
        # One transfer for all micro-batches: a synchronisation after each would leave the device idle.
        table = torch.stack([torch.stack([s[name].float() for name in sums[0]]) for s in sums]).double().sum(0)
        totals = dict(zip(sums[0], self._over_ranks(table).tolist(), strict=True))
        if not math.isfinite(totals["loss"]):
            raise NonFiniteError(f"the loss is {totals['loss']}")
        if self._gradients is not None:
            self._gradients.drop_unused()
        grad_norm = self._clip_gradients()
        if not math.isfinite(grad_norm):
            raise NonFiniteError(f"the gradient's norm is {grad_norm}")
        # The device has just finished, so that these copies do not wait, as they would after the step.
        for indices, (_, tokens) in backward:
            of_samples = tokens.split([len(trained[i].response_ids) for i in indices])
            for i, of_sample in zip(indices, of_samples, strict=True):
                seen[places[i]] = of_sample
        set_learning_rate(self._optimizer, lr)
        self._step()
        metrics = self._summarise(totals, counts.tokens) | {"actor/grad_norm": grad_norm, "actor/lr": lr}
        notes, self._notes = tuple(self._notes), []
        return Update(metrics, tuple(seen), notes)

    def save(self, directory: Path) -> Rest:
        """Copies the weights and the state of the optimizer; the result writes them: `model/`, `optimizer.pt`, and
        `weights.pt` if `model/` does not store the weights exactly. The next call reuses the copies' memory. If the
        host has no memory for copies, this writes everything itself."""
        state = {"optimizer": self._optimizer.state_dict(), "lowered_budget": self._lowered_budget}
        if name := not_finite(state):
            raise NonFiniteError(f"the state of the optimizer is not finite, in {name}")
        write_model = self._stored.save(directory)
        copied = state if self._copies is None else self._copies.take(state)

        def write(is_cancelled: IsCancelled) -> Digests:
            digests = write_model(is_cancelled)
            return {**digests, OPTIMIZER: save_hashed(copied, directory / OPTIMIZER, is_cancelled)}

        return write if self._copies is not None else done_now(write)

    def load(self, directory: Path) -> None:
        """Loads what `save` wrote. A NonFiniteError leaves the policy unchanged."""
        try:
            state = torch.load(directory / OPTIMIZER, map_location="cpu", weights_only=True)
            weights = stored_weights(directory)
        except Exception as error:
            raise UserError(f"{directory}: cannot be read as a checkpoint: {one_line(error)}") from error
        if name := not_finite(weights):
            raise NonFiniteError(f"its weights are not finite, in {name}")
        if name := not_finite(state):
            raise NonFiniteError(f"the state of its optimizer is not finite, in {name}")
        own = self.model.state_dict()
        if other := weight_difference(own, weights):
            raise UserError(f"{directory}: belongs to a different model: {other}; resume with the run's own model")
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        try:
            self._restore(state)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"{directory}: its optimizer state cannot be loaded: {one_line(error)}; remove {directory} to resume "
                "from the previous checkpoint"
            ) from error

    def export(self, path: str | os.PathLike[str]) -> None:
        """Saves the model and tokenizer in Hugging Face format, or in PEFT format with `model.lora.save: adapter`."""
        lora = self._settings.lora
        if lora is not None and lora.save == "adapter":
            save_adapter(self.model, self._tokenizer, lora, self._settings.name, path)
        else:
            save_model(self.model, self._tokenizer, path, self._save_dtype)

    def _logps_of(self, model: Any, **how: Any) -> ResponseLogps:
        return ResponseLogps(model, **how)

    def _count(self, samples: Sequence[TrainSample]) -> _Counts:
        """The counts of the whole optimizer step."""
        return _Counts.of(samples)

    def _over_ranks(self, sums: Tensor) -> Tensor:
        """The sums over all ranks; here there is one."""
        return sums

    def _clip_gradients(self) -> float:
        """Returns the gradient's norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._train.max_grad_norm))

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        for parameter, moments in self._optimizer.state.items():
            if any(isinstance(m, Tensor) and m.dim() and m.shape != parameter.shape for m in moments.values()):
                raise ValueError("its moments and the weights differ in shape")
        # A budget lowered by an out-of-memory error is kept, because another split would sum in another order. The
        # settings can lower it further.
        if (lowered := state.get("lowered_budget")) is not None:
            if not isinstance(lowered, int) or lowered < 1:
                raise ValueError(f"lowered_budget is {lowered!r}")
            self._token_budget = self._lowered_budget = min(self._token_budget, lowered)

    def _backward(
        self, samples: Sequence[TrainSample], counts: _Counts, micro_batches: int
    ) -> tuple[dict[str, Tensor], _Tokens]:
        """Accumulates the gradient of one micro-batch; returns sums over its tokens, and per-token results."""
        algo, device = self._algo, self._responses.device
        behaviour_logps = to_device(_padded([s.old_logps for s in samples]), device)
        advantages = to_device(_padded([s.advantages for s in samples]), device)
        written = to_device(_padded([s.mask for s in samples]), device)
        bounds: dict[str, Any] = {
            "clip_low": algo.clip_low,
            "clip_high": algo.clip_high,
            "clip_ratio_c": algo.clip_ratio_c,
        }
        how: dict[str, Any] = {
            "aggregation": algo.aggregation,
            "denominator": counts.denominator(algo.aggregation, micro_batches),
            "group_tokens": to_device(np.array([counts.group_tokens[s.group] for s in samples]), device),
            "norm_length": self._norm_length,
        }
        sums: dict[str, Tensor] = {}
        if self._reference is not None and algo.kl_coef > 0:
            with torch.no_grad(), self._reference.compute(samples) as reference:
                ref_logps = reference.logps
        with self._responses.compute(samples) as stats:
            logps, mask = stats.logps, stats.mask & written
            old_logps = behaviour_logps if algo.proximal == "behaviour" else _proximal_logps(samples, logps)
            losses = self._losses(logps, old_logps, advantages, mask, **bounds)
            if algo.importance_cap is not None:
                cap, mode = algo.importance_cap, algo.importance_mode
                weights = importance_weights(old_logps, behaviour_logps, mask, cap=cap, mode=mode)
                losses = losses * weights
            loss = sums["pg_loss"] = aggregate(losses, mask, **how)
            if algo.kl_coef > 0:
                sums["kl_loss"] = aggregate(kl_penalty(logps, ref_logps, algo.kl_kind), mask, **how)
                loss = loss + algo.kl_coef * sums["kl_loss"]
            if isinstance(self._losses, OwnLoss):
                self._losses.backward(loss, logps)
            else:
                loss.backward()

        with torch.no_grad():
            high, low, dual = clipped_tokens(logps, old_logps, advantages, mask, **bounds, ratio_of=self._ratio_of)
            probabilities = logps.exp()
            fresh = mask & to_device(_padded([s.fresh for s in samples]), device)
            totals = {name: value.detach() for name, value in sums.items()} | {
                "loss": loss.detach(),
                "entropy": _total(stats.entropy, mask),
                "prob": _total(probabilities, mask),
                "ppo_kl": _total(old_logps - logps, mask),
                "mismatch_kl": _total(kl_penalty(behaviour_logps, logps), fresh),
                "fresh": fresh.sum(),
                "high": high.sum(),
                "high_prob": _total(probabilities, high),
                "low": low.sum(),
                "dual": dual.sum(),
            }
            if algo.importance_cap is not None:
                totals["is_weight"] = _total(weights, mask)
                totals["above_cap"] = above_cap(old_logps, behaviour_logps, mask, cap).sum()
            return totals, _Tokens(logps.detach(), stats.entropy, _which_bound(high, low, dual))

    def _summarise(self, totals: Mapping[str, float], tokens: int) -> dict[str, float]:
        def mean(name: str) -> float:
            return totals.get(name, 0.0) / tokens

        metrics = {
            "actor/pg_loss": totals["pg_loss"],
            "actor/entropy": mean("entropy"),
            "actor/prob": mean("prob"),
            "actor/ppo_kl": mean("ppo_kl"),
            "actor/mismatch_kl": totals["mismatch_kl"] / totals["fresh"] if totals.get("fresh") else math.nan,
            "actor/pg_clipfrac": mean("high") + mean("low"),
            "actor/pg_clipfrac_high": mean("high"),
            "actor/pg_clipfrac_low": mean("low"),
            "actor/pg_clipfrac_lower": mean("dual"),
            "actor/clipped_high_prob": totals["high_prob"] / totals["high"] if totals.get("high") else math.nan,
        }
        if self._algo.kl_coef > 0:
            metrics["actor/kl_loss"] = totals["kl_loss"]
        if self._algo.importance_cap is not None:
            metrics["rollout/is_weight_mean"] = mean("is_weight")
            metrics["rollout/is_above_cap_share"] = mean("above_cap")
        return metrics

    def _why_no_copy(self) -> str | None:
        """Why a checkpoint cannot be copied to host memory; None if it can."""
        parameters = list(self.model.parameters())
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        moments = (2 if self._train.optimizer == "adamw_8bit" else 8) * trained
        copied = sum(parameter.nbytes for parameter in parameters) + moments
        return why_no_copy(copied, 0 if parameters[0].is_cuda else copied + 4 * trained)

    def _tokens_that_fit(self) -> int:
        """The tokens that fit into a third of the GPU memory left after gradients and moments: large micro-batches are
        faster."""
        free: int = torch.cuda.mem_get_info()[0]
        trained: int = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        try:
            return min(max(free - 12 * trained, 0) // 3 // self._responses.bytes_per_token(), MOST_TOKENS)
        except torch.OutOfMemoryError:
            return 0

    def _micro_batches(self, samples: Sequence[TrainSample]) -> list[list[int]]:
        split = packed_batches if self._responses.packed else padded_batches
        return split(samples, self._token_budget)

    def _in_micro_batches(
        self, samples: Sequence[TrainSample], compute: Callable[[Sequence[TrainSample], int], T]
    ) -> list[tuple[list[int], T]]:
        """The indices of each micro-batch with the result of `compute(micro_batch, number of micro-batches)`.

        If a micro-batch does not fit into memory, everything is recomputed with smaller ones.
        """
        while True:
            done: list[tuple[list[int], T]] = []
            micro_batches = self._micro_batches(samples)
            for indices in micro_batches:
                try:
                    done.append((indices, compute([samples[i] for i in indices], len(micro_batches))))
                except torch.OutOfMemoryError:
                    break
            else:
                return done
            # Outside the except block, because the exception's traceback keeps the activations alive.
            done.clear()
            self._optimizer.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
            if len(indices) == 1 or self._token_budget == 1:
                raise UserError(_too_long(samples[indices[0]], self._recomputes))
            self._lower_budget(samples, len(micro_batches))

    def _lower_budget(self, samples: Sequence[TrainSample], count: int) -> None:
        """Halves the budget until these samples need more than `count` micro-batches."""
        before = self._token_budget
        while len(self._micro_batches(samples)) <= count and self._token_budget > 1:
            self._token_budget //= 2
        self._lowered_budget = self._token_budget
        self._notes.append(budget_note(before, self._token_budget))

    def _step(self) -> None:
        if self._gradients is not None and not self._optimizer.state:
            torch.cuda.empty_cache()  # the first step allocates the moments, which stay
        try:
            self._optimizer.step()
        except torch.OutOfMemoryError:  # only some of the weights may have been updated, so the run must stop
            raise UserError(
                "out of GPU memory in the optimizer's step; lower sampling.kv_memory_gib, or set "
                "train.optimizer=adamw_8bit in a new run"
            ) from None


class _Counts:
    """Counts over a whole optimizer step: the denominators that its micro-batches share."""

    def __init__(self, tokens: int, samples: int, group_tokens: Mapping[int, int]) -> None:
        self.tokens, self.samples, self.group_tokens = tokens, samples, group_tokens

    @classmethod
    def of(cls, samples: Sequence[TrainSample]) -> _Counts:
        group_tokens: Counter[int] = Counter({s.group: 0 for s in samples})
        trained = [s for s in samples if s.trained_tokens]
        for sample in trained:
            group_tokens[sample.group] += sample.trained_tokens
        return cls(sum(group_tokens.values()), len(trained), group_tokens)

    def denominator(self, aggregation: Aggregation, micro_batches: int) -> int:
        return {
            "tokens": self.tokens,
            "groups": sum(count > 0 for count in self.group_tokens.values()),
            "samples": self.samples,
            "micro-batches": micro_batches,
        }[AGGREGATIONS[aggregation].denominator]


def budget_note(before: int, budget: int) -> str:
    return (
        f"out of GPU memory: micro-batches now have {budget} tokens instead of {before}; train.token_budget sets this "
        "from the start"
    )


def _too_long(sample: TrainSample, recomputes: bool) -> str:
    remedy = "" if recomputes else "set train.gradient_checkpointing=true, or "
    return (
        f"out of GPU memory: a single sample of {len(sample.prompt_ids) + len(sample.response_ids)} tokens does not "
        f"fit; {remedy}lower sampling.kv_memory_gib or sampling.max_new_tokens"
    )


class _Tokens(NamedTuple):
    """Per-token results of a micro-batch, `[B, T]` each, on the device."""

    logps: Tensor
    entropies: Tensor
    clipped: Tensor

    def split(self, lengths: Sequence[int]) -> list[SeenTokens]:
        """The results of each sample, without padding."""
        logps, entropies, clipped = (rows.cpu().numpy() for rows in self)
        return [SeenTokens(logps[i, :n], entropies[i, :n], clipped[i, :n]) for i, n in enumerate(lengths)]


def _which_bound(high: Tensor, low: Tensor, dual: Tensor) -> Tensor:
    """The codes of `SeenTokens.clipped`."""
    return (high.to(torch.int8) + 2 * low.to(torch.int8) + 3 * dual.to(torch.int8)).to(torch.int8)


def _proximal_logps(samples: Sequence[TrainSample], logps: Tensor) -> Tensor:
    """What the step scored before its first update. If it scored nothing, this is the first update, and the current
    policy is the proximal one."""
    scored = [s.proximal_logps for s in samples if s.proximal_logps is not None]
    if not scored:
        return logps.detach()
    if len(scored) < len(samples):
        raise ValueError("some samples have log-probabilities under the proximal policy, and some do not")
    return to_device(_padded(scored), logps.device)


def _padded(rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Rows of different lengths as one array, right-padded with zeros."""
    table = np.zeros((len(rows), max(len(row) for row in rows)), rows[0].dtype)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def _total(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum()
