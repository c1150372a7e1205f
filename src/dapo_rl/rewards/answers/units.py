"""Units and counted things behind a number: `5 cm`, `12 handshakes`, `$5`.

They are dropped, since answers leave them out or write them differently; but 5 cents is not $5, and a word that
changes the value, as in `5 million` or `5 minus two`, is no unit.
"""

from __future__ import annotations

import re

TEXT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf)|mbox|hbox)"

_SPELLINGS = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "meter metre",
    "km": "km kilometer kilometre",
    "in": "inch inches",
    "ft": "ft feet foot",
    "yd": "yd yard",
    "mi": "mi mile",
    "acre": "acre",
    "mg": "mg milligram",
    "g": "gram",
    "kg": "kg kilogram",
    "lb": "lb pound",
    "oz": "oz ounce",
    "ton": "ton tonne",
    "ml": "ml milliliter millilitre",
    "l": "liter litre",
    "gal": "gallon",
    "s": "sec second",
    "min": "min minute",
    "h": "hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "year",
    "$": "dollar usd buck",
    "¢": "cent",
    "€": "euro eur",
    "°": "degree",
    "rad": "rad radian",
    "mi/h": "mph",
    "km/h": "kmh kph",
    "": "unit",
}
_UNITS = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings.split()}
_SYMBOLS = {symbol: symbol for symbol in ("m", "g", "s", "h", "l")}
"""Units where a text says so, `5\\text{ m}`; elsewhere they are variables."""
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}

_CHANGES_VALUE = re.compile(
    "(?:hundred|thousand|million|billion|trillion|dozen|score|pair|half|halve|third|quarter|fourth|fifth|sixth|seventh"
    "|eighth|ninth|tenth|hundredth|thousandth|ten|one|two|three|four|five|six|seven|eight|nine|eleven|twelve|zero|none"
    "|time|pi|sqrt|or|and|to|minus|plus|less|more|over|under|below|above|squared|cubed|factorial|negative|positive"
    "|divided|multiplied|increased|decreased|by|not|no|except|without|than|about|approximately|roughly|almost|nearly"
    "|percent|base|mod|modulo|choose|remainder|is|was|as|this|thu|yes|ye|if|unles|wrong|but|am|pm)s?"
)
_DESCRIBES = re.compile("old|long|tall|wide|high|deep|left|total|away|each|people|men|women|children")
"""Words that may close a description and are no plurals: `12 years old`, `7 people`."""

_WORD = re.compile("[A-Za-z]+")
_TEXT_AT_END = re.compile(rf"(?<=[0-9}})\]\s])\s*{TEXT}\{{([^{{}}]*)\}}(?:\^\{{?([0-9])\}}?)?$")
_WORDS_AT_END = re.compile(
    r"(?<=[0-9.}\)\]\s])\s*(?<![A-Za-z\\^_{])((?:[A-Za-z]+\.?)(?:(?:\s+|\s*/\s*)[A-Za-z]+\.?){0,4})(?:\^\{?([0-9])\}?)?$"
)
_DOLLARS = re.compile(r"\\\$|^[^$]*\$[^$]*$")


def split_unit(text: str) -> tuple[str, str]:
    """The text without the unit or the counted things at its end, and the unit in one spelling ("" for a thing)."""
    for pattern, symbols in ((_TEXT_AT_END, _SYMBOLS), (_WORDS_AT_END, {})):
        match = pattern.search(text)
        if match is None:
            continue
        before = text[: match.start()].strip()
        unit = _unit(match[1], match[2], symbols)
        if unit is None and _is_thing(match[1]) and not match[2]:
            unit = ""
        if unit is not None and before:
            return before, unit
    return text, ""


def currency(text: str) -> str:
    """The currency whose sign stands in an answer; a pair of dollar signs is markup."""
    if _DOLLARS.search(text):
        return "$"
    return next((sign for sign in "€£¥¢" if sign in text), "")


def _unit(words: str, power: str | None, symbols: dict[str, str]) -> str | None:
    """`miles per hour` as `mi/h`, `square feet` as `ft2`; None where a word is no unit."""
    result, raised = "", ""
    for word in re.findall(r"[A-Za-z]+|/", words):
        small = word.lower()
        if small in ("per", "/"):
            result += "/"
        elif small in _POWERS:
            raised = _POWERS[small]
        elif (unit := symbols.get(word, _UNITS.get(small, _UNITS.get(small.removesuffix("s"))))) is not None:
            result, raised = result + unit + raised, ""
        else:
            return None
    return result + (power or "") if _WORD.search(words) and not raised else None


def _is_thing(words: str) -> bool:
    """Whether words name what was counted: one to three of them, the last a plural."""
    if re.search("[^A-Za-z ]", words):
        return False
    each = words.lower().split()
    if not 1 <= len(each) <= 3 or any(map(_CHANGES_VALUE.fullmatch, each)):
        return False
    if any(len(word) < 3 for word in each):
        return False
    return _DESCRIBES.fullmatch(each[-1]) is not None or re.search(r"[^su]s$", each[-1]) is not None
