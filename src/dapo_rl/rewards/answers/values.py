"""Computes the values of expressions, and compares them.

Rational constants are compared exactly, irrational ones to 30 digits, and expressions with names at random points. No
comparison takes long: nothing is expanded or simplified, and what is too large to compute is rejected by its size.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from dapo_rl.rewards.answers.exact import MAX_BITS, MAX_FACTORIAL, NotComputedError, exact
from dapo_rl.rewards.answers.expressions import Node

DIGITS = 60
SAME_DIGITS = 30
LEAST_DECIMALS = 6
"""A decimal with at least this many digits may stand for an irrational number."""


def equal(truth: Node, given: Node) -> bool:
    """Whether two expressions are the same number or the same function of their names."""
    if truth == given:
        return True
    if "based" in (truth.kind, given.kind):
        return _same_numeral(truth, given)
    if names := names_in(truth) | names_in(given):
        return _equal_at_points(truth, given, sorted(names))
    ours, theirs = exact(given), exact(truth)
    if ours is not None and theirs is not None:
        return ours == theirs
    try:
        return _equal_numbers(truth, given, {})
    except NotComputedError:
        return False


def names_in(node: Node) -> frozenset[str]:
    if node.kind == "name":
        return frozenset((str(node.value),))
    return frozenset(name for part in node.parts for name in names_in(part))


def _same_numeral(truth: Node, given: Node) -> bool:
    """Compares numerals with a base; the answer may omit the base, which the question states."""
    if truth.kind != "based":
        return False
    if given.kind == "based":
        return given.value == truth.value
    return isinstance(truth.value, tuple) and given.kind == "number" and str(given.value) == truth.value[0]


def _equal_numbers(truth: Node, given: Node, point: Mapping[str, Fraction]) -> bool:
    """Whether both have the same value; raises NotComputedError if the truth has no value at this point."""
    digits = DIGITS
    for _ in range(2):
        theirs, lost = _Evaluator(digits, point).value(truth)
        try:
            ours, lost_too = _Evaluator(digits, point).value(given)
        except NotComputedError:
            return False
        if max(lost, lost_too) < DIGITS - SAME_DIGITS:
            break
        digits = DIGITS + max(lost, lost_too)
    mp = _context()
    if point and mp.im(theirs) and "i" not in _constants_in(truth):
        raise NotComputedError("a real function outside of its domain")
    if mp.isinf(ours) or mp.isinf(theirs):
        return bool(ours == theirs)
    difference = abs(ours - theirs)
    if not point and (decimals := _decimals(given)) >= LEAST_DECIMALS and exact(truth) is None:
        return bool(difference < mp.mpf(10) ** -decimals)
    size = max(abs(ours), abs(theirs))
    return bool(difference <= size * mp.mpf(10) ** -SAME_DIGITS + mp.mpf(10) ** (SAME_DIGITS - DIGITS - 20))


def _constants_in(node: Node) -> frozenset[str]:
    if node.kind == "constant":
        return frozenset((str(node.value),))
    return frozenset(name for part in node.parts for name in _constants_in(part))


def _decimals(node: Node) -> int:
    return _decimals(node.parts[0]) if node.kind == "negative" else node.decimals


POINTS = 12


def _equal_at_points(truth: Node, given: Node, names: list[str]) -> bool:
    """Compares at points where the truth has a value; there must be at least two."""
    seen = 0
    for point in _points(names):
        try:
            if not _equal_numbers(truth, given, point):
                return False
        except NotComputedError:
            continue
        seen += 1
    return seen >= 2


def is_multiple(truth: Node, given: Node) -> bool:
    """Whether two functions of the same names differ only by a nonzero factor."""
    names = sorted(names_in(truth) | names_in(given))
    first: tuple[Any, Any] | None = None
    for point in _points(names) if names else ():
        try:
            theirs, ours = (_Evaluator(DIGITS, point).value(node)[0] for node in (truth, given))
        except NotComputedError:
            continue
        if not theirs and not ours:
            continue
        if not theirs or not ours:
            return False
        first = first or (theirs, ours)
        cross = theirs * first[1], ours * first[0]
        if abs(cross[0] - cross[1]) > max(map(abs, cross)) * _context().mpf(10) ** -SAME_DIGITS:
            return False
    return first is not None


def _points(names: list[str]) -> Iterator[dict[str, Fraction]]:
    """Positive, negative and whole numbers: some expressions have values only at some of these."""
    draw = random.Random(0)
    for index in range(POINTS):
        if index % 3 == 2:
            yield {name: Fraction(draw.randint(2, 12)) for name in names}
        else:
            sign = -1 if index % 3 else 1
            yield {name: sign * Fraction(draw.randint(1_001, 30_011), 10_007) for name in names}


_contexts = threading.local()


def _context() -> Any:
    """An mpmath context with its own precision for this thread."""
    if not hasattr(_contexts, "mp"):
        import mpmath

        _contexts.mp = mpmath.MPContext()
    return _contexts.mp


def load() -> None:
    """Imports in advance what the first comparison needs."""
    _context()


class _Evaluator:
    """Computes a value to a number of digits, and counts the digits lost to cancellation."""

    def __init__(self, digits: int, point: Mapping[str, Fraction]) -> None:
        self._mp, self._digits, self._point = _context(), digits, point
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
            return self._power(*values)
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

    def _power(self, base: Any, exponent: Any) -> Any:
        mp = self._mp
        if not base:
            if mp.re(exponent) <= 0:
                raise NotComputedError("a power of zero")
            return base
        if abs(exponent) * (abs(mp.mag(base)) + 1) > MAX_BITS:
            raise NotComputedError("too large")
        if mp.im(base) == 0 and mp.im(exponent) == 0 and mp.isint(exponent):
            return mp.power(mp.re(base), int(mp.re(exponent)))
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
