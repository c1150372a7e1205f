"""User-defined reward functions with the signatures of TRL and verl."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Never

from dapo_rl.base.format import counted
from dapo_rl.base.quote import describe, describe_traceback
from dapo_rl.choices import REWARD_MODEL, is_judge, is_reward_model
from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards.logbook import LONGEST_NAME, Logbook, with_metrics
from dapo_rl.rewards.trainer_state import AT_START, RewardState
from dapo_rl.rewards.validation import failure, fault_of_score, kind_of, limit_of, name_of
from dapo_rl.types import Prompt, RewardPart, Trajectory, Verdict, VerdictStatus

DEFAULT_THRESHOLD = 0.5
SIGNATURES = (
    "f(prompts, completions, **columns) -> list[float] (TRL), "
    "compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float or dict (verl), "
    "or f(prompt, samples) -> list[Verdict]"
)


GIVEN = ("environments", "trainer_state", "log_extra", "log_metric")
"""Arguments in TRL's form that do not come from the data."""


@dataclass(slots=True)
class Call:
    """One call of a function, for one sample or for all of a group."""

    count: int
    """Samples that the call is about."""
    value: Any = None
    """The returned value; awaitable until the call is complete."""
    error: BaseException | None = None
    late: bool = False
    """Whether it exceeded the time limit of the function."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls about the samples of a group, with the values that they log."""

    verifier: CustomVerifier
    calls: list[Call]
    log: Logbook

    def verdicts(self) -> list[Verdict | None]:
        """The verdicts of complete calls; None for samples for which the function returned None: it does not apply."""
        return [verdict for call in self.calls for verdict in self.verifier.verdicts_of(call)]


class CustomVerifier:
    """A user-defined function as a verifier. Any failure in it becomes a verdict of status `error`; only a `UserError`
    of this package propagates.

    A function with TRL's signature is called once per group, one with verl's once per sample. The returned score is
    the reward; a sample is correct by the `acc` of a returned dict, by a boolean score, or by a score above
    `reward.threshold`. `timeout_s`, or the function's attribute of that name, limits the time of an asynchronous
    function; `VerifierPool` limits that of any call.
    """

    takes_state = True

    def __init__(
        self,
        function: Callable[..., Any],
        settings: RewardSettings,
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        kind = signature_of(function)
        if kind is None:
            raise UserError(f"{name_of(function)}: its parameters fit no known signature; write it as {SIGNATURES}")
        self.function = function
        self.settings = settings
        self.name = name or curve_name(function)
        """The name of its curve."""
        self.timeout_s = limit_of(function) if timeout_s is None else timeout_s
        self.kind: Literal["trl", "verl"] = kind
        self.per_sample = self.text_only = kind == "verl"
        self._parameters = inspect.signature(function).parameters
        self._traceback_given = False

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(type(self.function).__call__)

    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory], state: RewardState = AT_START) -> list[Verdict]:
        begun = self.begin(prompt, samples, state)
        wait_for([begun])
        nothing = self._failure("returned None, and no other reward function applies")
        verdicts = []
        for index, verdict in enumerate(each or nothing for each in begun.verdicts()):
            parts = () if verdict.failed else (RewardPart(self.name, verdict.score),)
            verdicts.append(replace(verdict, parts=parts, extra=begun.log.extra(index)))
        return with_metrics(verdicts, [begun.log.metrics])

    def begin(self, prompt: Prompt, samples: Sequence[Trajectory], state: RewardState = AT_START) -> Calls:
        """Calls the function. An asynchronous one starts in `wait_for`, with others at the same time."""
        log = Logbook(len(samples))
        if self.kind == "trl":
            given = self._trl_arguments(prompt, samples)
            given |= {"trainer_state": state, "log_extra": log.log_extra, "log_metric": log.log_metric}
            return Calls(self, [self._start(given, len(samples))], log)
        return Calls(self, [self._start(self._verl_arguments(prompt, sample), 1) for sample in samples], log)

    def _start(self, given: Mapping[str, Any], count: int) -> Call:
        try:
            return Call(count, self._call(given))
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:
            return Call(count, error=error)

    def verdicts_of(self, call: Call) -> list[Verdict | None]:
        if isinstance(call.error, UserError | KeyboardInterrupt):
            raise call.error
        if call.late:
            detail = f"{name_of(self.function)}: not decided within {self.timeout_s:g} s"
            return [failure(detail, self.settings.wrong, "timeout")] * call.count
        if call.error is not None:
            return [self._crash(call.error) for _ in range(call.count)]
        if self.kind == "verl":
            return [self._verdict(call.value)]
        try:
            scores = call.value.tolist() if hasattr(call.value, "tolist") else call.value
            if isinstance(scores, list | tuple) and len(scores) == call.count:
                return [self._verdict(score) for score in scores]
        except Exception as error:
            return [self._crash(error) for _ in range(call.count)]
        if isinstance(scores, list | tuple):
            fault = f"returned {counted(len(scores), 'score')} for {counted(call.count, 'completion')}"
        else:
            fault = f"returned {kind_of(scores)}, not a list of {counted(call.count, 'score')}"
        return [self._failure(fault)] * call.count

    def _trl_arguments(self, prompt: Prompt, samples: Sequence[Trajectory]) -> dict[str, Any]:
        count = len(samples)
        columns: dict[str, Any] = {name: [value] * count for name, value in prompt.columns.items()}
        for name, value in (("answer", prompt.answer), ("ground_truth", prompt.answer)):
            if value is not None:
                columns.setdefault(name, [value] * count)
        if prompt.data_source:
            columns.setdefault("data_source", [prompt.data_source] * count)
        is_chat = prompt.messages is not None or any(sample.episode or sample.messages for sample in samples)
        conversations = [conversation(prompt, sample) for sample in samples] if is_chat else []
        columns["prompts"] = [opening for opening, _ in conversations] or [prompt.text] * count
        columns["completions"] = [said for _, said in conversations] or [sample.text for sample in samples]
        columns["completion_ids"] = [sample.token_ids.tolist() for sample in samples]
        if any(sample.episode for sample in samples):
            columns["environments"] = [EnvironmentView(**sample.episode.get("state", {})) for sample in samples]
        return columns

    def _verl_arguments(self, prompt: Prompt, sample: Trajectory) -> dict[str, Any]:
        return {
            "data_source": prompt.data_source,
            "solution_str": sample.text,
            "ground_truth": prompt.answer,
            "extra_info": prompt.columns.get("extra_info"),
        }

    def _call(self, given: Mapping[str, Any]) -> Any:
        missing = [name for name, p in self._parameters.items() if _is_required(p) and name not in given]
        if missing:
            there = ", ".join(sorted(name for name in given if name not in GIVEN))
            raise TypeError(f"it needs {missing[0]!r}, but the data has only {there}")
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._parameters.values())
        return self.function(**{k: v for k, v in given.items() if takes_all or k in self._parameters})

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
            by_score = score if isinstance(score, bool) else score > threshold_of(self.settings)
            correct = bool(by_score if accuracy is None else accuracy)
            status: VerdictStatus = "correct" if correct else "wrong"
            return Verdict(float(score), correct, status, answer if isinstance(answer, str) else None)
        except Exception as error:
            return self._failure(f"returned a score that cannot be used: {describe(error)}")

    def _failure(self, what: str) -> Verdict:
        return failure(f"{name_of(self.function)} {what}", self.settings.wrong)

    def _crash(self, error: BaseException) -> Verdict:
        """Only the first crash has its traceback, which would otherwise fill every rollout file."""
        detail = f"raised {describe(error)}"
        if not self._traceback_given:
            self._traceback_given = True
            detail += "\n" + describe_traceback(error)
        return self._failure(detail)


