"""Reads an answer in LaTeX or plain notation, whole or not at all.

The grammar covers what answers are made of: numbers, names, sums, products, fractions, powers, roots, functions, and
above them lists, tuples, intervals, sets, matrices and relations. Nothing is computed here, and a text of which any
part is not understood has no tree: it is never judged by the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn

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
    """A number's value; the name of a name, constant, function or domain; a tuple's brackets; a relation's signs."""
    decimals: int = 0
    """Of a number: how many digits its writer gave after the point."""

    @property
    def is_shape(self) -> bool:
        return self.kind in _SHAPES


_SHAPES = frozenset(("list", "set", "tuple", "matrix", "row", "ratio", "relation", "domain")) | {
    "union",
    "intersection",
    "difference",
}

_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2}(?![0-9]))?"
_TOKEN = re.compile(
    rf" *(?:(?P<number>{_NUMBER})|(?P<command>\\(?:[A-Za-z]+|[{{}}\\]))|(?P<letter>[A-Za-z])"
    r"|(?P<sign>[-+*/^_!=<>,;:()\[\]{}|&]))"
)
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{5}")
_DERIVATIVE = re.compile(r"\\frac\{(?:d|\\Delta)[^{}]*\}\{(?:d|\\Delta)[^{}]*[A-Za-z]|d[a-z]?/d[a-z]")
"""Its letters are no factors, and do not cancel."""
_LONE_WORD = re.compile("[A-Za-z]{3,}|no|on|or|if|is|it|so|to|up|us|we|me|my|be|by|do|go|he|in|of|ok|am|an|as|at|pm")

_GREEK = re.compile(
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
_PAIRS = {"|": ("|", "abs"), r"\lvert": (r"\rvert", "abs"), r"\lfloor": (r"\rfloor", "floor")} | {
    r"\lceil": (r"\rceil", "ceil")
}
_MATRIX = re.compile(
    r"(?P<begin>[(\[]\\begin\{(?:array\}\{[clr|]*|matrix)\}|\\begin\{[pb]?matrix\})"
    r"|\\end\{(?:array|matrix)\}[)\]]|\\end\{[pb]?matrix\}"
)
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"} | {
    "ten": "10",
    "twelve": "12",
    "sixteen": "16",
}


class NotAnExpressionError(ValueError):
    """A text that the grammar does not cover."""


def parse(text: str) -> Node | None:
    """The tree of a text, or None where any part of it is not understood."""
    if len(text) > MAX_CHARS or _LONE_WORD.fullmatch(text) or text.count("|") > 8:
        return None
    try:
        return _Parser(text).whole()
    except NotAnExpressionError:
        return None


