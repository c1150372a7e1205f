"""A model that learns in this process: micro-batches, gradients, one optimizer step, and what to do when memory runs
out. The policy and the critic are learners."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dapo_rl.base.hashing import DeferredWrite, Digests, IsCancelled
from dapo_rl.base.quote import one_line
from dapo_rl.config import TrainSettings
from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.models.device import to_device
from dapo_rl.models.finite import not_finite
from dapo_rl.models.response_logps import ResponsePass
from dapo_rl.models.save import HostCopy, done_now, save_hashed, weight_difference, why_no_copy
from dapo_rl.train.gradient_buffers import Gradients
from dapo_rl.train.loss_denominators import Counts
from dapo_rl.train.micro_batches import packed_batches, padded_batches, tokens_that_fit
from dapo_rl.train.off_policy import SCALE
from dapo_rl.train.optimizer import build_optimizer, set_learning_rate
from dapo_rl.types import Array, FloatArray, Trajectory

T = TypeVar("T")
Stats = TypeVar("Stats")
Tensors = Mapping[str, Tensor]

PLACEHOLDER = Trajectory(
    [0],
    mask=False,
    prompt_ids=[0],
    scalars={"group": -1, SCALE: 1.0},
    advantages=0.0,
    ref_logps=0.0,
    values=0.0,
    returns=0.0,
    entropy_mask=False,
    cov_mask=False,
)
"""What a rank computes when it has no sample left, to take part in the collectives of the others."""


class Learner(Generic[Stats]):
    """A model with its optimizer. It has float32 weights, and computes in the type of its forward pass."""

    forward: ClassVar[Any]
    """Makes the forward pass of a model."""
    whose: ClassVar[str] = "the"
    """Of its loss and gradient, in errors."""
    copies: ClassVar[int] = 1
    """How many copies of this size a checkpoint of the run takes in host memory."""
    _synced: Any = None
    """A reference policy that follows the model, and is part of its checkpoints."""

    def __init__(
        self,
        model: Any,
        *,
        train: TrainSettings,
        token_budget: int,
        fill_memory: bool = False,
        time_share: bool = False,
        **how: Any,
    ) -> None:
        """`how` are further arguments of the forward pass. `fill_memory` raises the token budget to what fits into GPU
        memory. If `time_share`, the memory that only updates need is free in between, by `release_memory`."""
        self.model, self._train, self._token_budget = model, train, token_budget
        self._lowered_budget: int | None = None
        self._notes: list[str] = []
        """Notes for the user, returned by the next update."""
        # With dropout the trained policy would differ from the policy that sampled.
        model.eval()
        self._recomputes = train.gradient_checkpointing is True
        self._how = {"packed": train.packed, "fused": train.fused, **how}
        self._responses = self._pass_of(model, recompute=self._recomputes, **self._how)
        self.packed, self.note = self._responses.packed, self._responses.note
        self.optimizer = build_optimizer(model, train)
        self._gradients = Gradients(model) if time_share else None
        reason = self._why_no_copy()
        self._copies = HostCopy() if reason is None else None
        self.save_note = reason and f"each checkpoint stops the run until it is written: {reason}"
        """A note for the user if checkpoints are not written in the background."""
        if fill_memory and next(model.parameters()).is_cuda:
            self._token_budget = max(token_budget, tokens_that_fit(model, self._responses.bytes_per_token))

    def release_memory(self) -> None:
        """Frees the memory that only updates need: gradients, and what torch keeps of activations."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()

    def _pass_of(self, model: Any, **how: Any) -> ResponsePass[Stats]:
        made: ResponsePass[Stats] = self.forward(model, **how)
        return made

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
        backward: Callable[[Sequence[Trajectory], int], tuple[Tensors, Tensors]],
    ) -> tuple[dict[str, float], list[dict[str, Array]], float]:
        """One optimizer step on samples that are all in the loss. `backward` adds the gradients of a micro-batch; it
        returns sums over its tokens, "loss" among them, and results for each token, `[B, T]`, by name.

        Returns the sums of the whole step, the results of each sample, and the norm of the gradient.
        """
        if self._gradients is None:
            self.optimizer.zero_grad(set_to_none=True)
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
        results: dict[int, dict[str, Array]] = {}
        for indices, (_, of_tokens) in done:
            rows = {name: tensor.cpu().numpy() for name, tensor in of_tokens.items()}
            for row, i in enumerate(indices):
                results[i] = {name: table[row, : len(samples[i].token_ids)] for name, table in rows.items()}
        set_learning_rate(self.optimizer, lr)
        self._step()
        return totals, [results[i] for i in range(len(samples))], grad_norm

    def _column(self, samples: Sequence[Trajectory], name: str) -> Tensor:
        """A column of the samples on the device, `[B, T]`."""
        return self._padded([sample[name] for sample in samples])

    def _padded(self, rows: Sequence[Array]) -> Tensor:
        return to_device(padded(rows), self._responses.device)

    def _per_sample(self, values: Sequence[float]) -> Tensor:
        return to_device(np.array(values), self._responses.device)

    def _take_notes(self) -> tuple[str, ...]:
        notes, self._notes = tuple(self._notes), []
        return notes

    def _count(self, samples: Sequence[Trajectory]) -> Counts:
        return Counts.over(self._gather(Counts.of(samples)))

    def _gather(self, value: T) -> list[T]:
        """The value of each rank; here there is one."""
        return [value]

    def _over_ranks(self, sums: Tensor) -> Tensor:
        return sums

    def _clip_gradients(self) -> float:
        """Returns the gradient's norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._train.max_grad_norm))

    def _deferred(
        self, directory: Path, state: Mapping[str, Any], write_first: DeferredWrite = lambda is_cancelled: {}
    ) -> DeferredWrite:
        """Copies the state of each file; the result writes them, after `write_first`. The next call reuses the copies'
        memory. If the host has no memory for copies, this writes everything itself."""
        copied = state if self._copies is None else self._copies.take(state)

        def write(is_cancelled: IsCancelled) -> Digests:
            digests = dict(write_first(is_cancelled))
            return digests | {name: save_hashed(copied[name], directory / name, is_cancelled) for name in copied}

        return write if self._copies is not None else done_now(write)

    def _restore(self, directory: Path, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Takes over weights and the state of the optimizer, from files of a checkpoint. A NonFiniteError leaves the
        model unchanged."""
        if name := not_finite(weights):
            raise NonFiniteError(f"its weights are not finite, in {name}")
        if name := not_finite(state):
            raise NonFiniteError(f"the state of its optimizer is not finite, in {name}")
        if other := weight_difference(self.model.state_dict(), weights):
            raise UserError(f"{directory}: belongs to a different model: {other}; resume with the run's own model")
        copy_weights(weights, self.model)
        try:
            self._restore_optimizer(state)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"{directory}: its optimizer state cannot be loaded: {one_line(error)}; remove {directory} to resume "
                "from the previous checkpoint"
            ) from error

    def _restore_optimizer(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        for parameter, moments in self.optimizer.state.items():
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
        split = packed_batches if self.packed else padded_batches
        return split(samples, self._token_budget)

    def _in_micro_batches(
        self, samples: Sequence[Trajectory], compute: Callable[[Sequence[Trajectory], int], T]
    ) -> list[tuple[list[int], T]]:
        """The indices of each micro-batch with the result of `compute(micro_batch, number of micro-batches)`. Each rank
        computes as many as the rank with the most, and the number is that of all ranks.

        If a micro-batch does not fit into memory, everything is recomputed with smaller ones.
        """
        while True:
            own = self._micro_batches(samples)
            numbers = self._gather(len(own))
            done: list[tuple[list[int], T]] = []
            for k in range(max(numbers)):
                indices = own[k] if k < len(own) else []
                try:
                    done.append((indices, compute([samples[i] for i in indices] or [PLACEHOLDER], sum(numbers))))
                except torch.OutOfMemoryError as error:
                    here = self._is_here(error)
                    break
            else:
                return done
            # Outside the except block, because the exception's traceback keeps the activations alive.
            done.clear()
            self.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
            alone = here and (len(indices) <= 1 or self._token_budget == 1)
            problems = self._gather(self._too_large([samples[i] for i in indices]) if alone else None)
            if problem := next(filter(None, problems), None):
                raise UserError(problem)
            self._lower_budget(samples, sum(numbers))

    def _is_here(self, error: torch.OutOfMemoryError) -> bool:
        """Whether this rank has run out of memory; raises if it cannot go on."""
        return True

    def _lower_budget(self, samples: Sequence[Trajectory], count: int) -> None:
        """Halves the budget until the samples of all ranks need more than `count` micro-batches."""
        before = self._token_budget
        while sum(self._gather(len(self._micro_batches(samples)))) <= count and self._token_budget > 1:
            self._token_budget //= 2
        self._lowered_budget = self._token_budget
        self._notes.append(
            f"out of GPU memory: micro-batches now have {self._token_budget} tokens instead of {before}; "
            "train.token_budget sets this from the start"
        )

    def _too_large(self, samples: Sequence[Trajectory]) -> str:
        """What to say of samples that do not fit into memory with the smallest micro-batches."""
        remedy = "" if self._recomputes else "set train.gradient_checkpointing=true, or "
        return (
            f"out of GPU memory: a single sample of {len(samples[0].prompt_ids) + len(samples[0].token_ids)} tokens "
            f"does not fit; {remedy}lower sampling.kv_memory_gib or sampling.max_new_tokens"
        )

    def _step(self) -> None:
        if self._gradients is not None and not self.optimizer.state:
            torch.cuda.empty_cache()  # the first step allocates the moments, which stay
        try:
            self.optimizer.step()
        except torch.OutOfMemoryError:  # only some of the weights may have been updated, so the run must stop
            raise UserError(
                "out of GPU memory in the optimizer's step; lower sampling.kv_memory_gib, or set "
                "train.optimizer=adamw_8bit in a new run"
            ) from None


@contextmanager
def read_checkpoint(directory: Path) -> Iterator[None]:
    """Turns whatever goes wrong while files are read into one line for the user."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{directory}: cannot be read as a checkpoint: {one_line(error)}") from error


@torch.no_grad()
def copy_weights(weights: Tensors, model: Any) -> None:
    own = model.state_dict()
    for name, tensor in weights.items():
        own[name].copy_(tensor)


def padded(rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Rows of different lengths as one array, right-padded with zeros."""
    table = np.zeros((len(rows), max(len(row) for row in rows), *rows[0].shape[1:]), rows[0].dtype)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def total(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum()
