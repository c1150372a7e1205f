"""Parses plain numbers as exact fractions, without floating point or evaluation."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 100
MAX_EXPONENT = 100

# The pattern bounds sizes, so that huge numbers and exponents are rejected before they are computed.
_DIGITS = rf"[0-9]{{1,{MAX_DIGITS}}}"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]{{0,{MAX_DIGITS}}})?|\.{_DIGITS})"
_EXPONENT = r"[+-]?[0-9]{1,3}"
_DECIMAL_FORM = re.compile(
    rf"(?P<mantissa>[+-]?{_DECIMAL})"
    rf"(?:[eE](?P<e>{_EXPONENT})|(?:\\times|\\cdot|\*|x) ?10\^(?:\{{(?P<braced>{_EXPONENT})\}}|(?P<bare>[0-9])))?"
)
_POWER_OF_TEN = re.compile(rf"(?P<sign>[+-]?)10\^(?:\{{(?P<braced>{_EXPONENT})\}}|(?P<bare>[0-9]))")
_FRACTION_FORM = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<whole>{_DIGITS})(?: |(?=\\)))?"
    rf"(?:\\frac\{{(?P<top>[+-]?{_DECIMAL})\}}\{{(?P<bottom>{_DECIMAL})\}}|(?P<a>{_DECIMAL})/(?P<b>{_DECIMAL}))"
)


def plain_number(text: str) -> Fraction | None:
    """The value of an integer, decimal, fraction, mixed number or number in scientific notation; otherwise None."""
    if match := _DECIMAL_FORM.fullmatch(text):
        exponent = int(match["e"] or match["braced"] or match["bare"] or 0)
        return Fraction(match["mantissa"]) * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None
    if match := _POWER_OF_TEN.fullmatch(text):
        exponent = int(match["braced"] or match["bare"])
        return int(f"{match['sign']}1") * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None
    if match := _FRACTION_FORM.fullmatch(text):
        top, bottom = Fraction(match["top"] or match["a"]), Fraction(match["bottom"] or match["b"])
        if bottom == 0:
            return None
        value = int(match["whole"] or 0) + top / bottom
        return -value if match["sign"] == "-" else value
    return None


def is_division(text: str) -> bool:
    """Whether a plain number is a fraction with a division left to do: not by 1, and not of 0."""
    match = _FRACTION_FORM.fullmatch(text)
    return (
        match is not None and Fraction(match["bottom"] or match["b"]) != 1 and Fraction(match["top"] or match["a"]) != 0
    )
