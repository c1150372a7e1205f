"""The browser of all browser tests that follow one another: to start it takes longer than a test."""

from contextlib import ExitStack
from typing import Any

ends = ExitStack()
launched: list[Any] = []


def end_browser() -> None:
    launched.clear()
    ends.close()
