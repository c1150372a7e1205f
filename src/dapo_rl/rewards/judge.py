"""Calls a verifier and turns whatever it raises or returns into one valid verdict per sample.

This is the only place that catches exceptions from verifiers and checks what they return, in a worker process or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

from dapo_rl.base.format import counted
from dapo_rl.base.quote import LINE_LIMIT, TRACEBACK_LIMIT, describe, describe_traceback, printable, shorten
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt, Sample, Verdict, VerdictStatus, Verifier

MAX_SCORE = 1e6
"""A larger score is treated as a mistake: advantages would lose their precision."""
STATUSES: tuple[str, ...] = get_args(VerdictStatus)
_DETAIL_LIMIT = LINE_LIMIT + TRACEBACK_LIMIT + 200


def judge(verifier: Verifier, prompt: Prompt, samples: Sequence[Sample], wrong: float = 0.0) -> list[Verdict]:
    """One verdict per sample; if the verifier fails, they have status `error` and score `wrong`.

    A `UserError` propagates: with it, a verifier says that it cannot judge at all, for example because a ground truth
    or a package is missing. So does Ctrl-C.
    """
    try:
        returned = verifier(prompt, samples)
        if not isinstance(returned, list | tuple):
            fault = f"returned {_kind(returned)}, not a list of {counted(len(samples), 'verdict')}"
        elif len(returned) != len(samples):
            fault = f"returned {counted(len(returned), 'verdict')} for {counted(len(samples), 'sample')}"
        else:
            return [_checked(verdict, verifier, wrong) for verdict in returned]
        return failures(f"{name_of(verifier)} {fault}", len(samples), wrong)
    except (UserError, KeyboardInterrupt):
        raise
    except MemoryError:
        return failures(f"{name_of(verifier)} ran out of memory (reward.memory_mb)", len(samples), wrong)
    except BaseException as error:  # including SystemExit: sys.exit() in a verifier does not end the run
        return crash(name_of(verifier), error, len(samples), wrong)


def trait(verifier: Verifier, name: str) -> bool:
    """An attribute that a verifier may have: `needs_answer`, `per_sample` or `text_only`."""
    try:
        return bool(getattr(verifier, name, False))
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UserError(f"reward.verifier: {name_of(verifier)}.{name} raised {describe(error)}") from error


def crash(name: str, error: BaseException, count: int, wrong: float) -> list[Verdict]:
    """Verdicts that report an exception; the first one has the traceback."""
    line = f"{name} raised {describe(error)}"
    first = failures(f"{line}\n{describe_traceback(error)}", min(count, 1), wrong)
    return first + failures(line, count - len(first), wrong)


def failures(detail: str, count: int, wrong: float, status: VerdictStatus = "error") -> list[Verdict]:
    return [Verdict(wrong, False, status, detail=detail)] * count


def without_traceback(verdict: Verdict) -> Verdict:
    line = verdict.detail.partition("\n")[0]
    return Verdict(verdict.score, verdict.correct, verdict.status, verdict.answer, line)


def has_traceback(verdict: Verdict) -> bool:
    return verdict.failed and "\n" in verdict.detail and "Traceback (most recent call last)" in verdict.detail


def fault_of(verdict: Any) -> str:
    """What is wrong with a verdict; empty if nothing is."""
    if not isinstance(verdict, Verdict):
        return f"returned {_kind(verdict)} instead of a Verdict"
    if type(verdict.score) not in (int, float):
        return f"returned a Verdict whose score is {_kind(verdict.score)}, not a float"
    if fault := fault_of_score(verdict.score):
        return f"returned a Verdict whose score {fault}"
    if type(verdict.correct) is not bool:
        return f"returned a Verdict whose correct is {_kind(verdict.correct)}, not a bool"
    if not isinstance(verdict.status, str) or verdict.status not in STATUSES:
        return f"returned a Verdict whose status is not one of {', '.join(STATUSES)}"
    if verdict.answer is not None and not isinstance(verdict.answer, str):
        return f"returned a Verdict whose answer is {_kind(verdict.answer)}, not a string or None"
    if not isinstance(verdict.detail, str):
        return f"returned a Verdict whose detail is {_kind(verdict.detail)}, not a string"
    return ""


def fault_of_score(score: float) -> str:
    try:
        value = float(score)
    except OverflowError as error:
        return f"cannot be a float ({describe(error)})"
    if abs(value) <= MAX_SCORE:
        return ""
    return f"{value:g} is beyond ±{MAX_SCORE:.0f}" if math.isfinite(value) else f"{value} is not finite"


def name_of(verifier: Callable[..., Any]) -> str:
    """The name of a verifier, for messages."""
    name = getattr(verifier, "__qualname__", None)
    return printable(shorten(name if isinstance(name, str) else type(verifier).__name__, 100))


def _checked(verdict: Any, verifier: Verifier, wrong: float) -> Verdict:
    if fault := fault_of(verdict):
        return failures(f"{name_of(verifier)} {fault}", 1, wrong)[0]
    if type(verdict) is Verdict and type(verdict.score) is float and not verdict.detail:
        return verdict
    detail = printable(shorten(verdict.detail, _DETAIL_LIMIT))
    return Verdict(float(verdict.score), verdict.correct, verdict.status, verdict.answer, detail)


def _kind(value: Any) -> str:
    """The type of a value, with its module unless it is built in: a numpy.float64 is not a float."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"a {shorten(name, 100)}" if value is not None else "None"
