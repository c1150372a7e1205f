"""A model that learns in this process: micro-batches, gradients, one optimizer step, and what to do when memory runs
out. The policy and the critic are learners."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dapo_rl.base.quote import one_line
from dapo_rl.config import TrainSettings
from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.models.finite import not_finite
from dapo_rl.models.response_logps import ResponsePass
from dapo_rl.models.save import HostCopy, weight_difference, why_no_copy
from dapo_rl.train.gradient_buffers import Gradients
from dapo_rl.train.loss_denominators import Counts
from dapo_rl.train.micro_batches import packed_batches, padded_batches, tokens_that_fit
from dapo_rl.train.optimizer import build_optimizer, set_learning_rate
from dapo_rl.types import FloatArray, Trajectory

T = TypeVar("T")
Stats = TypeVar("Stats")
Row = TypeVar("Row", covariant=True)


class TokenRows(Protocol[Row]):
    """Per-token results of a micro-batch, on the device."""

    def split(self, lengths: Sequence[int]) -> Sequence[Row]:
        """The results of each sample, without padding."""
        ...


class Learner(Generic[Stats]):
    """A model with its optimizer. It has float32 weights, and computes in the type of its forward pass."""

    whose: ClassVar[str] = "the"
    """Of its loss and gradient, in errors."""
    copies: ClassVar[int] = 1
    """How many copies of this size a checkpoint of the run takes in host memory."""
    _synced: Any = None
    """A reference policy that follows the model, and is part of its checkpoints."""

    def __init__(
        self, model: Any, *, train: TrainSettings, token_budget: int, fill_memory: bool, time_share: bool, **how: Any
    ) -> None:
        """`how` are the arguments of the forward pass. `fill_memory` raises the token budget to what fits into GPU
        memory. If `time_share`, the memory that only updates need is free in between, by `release_memory`."""
        self.model, self._train, self._token_budget = model, train, token_budget
        self._lowered_budget: int | None = None
        self._notes: list[str] = []
        """Notes for the user, returned by the next update."""
        # With dropout the trained policy would differ from the policy that sampled.
        model.eval()
        self._recomputes = train.gradient_checkpointing is True
        self._responses = self._pass_of(
            model, packed=train.packed, recompute=self._recomputes, fused=train.fused, **how
        )
        self._optimizer = build_optimizer(model, train)
        self._gradients = Gradients(model) if time_share else None
        reason = self._why_no_copy()
        self._copies = HostCopy() if reason is None else None
        self.save_note = reason and f"each checkpoint stops the run until it is written: {reason}"
        """A note for the user if checkpoints are not written in the background."""
        if fill_memory and next(model.parameters()).is_cuda:
            self._token_budget = max(token_budget, tokens_that_fit(model, self._responses.bytes_per_token))

    @property
    def note(self) -> str | None:
        """A note for the user on how this model is trained."""
        return self._responses.note

    @property
    def packed(self) -> bool:
        """Whether samples are packed."""
        return self._responses.packed

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def release_memory(self) -> None:
        """Frees the memory that only updates need: gradients, and what torch keeps of activations."""
        self._optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()

    def _pass_of(self, model: Any, **how: Any) -> ResponsePass[Stats]:
        """The forward pass of a model."""
        raise NotImplementedError

    @torch.no_grad()
    def _results(self, samples: Sequence[Trajectory], of: Callable[[Sequence[Trajectory]], Tensor]) -> list[FloatArray]:
        """One number per response token of each sample; `of` computes those of a micro-batch, `[B, R]`."""

        def compute(micro_batch: Sequence[Trajectory], _count: int) -> list[FloatArray]:
            rows: FloatArray = of(micro_batch).cpu().numpy()
            return [row[: len(sample.token_ids)] for row, sample in zip(rows, micro_batch, strict=True)]

        result: dict[int, FloatArray] = {}
        for indices, rows in self._in_micro_batches(samples, compute):
            result |= zip(indices, rows, strict=False)  # a rank computes a placeholder if it has no sample left
        return [result[i] for i in range(len(samples))]

    def _learn(
        self,
        samples: Sequence[Trajectory],
        lr: float,
        backward: Callable[[Sequence[Trajectory], int], tuple[dict[str, Tensor], TokenRows[T]]],
    ) -> tuple[dict[str, float], list[T], float]:
        """One optimizer step on samples that are all in the loss. `backward` adds the gradients of a micro-batch; it
        returns sums over its tokens, "loss" among them, and per-token results.

        Returns the sums of the whole step, the results of each sample, and the norm of the gradient.
        """
        if self._gradients is None:
            self._optimizer.zero_grad(set_to_none=True)
        else:
            self._gradients.allocate()
        done = self._in_micro_batches(samples, backward)
        sums = [of_batch for _, (of_batch, _) in done]
        # One transfer for all micro-batches: a synchronisation after each would leave the device idle.
        table = torch.stack([torch.stack([s[name].float() for name in sums[0]]) for s in sums]).double().sum(0)
        totals = dict(zip(sums[0], self._over_ranks(table).tolist(), strict=True))
        if not math.isfinite(totals["loss"]):
            raise NonFiniteError(f"{self.whose} loss is {totals['loss']}")
        if self._gradients is not None:
            self._gradients.drop_unused()
        grad_norm = self._clip_gradients()
        if not math.isfinite(grad_norm):
            raise NonFiniteError(f"{self.whose} gradient's norm is {grad_norm}")
        # The device has just finished, so that these copies do not wait, as they would after the step.
        results: dict[int, T] = {}
        for indices, (_, tokens) in done:
            results |= zip(indices, tokens.split([len(samples[i].token_ids) for i in indices]), strict=True)
        set_learning_rate(self._optimizer, lr)
        self._step()
        return totals, [results[i] for i in range(len(samples))], grad_norm

    def _take_notes(self) -> tuple[str, ...]:
        notes, self._notes = tuple(self._notes), []
        return notes

    def _count(self, samples: Sequence[Trajectory]) -> Counts:
        """The counts of the whole optimizer step."""
        return Counts.of(samples)

    def _over_ranks(self, sums: Tensor) -> Tensor:
        """The sums over all ranks; here there is one."""
        return sums

    def _clip_gradients(self) -> float:
        """Returns the gradient's norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._train.max_grad_norm))

    def _restore(self, directory: Path, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Takes over weights and the state of the optimizer, from files of a checkpoint. A NonFiniteError leaves the
        model unchanged."""
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
            self._restore_optimizer(state)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"{directory}: its optimizer state cannot be loaded: {one_line(error)}; remove {directory} to resume "
                "from the previous checkpoint"
            ) from error

    def _restore_optimizer(self, state: Mapping[str, Any]) -> None:
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

    def _why_no_copy(self) -> str | None:
        """Why a checkpoint cannot be copied to host memory; None if it can."""
        parameters = list(self.model.parameters())
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        moments = (2 if self._train.optimizer == "adamw_8bit" else 8) * trained
        weights = sum(parameter.nbytes for parameter in parameters)
        copied = weights * (1 if self._synced is None else 2) + moments
        taken = 0 if parameters[0].is_cuda else copied + 4 * trained
        return why_no_copy(self.copies * copied, self.copies * taken)

    def _micro_batches(self, samples: Sequence[Trajectory]) -> list[list[int]]:
        split = packed_batches if self._responses.packed else padded_batches
        return split(samples, self._token_budget)

    def _in_micro_batches(
        self, samples: Sequence[Trajectory], compute: Callable[[Sequence[Trajectory], int], T]
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

    def _lower_budget(self, samples: Sequence[Trajectory], count: int) -> None:
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


def budget_note(before: int, budget: int) -> str:
    return (
        f"out of GPU memory: micro-batches now have {budget} tokens instead of {before}; train.token_budget sets this "
        "from the start"
    )


def _too_long(sample: Trajectory, recomputes: bool) -> str:
    remedy = "" if recomputes else "set train.gradient_checkpointing=true, or "
    return (
        f"out of GPU memory: a single sample of {len(sample.prompt_ids) + len(sample.token_ids)} tokens does not "
        f"fit; {remedy}lower sampling.kv_memory_gib or sampling.max_new_tokens"
    )


@contextmanager
def read_checkpoint(directory: Path) -> Iterator[None]:
    """Turns whatever goes wrong while files are read into one line for the user."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{directory}: cannot be read as a checkpoint: {one_line(error)}") from error


def padded(rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Rows of different lengths as one array, right-padded with zeros."""
    table = np.zeros((len(rows), max(len(row) for row in rows), *rows[0].shape[1:]), rows[0].dtype)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def total(values: Tensor, mask: Tensor) -> Tensor:
    """The sum over the tokens of the mask."""
    return torch.where(mask, values, 0.0).sum()
