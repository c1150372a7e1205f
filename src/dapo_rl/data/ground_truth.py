"""Converts values of a row (bytes, numbers, dates) to text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from dapo_rl.base.quote import one_line
from dapo_rl.data.rows import BadRowError

LONGEST_NUMBER = 400
"""Maximum digits before or after the decimal point; a float has fewer."""


def decoded(value: Any, what: str) -> Any:
    """Decodes bytes as UTF-8; other values stay as they are. `what` names the value in the error."""
    if not isinstance(value, bytes | bytearray | memoryview):
        return value
    try:
        # Fixed-width columns are padded with zeros.
        return bytes(value).rstrip(b"\0").decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadRowError(f"{what} is bytes that are not UTF-8 text") from None


def answer_text(value: Any) -> str | None:
    """The ground truth as text; None if it is missing.

    For a solution in GSM8K's format, with a line `#### 1,080`, this is what follows the mark, without thousands
    separators. Numbers have no exponent and no trailing zeros: a column of whole numbers becomes a column of floats
    as soon as a value is missing.
    """
    value = decoded(value, "the ground truth")
    if value is None:
        return None
    if isinstance(value, str):
        marked = re.findall(r"^#### +(\S.*)$", value, re.MULTILINE)
        return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", marked[-1].strip()) if marked else value
    if isinstance(value, float | Decimal):
        return _digits(value)
    if isinstance(value, datetime) and value.tzinfo is None and value == datetime(value.year, value.month, value.day):
        return value.date().isoformat()  # pandas stores dates as times at midnight
    if all(getattr(type(value), name) is getattr(object, name) for name in ("__str__", "__repr__")):
        raise BadRowError(f"the ground truth is a {type(value).__name__}, which has no text")
    try:
        return str(_without_bytes(value))
    except BadRowError:
        raise
    except Exception as error:  # a number with more digits than Python prints, or a user-defined class
        raise BadRowError(f"the ground truth cannot be written as text: {one_line(error)}") from None


def _digits(value: float | Decimal) -> str | None:
    number = Decimal(str(value))
    if number.is_nan():  # a missing value in pandas
        return None
    if not number.is_finite() or abs(number.adjusted()) > LONGEST_NUMBER:
        return str(value)
    digits = format(number, "f")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if digits == "-0" else digits


def _without_bytes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_bytes(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_bytes(inner) for inner in value)
    return decoded(value, "a part of the ground truth")
