"""Compares answers element by element: numbers, tuples, intervals, sets, lists, matrices, relations.

Tuples are ordered, sets and lists are not. An answer with more elements than the truth is wrong, even if the right one
is among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from dapo_rl.rewards.answers.evaluate import exact
from dapo_rl.rewards.answers.expressions import Node, names_in, ordered_sides
from dapo_rl.rewards.answers.forms import is_numeral, is_worked_out, same_operations
from dapo_rl.rewards.answers.values import equal, is_multiple

MAX_UNORDERED = 20
"""Longer lists are compared in order."""
_REALS = Node(
    "tuple", (Node("negative", (Node("constant", value="infty"),)), Node("constant", value="infty")), value="()"
)


def same_shape(truth: Node, given: Node) -> bool:
    """Whether an answer equals the truth, whatever the order or notation."""
    if given.kind == "set" and len(given.parts) == 1 and not truth.is_shape:
        given = given.parts[0]  # a solution set
    elif truth.kind == "set" and len(truth.parts) == 1 and not given.is_shape:
        truth = truth.parts[0]
    return _same(truth, given)


def names_in_list(node: Node) -> set[str]:
    """The names in `x = 2, y = 3`."""
    names = {_name_of(part) for part in node.parts} if node.kind == "list" else set()
    return {name for name in names if name is not None}


def same_equation(truth: Node, given: Node, swapped: bool) -> bool:
    """Whether two equations are multiples of each other, or have the same sides in the opposite order."""
    if any(node.kind != "relation" or node.value != ("=",) for node in (truth, given)):
        return False
    if swapped:
        return given.parts[1] == truth.parts[0] and _same(truth.parts[1], given.parts[0])
    return len(names_in(truth)) > 1 and _same_equation(truth.parts, given.parts)


def _same(truth: Node, given: Node) -> bool:
    if _differ(_variable(truth), _variable(given)):
        return False
    truth, given = _plain(truth), _plain(given)
    if truth.kind == "list" and all(map(_name_of, truth.parts)):
        return _same_assignments(truth, given)
    if name := _name_of(given):
        if _name_of(truth) not in (None, name) or truth.kind == "name":
            return False
        given = given.parts[-1]
    if _name_of(truth):
        truth = truth.parts[-1]
    if truth.kind in ("list", "set"):
        return _same_elements(truth, given)
    if truth.kind == "tuple" and given.kind == "list" and len(names_in_list(given)) == len(given.parts):
        return _same_sequence(truth, given)
    if truth.kind == "relation" and (interval := _interval(truth)) is not None and given.kind == "tuple":
        return _same_shape(interval, given)
    if given.kind == "relation" and (interval := _interval(given)) is not None and _is_interval(truth):
        return _same_shape(truth, interval)
    if truth.kind == "relation" or given.kind == "relation":
        return _same_relation(truth, given)
    if truth.kind == "ratio" or given.kind == "ratio":
        return _same_ratio(truth, given)
    if truth.is_shape or given.is_shape:
        return _same_shape(truth, given)
    if names_in(given) - names_in(truth):
        return False  # a variable that the truth does not have
    return equal(truth, given) and is_worked_out(given, truth)


def _plain(node: Node) -> Node:
    """Replaces equivalent notation: `x in [1, 2]`, the reals as a letter."""
    if node.kind == "relation" and node.value == ("in",) and node.parts[0].kind == "name":
        node = node.parts[1]
    return _REALS if node == Node("domain", value="R") else node


def _variable(node: Node) -> str | None:
    """The variable of `x in [1, 2]` and of `x > 5`."""
    if node.kind != "relation" or (node.value != ("in",) and _interval(node) is None):
        return None
    return next((str(side.value) for side in node.parts if side.kind == "name"), None)


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _name_of(node: Node) -> str | None:
    """The name in `x = 5`; None for `x = x^2`."""
    if node.kind != "relation" or node.value != ("=",) or node.parts[0].kind != "name":
        return None
    name, value = str(node.parts[0].value), node.parts[1]
    return None if name in names_in(value) or value.kind == "name" else name


def _same_assignments(truth: Node, given: Node) -> bool:
    """Compares `x = 1, y = 2` by name, or in order if the answer omits the names."""
    names = [_name_of(part) for part in truth.parts]
    if len(set(names)) == 1:
        return _same_elements(Node("list", tuple(part.parts[1] for part in truth.parts)), given)
    if len(given.parts) != len(names) or given.kind not in ("list", "tuple"):
        return False
    values = {_name_of(part): part for part in given.parts}
    if set(values) == set(names):
        return all(_same(part, values[name]) for name, part in zip(names, truth.parts, strict=True))
    return set(values) == {None} and names == sorted(map(str, names)) and _same_sequence(truth, given)


def _same_elements(truth: Node, given: Node) -> bool:
    """Whether both have the same elements, equally often."""
    if given.kind == "tuple" and truth.kind == "list":
        return given.value == "()" and _same_sequence(truth, given)
    if given.kind not in ("list", "set") or len(given.parts) != len(truth.parts):
        return False
    if len(names_in_list(given)) > 1 or len(truth.parts) > MAX_UNORDERED:
        return _same_sequence(truth, given)
    left = list(given.parts)
    for element in truth.parts:
        match = next((i for i, other in enumerate(left) if _same(element, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def _same_sequence(truth: Node, given: Node) -> bool:
    return len(truth.parts) == len(given.parts) and all(map(_same, truth.parts, given.parts))


def _same_shape(truth: Node, given: Node) -> bool:
    if truth.kind != given.kind or (truth.value != given.value):
        return False
    if truth.kind in ("union", "intersection"):
        return _same_elements(Node("set", truth.parts), Node("set", given.parts))
    return _same_sequence(truth, given)


def _same_ratio(truth: Node, given: Node) -> bool:
    """`2:3` equals `4:6` and the fraction 2/3."""
    ours, theirs = _terms(given), _terms(truth)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return False
    if all(map(is_numeral, theirs)) and not all(map(is_numeral, ours)):
        return False  # (1+1):4 is not worked out
    return all(equal(_product(ours[0], b), _product(theirs[0], a)) for a, b in zip(ours, theirs, strict=True))


def _terms(node: Node) -> tuple[Node, ...] | None:
    terms = node.parts if node.kind in ("ratio", "quotient") else ()
    return terms if terms and all(exact(term) not in (None, 0) for term in terms) else None


def _product(a: Node, b: Node) -> Node:
    return Node("product", (a, b))


def _same_relation(truth: Node, given: Node) -> bool:
    if truth.kind != "relation":
        return _is_chain_to(truth, given)
    if given.kind != "relation":
        return False
    (ours, our_signs), (theirs, their_signs) = ordered_sides(given), ordered_sides(truth)
    if our_signs != their_signs:
        return False
    if not names_in(truth) and not same_operations(given, truth):
        return False  # in `2 + 3 = 5`, an equation of numbers, the operations are the content
    if all(map(_same, theirs, ours)):
        return True
    if set(our_signs) <= {"=", "!="}:
        return all(map(_same, theirs, reversed(ours))) or _same_equation(theirs, ours)
    return False


def _interval(node: Node) -> Node | None:
    """The interval of `x > 5` or `1 < x <= 4`; None for another relation."""
    sides, signs = ordered_sides(node)
    if not set(signs) <= {"<", "<="} or not 2 <= len(sides) <= 3:
        return None
    names = [side.kind == "name" for side in sides]
    if names.count(True) != 1 or any(names_in(side) for side, name in zip(sides, names, strict=True) if not name):
        return None
    at = names.index(True)
    if len(sides) == 3 and at != 1:
        return None
    low = sides[at - 1] if at else _REALS.parts[0]
    high = sides[at + 1] if at + 1 < len(sides) else _REALS.parts[1]
    opening = "[" if at and signs[at - 1] == "<=" else "("
    closing = "]" if at + 1 < len(sides) and signs[at] == "<=" else ")"
    return Node("tuple", (low, high), opening + closing)


def _is_interval(node: Node) -> bool:
    """Whether it can only be an interval: `(2, 4)` can also be a pair."""
    if node.kind != "tuple" or len(node.parts) != 2:
        return False
    return node.value != "()" or node.parts[0] == _REALS.parts[0] or node.parts[1] == _REALS.parts[1]


def _is_chain_to(truth: Node, given: Node) -> bool:
    """Accepts `2 + 3 = 5` for 5: every side equals the truth, and the last one is worked out."""
    if not isinstance(given.value, tuple) or set(given.value) != {"="} or truth.is_shape:
        return False
    sides = given.parts
    if sides[0].kind == "name" and len(sides) > 2 and not any(names_in(sides[0]) & names_in(s) for s in sides[1:]):
        sides = sides[1:]
    if any(side.is_shape or names_in(side) - names_in(truth) for side in sides):
        return False
    if not all(equal(truth, side) for side in sides):
        return False
    if len(set(sides)) == 1:
        return False  # x = x says nothing
    return is_worked_out(sides[-1], truth)


def _same_equation(truth: Sequence[Node], given: Sequence[Node]) -> bool:
    """Accepts `2x + 4y = 8` for `x + 2y = 4`, a multiple. Equations of numbers are compared side by side."""
    if len(truth) != 2 or len(given) != 2 or any(side.is_shape for side in (*truth, *given)):
        return False
    return is_multiple(_difference(truth), _difference(given))


def _difference(sides: Sequence[Node]) -> Node:
    return Node("sum", (sides[0], Node("negative", (sides[1],))))
