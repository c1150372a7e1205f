"""The policy: forward, backward, step. One optimizer step is one mini-batch, in as many micro-batches as it takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dapo_rl.algo import aggregate, dapo_policy_loss, kl_penalty
from dapo_rl.algo.loss import clipped_tokens
from dapo_rl.config import AlgoSettings, TrainSettings
from dapo_rl.errors import NonFiniteError
from dapo_rl.models.forward import response_logps
from dapo_rl.types import TrainSample


class HFPolicy:
    """A Hugging Face causal LM that is trained in this process."""

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
        reference: Any | None = None,
    ) -> None:
        self.model = model
        self._pad_id, self._temperature, self._algo, self._train = pad_id, temperature, algo, train
        self._norm_length, self._token_budget = norm_length, token_budget
        self._reference = reference
        # Dropout would make the policy of the update another one than the policy that sampled.
        model.eval()
        decayed = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
        others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": train.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=train.lr,
            betas=train.betas,
        )

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Each response token's log-probability under the policy as it is now."""
        result: dict[int, list[float]] = {}
        for indices in self._micro_batches(samples):
            stats = response_logps(self.model, [samples[i] for i in indices], self._temperature, self._pad_id)
            for row, i in enumerate(indices):
                result[i] = stats.logps[row, : len(samples[i].response_ids)].tolist()
        return [result[i] for i in range(len(samples))]

    def update(self, mini_batch: Sequence[TrainSample], lr: float) -> dict[str, float]:
        """One optimizer step; the result is the same for any split into micro-batches."""
        counts = _Counts.of(mini_batch, self._algo.aggregation)
        if counts.tokens == 0:
            return {}
        self._optimizer.zero_grad(set_to_none=True)
        micro_batches = list(self._micro_batches(mini_batch))
        totals: Counter[str] = Counter()
        for indices in micro_batches:
            totals.update(self._backward([mini_batch[i] for i in indices], counts, len(micro_batches)))
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._train.max_grad_norm))
        if not math.isfinite(grad_norm):
            raise NonFiniteError(f"the gradient's norm is {grad_norm}")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return self._summarise(totals, counts.tokens) | {"actor/grad_norm": grad_norm, "actor/lr": lr}

    def state(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])

    def _backward(self, samples: Sequence[TrainSample], counts: _Counts, micro_batches: int) -> dict[str, float]:
        """Adds one micro-batch's gradient; returns sums over its tokens."""
        algo = self._algo
        stats = response_logps(self.model, samples, self._temperature, self._pad_id)
        in_loss = torch.tensor([s.in_loss for s in samples], device=stats.mask.device)
        mask = stats.mask & in_loss[:, None]
        old_logps = _pad_floats([s.old_logps for s in samples]).to(mask.device)
        advantages = torch.tensor([s.advantage for s in samples], device=mask.device)
        bounds: dict[str, Any] = {
            "clip_low": algo.clip_low,
            "clip_high": algo.clip_high,
            "clip_ratio_c": algo.clip_ratio_c,
        }
        how: dict[str, Any] = {
            "aggregation": algo.aggregation,
            "denominator": micro_batches if algo.aggregation == "micro-batch-token-mean" else counts.denominator,
            "group_tokens": torch.tensor([counts.group_tokens[s.group] for s in samples], device=mask.device),
            "norm_length": self._norm_length,
        }

        pg_loss = dapo_policy_loss(stats.logps, old_logps, advantages, mask, **bounds, **how)
        loss = pg_loss
        sums = {"pg_loss": pg_loss.item()}
        if algo.kl_coef > 0:
            with torch.no_grad():
                ref_logps = response_logps(self._reference, samples, self._temperature, self._pad_id).logps
            kl_loss = aggregate(kl_penalty(stats.logps, ref_logps, algo.kl_kind), mask, **how)
            loss = pg_loss + algo.kl_coef * kl_loss
            sums["kl_loss"] = kl_loss.item()
        if not torch.isfinite(loss):
            raise NonFiniteError(f"the loss is {loss.item()}")
        loss.backward()

        with torch.no_grad():
            high, low, dual = clipped_tokens(stats.logps, old_logps, advantages, mask, **bounds)
            probabilities = stats.logps.exp()
            fresh = mask & torch.tensor([s.fresh for s in samples], device=mask.device)[:, None]
            sums |= {
                "entropy": stats.entropy[mask].sum().item(),
                "prob": probabilities[mask].sum().item(),
                "ppo_kl": (old_logps - stats.logps)[mask].sum().item(),
                "mismatch_kl": kl_penalty(old_logps, stats.logps)[fresh].sum().item(),
                "fresh": fresh.sum().item(),
                "high": high.sum().item(),
                "high_prob": probabilities[high].sum().item(),
                "low": low.sum().item(),
                "dual": dual.sum().item(),
            }
        return sums

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
        return metrics

    def _micro_batches(self, samples: Sequence[TrainSample]) -> Iterator[list[int]]:
        """Samples of like length together, as many as the token budget holds with their padding."""
        order = sorted(range(len(samples)), key=lambda i: (len(samples[i].response_ids), len(samples[i].prompt_ids)))
        batch: list[int] = []
        prompt_width = response_width = 0
        for i in order:
            wider_prompt = max(prompt_width, len(samples[i].prompt_ids))
            wider_response = max(response_width, len(samples[i].response_ids))
            if batch and (len(batch) + 1) * (wider_prompt + wider_response) > self._token_budget:
                yield batch
                batch, wider_prompt, wider_response = [], len(samples[i].prompt_ids), len(samples[i].response_ids)
            batch.append(i)
            prompt_width, response_width = wider_prompt, wider_response
        if batch:
            yield batch


class _Counts:
    """What the whole optimizer step has: the denominators that its micro-batches share."""

    def __init__(self, tokens: int, denominator: int, group_tokens: Mapping[int, int]) -> None:
        self.tokens, self.denominator, self.group_tokens = tokens, denominator, group_tokens

    @classmethod
    def of(cls, samples: Sequence[TrainSample], aggregation: str) -> _Counts:
        group_tokens: Counter[int] = Counter({s.group: 0 for s in samples})
        trained = [s for s in samples if s.in_loss]
        for sample in trained:
            group_tokens[sample.group] += len(sample.response_ids)
        tokens = sum(group_tokens.values())
        denominator = {
            "token-mean": tokens,
            "token-mean-per-group": sum(count > 0 for count in group_tokens.values()),
        }.get(aggregation, len(trained))
        return cls(tokens, denominator, group_tokens)


def _pad_floats(rows: Sequence[Sequence[float]]) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows])
