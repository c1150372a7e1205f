"""User-defined reward functions with the signatures of TRL and verl."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from dapo_rl.base.format import counted
from dapo_rl.base.quote import describe, describe_traceback
from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards.judge import fault_of_score, name_of
from dapo_rl.types import Prompt, Sample, Verdict, VerdictStatus

DEFAULT_THRESHOLD = 0.5
SIGNATURES = (
    "f(prompts, completions, **columns) -> list[float] (TRL), "
    "compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float or dict (verl), "
    "or f(prompt, samples) -> list[Verdict]"
)


class UserVerifier:
    """A user-defined function as a verifier. Any failure in it becomes a verdict of status `error`; only a `UserError`
    of this package propagates.

    A function with TRL's signature is called once per group, one with verl's once per sample. The returned score is
    the reward; a sample is correct by the `acc` of a returned dict, by a boolean score, or by a score above
    `reward.threshold`. Time is not limited here, but by `VerifierPool`.
    """

    def __init__(self, function: Callable[..., Any], settings: RewardSettings) -> None:
        kind = signature_of(function)
        if kind is None:
            raise UserError(f"{name_of(function)}: its parameters fit no known signature; write it as {SIGNATURES}")
        self.function = function
        self.settings = settings
        self.kind: Literal["trl", "verl"] = kind
        self._parameters = inspect.signature(function).parameters
        self._traceback_given = False

    @property
    def per_sample(self) -> bool:
        return self.kind == "verl"

    @property
    def text_only(self) -> bool:
        return self.kind == "verl"

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Verdict]:
        nothing = self._failure("returned None, and no other reward function applies")
        return [nothing if verdict is None else verdict for verdict in self.judge(prompt, samples)]

    def judge(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Verdict | None]:
        """Verdicts like a call, but None for samples for which the function returned None: it does not apply."""
        if self.kind == "trl":
            return self._attempt(lambda: self._call_group(prompt, samples), len(samples))
        verdicts: list[Verdict | None] = []
        for sample in samples:
            arguments = self._verl_arguments(prompt, sample)
            verdicts += self._attempt(lambda arguments=arguments: [self._call(arguments)], 1)  # type: ignore[misc]
        return verdicts

    def _attempt(self, call: Callable[[], list[Any]], count: int) -> list[Verdict | None]:
        """Verdicts for the `count` scores that the call returns, or failures if it raises."""
        try:
            return [self._verdict(score) for score in call()]
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:
            return [self._crash(error) for _ in range(count)]

    def _call_group(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Any]:
        scores = self._call(self._trl_arguments(prompt, samples))
        scores = scores.tolist() if hasattr(scores, "tolist") else scores
        if not isinstance(scores, list | tuple):
            raise TypeError(f"returned a {type(scores).__name__}, not a list of {counted(len(samples), 'score')}")
        if len(scores) != len(samples):
            given, wanted = counted(len(scores), "score"), counted(len(samples), "completion")
            raise ValueError(f"returned {given} for {wanted}")
        return list(scores)

    def _trl_arguments(self, prompt: Prompt, samples: Sequence[Sample]) -> dict[str, Any]:
        count = len(samples)
        columns: dict[str, Any] = {name: [value] * count for name, value in prompt.columns.items()}
        for name, value in (("answer", prompt.answer), ("ground_truth", prompt.answer)):
            if value is not None:
                columns.setdefault(name, [value] * count)
        if prompt.data_source:
            columns.setdefault("data_source", [prompt.data_source] * count)
        if prompt.messages is None:
            columns["prompts"] = [prompt.text] * count
            columns["completions"] = [sample.text for sample in samples]
        else:
            columns["prompts"] = [[dict(message) for message in prompt.messages] for _ in samples]
            columns["completions"] = [[{"role": "assistant", "content": sample.text}] for sample in samples]
        columns["completion_ids"] = [sample.token_ids.tolist() for sample in samples]
        return columns

    def _verl_arguments(self, prompt: Prompt, sample: Sample) -> dict[str, Any]:
        return {
            "data_source": prompt.data_source,
            "solution_str": sample.text,
            "ground_truth": prompt.answer,
            "extra_info": prompt.columns.get("extra_info"),
        }

    def _call(self, columns: Mapping[str, Any]) -> Any:
        missing = [name for name, p in self._parameters.items() if _is_required(p) and name not in columns]
        if missing:
            raise TypeError(f"it needs {missing[0]!r}, but the data has only {', '.join(sorted(columns))}")
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._parameters.values())
        result = self.function(**{k: v for k, v in columns.items() if takes_all or k in self._parameters})
        return _wait_for(result) if inspect.isawaitable(result) else result

    def _verdict(self, value: Any) -> Verdict | None:
        if value is None:
            return None
        accuracy = answer = None
        try:
            if isinstance(value, Mapping):
                accuracy, answer = _plain(value.get("acc")), value.get("pred")
                value = value["score"]
            score = _plain(value)
            if not isinstance(score, bool | int | float):
                raise TypeError(f"{type(score).__name__} is not a number")
            if fault := fault_of_score(score):
                raise ValueError(fault)
            threshold = DEFAULT_THRESHOLD if self.settings.threshold is None else self.settings.threshold
            by_score = score if isinstance(score, bool) else score > threshold
            correct = bool(by_score if accuracy is None else accuracy)
            status: VerdictStatus = "correct" if correct else "wrong"
            return Verdict(float(score), correct, status, answer if isinstance(answer, str) else None)
        except Exception as error:
            return self._failure(f"returned a score that cannot be used: {describe(error)}")

    def _failure(self, what: str) -> Verdict:
        return Verdict(self.settings.wrong, False, "error", detail=f"{name_of(self.function)} {what}")

    def _crash(self, error: BaseException) -> Verdict:
        """Only the first crash has its traceback, which would otherwise fill every rollout file."""
        detail = f"raised {describe(error)}"
        if not self._traceback_given:
            self._traceback_given = True
            detail += "\n" + describe_traceback(error)
        return self._failure(detail)


def signature_of(function: Callable[..., Any]) -> Literal["trl", "verl"] | None:
    """The signature of a function, by the names of its parameters."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return "verl" if "solution_str" in names else "trl" if {"completions", "completion_ids"} & set(names) else None


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variadic


def _plain(value: Any) -> Any:
    """A NumPy or torch scalar as a Python number."""
    return value.item() if hasattr(value, "item") else value


def _wait_for(awaitable: Any) -> Any:
    async def result() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(result())
    # An event loop is already running in this thread, as in a notebook.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, result()).result()
