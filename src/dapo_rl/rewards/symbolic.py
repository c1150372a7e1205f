"""Equivalence of expressions by math-verify, for text that a model wrote.

math-verify has two parsers. The one for plain expressions hands text to sympy's `parse_expr`, which is Python's
`eval`; it is not used here. The one for LaTeX is a grammar that builds sympy objects and evaluates no code; it gets
only text that `is_small_latex` lets through, because sympy computes powers and factorials of any size.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from dapo_rl.rewards.hostile import is_small_latex


def equivalent(given: str, truth: str, timeout_s: float) -> bool:
    """Whether two LaTeX expressions are mathematically the same; TimeoutError if that takes too long to say."""
    if not (is_small_latex(given) and is_small_latex(truth)):
        return False
    parse, verify = _math_verify()
    return within(timeout_s, lambda: bool(verify(parse(truth), parse(given))))


def load_symbolic() -> None:
    """What the first comparisons would load and set up, in a second or two, outside of any time limit."""
    parse, verify = _math_verify()
    for gold, target in ((r"\frac{\sqrt{8}}{2}", r"\sqrt{2}"), (r"x+\sqrt{2}", "5"), ("(1,2)", "(2,1)")):
        verify(parse(gold), parse(target))


@cache
def _math_verify() -> tuple[Callable[[str], Any], Callable[[Any, Any], Any]]:
    """math-verify's two functions, set up once; the import takes a second and is left out of any time limit."""
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    # It warns that its own time limit is off: that one needs signals, which only the main thread has.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Units are off: there `2c` and `2` are the same, c being a unit. `normalize_answer` removes those that are not
    # variables.
    spelling = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    latex_only = [math_verify.LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)]

    def parse(text: str) -> Any:
        boxed = rf"\boxed{{{text}}}"
        return math_verify.parse(boxed, latex_only, fallback_mode="no_fallback", parsing_timeout=None)

    def verify(gold: Any, target: Any) -> Any:
        return math_verify.verify(gold, target, timeout_seconds=None)

    return parse, verify


def within(seconds: float, judge: Callable[[], bool]) -> bool:
    """Runs `judge` in a thread of its own, from any thread, and stops it where it exceeds its time.

    The thread is stopped between two of Python's instructions: this ends a long computation in sympy, not a single
    huge operation on integers. `is_small_latex` keeps those out.
    """
    outcome: list[bool] = []
    crash: list[Exception] = []

    def run() -> None:
        try:
            outcome.append(judge())
        except SystemExit:
            pass  # out of time
        except Exception as error:
            crash.append(error)

    thread = threading.Thread(target=run, name="dapo-math-verify", daemon=True)
    thread.start()
    try:
        thread.join(seconds)
    finally:
        if thread.is_alive() and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    if crash:
        raise crash[0]
    if not outcome:
        raise TimeoutError(f"not decided within {seconds:g} s")
    return outcome[0]
