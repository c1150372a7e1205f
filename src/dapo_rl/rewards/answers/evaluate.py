"""Computes the value of an expression at a point, to a number of digits."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from dapo_rl.rewards.answers.exact import MAX_BITS, MAX_FACTORIAL, NotComputedError, exact
from dapo_rl.rewards.answers.expressions import Node

_contexts = threading.local()


def context() -> Any:
    """An mpmath context with its own precision for this thread."""
    if not hasattr(_contexts, "mp"):
        import mpmath

        _contexts.mp = mpmath.MPContext()
    return _contexts.mp


def load() -> None:
    """Imports in advance what the first comparison needs."""
    context()


class Evaluator:
    """Computes a value to a number of digits, and counts the digits lost to cancellation."""

    def __init__(self, digits: int, point: Mapping[str, Fraction]) -> None:
        self._mp, self._digits, self._point = context(), digits, point
        self._mp.dps = digits
        self._lost = 0

    def value(self, node: Node) -> tuple[Any, int]:
        try:
            result = self._of(node)
        except (ArithmeticError, ValueError, TypeError, LookupError) as error:
            raise NotComputedError(str(error)) from None
        return result, self._lost

    def _of(self, node: Node) -> Any:
        result = self._checked(self._compute(node))
        if self._mp.isinf(result) and node.kind not in ("constant", "negative"):
            raise NotComputedError("computed with infinity")
        return result

    def _compute(self, node: Node) -> Any:
        mp, kind = self._mp, node.kind
        if kind == "number":
            return self._rational(node.value)
        if kind == "name":
            return self._rational(self._point[str(node.value)])
        if kind == "constant":
            return {"pi": mp.pi, "e": mp.e, "i": mp.j, "infty": mp.inf}[str(node.value)] * 1
        values = [self._of(part) for part in node.parts]
        if kind == "sum":
            return self._sum(values)
        if kind == "negative":
            return -values[0]
        if kind == "product":
            return mp.fprod(values)
        if kind == "quotient":
            return values[0] / values[1]
        if kind == "power":
            return self._power(values[0], values[1], self._odd_root(node.parts[1]))
        if kind == "root":
            return self._root(*values)
        if kind == "factorial":
            return self._call("factorial", values)
        if kind == "call":
            return self._call(str(node.value), values)
        raise NotComputedError(kind)

    def _rational(self, value: Any) -> Any:
        return self._mp.mpf(value.numerator) / value.denominator

    def _checked(self, value: Any) -> Any:
        """The value itself, if it is a number that is not too large to compute with."""
        mp = self._mp
        if mp.isnan(value):
            raise NotComputedError("no number")
        if not mp.isinf(value) and value and abs(mp.mag(value)) > MAX_BITS:
            raise NotComputedError("too large")
        return value

    def _sum(self, values: list[Any]) -> Any:
        total = self._mp.fsum(values)
        largest = max(abs(value) for value in values)
        if largest and not self._mp.isinf(largest):
            left = self._mp.mag(total) if total else -self._digits * 4
            self._lost = max(self._lost, int((self._mp.mag(largest) - left) * 0.302) + 1)
            if not total or abs(total) < largest * self._mp.mpf(10) ** (5 - self._digits):
                return self._mp.mpf(0)  # only rounding error is left
        return total

    @staticmethod
    def _odd_root(exponent: Node) -> Fraction | None:
        """An exponent such as 2/3, whose power of a negative number is real."""
        value = exact(exponent)
        return value if value is not None and value.denominator % 2 and value.denominator > 1 else None

    def _power(self, base: Any, exponent: Any, odd_root: Fraction | None = None) -> Any:
        mp = self._mp
        if not base:
            if mp.re(exponent) <= 0:
                raise NotComputedError("a power of zero")
            return base
        if abs(exponent) * (abs(mp.mag(base)) + 1) > MAX_BITS:
            raise NotComputedError("too large")
        if mp.im(base) == 0 and mp.im(exponent) == 0 and mp.isint(exponent):
            return mp.power(mp.re(base), int(mp.re(exponent)))
        if odd_root is not None and mp.im(base) == 0 and mp.re(base) < 0:
            return (-1) ** (odd_root.numerator % 2) * mp.power(-mp.re(base), exponent)
        return mp.power(base, exponent)

    def _root(self, radicand: Any, degree: Any) -> Any:
        mp = self._mp
        if not mp.isint(degree) or not 1 <= degree <= MAX_BITS:
            raise NotComputedError("a root")
        if mp.im(radicand) == 0 and mp.re(radicand) < 0 and int(degree) % 2:
            return -mp.root(-mp.re(radicand), int(degree))
        return mp.root(radicand, int(degree))

    def _call(self, name: str, values: list[Any]) -> Any:
        mp = self._mp
        if name in ("factorial", "binom") and max(abs(value) for value in values) > MAX_FACTORIAL:
            raise NotComputedError("too large")
        if name in ("exp", "sinh", "cosh") and abs(values[0]) > MAX_BITS:
            raise NotComputedError("too large")
        if name in ("log", "ln"):
            base = values[1] if len(values) > 1 else mp.e if name == "ln" else mp.mpf(10)
            return mp.log(values[0]) / mp.log(base)
        if name in ("min", "max"):
            return (min if name == "min" else max)(values)
        return getattr(mp, _NUMERIC[name])(*values)


_NUMERIC = {
    **{
        name: name
        for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp", "floor", "ceil")
    },
    **{"arcsin": "asin", "arccos": "acos", "arctan": "atan", "abs": "fabs", "factorial": "factorial"},
    "binom": "binomial",
}
