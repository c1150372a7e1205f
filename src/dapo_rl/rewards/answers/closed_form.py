"""Decides whether an answer is fully worked out.

If the truth is a number, `3+8-4+7` and `2^{10}-1` only repeat the question, even if their value is right. An answer may
use what the truth uses: a fraction if the truth is one, a root if the truth has one.
"""

from __future__ import annotations

from collections import Counter

from dapo_rl.rewards.answers.exact import exact
from dapo_rl.rewards.answers.expressions import Node
from dapo_rl.rewards.answers.values import names_in

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
    operations, wanted = Counter(_operations(given)), Counter(_operations(truth))
    if value is not None:
        return operations <= wanted
    if operations["sum"] > wanted["sum"] or not set(operations) <= _CLOSED | set(wanted):
        return False
    return _is_pending(truth) or not _is_pending(given)


def same_operations(given: Node, truth: Node) -> bool:
    """Whether both have the same operations left to compute."""
    return Counter(_operations(given)) == Counter(_operations(truth))


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


def _operations(node: Node) -> list[str]:
    inside = [operation for part in node.parts for operation in _operations(part)]
    return [*inside, name] if (name := _operation(node)) else inside


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
    if node.kind == "product" and sum(exact(part) is not None for part in node.parts) > 1:
        return True
    if node.kind == "sum" and len({_irrational_part(part) for part in node.parts}) < len(node.parts):
        return True
    if node.kind == "power" and exact(node) is not None:
        return True
    return any(_is_pending(part) for part in node.parts)


def _irrational_part(node: Node) -> tuple[Node, ...]:
    """A term without its rational factor; terms that share it can be added."""
    if exact(node) is not None:
        return ()
    if node.kind == "negative" or (node.kind == "quotient" and exact(node.parts[1]) is not None):
        return _irrational_part(node.parts[0])
    if node.kind == "product":
        return tuple(part for part in node.parts if exact(part) is None)
    return (node,)
