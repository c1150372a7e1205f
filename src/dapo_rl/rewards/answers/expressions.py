"""Parses an answer in LaTeX or plain notation, completely or not at all.

The grammar covers numbers, names, sums, products, fractions, powers, roots and functions, and lists, tuples,
intervals, sets, matrices and relations of these. Nothing is computed here. If any part of a text is not understood,
there is no tree, so that an answer is never judged by a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from dapo_rl.rewards.answers.tokens import NotAnExpressionError, Tokens

MAX_CHARS = 300
MAX_DEPTH = 10
MAX_DIGITS = 100


@dataclass(frozen=True, slots=True)
class Node:
    """An expression or a shape.

    Expressions: number, based, name, constant, sum, product, quotient, power, root, negative, factorial, call.
    Shapes: list, set, tuple, matrix, row, ratio, relation, union, intersection, difference, domain.
    """

    kind: str
    parts: tuple[Node, ...] = ()
    value: Fraction | str | tuple[str, ...] | None = None
    """The value of a number; the name of a name, constant, function or domain; brackets of a tuple; relation signs."""
    decimals: int = 0
    """Digits after the decimal point of a number, as written."""

    @property
    def is_shape(self) -> bool:
        return self.kind in _SHAPES

    def walk(self) -> Iterator[Node]:
        """This node and all nodes below it."""
        yield self
        for part in self.parts:
            yield from part.walk()


def values_in(node: Node, kind: str) -> frozenset[str]:
    """The constants or the functions in an expression."""
    return frozenset(str(each.value) for each in node.walk() if each.kind == kind)


def names_in(node: Node) -> frozenset[str]:
    return values_in(node, "name")


def ordered_sides(relation: Node) -> tuple[Sequence[Node], tuple[str, ...]]:
    """The sides and signs, from small to large: `5 > x` is `x < 5`."""
    assert isinstance(relation.value, tuple)
    if all(sign in _FLIPPED for sign in relation.value):
        return relation.parts[::-1], tuple(_FLIPPED[sign] for sign in reversed(relation.value))
    return relation.parts, relation.value


_FLIPPED = {">": "<", ">=": "<="}
_SHAPES = frozenset(
    ["list", "set", "tuple", "matrix", "row", "ratio", "relation", "domain", "union", "intersection", "difference"]
)

_LONE_WORD = re.compile("[A-Za-z]{3,}|no|on|or|if|is|it|so|to|up|us|we|me|my|be|by|do|go|he|in|of|ok|am|an|as|at|pm")

GREEK = re.compile(
    "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|varphi|psi|omega|Delta|Gamma|Omega"
)
_FUNCTION = re.compile("(?:arc)?(?:sin|cos|tan)|cot|sec|csc|sinh|cosh|tanh|log|ln|exp|min|max|gcd|lcm")
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_RELATIONS = {
    **{sign: sign for sign in "=<>"},
    **{r"\le": "<=", r"\leq": "<=", r"\ge": ">=", r"\geq": ">=", r"\lt": "<", r"\gt": ">", r"\ne": "!=", r"\neq": "!="},
    r"\in": "in",
}
_JOINS = {r"\cup": "union", r"\cap": "intersection", r"\setminus": "difference"}
_PAIRS = {
    "|": ("|", "abs"),
    r"\lvert": (r"\rvert", "abs"),
    r"\lfloor": (r"\rfloor", "floor"),
    r"\lceil": (r"\rceil", "ceil"),
}


def parse(text: str) -> Node | None:
    """The tree of a text, or None if any part of it is not understood."""
    if len(text) > MAX_CHARS or _LONE_WORD.fullmatch(text) or text.count("|") > 8:
        return None
    try:
        return _Parser(text).whole()
    except NotAnExpressionError:
        return None


class _Parser(Tokens):
    """A recursive descent parser with one method per level of the grammar."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = -1  # the answer itself is not a bracket

    # Shapes.

    def whole(self) -> Node:
        items = self._items()
        if not self.at_end:
            self.fail()
        return items[0] if len(items) == 1 else Node("list", tuple(items))

    def _items(self) -> list[Node]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self.fail()
        items = self._separated(self._item, ",", ";")
        self._depth -= 1
        return items

    def _separated(self, parse: Callable[[], Node], *separators: str) -> list[Node]:
        parts = [parse()]
        while self.takes(*separators):
            parts.append(parse())
        return parts

    def _item(self) -> Node:
        sides, signs = [self._side()], []
        while self.token in _RELATIONS:
            sign = _RELATIONS[self.take()]
            if sign in "<>" and self.takes("="):
                sign += "="
            signs.append(sign)
            sides.append(self._side())
        return Node("relation", tuple(sides), tuple(signs)) if signs else sides[0]

    def _side(self) -> Node:
        left = self._ratio()
        while (kind := _JOINS.get(self.token)) is not None:
            self.take()
            right = self._ratio()
            left = Node(kind, (*left.parts, right) if left.kind == kind != "difference" else (left, right))
        return left

    def _ratio(self) -> Node:
        parts = self._separated(self._sum, ":")
        return Node("ratio", tuple(parts)) if len(parts) > 1 else parts[0]

    # Expressions.

    def _sum(self) -> Node:
        terms = [self._term()]
        while self.token in ("+", "-"):
            terms.append(self._term())
        if len(terms) > 1:
            self._no_shapes(terms)
            return Node("sum", tuple(terms))
        return terms[0]

    def _term(self) -> Node:
        negatives = signs = 0
        while self.token in ("+", "-"):
            signs += 1
            negatives += self.take() == "-"
        if signs > MAX_DEPTH:
            self.fail()
        term = self._product()
        for _ in range(negatives):
            self._no_shapes([term])
            term = Node("negative", (term,))
        return term

    def _product(self) -> Node:
        left = self._power()
        while True:
            if self.takes("*", r"\cdot", r"\times"):
                right = self._power()
            elif self.takes("/", r"\div"):
                right = self._power()
                self._no_shapes([left, right])
                left = Node("quotient", (left, right))
                continue
            elif self._starts_factor():
                is_fraction = self.token == r"\frac"
                right = self._power()
                if is_fraction and (mixed := _mixed_number(left, right)):
                    left = mixed
                    continue
            else:
                return left
            self._no_shapes([left, right])
            left = Node("product", (*left.parts, right) if left.kind == "product" else (left, right))

    def _starts_factor(self) -> bool:
        """Whether a factor follows without a sign. A number cannot: `3 4` and `x2` are not products."""
        token = self.token
        if self.kind == "letter" or token in ("(", "{", "[", r"\{"):
            return True
        return self.kind == "command" and token not in _NO_FACTOR

    def _power(self) -> Node:
        base = self._postfix()
        if not self.takes("^"):
            return base
        exponent = self._exponent()
        self._no_shapes([base, exponent])
        if self.token == "!":  # of the power or of its exponent
            self.fail()
        return Node("power", (base, exponent))

    def _exponent(self) -> Node:
        negative = self.takes("-")
        exponent = self._primary()
        if self.takes("^"):
            exponent = Node("power", (exponent, self._exponent()))
        self._no_shapes([exponent])
        return Node("negative", (exponent,)) if negative else exponent

    def _postfix(self) -> Node:
        node = self._primary()
        if self.token == "_" and node.kind == "number":
            return self._based(node)
        if self.takes("!"):
            self._no_shapes([node])
            node = Node("factorial", (node,))
            if self.token == "!":
                self.fail()
        return node

    def _based(self, number: Node) -> Node:
        """A numeral with a base: `52_8`."""
        self.take("_")
        braced = self.takes("{")
        base = self.take()
        if braced:
            self.take("}")
        if not base.isdecimal() or number.decimals or not isinstance(number.value, Fraction):
            self.fail()
        return Node("based", value=(str(number.value), base))

    def _primary(self) -> Node:
        kind, token = self.kind, self.take()
        if kind == "number":
            return _number(token) or self.fail()
        if kind == "letter":
            return self._name(token)
        if token in ("(", "[", "{", r"\{"):
            return self._bracket(token)
        if token in _PAIRS:
            return self._pair(*_PAIRS[token])
        if kind == "command":
            return self._command(token.removeprefix("\\"))
        return self.fail()

    def _name(self, letter: str) -> Node:
        if self.token == "_":
            self.take()
            return Node("name", value=f"{letter}_{self._subscript()}")
        return Node("constant", value=letter) if letter in "ei" else Node("name", value=letter)

    def _subscript(self) -> str:
        if not self.takes("{"):
            return self.take()
        parts = []
        while self.token != "}":
            parts.append(self.take())
        self.take("}")
        return "".join(parts)

    def _bracket(self, opening: str) -> Node:
        if opening == r"\{" and self.takes(r"\}"):
            return Node("domain", value="emptyset")
        items = self._items()
        closing = self.take()
        if opening == r"\{":
            if closing != r"\}":
                self.fail()
            return Node("set", tuple(items))
        if opening == "{":
            if closing != "}":
                self.fail()
            return items[0] if len(items) == 1 else Node("set", tuple(items))
        if closing not in (")", "]") or any(item.kind == "relation" for item in items):
            self.fail()
        if len(items) > 1:
            return Node("tuple", tuple(items), opening + closing)
        # A single item in brackets is a group; `[5]` and `((1, 4))` are not.
        if opening + closing != "()" and (opening + closing, items[0].kind) != ("[]", "sum"):
            self.fail()
        self._no_shapes(items)
        return items[0]

    def _pair(self, closing: str, function: str) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self.fail()
        inside = self._sum()
        self._depth -= 1
        self.take(closing)
        self._no_shapes([inside])
        return Node("call", (inside,), function)

    def _command(self, name: str) -> Node:
        if name == "frac":
            top, bottom = self._argument(), self._argument()
            return Node("quotient", (top, bottom))
        if name == "sqrt":
            return self._root()
        if name == "binom":
            return Node("call", (self._argument(), self._argument()), "binom")
        if _FUNCTION.fullmatch(name):
            return self._function(name)
        if name in ("pi", "infty"):
            return Node("constant", value=name)
        if name in ("emptyset", "varnothing"):
            return Node("domain", value="emptyset")
        if name == "mathbb":
            self.take("{")
            domain = self.take()
            self.take("}")
            return Node("domain", value=domain)
        if name == "matrix":
            return self._matrix()
        if GREEK.fullmatch(name):
            return self._name("\\" + name)
        return self.fail()

    def _argument(self) -> Node:
        if self.token == "{":
            self.take()
            inside = self._items()
            self.take("}")
        elif self.kind in ("number", "letter"):
            inside = [self._primary()]
        else:
            self.fail()
        if len(inside) != 1:
            self.fail()
        self._no_shapes(inside)
        return inside[0]

    def _root(self) -> Node:
        degree = Node("number", value=Fraction(2))
        if self.takes("["):
            degree = self._sum()
            self.take("]")
        radicand = self._argument()
        self._no_shapes([degree])
        return Node("root", (radicand, degree))

    def _function(self, name: str) -> Node:
        base = None
        if name == "log" and self.takes("_"):
            base = self._argument()
            if base == Node("constant", value="e"):
                name, base = "ln", None
        power = None
        if self.takes("^"):
            power = self._exponent()
        if name in _INVERSE and power == Node("negative", (Node("number", value=Fraction(1)),)):
            name, power = _INVERSE[name], None
        arguments = self._arguments()
        if (len(arguments) > 1) != (name in ("min", "max", "gcd", "lcm")):
            self.fail()
        self._no_shapes(arguments)
        call = Node("call", (*arguments, base) if base is not None else tuple(arguments), name)
        return Node("power", (call, power)) if power is not None else call

    def _arguments(self) -> list[Node]:
        """The arguments of a function: a bracket, or the following factors, as in `sin 2x`."""
        if self.takes("("):
            items = self._items()
            self.take(")")
            return items
        factors: list[Node] = []
        while not factors or (self._starts_factor() and self.token not in ("(", "[", r"\{")):
            if factors and _FUNCTION.fullmatch(self.token.removeprefix("\\")):
                break
            factors.append(self._power())
        return [factors[0] if len(factors) == 1 else Node("product", tuple(factors))]

    def _matrix(self) -> Node:
        rows = [self._row()]
        while self.takes("\\\\"):
            if self.token == r"\endmatrix":
                break
            rows.append(self._row())
        self.take(r"\endmatrix")
        if len({len(row.parts) for row in rows}) != 1:
            self.fail()
        return Node("matrix", tuple(rows))

    def _row(self) -> Node:
        cells = self._separated(self._sum, "&")
        self._no_shapes(cells)
        return Node("row", tuple(cells))

    def _no_shapes(self, nodes: list[Node]) -> None:
        if any(node.is_shape for node in nodes):
            self.fail()


_NO_FACTOR = frozenset(
    [*_RELATIONS, *_JOINS, r"\cdot", r"\times", r"\div", r"\}", "\\\\", r"\endmatrix", r"\rvert", r"\rfloor", r"\rceil"]
)


def _number(token: str) -> Node | None:
    mantissa, _, exponent = token.lower().partition("e")
    whole, _, decimals = mantissa.partition(".")
    if len(whole) > MAX_DIGITS or len(decimals) > MAX_DIGITS:
        return None
    value = Fraction(mantissa.rstrip(".")) * Fraction(10) ** int(exponent or 0)
    return Node("number", value=value, decimals=0 if exponent else len(decimals))


def _mixed_number(left: Node, right: Node) -> Node | None:
    """`1\\frac{1}{2}` is 3/2."""
    if left.kind != "number" or right.kind != "quotient" or left.decimals:
        return None
    top, bottom = right.parts
    if top.kind != "number" or bottom.kind != "number" or not bottom.value:
        return None
    assert isinstance(left.value, Fraction)
    assert isinstance(top.value, Fraction)
    assert isinstance(bottom.value, Fraction)
    return Node("number", value=left.value + top.value / bottom.value)
