"""DAPO's rule for mathematics: the last `Answer:` line of a response, compared with the ground truth."""

from __future__ import annotations

import re

from dapo_rl.rewards.normalize import is_percentage, normalize_answer
from dapo_rl.rewards.plain_numbers import plain_number
from dapo_rl.rewards.symbolic import equivalent

__all__ = ["answers_equal", "extract_answer", "last_boxed", "normalize_answer"]

MAX_ANSWER_CHARS = 1000
"""A longer line is not an answer. Responses can be a megabyte of anything, so every search here is linear."""

_ANSWER = re.compile(r"(?<![A-Za-z])answer[ \t*_]{0,8}[:：]", re.IGNORECASE)
_TIME = re.compile("[0-9]{1,2}(?::[0-5][0-9]){1,2}(?: ?[ap]\\.?m\\.?)?", re.IGNORECASE)
_LINE = re.compile(rf"[^\r\n]{{0,{MAX_ANSWER_CHARS + 1}}}")
_WRAPPERS = (("**", "**"), ("`", "`"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_BRACES = re.compile(r"(\\(?:boxed|fbox)[ \t]{0,4}\{)|\\.|[{}]", re.DOTALL)


def extract_answer(text: str, boxed: bool = False) -> str | None:
    """What follows the last `Answer:`, on that line only; with `boxed`, else the last `\\boxed{…}` of the text."""
    end = None
    for match in _ANSWER.finditer(text):
        end = match.end()
    if end is not None:
        line = _LINE.match(text, end)
        if line is not None and (answer := _strip_markup(line[0])) is not None:
            return answer
    return last_boxed(text) if boxed else None


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` whose braces are balanced."""
    if r"\boxed" not in text and r"\fbox" not in text:
        return None
    best: tuple[int, int] | None = None
    open_braces: list[tuple[int, bool]] = []
    for match in _BRACES.finditer(text):
        if match[0].endswith("{") and (match[1] or match[0] == "{"):
            open_braces.append((match.end(), match[1] is not None))
        elif match[0] == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and (best is None or start > best[0]):
                best = (start, match.start())
    if best is None or best[1] - best[0] > MAX_ANSWER_CHARS:
        return None
    return text[slice(*best)].strip() or None


def answers_equal(given: str, truth: str, timeout_s: float = 5.0) -> bool:
    """Whether an answer is the ground truth, differently written or not.

    Compared in turn: the normalised texts; exact fractions, where both are plain numbers; math-verify's equivalence
    of LaTeX expressions. A percentage stands for its number with or without the sign: 50% is 50, and is 0.5.
    Raises TimeoutError where the equivalence is not decided within `timeout_s`.
    """
    if len(given) > MAX_ANSWER_CHARS:
        return False
    ours, theirs = normalize_answer(given), normalize_answer(truth)
    if not ours or not theirs:  # nothing but markup is left
        return given.strip() == truth.strip()
    if ours == theirs or ("\\" not in ours + theirs and ours.casefold() == theirs.casefold()):
        return True
    number, expected = plain_number(ours), plain_number(theirs)
    if number is not None and expected is not None:
        percent, expected_percent = is_percentage(given), is_percentage(truth)
        return (
            number == expected
            or (percent and not expected_percent and number / 100 == expected)
            or (expected_percent and not percent and number == expected / 100)
        )
    if _TIME.fullmatch(theirs):
        return False  # 3:30 is no ratio, equal to 1:10
    if "=" in theirs and "=" not in ours and "," not in theirs:
        return False  # an equation, x + y = 5, is not its right side; math-verify says it is
    return equivalent(ours, theirs, timeout_s)


def _strip_markup(line: str) -> str | None:
    if len(line) > MAX_ANSWER_CHARS:
        return None
    if (content := last_boxed(line)) is not None:
        return content
    # Half of the bold marks can stand before the line's content: **Answer:** 42, **Answer: 42**.
    line = line.strip().removeprefix("**").removesuffix("**").strip()
    for opening, closing in _WRAPPERS:
        inside = line.removesuffix(".")
        if inside.startswith(opening) and inside.endswith(closing) and len(inside) > len(opening + closing):
            inside = inside[len(opening) : -len(closing)]
            line = line if closing in inside else inside.strip()
    return line if line.strip("$*_.` ") else None
