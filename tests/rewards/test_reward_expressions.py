"""Expressions: read whole or not at all, computed exactly, and compared as sympy compares them."""

import re
from fractions import Fraction

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.rewards.answers import answers_equal
from dapo_rl.rewards.answers.evaluate import MAX_BITS, exact
from dapo_rl.rewards.answers.expressions import parse
from dapo_rl.rewards.answers.forms import is_worked_out
from dapo_rl.rewards.answers.values import equal

NUMBERS = st.one_of(
    st.integers(0, 60).map(lambda n: (str(n), Fraction(n), False)),
    st.tuples(st.integers(0, 40), st.integers(1, 20)).map(
        lambda pair: (f"\\frac{{{pair[0]}}}{{{pair[1]}}}", Fraction(*pair), False)
    ),
)


def combine(parts):
    """Two numbers and what to do with them, in LaTeX and as a fraction worked out here."""
    (a, x, _), (b, y, _), operation = parts
    if operation == "+":
        return f"{{{a}}}+{{{b}}}", x + y, True
    if operation == "-":
        return f"{{{a}}}-\\left({b}\\right)".replace("\\left", "").replace("\\right", ""), x - y, True
    if operation == "*":
        return f"({a})\\cdot ({b})", x * y, True
    if operation == "/" and y:
        return f"\\frac{{{a}}}{{{b}}}", x / y, True
    return f"({a})^{{2}}", x**2, True


EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, inner, st.sampled_from("+-*/^")).map(combine),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS)
def test_rational_numbers_are_exact(expression):
    text, value, operated = expression
    tree = parse(text)
    if tree is None:  # deeper than what is read
        assert text.count("{") + text.count("(") > 10
        return
    assert exact(tree) == value
    truth = parse(str(value)) or parse(f"-{abs(value)}")
    assert equal(truth, tree)
    scientific = re.search(r"10(\.0*)?\)?\^", text)  # a number as it stands
    if operated and value.denominator == 1 and not scientific:
        assert not is_worked_out(tree, truth) or value == 0 or text.endswith("{1}")


X, Y = sympy.symbols("x y")
POLYNOMIALS = st.recursive(
    st.sampled_from([X, Y, sympy.Integer(1), sympy.Integer(2), sympy.Rational(1, 3), sympy.sqrt(2), sympy.pi]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] + pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] * pair[1]),
        st.tuples(inner, st.integers(2, 3)).map(lambda pair: pair[0] ** pair[1]),
        inner.map(lambda value: -value),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(POLYNOMIALS, POLYNOMIALS)
def test_equality_is_sympys(one, other):
    trees = [parse(sympy.latex(form)) for form in (one, sympy.expand(one), other)]
    if None in trees:
        return
    first, expanded, second = trees
    assert equal(first, expanded)
    assert equal(expanded, first)
    assert equal(first, second) == (sympy.expand(one - other) == 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3 4",
        "x2",
        "2 3/",
        "(1,2",
        "1}{",
        "\\frac{1}",
        "\\undefined",
        "5..6",
        "x_",
        "a'",
        "100!!",
        "1+",
        "=",
        "5=",
        "$",
        "\\begin{pmatrix}1&2\\\\3\\end{pmatrix}",
        "(1,2)+3",
        "word",
        "minus",
        "\\sqrt",
        "\\sin",
        "|",
        "2^",
        "٤٢",
    ],
)
def test_what_is_not_understood_whole_is_not_read(text):
    assert parse(text) is None


def test_pairs_side_by_side_are_not_nested():
    assert exact(parse("+".join([r"\lfloor 3/2 \rfloor"] * 12))) == 12
    assert parse(r"\lfloor " * 12 + "1" + r"\rfloor" * 12) is None


@pytest.mark.parametrize(
    "text", ["2^{40001}", "(2^{30000})(2^{30000})", "9^{9^{9}}", "3000!", "\\binom{99999}{5}", "1/0", "0^{-1}", "0^0"]
)
def test_what_is_too_large_or_undefined_has_no_value(text):
    tree = parse(text)
    assert exact(tree) is None
    assert not equal(parse("\\sqrt{2}"), tree)


def test_the_largest_power_is_exact():
    power = MAX_BITS // 3 - 1  # 2 itself is written with two bits, and 1 below it
    assert exact(parse(f"2^{{{power}}}")) == 2**power


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\\sqrt{3-2\\sqrt{2}}", "\\sqrt{2}-1"),
        ("10^{500}\\sqrt{2}+\\pi-10^{500}\\sqrt{2}", "\\pi"),
        ("\\sin\\frac{\\pi}{6}", "\\frac{1}{2}"),
        ("\\sin^{-1} 1", "\\frac{\\pi}{2}"),
        ("e^{\\ln 3}", "3"),
        ("\\sqrt[3]{-8}", "-2"),
        ("\\cos^2 x", "1-\\sin^2 x"),
        ("\\ln x^2", "2\\ln x"),
        ("\\frac{1+(-1)^n}{2}", "\\frac{(-1)^n+1}{2}"),
        ("(-1)^{n+2}", "(-1)^n"),
        ("n!", "n(n-1)!"),
        ("\\frac{1}{1+i}", "\\frac{1-i}{2}"),
    ],
)
def test_the_same_value(one, other):
    assert equal(parse(other), parse(one))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\\sqrt{x^2}", "x"),
        ("10^{60}+\\pi-10^{60}", "0"),
        ("\\pi+10^{-25}", "\\pi"),
        ("\\infty", "-\\infty"),
        ("x", "X"),
        ("a_1", "a_2"),
        ("x+\\frac{1}{10^{20}}", "x"),
    ],
)
def test_another_value(one, other):
    assert not equal(parse(other), parse(one))


def test_an_answer_without_variables_is_needed_where_the_truth_has_none():
    assert not answers_equal("x-x", "0")
    assert not answers_equal("\\frac{2x}{x}", "2")
    assert not answers_equal("\\sin^2x+\\cos^2x", "1")


@pytest.mark.parametrize(
    ("power", "root"),
    [
        (r"(-2)^{1/3}", r"-\sqrt[3]{2}"),
        (r"(-2)^{2/3}", r"\sqrt[3]{4}"),
        (r"(-3)^{3/5}", r"-\sqrt[5]{27}"),
    ],
)
def test_odd_roots_of_negative_numbers_are_real(power, root):
    assert answers_equal(power, root)
    assert answers_equal(root, power)
    negated = root.removeprefix("-") if root.startswith("-") else f"-{root}"
    assert not answers_equal(power, negated)
    assert not answers_equal(negated, power)
