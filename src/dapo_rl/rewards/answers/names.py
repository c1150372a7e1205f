"""Splits off the name of an answer: `x = 5`, `f(2) = 5`, `AB = 5`, `total area = 5`.

A name may be omitted. A different name than the truth's is a different answer, and a sum before the sign is not a name
but a side of an equation.
"""

from __future__ import annotations

import re
import string

from dapo_rl.rewards.answers.expressions import GREEK
from dapo_rl.rewards.answers.units import changes_value

_ARGUMENTS = (
    r"\((?:[A-Z] ?(?:[=<>]|\\[lg]eq?) ?[a-z0-9]+|-?[A-Za-z0-9]+(?: ?, ?-?[A-Za-z0-9]+)*"
    r"|[A-Z] ?(?:\\(?:cap|cup|mid|vert)|\|) ?[A-Z])\)"
)
_NAME = re.compile(
    r"(?:"
    rf"(?P<letter>[A-Za-z]|\\(?:{GREEK.pattern}|ell|min|max|Pr)(?![A-Za-z]) ?)(?:_\{{?[A-Za-z0-9]{{1,4}}\}}?)?'{{0,3}}"
    rf"|(?P<function>[A-Za-wyz](?:_\{{?[A-Za-z0-9]{{1,4}}\}}?)?'{{0,3}}(?:\^\{{?-1\}}?)?{_ARGUMENTS})"
    r"|(?P<figure>m?\\(?:angle|triangle) ?\{?[A-Z]{1,4}\}?|\\overline\{[A-Z]{2}\}|[A-Z]{2,4}|\[[A-Z]{3,6}\])"
    r"|(?P<derivative>\\frac\{d[a-z]?\}\{d[a-z]\}|d[a-z]/d[a-z])"
    r"|(?P<size>\|(?:[zw]|[A-Z]{2})\||\\deg ?\([a-z]\))"
    r"|(?P<tuple>\((?:[A-Za-z]|\\[a-z]+)(?: ?, ?(?:[A-Za-z]|\\[a-z]+))+\))"
    r"|(?P<sets>[A-Z] ?\\(?:cap|cup) ?[A-Z])"
    r"|(?P<words>[A-Za-z]{3,20}(?: [A-Za-z]{2,20}){0,4})"
    r") ?=(?!=) ?(?=\S)"
)
_SHORT_WORDS = frozenset(
    ["age", "ans", "avg", "day", "fee", "gcd", "lcm", "max", "min", "net", "pay", "sum", "tax", "tip"]
)
_BARE_LETTER = re.compile(r"[A-Za-z]|[A-Za-z ]*[A-Za-z]{2}[A-Za-z ]*")


def split_name(text: str) -> tuple[str, str]:
    """The name ("" if there is none or it is in words) and its value."""
    match = _NAME.match(text)
    if match is None:
        return "", text
    value = text[match.end() :]
    name = text[: match.start()] + match[0].rstrip("= ").replace(" ", "")
    if "=" in value and ("," in value or ";" in value):
        return "", text  # several names
    if match["words"]:
        words = match["words"].lower().split()
        is_name = not any(map(_is_function, words)) and not _BARE_LETTER.fullmatch(value)
        is_name = is_name and not (len(words) == 1 and _is_product(words[0]))
        return "", value if is_name else text
    if match["letter"] and (_BARE_LETTER.fullmatch(value) or re.search(rf"(?<![A-Za-z\\]){re.escape(name)}", value)):
        return "", text  # A = D states an equality; x = x says nothing
    if match["tuple"]:
        names = re.findall(r"\\?[A-Za-z]+", name)
        if names != sorted(names, key=lambda each: each.strip("\\")) or not value.startswith("("):
            return "", text
    return name, value


def _is_product(word: str) -> bool:
    """Whether letters are factors, as in `xyz = 1`, rather than a word."""
    if len(word) > 4 or word in _SHORT_WORDS:
        return False
    return len(word) == 3 or not re.search("[aeiouy]", word) or word in string.ascii_lowercase


def _is_function(word: str) -> bool:
    """Whether a word names a function of the value that was asked for, such as its root."""
    return changes_value(word) or re.fullmatch("roots?|squares?|cubes?|logarithm|log|sine|cosine", word) is not None
