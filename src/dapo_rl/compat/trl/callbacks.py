"""Calls `TrainerCallback`s as transformers' Trainer does, with the same arguments, state and metric names.

A step is a rollout step, as everywhere else: TRL counts optimizer updates. The state follows from metrics.jsonl, so a
resumed run restores it from there, and a run without callbacks need not keep it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from dapo_rl.base.quote import describe, describe_traceback
from dapo_rl.errors import DivergedError, NonFiniteError, UserError

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

Metrics = Mapping[str, float | None]
NOT_CALLED = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
"""Hooks inside a step, which are never called; a callback that defines one is mentioned in a note."""


class Callbacks:
    """The callbacks of a run. With none, and until `state` is read, nothing is computed or kept."""

    def __init__(
        self,
        args: Any = None,
        parts: Mapping[str, Any] | None = None,
        *,
        prompts: int | None = None,
        steps: int = 0,
        eval_steps: int | None = None,
        save_steps: int = 0,
    ) -> None:
        """`parts` are the keyword arguments of every hook, and `prompts` is the number of prompts of an epoch;
        None: a stream, whose length nobody knows."""
        self.args = args
        self._parts: dict[str, Any] = dict.fromkeys(("lr_scheduler", "train_dataloader", "eval_dataloader"))
        self._parts |= parts or {}
        self._prompts, self._steps = prompts, steps
        self._eval_steps, self._save_steps = eval_steps or steps, save_steps
        self._callbacks: list[TrainerCallback] = []
        self._state: TrainerState | None = None
        self._control: TrainerControl | None = None
        self._rows: Callable[[], Iterable[Metrics]] = tuple
        self._drawn = 0
        self._in_epoch = False
        self.stopped_by = ""
        """The callback that set `should_training_stop`."""

    def add(self, callback: Any) -> None:
        from transformers.trainer_callback import TrainerCallback

        name = getattr(callback, "__name__", type(callback).__name__)
        if isinstance(callback, type) and issubclass(callback, TrainerCallback):
            try:
                callback = callback()
            except Exception as error:
                raise UserError(
                    f"callbacks: {name}() raised {describe(error)}; pass an instance", describe_traceback(error)
                ) from error
        if not isinstance(callback, TrainerCallback):
            raise UserError(f"callbacks: expected a transformers TrainerCallback, got {name}")
        self._callbacks.append(callback)
        _ = self.state

    def pop(self, callback: Any) -> TrainerCallback | None:
        """Removes the first callback that is `callback`, or an instance of it, and returns it."""
        for known in self._callbacks:
            if isinstance(known, callback) if isinstance(callback, type) else known == callback:
                self._callbacks.remove(known)
                return known
        return None

    @property
    def state(self) -> TrainerState:
        if self._state is None:
            self._restore()
        assert self._state is not None
        return self._state

    @property
    def control(self) -> TrainerControl:
        if self._control is None:
            from transformers.trainer_callback import TrainerControl

            self._control = TrainerControl()
        return self._control

    @property
    def should_evaluate(self) -> bool:
        return self._control is not None and self._control.should_evaluate

    @property
    def should_save(self) -> bool:
        return self._control is not None and self._control.should_save

    @property
    def should_stop(self) -> bool:
        return self._control is not None and self._control.should_training_stop

    @property
    def wait_for_saves(self) -> bool:
        """Whether a callback has `on_save`, which expects to find the checkpoint complete."""
        return any(_defines(callback, "on_save") for callback in self._callbacks)

    def never_called(self) -> list[str]:
        found = []
        for callback in self._callbacks:
            defined = [hook for hook in NOT_CALLED if _defines(callback, hook)]
            if defined:
                found.append(f"callbacks: {_name(callback)}: never called here: {', '.join(defined)}")
        return found

    def follow(self, rows: Callable[[], Iterable[Metrics]]) -> None:
        """Takes the state from the log of a run that starts or resumes; `rows` reads the log."""
        self._rows = rows
        if self._state is not None:
            self._restore()

    def train_begin(self) -> None:
        self.stopped_by = ""
        if self._control is not None:
            self._control.should_training_stop = False
        self.call("on_train_begin")

    def step_begin(self) -> None:
        if not self._in_epoch:
            self._in_epoch = True
            self.call("on_epoch_begin")
        if self._control is not None:
            self._control.should_evaluate = self._control.should_save = self._control.should_log = False
        self.call("on_step_begin")

    def step_end(self, step: int, metrics: Metrics) -> None:
        if self._state is None:
            return
        epoch = int(self._state.epoch)
        self._advance(step, metrics)
        self.call("on_step_end")
        if int(self._state.epoch) > epoch:
            self._epoch_end()
        self.log(metrics)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics to the log history and passes them to `on_log`."""
        logs = self._add_to_history(metrics)
        if self._control is not None:
            self._control.should_log = False
        self.call("on_log", logs=logs)

    def evaluated(self, metrics: Metrics) -> None:
        if self._state is None:
            return
        self.log(metrics)
        if self._control is not None:
            self._control.should_evaluate = False
        self.call("on_evaluate", metrics=with_trl_names(metrics))
        # After the hook, as in transformers: EarlyStoppingCallback compares with the best before.
        self._compare_with_best(metrics)

    def saved(self, is_saved: bool = True) -> None:
        """After a checkpoint; `is_saved`: it could be written."""
        if self._control is not None:
            self._control.should_save = False
        if is_saved:
            self.call("on_save")

    def train_end(self) -> None:
        self._epoch_end()
        self.call("on_train_end")

    def release(self) -> None:
        self._parts = dict.fromkeys(self._parts)

    def _epoch_end(self) -> None:
        if self._in_epoch:
            self._in_epoch = False
            self.call("on_epoch_end")

    def call(self, hook: str, **more: Any) -> None:
        for callback in list(self._callbacks):
            stopped = self.should_stop
            result = self._call_one(callback, hook, more)
            if result is not None:
                self._control = result
            if self.should_stop and not stopped:
                self.stopped_by = _name(callback)

    def _call_one(self, callback: TrainerCallback, hook: str, more: Mapping[str, Any]) -> TrainerControl | None:
        from transformers.trainer_callback import TrainerControl

        where = f"callbacks: {_name(callback)}.{hook}"
        try:
            result = getattr(callback, hook)(self.args, self.state, self.control, **self._parts, **more)
        except (UserError, NonFiniteError, DivergedError, KeyboardInterrupt, torch.OutOfMemoryError):
            raise
        except BaseException as error:  # SystemExit among them: sys.exit(0) in a callback is not a finished run
            raise UserError(f"{where} raised {describe(error)}", describe_traceback(error)) from error
        if result is not None and not isinstance(result, TrainerControl):
            raise UserError(f"{where} returned a {type(result).__name__}; a hook returns its control, or nothing")
        return result

    def _restore(self) -> None:
        """Computes the state from the log; callbacks that have the state keep the same object."""
        from transformers.trainer_callback import TrainerState

        fresh = TrainerState(max_steps=self._steps, logging_steps=1, save_steps=self._save_steps)
        fresh.eval_steps = self._eval_steps
        if self._state is None:
            self._state = fresh
        vars(self._state).update(vars(fresh))
        self._drawn, self._in_epoch = 0, False
        for row in self._rows():
            metrics = {name: value for name, value in row.items() if name != "step"}
            held_out = {name: value for name, value in metrics.items() if name.startswith("eval/")}
            self._advance(int(row["step"] or 0), metrics)
            if trained := {name: value for name, value in metrics.items() if name not in held_out}:
                self._add_to_history(trained)
            if held_out:
                self._add_to_history(held_out)
                self._compare_with_best(held_out)

    def _advance(self, step: int, metrics: Metrics) -> None:
        state = self.state
        self._drawn += int(metrics.get("sampling/drawn") or 0)
        state.global_step = step
        state.epoch = self._drawn / self._prompts if self._prompts else 0.0
        state.num_input_tokens_seen += int(metrics.get("sampling/tokens_trained") or 0)

    def _add_to_history(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        logs: dict[str, Any] = _both_names(metrics) | {"epoch": self.state.epoch}
        if "sampling/tokens_trained" in metrics:
            logs["num_tokens"] = self.state.num_input_tokens_seen
        self.state.log_history.append(logs | {"step": self.state.global_step})
        return logs

    def _compare_with_best(self, metrics: Metrics) -> None:
        """Sets `best_metric` from `metric_for_best_model`, as transformers does after an evaluation."""
        name = getattr(self.args, "metric_for_best_model", None)
        if name is None:
            return
        value = with_trl_names(metrics).get(name if name.startswith("eval_") else f"eval_{name}")
        state, best = self.state, self.state.best_metric
        greater = getattr(self.args, "greater_is_better", None) is not False
        if value is not None and (best is None or (value > best if greater else value < best)):
            state.best_metric, state.best_global_step = value, state.global_step


def _both_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers under both names; other values, which only `DAPOTrainer.log` accepts, as they are."""
    numbers = {name: value for name, value in metrics.items() if value is None or isinstance(value, int | float)}
    return {name: value for name, value in metrics.items() if name not in numbers} | with_trl_names(numbers)


def _name(callback: TrainerCallback) -> str:
    return type(callback).__name__


def _defines(callback: TrainerCallback, hook: str) -> bool:
    from transformers.trainer_callback import TrainerCallback

    return getattr(type(callback), hook) is not getattr(TrainerCallback, hook)


TRL_NAMES = {
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "reward/zero_std_share": "frac_reward_zero_std",
    "response_length/mean": "completions/mean_length",
    "response_length/max": "completions/max_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/entropy": "entropy",
    "actor/entropy_coef": "entropy_coef",
    "actor/kl_loss": "kl",
    "actor/pg_clipfrac_low": "clip_ratio/low_mean",
    "actor/pg_clipfrac_high": "clip_ratio/high_mean",
    "actor/pg_clipfrac": "clip_ratio/region_mean",
    "timing_s/step": "step_time",
    "eval/reward": "eval_reward",
    "eval/accuracy": "eval_accuracy",
    "eval/response_length": "eval_completions/mean_length",
    "eval/truncated": "eval_completions/clipped_ratio",
}
"""A metric here, and the same metric there. TRL averages over the batch; here, `reward` and `completions/` are averages
over everything sampled in the step. Any other `eval/NAME` is also `eval_NAME`, and `reward/FUNCTION/mean` is also
`rewards/FUNCTION/mean`."""
BY_FUNCTION = re.compile(r"reward/.+/(mean|std)")


def with_trl_names(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The metrics under both names; those that are missing or not finite are left out."""
    known = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
    return known | {there: value for name, value in known.items() if (there := _trl_name(name)) is not None}


def _trl_name(name: str) -> str | None:
    if name in TRL_NAMES:
        return TRL_NAMES[name]
    if name.startswith("eval/"):
        return f"eval_{name.removeprefix('eval/')}"
    return f"rewards/{name.removeprefix('reward/')}" if BY_FUNCTION.fullmatch(name) else None
