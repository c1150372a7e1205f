"""The form of expressions: whether two have the same one, and whether an answer is fully worked out.

`5x` and `x\\cdot 5` have the same form, `2x+3x` another. The order of terms, factors and elements, the notation of
products and fractions, and nested brackets do not count.

If the truth is a number, `3+8-4+7` and `2^{10}-1` only repeat the question, even if their value is right. An answer may
use what the truth uses: a fraction if the truth is one, a root if the truth has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from dapo_rl.rewards.answers.evaluate import exact
from dapo_rl.rewards.answers.expressions import Node, names_in, ordered_sides

_ELEMENTS = ("list", "set", "tuple", "union", "intersection")
"""Collections whose order and brackets are a matter of their values, which are compared elsewhere."""

_OPERATIONS = ("sum", "product", "quotient", "power", "root", "factorial", "call")

Form = tuple[object, ...]


def same_form(truth: Node, given: Node) -> bool:
    """Whether two expressions or shapes are the same, except for the order and notation of their parts."""
    return _form(truth) == _form(given)


def has_operations(node: Node) -> bool:
    return any(each.kind in _OPERATIONS for each in node.walk())


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


def _sorted(parts: Sequence[Node]) -> list[Form]:
    return sorted(map(_form, parts), key=repr)


def _relation(node: Node) -> Form:
    """`5 < x` is `x > 5`. The name of a value, as in `y = 2x`, is compared elsewhere."""
    sides, signs = ordered_sides(node)
    if signs == ("=",) and "name" in (sides[0].kind, sides[1].kind):
        return _form(sides[1] if sides[0].kind == "name" else sides[0])
    if signs == ("in",):
        return _form(sides[1])
    if set(signs) <= {"=", "!="}:
        return (signs, *_sorted(sides))
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


_CLOSED = frozenset(("product", "quotient", "root", "pi"))
"""Operations of the closed form of an irrational number; any other must also appear in the truth."""


def is_worked_out(given: Node, truth: Node) -> bool:
    """Whether an answer that has the value of the truth needs no further computation."""
    if names_in(truth) or given == truth:
        return True
    if names_in(given):
        return False
    value = exact(truth)
    if value is not None and is_numeral(truth):
        return is_numeral(given) and (value.denominator > 1 or not _divides(given))
    if is_numeral(given):
        return True
    operations, wanted = _operations(given), _operations(truth)
    if value is not None:
        return operations <= wanted
    if operations["sum"] > wanted["sum"] or not set(operations) <= _CLOSED | set(wanted):
        return False
    return _is_pending(truth) or not _is_pending(given)


def same_operations(given: Node, truth: Node) -> bool:
    """Whether both have the same operations left to compute."""
    return _operations(given) == _operations(truth)


def is_numeral(node: Node) -> bool:
    """Whether it is a plain number: an integer, a decimal, or a fraction of these."""
    if node.kind == "negative":
        return node.parts[0].kind != "negative" and is_numeral(node.parts[0])
    if node.kind == "quotient":
        return all(part.kind == "number" or _is_signed(part) for part in node.parts)
    return node.kind in ("number", "based") or _is_scientific(node)


def _is_scientific(node: Node) -> bool:
    """`1.2 \\cdot 10^{5}`, `10^{5}`"""
    if node.kind == "product":
        return len(node.parts) == 2 and node.parts[0].kind == "number" and _is_scientific(node.parts[1])
    if node.kind != "power" or node.parts[0].kind != "number" or exact(node.parts[0]) != 10:
        return False
    return node.parts[1].kind == "number" or _is_signed(node.parts[1])


def _is_signed(node: Node) -> bool:
    return node.kind == "negative" and node.parts[0].kind == "number"


def _divides(node: Node) -> bool:
    """Whether a division is left to do: a fraction that is a whole number, unless it divides by 1 or divides 0."""
    if node.kind == "negative":
        return _divides(node.parts[0])
    return node.kind == "quotient" and exact(node.parts[0]) != 0 and exact(node.parts[1]) not in (1, -1)


def _operations(node: Node) -> Counter[str]:
    return Counter(name for each in node.walk() if (name := _operation(each)))


def _operation(node: Node) -> str:
    if node.kind == "power" and (exponent := exact(node.parts[1])) is not None and exponent.denominator > 1:
        return "root"
    if node.kind == "power" and node.parts[0].kind == "constant":
        return ""  # a power of e or π has no other form
    if node.kind in ("call", "constant"):
        return {"ln": "log", "exp": "e"}.get(str(node.value), str(node.value))
    return "" if node.kind in ("number", "negative", "name", "based") else node.kind


def _is_pending(node: Node) -> bool:
    """Whether two of its numbers can still be added, multiplied or raised to a power."""
    return any(map(_has_pending_operation, node.walk()))


def _has_pending_operation(node: Node) -> bool:
    if node.kind == "product":
        return sum(exact(part) is not None for part in node.parts) > 1
    if node.kind == "sum":
        return len({_irrational_part(part) for part in node.parts}) < len(node.parts)
    return node.kind == "power" and exact(node) is not None


def _irrational_part(node: Node) -> tuple[Node, ...]:
    """A term without its rational factor; terms that share it can be added."""
    if exact(node) is not None:
        return ()
    if node.kind == "negative" or (node.kind == "quotient" and exact(node.parts[1]) is not None):
        return _irrational_part(node.parts[0])
    if node.kind == "product":
        return tuple(part for part in node.parts if exact(part) is None)
    return (node,)
