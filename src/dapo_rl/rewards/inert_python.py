"""Responses are untrusted: decides from the text alone what may reach a scorer that evaluates it."""

from __future__ import annotations

import re

MAX_EXPRESSION_CHARS = 300
MAX_DEPTH = 10
MAX_POWER = 10_000
"""Bound on the product of nested exponents, which keeps numbers below about ten million bits."""
MAX_SYMBOLIC_POWER = 30
"""The same for powers of brackets with variables, which are expanded term by term."""

_CALL = re.compile(r"(\w*)\s*\(")
_KNOWN_FUNCTION = re.compile("|sin|cos|tan|sec|csc|cot|asin|acos|atan|sinh|cosh|tanh|exp|log|ln|sqrt|Abs")
_GROWTH = re.compile(r"(?:exp|sinh|cosh)\s*\(")
_PYTHON_ALPHABET = re.compile(r"[A-Za-z0-9\s+\-*/^()\[\]{},.'\"_!]*")
_PYTHON_REFUSED = re.compile(
    r"__|[A-Za-z_)\]}'\"]\s*\.|\.\s*[A-Za-z_]"  # attributes
    r"|[)\]}'\"]\s*\("  # a call of anything but a name
    r"|\b(?:for|lambda|if|await|yield)\b"
    r"|[0-9][eE][+-]?[0-9]{3}"
    r"|[0-9]{101}"
)


def is_inert_python(text: str) -> bool:
    """Whether text passed to `eval` or sympy's `parse_expr` can only be arithmetic or a list."""
    if len(text) > 10 * MAX_EXPRESSION_CHARS or not _PYTHON_ALPHABET.fullmatch(text) or _PYTHON_REFUSED.search(text):
        return False
    if not all(_KNOWN_FUNCTION.fullmatch(name) for name in _CALL.findall(text)):
        return False
    if "*" in text and re.search(r"[\[{'\"]", text):  # [0] * 10 ** 9
        return False
    if any(_GROWTH.search(text[m.end() : _closing(text, m.end() - 1)]) for m in _GROWTH.finditer(text)):
        return False
    return _is_shallow(text) and _powers_are_small(text)


def _is_shallow(text: str) -> bool:
    """Whether brackets are not nested deeply and braces are balanced."""
    depth = braces = 0
    for char in text:
        if char in "({[":
            depth += 1
            braces += char == "{"
        elif char in ")}]":
            depth -= 1
            braces -= char == "}"
        if depth > MAX_DEPTH or braces < 0:
            return False
    return braces == 0


_FACTORIAL = re.compile(r"(?<![0-9^])(?:[0-9]{1,3}|[A-Za-z])!")
_WORD = re.compile(r"[+-]*[A-Za-z0-9.]*")


def _powers_are_small(text: str) -> bool:
    """Whether there are no towers of powers and no powers or factorials that take long to compute.

    Exponents of brackets can be nested, as in `((9^9)^9)^9`, so they are multiplied; those of a number or a letter
    cannot.
    """
    text = re.sub(r"[\s,_]", "", text.replace("**", "^"))
    if text.count("!") != len(_FACTORIAL.findall(text)):
        return False
    single = stacked = 1.0
    for match in re.finditer(r"\^", text):
        exponent, end = _exponent(text, match.end())
        if re.search(r"\^|!|0[xXbBoO]", exponent) or text[end : end + 1] in ("^", "!"):
            return False
        size = 1.0
        for number in re.findall(r"[0-9]{1,300}(?:\.[0-9]+)?", exponent):
            size *= max(1.0, float(number))
        if match.start() and text[match.start() - 1] in ")}]":
            stacked *= size
        else:
            single = max(single, size)
    symbolic = re.search("[A-Za-z]", text) is not None
    return stacked <= (MAX_SYMBOLIC_POWER if symbolic else MAX_POWER) and single * stacked <= MAX_POWER


def _exponent(text: str, start: int) -> tuple[str, int]:
    """The exponent that starts here, and its end: a word, a bracket, or a function with its bracket."""
    word = _WORD.match(text, start)
    assert word is not None  # it may be empty
    end = word.end()
    if text[end : end + 1] in ("{", "(", "["):
        end = _closing(text, end)
    return text[start:end], end


def _closing(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] in "({[") - (text[index] in ")}]")
        if depth == 0:
            return index + 1
    return len(text)
