"""Compares an answer with the ground truth, whatever the notation."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from dapo_rl.rewards.answers.dates import date, time_of_day
from dapo_rl.rewards.answers.expressions import Node, parse
from dapo_rl.rewards.answers.extract import MAX_ANSWER_CHARS
from dapo_rl.rewards.answers.forms import has_operations, last_side, same_form
from dapo_rl.rewards.answers.normalize import Written, read
from dapo_rl.rewards.answers.plain_numbers import is_division, plain_number
from dapo_rl.rewards.answers.sets_and_tuples import same_equation, same_shape

_PROSE = re.compile(r"[A-Za-z ,.'()-]*[A-Za-z]{2}[A-Za-z ,.'()-]*")
_POINTS = re.compile("[A-Z]{2,4}")
"""Points of a figure; upper and lower case differ."""
_CHOICE = re.compile(r"\(?([A-Ea-e])\)?")
_OPTION = re.compile(r"(?:option|choice)\(?([A-Za-z])\)?", re.IGNORECASE)
_VARIABLE = re.compile("[A-Za-z]")
_LETTER = re.compile(r"\(?[A-Z]\)?")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_COMMA_INSIDE = re.compile(r"[(\[{][^()\[\]{}]*,")
_PROSE_OR_LETTER = re.compile(rf"{_PROSE.pattern}|[A-Za-z]")
_ASSIGNED = re.compile("([A-Za-z])=")
_OR = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])")


def answers_equal(given: str, truth: str, form: Literal["any", "same"] = "any") -> bool:
    """Whether an answer equals the ground truth, in any notation or, with `form="same"`, in the form of the truth.

    Compares in turn the cleaned texts, exact fractions if both are plain numbers, and expressions and shapes element
    by element. Each must parse completely. A percentage equals its number with and without the sign: 50% is 50 and
    0.5. If the truth is a number, an answer that is not fully worked out is wrong.
    """
    if max(len(given), len(truth)) > MAX_ANSWER_CHARS:
        return False
    ours, theirs = _read(given), _read(truth)
    if not ours.text or not theirs.text:  # only markup
        return given.strip() == truth.strip()
    if _OR.search(given) and not _OR.search(truth) and len(set(_ASSIGNED.findall(ours.whole))) > 1:
        return False  # x = 2 or y = 3 is not both
    if ours.whole == theirs.whole and ours.unit == theirs.unit:
        return True
    if _conflict(ours.unit, theirs.unit) or _conflict(ours.name, theirs.name):
        return False
    if _same_equation(ours, theirs):
        return form == "any" or _same_form(ours.whole, theirs.whole)
    if ours.name and not theirs.name and _PROSE_OR_LETTER.fullmatch(theirs.text):
        return False  # a choice or a word has no name
    if (number := plain_number(ours.text)) is not None and (value := plain_number(theirs.text)) is not None:
        same = _same_number(ours, theirs, number, value)
        return same and (form == "any" or _same_form(ours.text, theirs.text))
    if ours.text == theirs.text or _same_words(ours.text, theirs.text):
        return True
    if (time := time_of_day(theirs.whole)) is not None:
        return time_of_day(ours.whole) == time
    if (day := date(theirs.text)) is not None:
        return date(ours.text) == day
    tree, expected = _tree(ours.text), _tree(theirs.text)
    if tree is None or expected is None:
        return False
    return same_shape(expected, tree) and (form == "any" or _same_form(ours.text, theirs.text))


def has_other_forms(truth: str) -> bool:
    """Whether expressions of another form can equal the truth: `5x`, `\\frac{1}{2}`, but not `14`."""
    tree = _tree(_read(truth).text) if len(truth) <= MAX_ANSWER_CHARS else None
    return tree is not None and has_operations(tree)


def _same_form(given: str, truth: str) -> bool:
    tree, expected = _tree(given), _tree(truth)
    return tree is not None and expected is not None and same_form(expected, last_side(tree, expected))


def _conflict(ours: str, theirs: str) -> bool:
    """Whether both are given and differ; degrees may omit the scale."""
    if not ours or not theirs or ours == theirs:
        return False
    return "°" not in (ours, theirs) or re.sub("[FC]", "", ours + theirs) != "°°"


def _same_equation(given: Written, truth: Written) -> bool:
    """Whether the answer solves the truth for a variable, or has the sides of a solved truth the other way round.

    Accepts `c = a + b` for `a + b = c`, and `2x + 3 = y` for `y = 2x + 3`, but not `2x - y + 3 = 0`, which is not
    solved.
    """
    solved = given.name or truth.name
    if bool(given.name) == bool(truth.name) or not _VARIABLE.fullmatch(solved) or "=" not in given.whole:
        return False
    tree, expected = _tree(given.whole), _tree(truth.whole)
    return tree is not None and expected is not None and same_equation(expected, tree, swapped=bool(truth.name))


def _same_number(given: Written, truth: Written, number: Fraction, expected: Fraction) -> bool:
    if expected.denominator == 1 and is_division(given.text):
        return False
    if number == expected:
        return True
    percent, expected_percent = given.unit == "%", truth.unit == "%"
    return percent != expected_percent and (number / 100 == expected if percent else number == expected / 100)


def _same_words(given: str, truth: str) -> bool:
    """Compares words, ignoring case, except for names of points. A letter can be a choice."""
    if (option := _OPTION.fullmatch(given)) and _LETTER.fullmatch(truth):
        return option[1].upper() == truth.strip("()").upper()
    if (choice := _CHOICE.fullmatch(truth)) and (chosen := _CHOICE.fullmatch(given)):
        return choice[1].upper() == chosen[1].upper() and (choice[1] == chosen[1] or choice[1].isupper())
    if not _PROSE.fullmatch(truth) or _POINTS.fullmatch(truth):
        return False
    return given.casefold() == truth.casefold()


# A truth is compared with the answers of a group, and with those of later epochs.
_read = lru_cache(maxsize=1024)(read)


@lru_cache(maxsize=1024)
def _tree(text: str) -> Node | None:
    return parse(_both_signs(text))


def _both_signs(text: str) -> str:
    """Rewrites `3 \\pm x` as the list `3 + x, 3 - x`."""
    if not _PLUS_MINUS.search(text) or _COMMA_INSIDE.search(text):
        return text
    items = text.split(",")
    if any(len(_PLUS_MINUS.findall(item)) > 1 for item in items):
        return text
    return ",".join(
        _PLUS_MINUS.sub(sign, item) for item in items for sign in ("+-" if _PLUS_MINUS.search(item) else "+")
    )
