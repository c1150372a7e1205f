"""Half of a surrogate pair: JSON and Python's strings can hold it; UTF-8, and so files and tokenizers, cannot."""

from __future__ import annotations


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold the text."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def as_unicode(text: str | None) -> str | None:
    """The text with a question mark for whatever UTF-8 cannot hold."""
    return None if text is None else text.encode("utf-8", "replace").decode("utf-8")
