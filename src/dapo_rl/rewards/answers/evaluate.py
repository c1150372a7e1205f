"""Computes the values of expressions: exactly if they are rational, otherwise at a point to a number of digits.

Numbers too large to compute are rejected by their size.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import reduce
from typing import Any

from dapo_rl.rewards.answers.expressions import Node

MAX_BITS = 40_000
"""Maximum size of a computed number: 12,000 decimal digits."""
MAX_FACTORIAL = 2_000
MAX_ROOT_BITS = 2_000
"""Maximum size of a number whose root is computed exactly."""


class NotComputedError(ArithmeticError):
    """Too large, undefined, or not supported."""


def exact(node: Node) -> Fraction | None:
    """The value if the expression and all of its parts are rational, otherwise None."""
    try:
        return _exact(node)
    except NotComputedError:
        return None


def _exact(node: Node) -> Fraction | None:
    if node.kind == "number":
        assert isinstance(node.value, Fraction)
        return node.value
    values = [_exact(part) for part in node.parts]
    if not values or any(value is None for value in values):
        return None
    operate = _RATIONAL.get(node.kind) or (_RATIONAL.get(str(node.value)) if node.kind == "call" else None)
    if operate is None:
        return None
    result = operate(*values)
    if result is not None and _bits(result) > MAX_BITS:
        raise NotComputedError("too large")
    return result


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _product(*factors: Fraction) -> Fraction:
    if sum(map(_bits, factors)) > 2 * MAX_BITS:
        raise NotComputedError("too large")
    return reduce(lambda a, b: a * b, factors)


def _quotient(top: Fraction, bottom: Fraction) -> Fraction:
    if not bottom:
        raise NotComputedError("divided by zero")
    return top / bottom


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return _exact_root(_exact_power(base, Fraction(exponent.numerator)), Fraction(exponent.denominator))
    if not base and exponent <= 0:
        raise NotComputedError("a power of zero")
    if abs(base) != 1 and _bits(base) * abs(exponent) > MAX_BITS:
        raise NotComputedError("too large")
    return base ** int(exponent % 2 if abs(base) == 1 else exponent)


def _exact_root(radicand: Fraction | None, degree: Fraction) -> Fraction | None:
    """A rational root; None if the root is irrational."""
    if radicand is None or degree.denominator != 1 or not 0 < degree <= MAX_BITS:
        return None
    if radicand < 0:
        return None if degree % 2 == 0 else _negated(_exact_root(-radicand, degree))
    top, bottom = (_whole_root(number, int(degree)) for number in (radicand.numerator, radicand.denominator))
    return None if top is None or bottom is None else Fraction(top, bottom)


def _negated(value: Fraction | None) -> Fraction | None:
    return None if value is None else -value


def _whole_root(number: int, degree: int) -> int | None:
    if degree == 1 or number < 2:
        return number
    if number.bit_length() > MAX_ROOT_BITS:
        return None
    if degree == 2:
        root = math.isqrt(number)
        return root if root * root == number else None
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= number else (low, middle - 1)
    return low if low**degree == number else None


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise NotComputedError("a factorial")
    return Fraction(math.factorial(int(value)))


def _binomial(n: Fraction, k: Fraction) -> Fraction:
    if n.denominator != 1 or k.denominator != 1 or not 0 <= n <= MAX_FACTORIAL or k < 0:
        raise NotComputedError("a binomial coefficient")
    return Fraction(math.comb(int(n), int(k)))


def _whole(function: Callable[..., int]) -> Callable[..., Fraction]:
    def of(*values: Fraction) -> Fraction:
        if any(value.denominator != 1 for value in values):
            raise NotComputedError("of whole numbers alone")
        return Fraction(function(*map(int, values)))

    return of


_RATIONAL: dict[str, Callable[..., Fraction | None]] = {
    "sum": lambda *terms: sum(terms, Fraction()),
    "negative": lambda value: -value,
    "product": _product,
    "quotient": _quotient,
    "power": _exact_power,
    "root": _exact_root,
    "factorial": _factorial,
    "binom": _binomial,
    "abs": abs,
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
    "min": lambda *values: min(values),
    "max": lambda *values: max(values),
    "gcd": _whole(math.gcd),
    "lcm": _whole(math.lcm),
}

_contexts = threading.local()


def context() -> Any:
    """An mpmath context with its own precision for this thread."""
    if not hasattr(_contexts, "mp"):
        import mpmath

        _contexts.mp = mpmath.MPContext()
    return _contexts.mp


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
