"""The policy: forward, backward, step. One optimizer step trains on one mini-batch, split into micro-batches."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dapo_rl.base.hashing import DeferredWrite
from dapo_rl.config import AlgoSettings, Config, ModelSettings, TrainSettings
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.errors import NonFiniteError
from dapo_rl.models.device import to_device
from dapo_rl.models.finite import not_finite
from dapo_rl.models.lora import WithoutAdapter, dropping_out, save_adapter
from dapo_rl.models.response_logps import ResponseLogps, ResponsePass, TokenStats
from dapo_rl.models.save import StoredModel, save_model, stored_weights
from dapo_rl.models.weights import ModelWeights
from dapo_rl.objectives.aggregation import aggregate
from dapo_rl.objectives.critic import positive_lm_loss
from dapo_rl.objectives.importance import above_cap, importance_weights, off_policy_mask
from dapo_rl.objectives.kl import kl_penalty, sample_means, unbiased_kl
from dapo_rl.train.coefficients import Coefs
from dapo_rl.train.custom import CustomLoss, build_losses, build_ratio
from dapo_rl.train.learner import Learner, Tensors, copy_weights, read_checkpoint, total
from dapo_rl.train.loss_denominators import Counts
from dapo_rl.train.off_policy import SCALE, weight_bounds
from dapo_rl.train.reference import FILE as REFERENCE
from dapo_rl.train.reference import check_reference, move_towards
from dapo_rl.train.update_metrics import clipping_sums, update_metrics
from dapo_rl.types import KEPT_IDS, FloatArray, Trajectory, Update

OPTIMIZER = "optimizer.pt"


def policy_settings(config: Config, tokenizer: Any) -> dict[str, Any]:
    """The arguments of an `HFPolicy` that follow from the settings alone, in one process and on ranks."""
    return {
        "temperature": config.sampling.temperature,
        "algo": config.algo,
        "norm_length": config.norm_length,
        "tokenizer": tokenizer,
        "settings": config.model,
        "seed": config.seed,
    }


class HFPolicy(Learner[TokenStats]):
    """A Hugging Face causal LM that is trained in this process, with float32 weights and computation in `dtype`."""

    forward: ClassVar[Any] = ResponseLogps

    def __init__(
        self,
        model: Any,
        *,
        algo: AlgoSettings,
        train: TrainSettings,
        norm_length: int,
        reference: Any | None = None,
        tokenizer: Any = None,
        settings: ModelSettings | None = None,
        save_dtype: torch.dtype | None = None,
        seed: int = 0,
        **how: Any,
    ) -> None:
        """If `reference` is the model itself, the reference policy is the model without its adapters. The tokenizer is
        saved with the weights; `settings` say how adapters are saved, and `save_dtype` is the type of saved models, by
        default that of the weights. `seed` is that of the adapters' dropout. The others are arguments of `Learner`."""
        self._seed, self._updates = seed, 0
        self._synced = None if algo.ref_sync_steps is None or reference is model else reference
        self._tokenizer, self._settings = tokenizer, settings or ModelSettings()
        self._save_dtype = save_dtype
        self._algo = algo
        self._losses = build_losses(algo)
        self._ratio_of = build_ratio(algo)
        self._adapts_kl = algo.kl_target is not None and algo.kl_in == "loss"
        self._norm_length = norm_length
        self._coefs = Coefs.of(algo)
        takes_entropy = isinstance(self._losses, CustomLoss) and self._losses.takes("entropy")
        super().__init__(model, train=train, entropy_grad=algo.has_entropy_bonus or takes_entropy, **how)
        self._reference: ResponsePass[TokenStats] | WithoutAdapter | None = None
        if reference is model:
            self._reference = WithoutAdapter(model, self._responses)
        elif reference is not None:
            same = {**self._how, "packed": self.packed, "entropy_grad": False}
            self._reference = self._pass_of(reference, **same)
        self._stored = StoredModel(model, tokenizer, save_dtype, copied=self._copies is not None)

    def weights(self) -> ModelWeights:
        """The current weights, valid until the next update."""
        return ModelWeights(self.model)

    def figures(self) -> dict[str, float]:
        """Metrics of the ranks: there are none."""
        return {}

    def score(self, samples: Sequence[Trajectory]) -> list[FloatArray]:
        return self._results(samples, lambda batch: _stats(self._responses, batch).logps)

    def score_reference(self, samples: Sequence[Trajectory]) -> list[FloatArray]:
        """The same under the reference policy."""
        assert self._reference is not None
        reference = self._reference
        with self._brought_here(reference):
            return self._results(samples, lambda batch: _stats(reference, batch).logps)

    @contextmanager
    def _brought_here(self, reference: ResponsePass[TokenStats] | WithoutAdapter) -> Iterator[None]:
        """In turns, moves a reference model that is on the host to the device while it scores."""
        here = self._responses.device
        if self._gradients is None or isinstance(reference, WithoutAdapter) or reference.device == here:
            yield
            return
        host = reference.device
        reference.move_to(here)
        try:
            yield
        finally:
            reference.move_to(host)
            torch.cuda.empty_cache()

    def score_entropy(self, samples: Sequence[Trajectory]) -> list[FloatArray]:
        return self._results(samples, lambda batch: _stats(self._responses, batch).entropy)

    def sync_reference(self, alpha: float) -> None:
        assert self._synced is not None
        move_towards(self._synced, self.model, alpha)

    def update(self, samples: Sequence[Trajectory], lr: float, coefs: Coefs | None = None) -> Update:
        """One optimizer step; the result does not depend on the split into micro-batches. `coefs` replace those of the
        settings."""
        coefs = coefs or self._coefs
        counts = self._count(samples)
        if counts.tokens == 0:
            return Update({}, (None,) * len(samples))
        places = [i for i, sample in enumerate(samples) if sample.trained_tokens]
        trained = [samples[i] for i in places]
        totals, results, grad_norm = self._learn(
            trained, lr, lambda batch, count: self._backward(batch, counts, count, coefs)
        )
        columns = dict(zip(places, results, strict=True))
        self._updates += 1
        metrics = update_metrics(totals, counts.tokens, self._algo) | {"actor/grad_norm": grad_norm, "actor/lr": lr}
        if self._algo.has_entropy_bonus:
            metrics["actor/entropy_coef"] = coefs.entropy
        if self._adapts_kl:
            metrics["actor/kl_coef"] = coefs.kl
        return Update(metrics, tuple(map(columns.get, range(len(samples)))), self._take_notes())

    def save(self, directory: Path) -> DeferredWrite:
        """Copies the weights and the state of the optimizer; the result writes them: `model/`, `optimizer.pt`, and
        `weights.pt` if `model/` does not store the weights exactly, `reference.pt` if the reference policy changes."""
        state = {
            "optimizer": self.optimizer.state_dict(),
            "lowered_budget": self._lowered_budget,
            "updates": self._updates,
        }
        if name := not_finite(state):
            raise NonFiniteError(f"the state of the optimizer is not finite, in {name}")
        files = {OPTIMIZER: state} | ({} if self._synced is None else {REFERENCE: self._synced.state_dict()})
        return self._deferred(directory, files, self._stored.save(directory))

    def load(self, directory: Path) -> None:
        """Loads what `save` wrote. A NonFiniteError leaves the policy unchanged."""
        with read_checkpoint(directory):
            state = torch.load(directory / OPTIMIZER, map_location="cpu", weights_only=True)
            weights = stored_weights(directory)
            if self._synced is not None:
                reference = torch.load(directory / REFERENCE, map_location="cpu", weights_only=True)
        if self._synced is not None:
            check_reference(directory, self._synced, reference)
        self._restore(directory, weights, state)
        if self._synced is not None:
            copy_weights(reference, self._synced)

    def _restore_optimizer(self, state: Mapping[str, Any]) -> None:
        super()._restore_optimizer(state)
        updates = state.get("updates", 0)
        if not isinstance(updates, int) or updates < 0:
            raise ValueError(f"updates is {updates!r}")
        self._updates = updates

    def export(self, path: str | os.PathLike[str]) -> None:
        """Saves the model and tokenizer in Hugging Face format, or in PEFT format with `model.lora.save: adapter`."""
        lora = self._settings.lora
        if lora is not None and lora.save == "adapter":
            save_adapter(self.model, self._tokenizer, lora, self._settings.name, path)
        else:
            save_model(self.model, self._tokenizer, path, self._save_dtype)

    def _dropout(self, samples: Sequence[Trajectory]) -> AbstractContextManager[None]:
        """Turns the adapters' dropout on. Its masks depend on the update and on the samples, so that a micro-batch that
        is computed again has the same, and a resumed run too."""
        lora = self._settings.lora
        if lora is None or not lora.dropout:
            return nullcontext()
        self._responses.prepare()
        tokens = b"".join(np.asarray(sample.token_ids, np.int32).tobytes() for sample in samples)
        return dropping_out(self.model, derive_seed(self._seed, "dropout", self._updates, zlib.crc32(tokens)))

    def _backward(
        self, samples: Sequence[Trajectory], counts: Counts, micro_batches: int, coefs: Coefs
    ) -> tuple[Tensors, Tensors]:
        """Accumulates the gradient of one micro-batch; returns sums over its tokens, and per-token results."""
        algo = self._algo
        behaviour_logps, advantages = self._column(samples, "logps"), self._column(samples, "advantages")
        in_loss = self._padded([s.loss_mask for s in samples])
        bounds: dict[str, Any] = {
            "clip_low": algo.clip_low,
            "clip_high": algo.clip_high,
            "clip_ratio_c": algo.clip_ratio_c,
        }
        how: dict[str, Any] = {
            "aggregation": algo.aggregation,
            "denominator": counts.denominator(algo.aggregation, micro_batches),
            "group_tokens": self._per_sample([counts.group_tokens[s.group] for s in samples]),
            "norm_length": self._norm_length,
        }
        sums: dict[str, Tensor] = {}
        with self._dropout(samples), self._responses.compute(samples) as stats:
            logps, mask = stats.logps, stats.mask & in_loss
            old_logps = behaviour_logps if algo.old_policy == "behaviour" else self._proximal_logps(samples, logps)
            more = self._inputs(samples, stats) if isinstance(self._losses, CustomLoss) else self._selected(samples)
            losses = self._losses(logps, old_logps, advantages, mask, **bounds, **more)
            if algo.top_entropy_quantile < 1:
                losses = losses * self._column(samples, "entropy_mask")
            losses, corrected = self._correct(samples, losses, (logps, old_logps, behaviour_logps), advantages, mask)
            loss = sums["pg_loss"] = aggregate(losses, mask, **how)
            for name, coef, term in self._terms(samples, stats, mask, counts, coefs, how):
                sums[name] = term
                loss = loss + coef * term
            if isinstance(self._losses, CustomLoss):
                self._losses.backward(loss, logps, stats.entropy)
            else:
                loss.backward()

        with torch.no_grad():
            fresh = mask & self._padded([s.fresh for s in samples])
            of_clipping, clipped = clipping_sums(
                logps, old_logps, advantages, mask, fresh, algo.per_sequence, **bounds, ratio_of=self._ratio_of
            )
            totals = {name: value.detach() for name, value in sums.items()} | of_clipping
            totals |= {
                "loss": loss.detach(),
                "entropy": total(stats.entropy, mask),
                "mismatch_kl": total(kl_penalty(behaviour_logps, logps), fresh),
            }
            if self._adapts_kl:
                totals["kl"], totals["kl_of"] = sample_means(self._kl(samples, logps), mask).sum(), mask.any(-1).sum()
            of_tokens = {"train_logps": logps.detach(), "entropies": stats.entropy.detach(), "clipped": clipped}
            return totals | corrected, of_tokens

    def _correct(
        self,
        samples: Sequence[Trajectory],
        losses: Tensor,
        logps: tuple[Tensor, Tensor, Tensor],
        advantages: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Token losses with importance weights, and without those of off-policy samples; and sums for metrics. `logps`
        are those of the current, the old and the behaviour policy."""
        algo, sums = self._algo, dict[str, Tensor]()
        new, old, behaviour = logps
        if (cap := algo.importance_cap) is not None:
            weights = importance_weights(old, behaviour, mask, **weight_bounds(algo))
            sums["is_weight"] = total(weights, mask)
            sums["above_cap"] = above_cap(old, behaviour, mask, cap, algo.importance_level).sum()
            if algo.importance_normalize:
                scales = np.array([[sample.scalars[SCALE]] for sample in samples], np.float32)
                weights = weights * to_device(scales, weights.device)
            losses = losses * weights
        if (threshold := algo.off_policy_mask_threshold) is not None:
            off_policy = off_policy_mask(new, behaviour, advantages, mask, threshold)
            sums["opsm"], sums["opsm_of"] = off_policy.any(-1).sum(), mask.any(-1).sum()
            losses = losses.where(~off_policy, 0.0)
        return losses, sums

    def _terms(
        self,
        samples: Sequence[Trajectory],
        stats: TokenStats,
        mask: Tensor,
        counts: Counts,
        coefs: Coefs,
        how: Mapping[str, Any],
    ) -> Iterator[tuple[str, float, Tensor]]:
        """What is added to the policy's loss: a name, a coefficient and the term, aggregated as `how` says."""
        algo = self._algo
        if coefs.kl > 0:
            yield "kl_loss", coefs.kl, aggregate(self._kl(samples, stats.logps), mask, **how)
        if algo.positive_lm_coef > 0:
            correct = self._per_sample([sample.correct for sample in samples])
            weight, tokens = algo.positive_lm_coef, max(counts.correct_tokens, 1)
            yield "lm_loss", 1.0, positive_lm_loss(stats.logps, correct, mask, weight=weight, denominator=tokens)
        if coefs.entropy > 0:
            entropy = stats.entropy
            if algo.top_entropy_quantile < 1:  # the bonus acts on the tokens that learn
                entropy = entropy * self._column(samples, "entropy_mask")
            yield "entropy_bonus", -coefs.entropy, aggregate(entropy, mask, **how)

    def _kl(self, samples: Sequence[Trajectory], logps: Tensor) -> Tensor:
        ref_logps = self._column(samples, "ref_logps")
        if not self._algo.kl_unbiased:
            return kl_penalty(logps, ref_logps, self._algo.kl_kind)
        return unbiased_kl(logps, ref_logps, self._column(samples, "logps"), self._algo.kl_kind)

    def _selected(self, samples: Sequence[Trajectory]) -> dict[str, Any]:
        if any("cov_mask" not in sample.columns for sample in samples):
            return {}
        return {"cov_mask": self._column(samples, "cov_mask")}

    def _inputs(self, samples: Sequence[Trajectory], stats: TokenStats) -> dict[str, Tensor]:
        """What a custom loss can take by name: the token columns that all samples have, but for `kept_ids`,
        `behaviour_logps`, the policy's `entropy`, and for each sample whether it is `correct` and the number of its
        `group`."""
        names = set.intersection(*({*sample.columns} for sample in samples)) - {"advantages", "mask", KEPT_IDS}
        columns = {name: self._column(samples, name) for name in sorted(names)}
        return columns | {
            "behaviour_logps": columns["logps"],
            "entropy": stats.entropy,
            "correct": self._per_sample([sample.correct for sample in samples]),
            "group": self._per_sample([sample.group for sample in samples]),
        }

    def _proximal_logps(self, samples: Sequence[Trajectory], logps: Tensor) -> Tensor:
        """What the step scored before its first update. If it scored nothing, this is the first update, and the current
        policy is the proximal one."""
        scored = ["proximal_logps" in sample.columns for sample in samples]
        if not any(scored):
            return logps.detach()
        if not all(scored):
            raise ValueError("some samples have log-probabilities under the proximal policy, and some do not")
        return self._column(samples, "proximal_logps")


def _stats(forward: ResponsePass[TokenStats] | WithoutAdapter, samples: Sequence[Trajectory]) -> TokenStats:
    with forward.compute(samples) as stats:
        return stats
