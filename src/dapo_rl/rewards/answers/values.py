"""Compares the values of expressions.

Rational constants are compared exactly, irrational ones to 30 digits, and functions at points in the domain of the
truth. No comparison takes long: nothing is expanded or simplified, and numbers too large to compute are rejected by
their size.

An answer must not be able to choose the points, nor know them: they are drawn from a seed that depends on the truth and
the answer, and they count if the truth has a value there.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, Literal

from dapo_rl.rewards.answers.evaluate import Evaluator, NotComputedError, context, exact
from dapo_rl.rewards.answers.expressions import Node, names_in, values_in
from dapo_rl.rewards.answers.forms import same_form

DIGITS = 60
SAME_DIGITS = 30
MORE_DIGITS = 4 * DIGITS
"""To tell a small number from a zero with a rounding error."""
LEAST_DIGITS = 6
"""A decimal with at least this many decimals and significant digits may stand for an irrational number."""

ENOUGH = 12
"""Points at which two functions must agree."""

Point = dict[str, Fraction]

_PRIME = 10_007
"""The denominator of general points: no expression in an answer has a root or a pole there."""
_NEAR = (2, 10, 2, 40, 10, 2, 300, 10, 2, 40, 10, 2)
"""Sizes of the first points; most functions have values at all of them."""
_FAR = (1, 3, 10, 30, 100, 1_000, 10_000, 1_000_000)
_FAR_TRIES = 240
HOPELESS = 100
"""General points after which a function without any value is taken to have none."""
_WHOLE = 64
_HALVES = 32

_STEPS = frozenset(("floor", "ceil"))


def equal(truth: Node, given: Node) -> bool:
    """Whether two expressions are the same number or the same function of their names."""
    if truth == given:
        return True
    if "based" in (truth.kind, given.kind):
        return _same_numeral(truth, given)
    if names := names_in(truth) | names_in(given):
        return _same_function(truth, given, sorted(names))
    ours, theirs = exact(given), exact(truth)
    if ours is not None and theirs is not None:
        return ours == theirs
    try:
        return _same_number(truth, given)
    except NotComputedError:
        return False


def is_multiple(truth: Node, given: Node) -> bool:
    """Whether two functions of the same names differ only by a nonzero factor."""
    names = names_in(truth)
    if not names or names_in(given) != names:
        return False
    first: list[tuple[Any, Any]] = []

    def in_proportion(theirs: Any, ours: Any, _point: Point) -> bool | None:
        if not theirs and not ours:
            return None
        if not theirs or not ours:
            return False
        first.append((theirs, ours))
        cross = theirs * first[0][1], ours * first[0][0]
        return bool(abs(cross[0] - cross[1]) <= max(map(abs, cross)) * context().mpf(10) ** -SAME_DIGITS)

    return _agree(truth, given, sorted(names), in_proportion) is True


def _same_numeral(truth: Node, given: Node) -> bool:
    """Compares numerals with a base; the answer may omit the base, which the question states."""
    if truth.kind != "based":
        return False
    if given.kind == "based":
        return given.value == truth.value
    return isinstance(truth.value, tuple) and given.kind == "number" and str(given.value) == truth.value[0]


def _same_number(truth: Node, given: Node) -> bool:
    theirs, ours = _values(truth, given, {})
    if ours is None:
        return False
    if (decimals := _digits(given)) >= LEAST_DIGITS and exact(truth) is None:
        return bool(abs(ours - theirs) < context().mpf(10) ** -decimals)
    return _close(truth, given, {}, theirs, ours)


def _digits(node: Node) -> int:
    """Decimals of a number as written; 0 if fewer than LEAST_DIGITS of its digits are significant."""
    if node.kind == "negative":
        return _digits(node.parts[0])
    if not isinstance(node.value, Fraction):
        return 0
    return node.decimals if abs(node.value) * 10**node.decimals >= 10 ** (LEAST_DIGITS - 1) else 0


def _same_function(truth: Node, given: Node, names: list[str]) -> bool:
    agree = _agree(truth, given, names, lambda theirs, ours, point: _close(truth, given, point, theirs, ours))
    return same_form(truth, given) if agree is None else agree


def _agree(
    truth: Node, given: Node, names: list[str], compare: Callable[[Any, Any, Point], bool | None]
) -> bool | None:
    """Compares two functions at points in the domain of the truth; None if too few are found.

    The answer must have a value at each point. A function that has values between whole numbers may have isolated
    singularities, such as `x^2/x` at 0, so that whole numbers count against it only if its value differs there.
    """
    draw = seeded(truth, given)
    found = 0
    for tried, point in enumerate(general_points(truth, names, draw)):
        outcome = _outcome(truth, given, point, compare)
        if outcome in ("no value", "differs"):
            return False
        found += outcome == "agrees"
        if found == ENOUGH or (tried == HOPELESS and not found):
            break
    is_enough = found == ENOUGH
    if is_enough and not _STEPS & (values_in(truth, "call") | values_in(given, "call")):
        return True
    for point in whole_points(names, draw):
        outcome = _outcome(truth, given, point, compare)
        if outcome == "differs" or (outcome == "no value" and not is_enough):
            return False
        found += outcome == "agrees"
    if found < ENOUGH:  # halves, unless the function is meant for whole numbers
        for point in half_points(names, draw):
            outcome = _outcome(truth, given, point, compare)
            if outcome in ("no value", "differs"):
                return False
            found += outcome == "agrees"
    return True if found >= ENOUGH else None


def _outcome(
    truth: Node, given: Node, point: Point, compare: Callable[[Any, Any, Point], bool | None]
) -> Literal["agrees", "differs", "no value", "says nothing"]:
    """Compares at a point. It says nothing if the truth has no value there; "no value" is the answer's."""
    try:
        theirs, ours = _values(truth, given, point)
    except NotComputedError:
        return "says nothing"
    if ours is None:
        return "no value"
    agrees = compare(theirs, ours, point)
    return "says nothing" if agrees is None else "agrees" if agrees else "differs"


