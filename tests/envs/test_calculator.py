"""The calculator computes as Python does, and nothing else."""

import contextlib
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_rl.envs.calculator import MAX_BITS, calculator

NUMBERS = st.one_of(st.integers(0, 10**6), st.floats(0, 1e6, allow_nan=False)).map(repr)


def joined(parts):
    left, operation, right = parts
    return f"({left}) {operation} ({right})"


EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(joined),
        st.tuples(inner, st.just("**"), st.integers(-3, 3).map(repr)).map(joined),
        inner.map("-{}".format),
    ),
    max_leaves=12,
).filter(lambda text: len(text) <= 1000)


@given(EXPRESSIONS)
def test_it_computes_as_python_does(expression):
    try:
        expected = eval(expression)
    except (ZeroDivisionError, OverflowError):
        expected = None
    is_wrong = expected is None or isinstance(expected, complex) or abs(expected) == float("inf")
    try:
        found = calculator(expression)
    except ValueError:
        # A part may be infinite, or too large, where the whole is not.
        assert is_wrong or "inf" in expression or "too large" in str(_error(expression)), expression
    else:
        assert found == repr(expected)


def _error(expression):
    with pytest.raises(ValueError, match=r".") as caught:
        calculator(expression)
    return caught.value


@given(st.text(max_size=60))
def test_any_text_is_a_number_or_an_error(text):
    try:
        value = calculator(text)
    except ValueError:
        return
    float(Fraction(value)) if "e" not in value and "." not in value else float(value)


@given(st.text(alphabet="0123456789.+-*/%() ", max_size=200))
def test_any_formula_ends_quickly(text):
    began = time.monotonic()
    with contextlib.suppress(ValueError):
        calculator(text)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        (" (2+3)*4 ", "20"),
        ("2**10", "1024"),
        ("7/2", "3.5"),
        ("-7//2", "-4"),
        ("-7 % 3", "2"),
        ("2**-1", "0.5"),
        ("1_000+1", "1001"),
        ("123456789123456789*987654321", "121932631234567900112635269"),
    ],
)
def test_values(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9**9**9", "too large"),
        ("(9**999)**999", "too large"),
        ("1e308*10", "too large"),
        ("-".join(["9" * 400] * 2) + "*" + "9" * 190, None),
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("(-8)**0.5", "not a real number"),
        ("2^3", r"write \*\* for powers"),
        ("1,000+1", "without commas"),
        ("__import__('os').getpid()", "no functions"),
        ("x+1", "no names"),
        ("True+1", "use numbers"),
        ("'a'*9", "use numbers"),
        ("1j", "use numbers"),
        ("[1]*9", "use numbers"),
        ("1 if 1 else 2", "use numbers"),
        ("", "not an arithmetic expression"),
        ("1+", "not an arithmetic expression"),
        ("-" * 999 + "1", None),
        ("(" * 499 + "1" + ")" * 499, "nested|parentheses"),
        ("1" * 1001, "more than 1000 characters"),
        ("1\x00", None),
    ],
)
def test_errors(expression, message):
    if message is None:
        with contextlib.suppress(ValueError):
            calculator(expression)
        return
    with pytest.raises(ValueError, match=message):
        calculator(expression)


def test_the_largest_power():
    assert calculator(f"2**{MAX_BITS - 1}") == str(2 ** (MAX_BITS - 1))
    with pytest.raises(ValueError, match="too large"):
        calculator(f"2**{MAX_BITS}")
