"""Units and counted things after a number: `5 cm`, `12 handshakes`, `$5`.

They are dropped, since answers omit them or write them differently. But 5 cents is not $5, and a word that changes the
value, as in `5 million` or `5 minus two`, is not a unit.
"""

from __future__ import annotations

import re

TEXT = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|hbox)"
THINGS = "things"
"""The unit of counted things."""

_SPELLINGS = """
mm=mm,millimeter,millimetre cm=cm,centimeter,centimetre m=meter,metre km=km,kilometer,kilometre in=inch,inches
ft=ft,feet,foot yd=yd,yard mi=mi,mile acre=acre mg=mg,milligram g=gram kg=kg,kilogram lb=lb,pound oz=oz,ounce
ton=ton,tonne ml=ml,milliliter,millilitre l=liter,litre gal=gallon cup=cup tbsp=tablespoon,tbsp
tsp=teaspoon,tsp qt=quart pt=pint s=sec,second min=min,minute h=hr,hour day=day week=week month=month year=year
$=dollar,usd,buck ¢=cent €=euro,eur peso=peso rupee=rupee franc=franc yen=yen yuan=yuan °=degree F=fahrenheit
C=celsius rad=rad,radian mi/h=mph km/h=kmh,kph =unit
"""
"""Each unit with the spellings of its singular."""
_UNITS = {
    spelling: unit
    for unit, spellings in (entry.split("=") for entry in _SPELLINGS.split())
    for spelling in spellings.split(",")
}
_SYMBOLS = {symbol: symbol for symbol in ("m", "g", "s", "h", "l", "in", "L")}
"""Units inside text, `5\\text{ m}`, and after a space, `5 m`; `5m` is a product."""
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}

_CARDINAL = (
    "zero|one|two|three|four|five|six|sixe|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    "|(?:twent|thirt|fort|fift|sixt|sevent|eight|ninet)(?:y|ie)|hundred|thousand|[a-z]*illion|[a-z]*illiard|myriad"
    "|googol|googolplex|lakh|crore|score|dozen|gross|grosse|grand"
)
_PART = (
    "half|halve|third|quarter|th|st|nd|rd|[a-z]*(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|teen|tie|hundred|thousand|illion"
    "|illiard|googol|googolplex)th|percent|percentage|percentile|permille?|permyriad|basi"
)
_GROUP = "pair|duo|trio|sixpack|twice|thrice|double|triple|quadruple|quintuple"
_OPERATION = (
    "time|pi|sqrt|minus|minuse|plus|less|fewer|more|over|under|below|above|squared|cubed|factorial|negative|positive|divided"
    "|multiplied|increased|decreased|by|base|mod|modulo|choose|remainder|opposite|inverse|reciprocal|complement"
    "|conjugate"
)
_HEDGE = (
    "or|and|to|not|no|none|nor|never|neither|cannot|except|excluding|without|than|about|around|circa|approx|approximate"
    "|approximately|approximation|estimate|estimated|roughly|almost|nearly|perhap|maybe|possibly|probably|sometime|is"
    "|isnt|was|as|this|thu|yes|ye|if|unles|wrong|incorrect|false|untrue|unequal|differ|beside|otherwise|else|but"
    "|instead|unlike|versu|am|pm"
)
"""Words that deny or weaken an answer."""
_CHANGES_VALUE = re.compile(rf"(?:{_CARDINAL}|{_PART}|{_GROUP}|{_OPERATION}|{_HEDGE})s?")
_ROOT = re.compile("(?:square|cube)s? root")
_DESCRIBES = re.compile("old|long|tall|wide|high|deep|left|total|away|each|people|men|women|children|way")
"""Words that may end a description although they are not plurals: `12 years old`, `7 people`."""

_WORD = re.compile("[A-Za-z]+")
_TEXT_AT_END = re.compile(rf"\s*{TEXT}\{{([^{{}}]*)\}}(?:\^\{{?([0-9])\}}?)?$")
_WORDS_AT_END = re.compile(
    r"(?<![A-Za-z\\^_{])((?:[A-Za-z]+\.?)(?:(?:\s+|\s*/\s*)[A-Za-z]+\.?){0,4})(?:\^\{?([0-9])\}?)?$"
)
_NUMBER_BEFORE = re.compile(r"[0-9})\].]\s*$|\\pi\s*$")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]")
_DOLLARS = re.compile(r"\\\$|^[^$]*\$[^$]*$")


def split_unit(text: str) -> tuple[str, str]:
    """The text without the unit or the counted things after its number, and the unit in its standard spelling."""
    for pattern in (_TEXT_AT_END, _WORDS_AT_END):
        match = pattern.search(text)
        if match is None or not _NUMBER_BEFORE.search(text[: match.start()]):
            continue
        before = text[: match.start()]
        in_text = pattern is _TEXT_AT_END or (before[-1].isspace() and not _VARIABLE.search(before))
        unit = _unit(match[1], match[2], _SYMBOLS if in_text else {})
        if unit is None and not match[2] and _is_thing(match[1]):
            unit = THINGS
        if unit is not None:
            return before.strip(), unit
    return text, ""


def currency(text: str) -> str:
    """The currency whose sign appears in an answer; a pair of dollar signs is markup."""
    if _DOLLARS.search(text):
        return "$"
    return next((sign for sign in "€£¥¢" if sign in text), "")


def _unit(words: str, power: str | None, symbols: dict[str, str]) -> str | None:
    """Converts `miles per hour` to `mi/h` and `square feet` to `ft2`; None if a word is not a unit."""
    result, raised = "", ""
    for word in re.findall(r"[A-Za-z]+|/", words):
        small = word.lower()
        if small in ("per", "/"):
            result += "/"
            symbols = _SYMBOLS
        elif small in _POWERS:
            raised = _POWERS[small]
        elif (unit := symbols.get(word, _UNITS.get(small, _UNITS.get(small.removesuffix("s"))))) is not None:
            result, raised = result + unit + raised, ""
        else:
            return None
    return result + (power or "") if _WORD.search(words) and not raised else None


def changes_value(word: str) -> bool:
    """Whether a word changes the value of the number next to it."""
    return _CHANGES_VALUE.fullmatch(word) is not None


def _is_thing(words: str) -> bool:
    """Whether words name counted things: one to three words, the last a plural."""
    if re.search("[^A-Za-z ]", words):
        return False
    each = words.lower().split()
    if not 1 <= len(each) <= 3 or any(map(changes_value, each)) or _ROOT.search(words.lower()):
        return False
    if any(len(word) < 3 for word in each):
        return False
    return _DESCRIBES.fullmatch(each[-1]) is not None or re.search(r"[^su]s$", each[-1]) is not None
