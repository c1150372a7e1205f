"""Parses dates with the month in letters, or as year-month-day: `March 4, 2019` is `4 March 2019`."""

from __future__ import annotations

import re

_MONTHS = re.findall("[a-z]+", "january february march april may june july august september october november december")
_MONTH = rf"(?P<month>{'|'.join(f'{m[:3]}(?:{m[3:]})?' for m in _MONTHS)})\.?"
_DAY, _YEAR = r"(?P<day>[0-9]{1,2})(?:st|nd|rd|th)?", r"(?P<year>[0-9]{3,4})"
_FORMS = [
    re.compile(form, re.IGNORECASE)
    for form in (rf"{_MONTH} ?{_DAY},? ?{_YEAR}", rf"{_DAY} ?{_MONTH},? ?{_YEAR}", rf"{_MONTH} ?{_DAY}")
]
_DIGITS = re.compile(r"(?P<year>[0-9]{4})-(?P<month>[0-9]{2})-(?P<day>[0-9]{2})")


def date(text: str) -> tuple[int | None, int, int] | None:
    """Year, month and day; None if it is not a date."""
    for form in _FORMS:
        if match := form.fullmatch(text):
            parts = match.groupdict()
            year = int(parts["year"]) if parts.get("year") else None
            return year, [m[:3] for m in _MONTHS].index(parts["month"][:3].lower()) + 1, int(parts["day"])
    if match := _DIGITS.fullmatch(text):
        return int(match["year"]), int(match["month"]), int(match["day"])
    return None


_TIME = re.compile(r"([0-9]{1,2}):([0-5][0-9])(?::([0-5][0-9]))? ?(?:([ap])\.?m\.?)?", re.IGNORECASE)


def time_of_day(text: str) -> tuple[int, int, int, str] | None:
    """Hour, minute, second and half of the day ("" if not given); None if it is not a time."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    return int(match[1]), int(match[2]), int(match[3] or 0), (match[4] or "").lower()
