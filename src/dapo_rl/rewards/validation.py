"""Calls a verifier and turns whatever it raises or returns into one valid verdict per sample.

This is the only place that catches exceptions from verifiers and checks what they return, in a worker process or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

from dapo_rl.base.format import counted
from dapo_rl.base.quote import LINE_LIMIT, TRACEBACK_LIMIT, describe, describe_traceback, printable, shorten, shown
from dapo_rl.errors import UserError
from dapo_rl.rewards.logbook import fault_of_extra, fault_of_metrics, fault_of_name
from dapo_rl.rewards.trainer_state import AT_START, RewardState
from dapo_rl.types import MOST_LOGGED, Prompt, RewardPart, Trajectory, Verdict, VerdictStatus, Verifier

MAX_SCORE = 1e6
"""A larger score is treated as a mistake: advantages would lose their precision."""
MAX_LIMIT_S = 1e9
STATUSES: tuple[str, ...] = get_args(VerdictStatus)
_DETAIL_LIMIT = LINE_LIMIT + TRACEBACK_LIMIT + 200


def verify(
    verifier: Verifier, prompt: Prompt, samples: Sequence[Trajectory], wrong: float = 0.0, state: RewardState = AT_START
) -> list[Verdict]:
    """One verdict per sample; if the verifier fails, they have status `error` and score `wrong`.

    A verifier with the attribute `takes_state` gets the state of the run as a third argument.

    A `UserError` propagates: with it, a verifier says that it cannot judge at all, for example because a ground truth
    or a package is missing. So does Ctrl-C.
    """
    try:
        given = (prompt, samples, state) if trait(verifier, "takes_state") else (prompt, samples)
        returned = verifier(*given)
        if not isinstance(returned, list | tuple):
            fault = f"returned {kind_of(returned)}, not a list of {counted(len(samples), 'verdict')}"
        elif len(returned) != len(samples):
            fault = f"returned {counted(len(returned), 'verdict')} for {counted(len(samples), 'sample')}"
        else:
            return [_checked(verdict, verifier, wrong) for verdict in returned]
        return [failure(f"{name_of(verifier)} {fault}", wrong)] * len(samples)
    except (UserError, KeyboardInterrupt):
        raise
    except MemoryError:
        return [failure(f"{name_of(verifier)} ran out of memory (reward.memory_mb)", wrong)] * len(samples)
    except BaseException as error:  # including SystemExit: sys.exit() in a verifier does not end the run
        return crash(name_of(verifier), error, len(samples), wrong)


def trait(verifier: Verifier, name: str) -> bool:
    """An attribute that a verifier may have: `needs_answer`, `per_sample`, `text_only` or `takes_state`."""
    with user_errors(verifier, name):
        return bool(getattr(verifier, name, False))


@contextmanager
def user_errors(verifier: Verifier, name: str) -> Iterator[None]:
    """Any exception of an attribute or a method, outside of a call, becomes a UserError that names it."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UserError(f"reward.verifier: {name_of(verifier)}.{name} raised {describe(error)}") from error


def crash(name: str, error: BaseException, count: int, wrong: float) -> list[Verdict]:
    """Verdicts that report an exception; the first one has the traceback."""
    line = f"{name} raised {describe(error)}"
    return [failure(f"{line}\n{describe_traceback(error)}", wrong), *[failure(line, wrong)] * (count - 1)][:count]


def failure(detail: str, wrong: float, status: VerdictStatus = "error") -> Verdict:
    return Verdict(wrong, False, status, detail=detail)


def fault_of(verdict: Any) -> str:
    """Why a verdict is invalid; empty if it is valid."""
    if not isinstance(verdict, Verdict):
        return f"returned {kind_of(verdict)} instead of a Verdict"
    if type(verdict.score) not in (int, float):
        return f"returned a Verdict whose score is {kind_of(verdict.score)}, not a float"
    if fault := fault_of_score(verdict.score):
        return f"returned a Verdict whose score {fault}"
    if type(verdict.correct) is not bool:
        return f"returned a Verdict whose correct is {kind_of(verdict.correct)}, not a bool"
    if not isinstance(verdict.status, str) or verdict.status not in STATUSES:
        return f"returned a Verdict whose status is not one of {', '.join(STATUSES)}"
    if verdict.correct is not (verdict.status == "correct"):
        return f"returned a Verdict whose correct is {verdict.correct}, but whose status is {verdict.status}"
    if verdict.answer is not None and not isinstance(verdict.answer, str):
        return f"returned a Verdict whose answer is {kind_of(verdict.answer)}, not a string or None"
    if not isinstance(verdict.detail, str):
        return f"returned a Verdict whose detail is {kind_of(verdict.detail)}, not a string"
    if verdict.parts != () and (fault := _fault_of_parts(verdict.parts)):
        return f"returned a Verdict whose parts {fault}"
    if verdict.extra != {} and (fault := fault_of_extra(verdict.extra)):
        return f"returned a Verdict whose extra {fault}"
    if verdict.metrics != {} and (fault := fault_of_metrics(verdict.metrics)):
        return f"returned a Verdict whose metrics {fault}"
    return ""


def _fault_of_parts(parts: Any) -> str:
    if not isinstance(parts, tuple) or len(parts) > MOST_LOGGED or any(type(part) is not RewardPart for part in parts):
        return f"are not a tuple of at most {MOST_LOGGED} RewardPart"
    for part in parts:
        if fault := fault_of_name(part.name):
            return f"have a wrong name: {fault}"
        for value in (part.score, part.weight):
            if type(value) is not float or fault_of_score(value):
                return f"have a score or a weight for {part.name!r} that is not a finite float"
    return "have a name twice" if len({part.name for part in parts}) < len(parts) else ""


def fault_of_score(score: float) -> str:
    try:
        value = float(score)
    except OverflowError as error:
        return f"cannot be a float ({describe(error)})"
    if abs(value) <= MAX_SCORE:
        return ""
    return f"{value:g} is beyond ±{MAX_SCORE:.0f}" if math.isfinite(value) else f"{value} is not finite"


def limit_of(verifier: Verifier) -> float | None:
    """The verifier's own time limit for a call in seconds, its attribute `timeout_s`; None if it has none."""
    with user_errors(verifier, "timeout_s"):
        limit = getattr(verifier, "timeout_s", None)
    if limit is None or (isinstance(limit, int | float) and not isinstance(limit, bool) and 0 < limit <= MAX_LIMIT_S):
        return limit
    raise UserError(f"{name_of(verifier)}.timeout_s: {shown(limit)} is not a number of seconds above 0")


def name_of(verifier: Callable[..., Any]) -> str:
    """The name of a verifier, for messages."""
    name = getattr(verifier, "__qualname__", None)
    return printable(shorten(name if isinstance(name, str) else type(verifier).__name__, 100))


def _checked(verdict: Any, verifier: Verifier, wrong: float) -> Verdict:
    if fault := fault_of(verdict):
        return failure(f"{name_of(verifier)} {fault}", wrong)
    if type(verdict) is Verdict and type(verdict.score) is float and not verdict.detail:
        return verdict
    fields = {field: getattr(verdict, field) for field in ("correct", "status", "answer", "parts", "extra", "metrics")}
    return Verdict(score=float(verdict.score), detail=printable(shorten(verdict.detail, _DETAIL_LIMIT)), **fields)


def kind_of(value: Any) -> str:
    """The type of a value, with its module unless it is built in: a numpy.float64 is not a float."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"a {shorten(name, 100)}" if value is not None else "None"