def _values(truth: Node, given: Node, point: Mapping[str, Fraction]) -> tuple[Any, Any]:
    """Both values, the answer's None if it has none; raises NotComputedError if the truth has none at this point."""
    mp, digits = context(), DIGITS
    for _ in range(2):
        theirs, lost = Evaluator(digits, point).value(truth)
        if point and mp.im(theirs) and "i" not in values_in(truth, "constant"):
            raise NotComputedError("a real function outside of its domain")
        try:
            ours, lost_too = Evaluator(digits, point).value(given)
        except NotComputedError:
            return theirs, None
        if max(lost, lost_too) < DIGITS - SAME_DIGITS:
            break
        digits = DIGITS + max(lost, lost_too)
    return theirs, ours


def _close(truth: Node, given: Node, point: Mapping[str, Fraction], theirs: Any, ours: Any) -> bool:
    """Whether two values differ only by rounding."""
    mp = context()
    if mp.isinf(ours) or mp.isinf(theirs):
        return bool(ours == theirs)
    size = max(abs(ours), abs(theirs))
    if abs(ours - theirs) <= size * mp.mpf(10) ** -SAME_DIGITS:
        return True
    if size > mp.mpf(10) ** -SAME_DIGITS:
        return False
    # sin(pi) is a zero with a rounding error, which shrinks if it is computed with more digits.
    try:
        return all(
            abs(Evaluator(MORE_DIGITS, point).value(node)[0]) <= abs(value) * mp.mpf(10) ** -DIGITS
            for node, value in ((truth, theirs), (given, ours))
        )
    except NotComputedError:
        return False


def seeded(truth: Node, given: Node) -> random.Random:
    """Random numbers that are the same in each run, and unknown to a policy that does not know the truth."""
    pair = repr((truth, given)).encode(errors="surrogatepass")
    return random.Random(hashlib.blake2b(pair, digest_size=16).digest())


def general_points(truth: Node, names: list[str], draw: random.Random) -> Iterator[Point]:
    """Points without special properties: first near 0, then anywhere and around the numbers in the truth."""
    for size in _NEAR * 2:
        yield {name: _general(size, draw) for name in names}
    numbers = {each.value for each in truth.walk() if each.kind == "number" and isinstance(each.value, Fraction)}
    centers = sorted(numbers) or [Fraction()]
    for attempt in range(_FAR_TRIES):
        if attempt % 2:
            size = draw.choice(_FAR)
            yield {name: _general(size, draw) for name in names}
        else:
            yield {
                name: draw.choice((-1, 1)) * draw.choice(centers) + _general(draw.choice(_FAR[:3]), draw)
                for name in names
            }


def whole_points(names: list[str], draw: random.Random) -> Iterator[Point]:
    """Whole numbers of both signs, in each combination of even and odd."""
    for index in range(_WHOLE):
        sign, size = draw.choice((-1, 1, 1, 1)), draw.choice((3, 6, 6, 20, 60))
        yield {
            name: Fraction(sign * (2 * draw.randint(1, size) + (index >> bit) % 2)) for bit, name in enumerate(names)
        }


def half_points(names: list[str], draw: random.Random) -> Iterator[Point]:
    """Half of odd numbers."""
    for _ in range(_HALVES):
        yield {name: Fraction(2 * draw.randint(-20, 20) + 1, 2) for name in names}


def _general(size: int, draw: random.Random) -> Fraction:
    return Fraction(draw.choice((-1, 1)) * draw.randint(1, size * _PRIME), _PRIME)
