"""Lone surrogates, which JSON and Python strings can hold, but UTF-8, and thus files and tokenizers, cannot."""

from __future__ import annotations


def is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def as_unicode(text: str | None) -> str | None:
    """The text with a question mark for every character that UTF-8 cannot encode."""
    return None if text is None else text.encode("utf-8", "replace").decode("utf-8")