class EnvironmentView(SimpleNamespace):
    """An environment after its episode, as reward functions get it: its attributes, without its methods."""

    def __getattr__(self, name: str) -> Never:
        raise AttributeError(
            f"environments: no attribute {name!r}; reward functions get the attributes of an environment that JSON can "
            f"express ({', '.join(vars(self)) or 'none'}), not its methods: set one, or write get_reward"
        )


def signature_of(function: Callable[..., Any]) -> Literal["trl", "verl"] | None:
    """The signature of a function, by the names of its parameters."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    of_trl = {"completions", "completion_ids", "environments"} & set(names)
    return "verl" if "solution_str" in names else "trl" if of_trl else None


def conversation(prompt: Prompt, sample: Trajectory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages before the first turn, and those from it on, as a function may change them."""
    asked = list(map(dict, prompt.conversation))
    if sample.episode:
        begun = sample.episode.get("opening", 0)
        whole = copy.deepcopy(list(sample.episode.get("messages", ())))
        return whole[:begun] or asked, whole[begun:]
    said = copy.deepcopy(list(sample.messages)) or [{"role": "assistant", "content": sample.text}]
    return asked, said  # type: ignore[return-value]


def threshold_of(settings: RewardSettings) -> float:
    return DEFAULT_THRESHOLD if settings.threshold is None else settings.threshold


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variadic


def _plain(value: Any) -> Any:
    """A NumPy or torch scalar as a Python number."""
    return value.item() if hasattr(value, "item") else value


def curve_name(function: str | Callable[..., Any]) -> str:
    """The name of a verifier's curve: `math`, or the name of the function, `lambda` for `<lambda>`."""
    if isinstance(function, CustomVerifier):
        return function.name
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, str):
        name = function.rpartition("/")[2] if is_reward_model(function) else function.rpartition(":")[2]
        name = Path(name).stem if is_judge(name) else name.removeprefix(REWARD_MODEL)
    else:
        name = str(getattr(function, "__name__", None) or type(function).__name__)
    return "".join(c for c in name if c.isalnum() or c in "-_.")[: LONGEST_NAME - 8] or "function"


def wait_for(begun: Sequence[Calls]) -> None:
    """Completes asynchronous calls, all at the same time, each within the limit of its function."""
    waiting = [(each.verifier, call) for each in begun for call in each.calls if inspect.isawaitable(call.value)]
    if not waiting:
        return

    async def complete(verifier: CustomVerifier, call: Call) -> None:
        limit = asyncio.timeout(verifier.timeout_s)
        try:
            async with limit:
                call.value = await call.value
        except BaseException as error:  # including SystemExit, which would end the loop
            call.error, call.late = error, isinstance(error, TimeoutError) and limit.expired()

    async def complete_all() -> None:
        await asyncio.gather(*(complete(verifier, call) for verifier, call in waiting))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(complete_all())
        return
    # An event loop is already running in this thread, as in a notebook.
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(asyncio.run, complete_all()).result()
