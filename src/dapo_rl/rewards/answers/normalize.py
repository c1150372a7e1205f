"""Normalises the notation of answers, as MATH graders do, so that they can be compared as text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from dapo_rl.rewards.answers.names import split_name
from dapo_rl.rewards.answers.plain_numbers import plain_number
from dapo_rl.rewards.answers.units import TEXT, currency, split_unit

_TEX = (
    "×times ·cdot ⋅cdot ∙cdot πpi ∞infty ≤le ≥ge ≠ne ∪cup ∩cap ±pm ∅emptyset ∈in αalpha βbeta γgamma δdelta εepsilon "
    "θtheta λlambda μmu νnu ρrho σsigma τtau φphi ψpsi ωomega ΔDelta ΓGamma ΩOmega"
)
"""Signs, each with the name of its TeX command."""
_FRACTIONS = "½12 ¼14 ¾34 ⅓13 ⅔23 ⅕15 ⅖25 ⅗35 ⅘45 ⅙16 ⅚56 ⅛18 ⅜38 ⅝58 ⅞78"
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
_SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉₊₋ₙ"
_RAISED = re.compile(f"[{_SUPERSCRIPTS}]+|[{_SUBSCRIPTS}]+")
_LEVEL = str.maketrans(_SUPERSCRIPTS + _SUBSCRIPTS, 2 * "0123456789+-n")
_LOOKALIKES = str.maketrans(
    {
        **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000", " "),
        # Invisible characters: zero-width spaces and joiners, directional marks, the byte order mark.
        **dict.fromkeys([*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF], None),
        **dict(zip("−–—‐‑÷⁄∕∗。，％“”‘’", "-----///*.,%\"\"''", strict=True)),
        **{entry[0]: rf"\{entry[1:]} " for entry in _TEX.split()},
        **{sign: rf"\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)},
        **{entry[0]: rf"\frac{{{entry[1]}}}{{{entry[2]}}}" for entry in _FRACTIONS.split()},
        "√": " sqrt ",
        "°": r"^\circ ",
    }
)

_INNERMOST_TEXT = re.compile(rf"{TEXT}\s*\{{([^{{}}]*)\}}")
_PERCENT = re.compile(rf"\s*(?:\\?%|{TEXT}\{{\s*(?:\\?%|percent)\s*\}}|\bpercent)$", re.IGNORECASE)
_DEGREES = re.compile(
    rf"(?<=[0-9}}])(?:\s|\\,)*\^\s*(?:\{{\s*\\circ\s*\}}|\\circ(?![A-Za-z]))"
    rf"\s*(?:{TEXT}\{{\s*([FC])\s*\}}|([FC]))?[\s.$]*$"
)
_SEPARATES = re.compile(r", |;| (?:and|or) |\\text\{ ?(?:and|or) ?\}")
_THOUSANDS = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_LAST_COMMA = re.compile(r"(.*[^\s,;\\])\s*,\s*", re.DOTALL)
_BRACKET = re.compile(r"[(\[{][^()\[\]{}]*[)\]}]")
_SPACE = re.compile(r"(\\[A-Za-z]+ (?=[A-Za-z])|[0-9] (?=[0-9]))| ")
_GROUPED = re.compile(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)(\.[0-9]*)?")


def _raised(match: re.Match[str]) -> str:
    """Rewrites x¹⁰ as x^{10} and a₁ as a_1."""
    sign, text = "^" if match[0][0] in _SUPERSCRIPTS else "_", match[0].translate(_LEVEL)
    return sign + (text if len(text) == 1 else f"{{{text}}}")


def _repeating(match: re.Match[str]) -> str:
    """Rewrites 0.1666… as a fraction; 0.999… stays, since it is not fully worked out."""
    whole, head, period = match[1] or "0", match[2], match[3] or match[4]
    if set(period) == {"9"}:
        return match[0]
    value = Fraction(f"{whole}.{head or 0}") + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(head))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\\s*\[[0-9.]+ ?(?:pt|ex|em|mm|cm)\]", r"\\\\"),
        (r"\\(?:mathbf|boldsymbol|mathit|mathsf|mathtt)(?=\{[^{}]*\{)", ""),
        (r"\{\\bf ([^{}]*)\}", r"\1"),
        (r"\\(l|r)brace(?![A-Za-z])", lambda match: r"\{" if match[1] == "l" else r"\}"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(leq|geq)slant(?![A-Za-z])", r"\\\1"),
        (r"\\mathbb ([A-Z])", r"\\mathbb{\1}"),
        (r"(?<![0-9.])([0-9]{0,9})\.([0-9]{0,9})\\(?:overline|bar)(?:\{([0-9]{1,9})\}|([0-9]))", _repeating),
        (r"\^\s*(?:\\prime(?![A-Za-z])|\{\s*\\prime\s*\})", "'"),
        (r"\\pmod\s*([0-9a-z])", r"\\pmod{\1}"),
        (r"\\(triangle|angle)\s*\{([A-Z]+)\}", r"\\\1 \2"),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"\{([^{}\\]{1,20})\\choose ([^{}\\]{1,20})\}", r"\\binom{\1}{\2}"),
        (r"\\!|\\(?:displaystyle|large|left|right|[bB]igg?[lr]?)(?![A-Za-z])", ""),
        (r"\{,\}", ","),
        # A tie is a space behind something; before a number it means "about".
        (r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|(?<=[0-9A-Za-z.,;%})\]~])~|\s", " "),
        (r"\\[()\[\]]|\\?\$|[€£¥]", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"(?<=[0-9}])\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z]))", ""),
        (rf",?\s*(?:{TEXT}\{{\s*(?:and|or)\s*\}}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*", ", "),
        (r"\*\*", "^"),
        # In plain text the root applies to the whole number; in TeX, \sqrt 12 applies to the first digit.
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


@dataclass(frozen=True, slots=True)
class Written:
    """The parts of an answer."""

    text: str
    """The value without markup, spaces and separators."""
    name: str = ""
    unit: str = ""
    """The unit in its standard spelling; `%` counts as one."""
    whole: str = ""
    """The whole answer, cleaned but not split."""


def normalize_answer(answer: str) -> str:
    """The answer without what does not change its value: markup, spaces, units, separators, a leading `x =`."""
    written = read(answer)
    if written.text == written.whole or "," in written.text:
        return written.text
    return _finished(re.split(r"(?<![<>!=])=(?!=)", written.text)[-1]) or written.text


def read(answer: str) -> Written:
    """Splits an answer into name, value and unit."""
    text = _without_last_comma(_RAISED.sub(_raised, answer.translate(_LOOKALIKES)))
    unit = currency(text)
    if degrees := _DEGREES.search(text):
        unit, text = f"°{degrees[1] or degrees[2] or ''}", text[: degrees.start()]
    if _SEPARATES.search(text):
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = whole = _strip_ends(text)
    if percent := _PERCENT.search(text):
        number = text[: percent.start()]
        if plain_number(_finished(split_name(number)[1])) is not None:
            text, unit = number, unit or "%"
    else:
        text, behind = split_unit(text)
        unit = behind or unit
    name, text = split_name(_without_text(text))
    return Written(_finished(text), name, unit, _finished(_without_text(whole)))


def _without_last_comma(text: str) -> str:
    """Drops the comma of `14,`; in `1, 4,` it announces another element."""
    match = _LAST_COMMA.fullmatch(text)
    return match[1] if match and "," not in _THOUSANDS.sub("", _BRACKET.sub("", match[1])) else text


def _without_text(text: str) -> str:
    for _ in range(3):  # nested ones, innermost first
        text = _INNERMOST_TEXT.sub(r"\1", text)
    return " ".join(text.split())


def _finished(text: str) -> str:
    text = _strip_ends(" ".join(text.split()))
    if grouped := _GROUPED.fullmatch(text):  # 60, 120 is a list
        text = grouped[1] + re.sub("[, ]", "", grouped[2]) + (grouped[3] or "")
    text = _strip_ends(_SPACE.sub(lambda match: match[1] or "", text))
    for pattern, replacement in _FINISH:
        text = pattern.sub(replacement, text)
    return text


def _strip_ends(text: str) -> str:
    text = text.strip(" \t*`").rstrip(".").strip()
    if len(text) > 2 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1].strip()
    while text.startswith("{") and text.endswith("}") and "{" not in text[1:-1] and "}" not in text[1:-1]:
        text = text[1:-1].strip()
    return text
