"""One spelling for answers that are written differently: what MATH graders agree on, for comparison as text."""

from __future__ import annotations

import re

from dapo_rl.rewards.answers.units import TEXT, currency, split_unit

_LOOKALIKES = str.maketrans(
    {
        **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000", " "),
        # Marks without width: zero-width spaces and joiners, directions of writing, the byte order mark.
        **dict.fromkeys([*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF], None),
        **dict.fromkeys("−–—‐‑", "-"),
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "⁄": "/",
        "∕": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "√": " sqrt ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "±": r"\pm ",
        "°": r"^\circ ",
        "∅": r"\emptyset ",
        "∈": r"\in ",
        "ℝ": r"\mathbb{R}",
        "²": "^2",
        "³": "^3",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "。": ".",
        "，": ",",
        "％": "%",
        "“": '"',
        "”": '"',
        "‘": "'",
        "’": "'",
    }
)

_INNERMOST_TEXT = re.compile(rf"{TEXT}\s*\{{([^{{}}]*)\}}")
_PERCENT = re.compile(rf"\s*(?:\\?%|{TEXT}\{{\s*(?:\\?%|percent)\s*\}}|\bpercent)$", re.IGNORECASE)
_NAME = r"(?:[A-Za-z]|\\[a-z]+|[A-Za-z]{3,20}(?: [A-Za-z]{2,20}){0,4})(?:_\{?[A-Za-z0-9]{1,3}\}?|'|\([A-Za-z]\))?"
_ASSIGNMENT = re.compile(rf"^{_NAME}\s*=(?!=)\s*(?=\S)")
_DEGREES = re.compile(r"(?:\\circ|\\degree)\s*\}?[\s.$]*$")
_WORDS_BEFORE = re.compile(
    r"^(?:[A-Za-z]{3,20}(?: [A-Za-z]{2,20}){0,4}|[A-Za-z](?:\([A-Za-z]\)|'))\s*=(?!=)\s*(?=[^,;]+$)"
)
_SEPARATES = re.compile(r", |;| (?:and|or) |\\text\{ ?(?:and|or) ?\}")
_THOUSANDS = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_SPACE = re.compile(r"(\\[A-Za-z]+ (?=[A-Za-z])|[0-9] (?=[0-9]))| ")
_GROUPED = re.compile(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)(\.[0-9]*)?")

_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\!|\\(?:displaystyle|left|right|[bB]igg?[lr]?)(?![A-Za-z])", ""),
        (r"\{,\}", ","),
        (r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~|\s", " "),
        (r"\\[()\[\]]|\\?\$|[€£¥]", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])", ""),
        (rf",?\s*(?:{TEXT}\{{\s*(?:and|or)\s*\}}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*", ","),
        (r"\*\*", "^"),
        # In plain text the root is of the whole number; in TeX, \sqrt 12 is of its first digit.
        (r"(?<![A-Za-z\\])sqrt\s*([0-9]+(?:\.[0-9]+)?)", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])(pi|sqrt|sin|cos|tan|log|ln)(?![A-Za-z])", r"\\\1 "),
        (r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
        (r"\\frac\s*([0-9A-Za-z])\s*(?=[0-9A-Za-z{])", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}"),
    )
]
_FINISH = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^([+-]?)\.(?=[0-9])", r"\g<1>0."),
        (r"^([+-]?)0+(?=[0-9])", r"\1"),
        (r"^(-?)([0-9]+)/([0-9]+)$", r"\1\\frac{\2}{\3}"),
    )
]


def normalize_answer(answer: str) -> str:
    """The answer without what does not change its value: markup, spaces, units, separators, a `x =` before it."""
    return _finished(_right_side(_cleaned(answer)[0]))


def clean_answer(answer: str) -> tuple[str, str]:
    """The answer without markup, spaces, separators, units and words before a `=`; and its unit, where it has one.

    The name of a variable stays: `x = 5`.
    """
    text, unit = _cleaned(answer)
    return _finished(_WORDS_BEFORE.sub("", text)), unit


def _cleaned(answer: str) -> tuple[str, str]:
    text = answer.translate(_LOOKALIKES)
    unit = "°" if _DEGREES.search(text) else currency(text)
    if _SEPARATES.search(text):
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _strip_ends(text)
    if _PERCENT.search(text):
        text = _PERCENT.sub("", text)
    else:
        text, behind = split_unit(text)
        unit = behind or unit
    for _ in range(3):  # nested ones, from the innermost
        text = _INNERMOST_TEXT.sub(r"\1", text)
    return text.strip(), unit


def _finished(text: str) -> str:
    text = _SPACE.sub(lambda match: match[1] or "", " ".join(text.split()))
    text = _strip_ends(text)
    if grouped := _GROUPED.fullmatch(text):
        text = grouped[1] + re.sub("[, ]", "", grouped[2]) + (grouped[3] or "")
    for pattern, replacement in _FINISH:
        text = pattern.sub(replacement, text)
    return text


def is_percentage(answer: str) -> bool:
    """Whether the answer is written with a percent sign, which `normalize_answer` drops."""
    return _PERCENT.search(answer.translate(_LOOKALIKES).rstrip(" .$*")) is not None


def _right_side(text: str) -> str:
    """`x = 5` and `x = 2 + 3 = 5` are 5; `x + y = 5` and `x = 2, y = 3` stay what they are."""
    if "," in text or ";" in text or not _ASSIGNMENT.match(text):
        return text
    return re.split(r"(?<![<>!=])=(?!=)", text)[-1].strip() or text


def _strip_ends(text: str) -> str:
    text = text.strip(" \t*`\"'").rstrip(".").strip()
    while text.startswith("{") and text.endswith("}") and "{" not in text[1:-1] and "}" not in text[1:-1]:
        text = text[1:-1].strip()
    return text
