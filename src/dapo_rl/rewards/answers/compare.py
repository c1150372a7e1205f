"""Whether an answer is the ground truth, however it is written."""

from __future__ import annotations

import re

from dapo_rl.rewards.answers.dates import date
from dapo_rl.rewards.answers.expressions import Node, parse
from dapo_rl.rewards.answers.extract import MAX_ANSWER_CHARS
from dapo_rl.rewards.answers.normalize import clean_answer, is_percentage
from dapo_rl.rewards.answers.plain_numbers import is_division, plain_number
from dapo_rl.rewards.answers.shapes import same

_TIME = re.compile("[0-9]{1,2}(?::[0-5][0-9]){1,2}(?: ?[ap]\\.?m\\.?)?", re.IGNORECASE)
_PROSE = re.compile(r"[A-Za-z ,.'()-]*[A-Za-z]{2}[A-Za-z ,.'()-]*")
_NAMES = re.compile("[A-Z]{2,4}")
"""Points of a figure, in which case matters."""
_CHOICE = re.compile(r"\(?([A-Ea-e])\)?")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")


def answers_equal(given: str, truth: str) -> bool:
    """Whether an answer is the ground truth, differently written or not.

    Compared in turn: the cleaned texts; exact fractions, where both are plain numbers; expressions and shapes,
    element by element. Each is read whole or not at all. A percentage stands for its number with or without the sign:
    50% is 50, and is 0.5. Where the truth is a number, an answer that still has to be worked out is wrong.
    """
    if len(given) > MAX_ANSWER_CHARS:
        return False
    (ours, our_unit), (theirs, their_unit) = clean_answer(given), clean_answer(truth)
    if not ours or not theirs:  # nothing but markup is left
        return given.strip() == truth.strip()
    if our_unit and their_unit and our_unit != their_unit:
        return False
    if ours == theirs or _same_words(ours, theirs):
        return True
    if plain_number(ours) is not None and plain_number(theirs) is not None:
        return _same_number(ours, theirs, is_percentage(given), is_percentage(truth))
    if _TIME.fullmatch(theirs):
        return False  # 3:30 is no ratio, equal to 1:10
    if (day := date(theirs)) is not None:
        return date(ours) == day
    tree, expected = _tree(ours), _tree(theirs)
    return tree is not None and expected is not None and same(expected, tree)


def _same_number(given: str, truth: str, percent: bool, expected_percent: bool) -> bool:
    number, expected = plain_number(given), plain_number(truth)
    assert number is not None
    assert expected is not None
    if expected.denominator == 1 and is_division(given):
        return False
    if number == expected:
        return True
    return percent != expected_percent and (number / 100 == expected if percent else number == expected / 100)


def _same_words(given: str, truth: str) -> bool:
    """Words are the same in capitals; names of points are not. A letter can be a choice."""
    if (choice := _CHOICE.fullmatch(truth)) and (chosen := _CHOICE.fullmatch(given)):
        return choice[1].upper() == chosen[1].upper() and (choice[1] == chosen[1] or choice[1].isupper())
    if not _PROSE.fullmatch(truth) or _NAMES.fullmatch(truth):
        return False
    return given.casefold() == truth.casefold()


def _tree(text: str) -> Node | None:
    return parse(_both_signs(text))


def _both_signs(text: str) -> str:
    """`3 \\pm x` as the list `3 + x, 3 - x`."""
    if len(_PLUS_MINUS.findall(text)) != 1 or "," in text or ";" in text:
        return text
    return ",".join(_PLUS_MINUS.sub(sign, text) for sign in "+-")
