"""A thousand different ground truths of all kinds."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product

SQUAREFREE = (2, 3, 5, 6, 7, 10, 11, 13, 14, 15, 17, 19)
PAIRS = ("xy", "ab", "mn", "pq", "st", "uv")
INNER = (
    *("{x}-10", "{x}-20", "{x}+3", "2{x}+1", "{x}^2+1", "{x}^2-4", "1-{x}", "9-{x}^2", "{x}+{y}", "{x}-{y}"),
    *("{x}^2+{y}^2", "{x}{y}", "{x}^2-{y}", "{x}-100"),
)
OUTER = (
    *("{0}", "({0})^2", "({0})^3", "\\sqrt{{{0}}}", "1+\\sqrt{{{0}}}", "\\ln({0})", "e^{{{0}}}", "\\sin({0})"),
    *("\\cos({0})", "\\frac{{1}}{{{0}}}", "|{0}|", "2^{{{0}}}", "\\arctan({0})", "\\sqrt[3]{{{0}}}"),
)
INTEGER_FUNCTIONS = (
    *("(-1)^n", "(-1)^{n+1}", "(-1)^{mn}", "(-1)^{m+n}", "(-2)^n", "n!", "(n+1)!", "(n!)^2", "\\binom{n}{2}"),
    *("\\binom{n}{3}", "\\binom{n}{k}", "\\binom{2n}{n}", "2^n", "3^n", "2^n-1", "n^n", "n^2-n+1", "\\frac{n(n+1)}{2}"),
    *("\\frac{(-1)^n}{n}", "\\lfloor\\frac{n}{2}\\rfloor", "\\lceil\\frac{n}{2}\\rceil", "\\lfloor\\sqrt{n}\\rfloor"),
    *("\\frac{1+(-1)^n}{2}", "\\frac{n(n+1)(2n+1)}{6}", "n\\cdot 2^{n-1}", "\\frac{1}{n(n+1)}", "i^n", "\\sqrt[n]{n}"),
)
WORDS = (
    *"ABCDE",
    *("\\text{Yes}", "\\text{No}", "\\text{Tuesday}", "\\text{even}", "\\text{odd}", "\\text{ellipse}", "\\emptyset"),
    *("\\mathbb{R}", "\\mathbb{Z}", "\\infty", "-\\infty", "March 4, 2019", "3:30", "\\text{undefined}", "BCA"),
    *("\\text{Alice}", "314_5", "101_2"),
)


def truths(seed: int = 0) -> list[str]:
    """A thousand truths, no two of them equal."""
    draw = random.Random(seed)
    every = [*_numbers(draw), *_irrational(), *_functions(draw), *_relations(), *_shapes(draw), *WORDS]
    assert len(every) == len(set(every))
    return draw.sample(every, 1000)


def _numbers(draw: random.Random) -> list[str]:
    whole = [str(number) for number in (*range(-12, 60), *draw.sample(range(1_001, 99_999, 2), 60))]
    parts = sorted({Fraction(a, b) for a in range(-7, 24, 3) for b in (3, 7, 9, 11)} - {Fraction(n) for n in range(30)})
    fractions = [f"{part.numerator}/{part.denominator}" for part in parts if part.denominator > 1]
    decimals = [f"{number / 1000:.3f}" for number in draw.sample(range(60_001, 90_000, 2), 40)]
    return [*whole, *fractions, *decimals]


def _irrational() -> list[str]:
    roots = [f"{k}\\sqrt{{{n}}}" for k in (2, 3, -5) for n in SQUAREFREE]
    sums = [f"{a}+{b}\\sqrt{{{n}}}" for a in (1, 3) for b in (2, 5) for n in SQUAREFREE[:8]]
    others = [f"{k}\\pi" for k in range(2, 12)] + [f"\\frac{{\\pi}}{{{k}}}" for k in range(3, 9)]
    small = [f"e^{{-{k}}}" for k in (20, 50, 200)] + [f"\\frac{{\\pi}}{{10^{{{k}}}}}" for k in (9, 30, 60)]
    powers = [f"{b}^{{{e}}}" for b in (2, 3, 7) for e in (101, 203, 305)]
    complexes = [f"{a}+{b}i" for a in (1, 2) for b in (3, 5, 7)]
    return [*roots, *sums, *others, *small, *powers, *complexes]


def _functions(draw: random.Random) -> list[str]:
    made = {}
    for pair, inner, outer in product(PAIRS, INNER, OUTER):
        if (inner, outer) in (("{x}^2+1", "|{0}|"), ("{x}^2+{y}^2", "|{0}|")):
            continue  # the same as without the bars
        made[outer.format(inner.format(x=pair[0], y=pair[1]))] = None
    return [*draw.sample(list(made), 400), *INTEGER_FUNCTIONS]


def _relations() -> list[str]:
    lines = [f"{a}x+{b}y={c}" for a, b, c in product((2, 3, 5), (7, 11), (1, 13, 17))]
    circles = [f"(x-{a})^2+(y+{b})^2={r * r}" for a, b, r in product((1, 2, 3), (4, 5), (2, 3, 6))]
    planes = [f"x+{a}y-{b}z={c}" for a, b, c in product((2, 3), (5, 7), (0, 4, 9))]
    named = [f"y={a}x^2+{b}x" for a, b in product((4, 6), (5, 8))]
    others = ["a+b=c", "ab=c", "a^2+b^2=c^2", "xyz=1", "y^2=4x", "\\frac{x}{2}+\\frac{y}{9}=1", "e^x+y=2", "x=y^3-y"]
    roots = ["\\sqrt{x}+y=3", "\\ln x=y+1", "\\sqrt{x-20}=y", "x-y=z^2", "\\frac{1}{x}+\\frac{1}{y}=z", "z^2=x+y"]
    limits = [("x", 3), ("x", -8), ("x", 61), ("t", 4), ("t", -9), ("t", 62)]
    bounds = [f"{name}{sign}{bound}" for sign in ("<", ">", "\\le ", "\\ge ") for name, bound in limits]
    chains = [f"{a}<x\\le {b}" for a in (1, 2) for b in (40, 50)] + ["x\\ne 5", "x\\ne -1"]
    return [*lines, *circles, *planes, *named, *others, *roots, *bounds, *chains]


def _shapes(draw: random.Random) -> list[str]:
    ends = draw.sample(range(-90, 90), 60)
    pairs = [f"({a},{b})" for a, b in zip(ends[:30], ends[30:], strict=True)]
    triples = [f"({a},{a + 1},{b})" for a, b in zip(ends[:20], ends[20:40], strict=True)]
    intervals = [f"[{a},{a + 5}{close}" for a in ends[:15] for close in "])"]
    rays = [f"({a}7,\\infty)" for a in range(10, 20)] + [f"(-\\infty,{a}7]" for a in range(10, 20)]
    unions = [f"(-\\infty,{a})\\cup({a + 7},\\infty)" for a in ends[:15]]
    sets = [f"\\{{{a},{b},{a + b}\\}}" for a, b in zip(ends[:20:2], ends[1:20:2], strict=True)]
    lists = [f"{a},{b}" for a, b in zip(ends[20:40:2], ends[21:40:2], strict=True)]
    signs = [f"\\pm {k}" for k in (91, 92, 93)] + [f"{k}\\pm\\sqrt{{2}}" for k in (1, 2, 3)]
    assigned = [f"x={a},y={b}" for a, b in zip(ends[40:60:2], ends[41:60:2], strict=True)]
    ratios = [f"{a}:{b}" for a, b in ((2, 13), (5, 17), (4, 19), (1, 23), (3, 29))]
    matrices = [f"\\begin{{pmatrix}}{a}&0\\\\0&{b}\\end{{pmatrix}}" for a, b in zip(ends[:8], ends[8:16], strict=True)]
    columns = [f"\\begin{{pmatrix}}{a}\\\\{b}\\end{{pmatrix}}" for a, b in zip(ends[:8], ends[8:16], strict=True)]
    return [
        *pairs, *triples, *intervals, *rays, *unions, *sets, *lists, *signs, *assigned, *ratios, *matrices, *columns
    ]  # fmt: skip
