"""Computes rational numbers exactly; rejects what is too large by its size."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import reduce

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


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return _root(_power(base, Fraction(exponent.numerator)), Fraction(exponent.denominator))
    if not base and exponent <= 0:
        raise NotComputedError("a power of zero")
    if abs(base) != 1 and _bits(base) * abs(exponent) > MAX_BITS:
        raise NotComputedError("too large")
    return base ** int(exponent % 2 if abs(base) == 1 else exponent)


def _root(radicand: Fraction | None, degree: Fraction) -> Fraction | None:
    """A rational root; None if the root is irrational."""
    if radicand is None or degree.denominator != 1 or not 0 < degree <= MAX_BITS:
        return None
    if radicand < 0:
        return None if degree % 2 == 0 else _negated(_root(-radicand, degree))
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
    "power": _power,
    "root": _root,
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
