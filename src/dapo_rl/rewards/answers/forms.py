"""Compares the form of expressions: `5x` and `x\\cdot 5` have the same one, `2x+3x` another.

The order of terms, factors and elements, the notation of products and fractions, and nested brackets do not count.
"""

from __future__ import annotations

from fractions import Fraction

from dapo_rl.rewards.answers.expressions import Node

_FLIPPED = {">": "<", ">=": "<="}
_ELEMENTS = ("list", "set", "tuple", "union", "intersection")
"""Collections whose order and brackets are a matter of their values, which are compared elsewhere."""

_OPERATIONS = ("sum", "product", "quotient", "power", "root", "factorial", "call")

Form = tuple[object, ...]


def same_form(truth: Node, given: Node) -> bool:
    """Whether two expressions or shapes are the same, except for the order and notation of their parts."""
    return _form(truth) == _form(given)


def has_operations(node: Node) -> bool:
    return node.kind in _OPERATIONS or any(map(has_operations, node.parts))


def last_side(given: Node, truth: Node) -> Node:
    """The result of a chain such as `(x+1)^2 = x^2+2x+1`, unless the truth is a relation."""
    if given.kind != "relation" or truth.kind == "relation" or not isinstance(given.value, tuple):
        return given
    return given.parts[-1] if set(given.value) == {"="} else given


def _form(node: Node) -> Form:
    if node.kind in _ELEMENTS:
        return ("elements", *_sorted(node.parts))
    if node.kind == "relation":
        return _relation(node)
    if node.kind == "sum":
        return ("sum", *sorted(map(_form, _terms(node)), key=repr))
    if node.kind in ("product", "quotient", "negative", "number"):
        return _product(node)
    if node.kind == "call" and node.value in ("min", "max", "gcd", "lcm"):
        return (node.value, *_sorted(node.parts))
    return (node.kind, node.value, *map(_form, node.parts))


def _sorted(parts: tuple[Node, ...]) -> list[Form]:
    return sorted(map(_form, parts), key=repr)


def _relation(node: Node) -> Form:
    """`5 < x` is `x > 5`. The name of a value, as in `y = 2x`, is compared elsewhere."""
    assert isinstance(node.value, tuple)
    sides, signs = node.parts, node.value
    if signs == ("=",) and "name" in (sides[0].kind, sides[1].kind):
        return _form(sides[1] if sides[0].kind == "name" else sides[0])
    if signs == ("in",):
        return _form(sides[1])
    if set(signs) <= {"=", "!="}:
        return (signs, *_sorted(sides))
    if all(sign in _FLIPPED for sign in signs):
        sides, signs = sides[::-1], tuple(_FLIPPED[sign] for sign in reversed(signs))
    return (signs, *map(_form, sides))


def _terms(node: Node) -> list[Node]:
    return [term for part in node.parts for term in _terms(part)] if node.kind == "sum" else [node]


def _product(node: Node) -> Form:
    """The sign, the numbers and the other factors above and below the fraction bar."""
    numbers: tuple[list[Fraction], list[Fraction]] = ([], [])
    others: tuple[list[Form], list[Form]] = ([], [])
    sign = _collect(node, 0, numbers, others)
    coefficients = tuple(tuple(sorted(number for number in each if number != 1)) for each in numbers)
    if sign == 1 and not any(coefficients) and not others[1] and len(others[0]) == 1:
        return others[0][0]
    return ("product", sign, coefficients, *(tuple(sorted(each, key=repr)) for each in others))


def _collect(
    node: Node, below: int, numbers: tuple[list[Fraction], list[Fraction]], others: tuple[list[Form], list[Form]]
) -> int:
    """Sorts the factors of a product into those above and below the bar; returns their sign."""
    if node.kind == "negative":
        return -_collect(node.parts[0], below, numbers, others)
    if node.kind == "product":
        sign = 1
        for part in node.parts:
            sign *= _collect(part, below, numbers, others)
        return sign
    if node.kind == "quotient":
        top, bottom = node.parts
        return _collect(top, below, numbers, others) * _collect(bottom, 1 - below, numbers, others)
    if node.kind == "number":
        assert isinstance(node.value, Fraction)
        numbers[below].append(node.value)
    else:
        others[below].append(_form(node))
    return 1