class _Parser:
    """Recursive descent, one method for each level of the grammar."""

    def __init__(self, text: str) -> None:
        # Ends of a matrix become signs of their own, and lose their names with that.
        text = _MATRIX.sub(lambda match: r"\matrix " if match["begin"] else r"\endmatrix ", text)
        text = re.sub(r"_\{?([a-z]+)\}?", lambda m: f"_{{{_BASES.get(m[1], m[1])}}}", text)
        if _WORD.search(text) or _DERIVATIVE.search(text):
            raise NotAnExpressionError(text)
        self._tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None or match.lastgroup is None:
                raise NotAnExpressionError(text)
            self._tokens.append((match.lastgroup, match[match.lastgroup]))
            position = match.end()
        self._next = 0
        self._depth = -1  # the answer itself is no bracket

    # Tokens.

    def _fail(self) -> NoReturn:
        raise NotAnExpressionError(f"at token {self._next}")

    @property
    def _token(self) -> str:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else ""

    @property
    def _kind(self) -> str:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    def _take(self, *wanted: str) -> str:
        token = self._token
        if not token or (wanted and token not in wanted):
            self._fail()
        self._next += 1
        return token

    def _takes(self, *wanted: str) -> bool:
        if self._token and self._token in wanted:
            self._next += 1
            return True
        return False

    # Shapes.

    def whole(self) -> Node:
        items = self._items()
        if self._next < len(self._tokens):
            self._fail()
        return items[0] if len(items) == 1 else Node("list", tuple(items))

    def _items(self) -> list[Node]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail()
        items = [self._item()]
        while self._takes(",", ";"):
            items.append(self._item())
        self._depth -= 1
        return items

    def _item(self) -> Node:
        sides, signs = [self._side()], []
        while self._token in _RELATIONS:
            sign = _RELATIONS[self._take()]
            if sign in "<>" and self._takes("="):
                sign += "="
            signs.append(sign)
            sides.append(self._side())
        return Node("relation", tuple(sides), tuple(signs)) if signs else sides[0]

    def _side(self) -> Node:
        left = self._ratio()
        while (kind := _JOINS.get(self._token)) is not None:
            self._take()
            right = self._ratio()
            left = Node(kind, (*left.parts, right) if left.kind == kind != "difference" else (left, right))
        return left

    def _ratio(self) -> Node:
        parts = [self._sum()]
        while self._takes(":"):
            parts.append(self._sum())
        return Node("ratio", tuple(parts)) if len(parts) > 1 else parts[0]

    # Expressions.

    def _sum(self) -> Node:
        terms = [self._term()]
        while self._token in ("+", "-"):
            terms.append(self._term())
        if len(terms) > 1:
            self._no_shapes(terms)
            return Node("sum", tuple(terms))
        return terms[0]

    def _term(self) -> Node:
        negatives = signs = 0
        while self._token in ("+", "-"):
            signs += 1
            negatives += self._take() == "-"
        if signs > MAX_DEPTH:
            self._fail()
        term = self._product()
        for _ in range(negatives):
            self._no_shapes([term])
            term = Node("negative", (term,))
        return term

    def _product(self) -> Node:
        left = self._power()
        while True:
            if self._takes("*", r"\cdot", r"\times"):
                right = self._power()
            elif self._takes("/", r"\div"):
                right = self._power()
                self._no_shapes([left, right])
                left = Node("quotient", (left, right))
                continue
            elif self._starts_factor():
                is_fraction = self._token == r"\frac"
                right = self._power()
                if is_fraction and (mixed := _mixed_number(left, right)):
                    left = mixed
                    continue
            else:
                return left
            self._no_shapes([left, right])
            left = Node("product", (*left.parts, right) if left.kind == "product" else (left, right))

    def _starts_factor(self) -> bool:
        """Whether a factor follows without a sign. A number does not: `3 4` and `x2` are no products."""
        token = self._token
        if self._kind == "letter" or token in ("(", "{", "[", r"\{"):
            return True
        return self._kind == "command" and token not in _NO_FACTOR

    def _power(self) -> Node:
        base = self._postfix()
        if not self._takes("^"):
            return base
        exponent = self._exponent()
        self._no_shapes([base, exponent])
        if self._token == "!":  # of the power, or of its exponent
            self._fail()
        return Node("power", (base, exponent))

    def _exponent(self) -> Node:
        negative = self._takes("-")
        exponent = self._primary()
        if self._takes("^"):
            exponent = Node("power", (exponent, self._exponent()))
        self._no_shapes([exponent])
        return Node("negative", (exponent,)) if negative else exponent

    def _postfix(self) -> Node:
        node = self._primary()
        if self._token == "_" and node.kind == "number":
            return self._based(node)
        if self._takes("!"):
            self._no_shapes([node])
            node = Node("factorial", (node,))
            if self._token == "!":
                self._fail()
        return node

    def _based(self, number: Node) -> Node:
        """`52_8`: a numeral and its base."""
        self._take("_")
        braced = self._takes("{")
        base = self._take()
        if braced:
            self._take("}")
        if not base.isdecimal() or number.decimals or not isinstance(number.value, Fraction):
            self._fail()
        return Node("based", value=(str(number.value), base))

    def _primary(self) -> Node:
        kind, token = self._kind, self._take()
        if kind == "number":
            return _number(token) or self._fail()
        if kind == "letter":
            return self._name(token)
        if token in ("(", "[", "{", r"\{"):
            return self._bracket(token)
        if token in _PAIRS:
            return self._pair(*_PAIRS[token])
        if kind == "command":
            return self._command(token.removeprefix("\\"))
        return self._fail()

    def _name(self, letter: str) -> Node:
        if self._token == "_":
            self._take()
            return Node("name", value=f"{letter}_{self._subscript()}")
        return Node("constant", value=letter) if letter in "ei" else Node("name", value=letter)

    def _subscript(self) -> str:
        if not self._takes("{"):
            return self._take()
        parts = []
        while self._token != "}":
            parts.append(self._take())
        self._take("}")
        return "".join(parts)

    def _bracket(self, opening: str) -> Node:
        if opening == r"\{" and self._takes(r"\}"):
            return Node("domain", value="emptyset")
        items = self._items()
        closing = self._take()
        if opening == r"\{":
            if closing != r"\}":
                self._fail()
            return Node("set", tuple(items))
        if opening == "{":
            if closing != "}":
                self._fail()
            return items[0] if len(items) == 1 else Node("set", tuple(items))
        if closing not in (")", "]") or any(item.kind == "relation" for item in items):
            self._fail()
        if len(items) > 1:
            return Node("tuple", tuple(items), opening + closing)
        # One thing in brackets is grouped; `[5]` and `((1, 4))` are something else.
        if opening + closing != "()" and (opening + closing, items[0].kind) != ("[]", "sum"):
            self._fail()
        self._no_shapes(items)
        return items[0]

    def _pair(self, closing: str, function: str) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail()
        inside = self._sum()
        self._depth -= 1
        self._take(closing)
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
            self._take("{")
            domain = self._take()
            self._take("}")
            return Node("domain", value=domain)
        if name == "matrix":
            return self._matrix()
        if _GREEK.fullmatch(name):
            return self._name("\\" + name)
        return self._fail()

    def _argument(self) -> Node:
        if self._token == "{":
            self._take()
            inside = self._items()
            self._take("}")
        elif self._kind in ("number", "letter"):
            inside = [self._primary()]
        else:
            self._fail()
        if len(inside) != 1:
            self._fail()
        self._no_shapes(inside)
        return inside[0]

    def _root(self) -> Node:
        degree = Node("number", value=Fraction(2))
        if self._takes("["):
            degree = self._sum()
            self._take("]")
        radicand = self._argument()
        self._no_shapes([degree])
        return Node("root", (radicand, degree))

    def _function(self, name: str) -> Node:
        base = None
        if name == "log" and self._takes("_"):
            base = self._argument()
            if base == Node("constant", value="e"):
                name, base = "ln", None
        power = None
        if self._takes("^"):
            power = self._exponent()
        if name in _INVERSE and power == Node("negative", (Node("number", value=Fraction(1)),)):
            name, power = _INVERSE[name], None
        arguments = self._arguments()
        if (len(arguments) > 1) != (name in ("min", "max", "gcd", "lcm")):
            self._fail()
        self._no_shapes(arguments)
        call = Node("call", (*arguments, base) if base is not None else tuple(arguments), name)
        return Node("power", (call, power)) if power is not None else call

    def _arguments(self) -> list[Node]:
        """What a function is of: a bracket, or the factors that follow: `sin 2x`."""
        if self._takes("("):
            items = self._items()
            self._take(")")
            return items
        factors: list[Node] = []
        while not factors or (self._starts_factor() and self._token not in ("(", "[", r"\{")):
            if factors and _FUNCTION.fullmatch(self._token.removeprefix("\\")):
                break
            factors.append(self._power())
        return [factors[0] if len(factors) == 1 else Node("product", tuple(factors))]

    def _matrix(self) -> Node:
        rows = [self._row()]
        while self._takes("\\\\"):
            if self._token == r"\endmatrix":
                break
            rows.append(self._row())
        self._take(r"\endmatrix")
        if len({len(row.parts) for row in rows}) != 1:
            self._fail()
        return Node("matrix", tuple(rows))

    def _row(self) -> Node:
        cells = [self._sum()]
        while self._takes("&"):
            cells.append(self._sum())
        self._no_shapes(cells)
        return Node("row", tuple(cells))

    def _no_shapes(self, nodes: list[Node]) -> None:
        if any(node.is_shape for node in nodes):
            self._fail()


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
