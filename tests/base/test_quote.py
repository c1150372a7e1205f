"""Quoting the words of other people's code."""

from hypothesis import given
from hypothesis import strategies as st

from dapo_rl.base.quote import LINE_LIMIT, TRACEBACK_LIMIT, describe, describe_traceback, printable, shorten


def test_a_short_text_stays():
    assert shorten("x" * LINE_LIMIT) == "x" * LINE_LIMIT


def test_a_long_text_keeps_its_head_and_its_tail_and_says_what_is_cut():
    text = "a" * 20 + "b" * 100 + "c" * 10
    assert shorten(text, 30) == "a" * 20 + " … (100 characters cut) … " + "c" * 10


@given(st.text(), st.integers(3, 50))
def test_the_cut_adds_up(text, limit):
    short = shorten(text, limit)
    if len(text) > limit:
        head, _, rest = short.partition(f" … ({len(text) - limit:,} characters cut) … ")
        assert len(head) + len(rest) == limit
        assert text.startswith(head)
        assert text.endswith(rest)


def test_an_exception_is_one_line():
    assert describe(ValueError("a\n  b\tc")) == "ValueError: a b c"
    assert describe(SystemExit(0)) == "SystemExit: 0"
    assert describe(KeyError("x")) == "KeyError: 'x'"
    assert describe(ValueError()) == "ValueError"


class SilentError(Exception):
    def __str__(self):
        raise RuntimeError


def test_an_exception_without_words():
    assert describe(SilentError()) == "SilentError: (its message cannot be shown)"
    assert "SilentError" in describe_traceback(SilentError())


def test_huge_messages_and_names():
    assert len(describe(ValueError("x" * 10**6))) < LINE_LIMIT + 50
    assert len(describe(type("X" * 10**6, (Exception,), {})("y"))) < LINE_LIMIT + 50
    assert len(describe_traceback(ValueError("x\n" * 10**6))) < TRACEBACK_LIMIT + 50


@given(st.text())
def test_no_text_steers_the_terminal(text):
    assert describe(ValueError(text)).isprintable()
    assert printable(text).replace("\n", "").isprintable()


def test_what_steers_a_terminal_is_shown():
    assert describe(ValueError("\x1b[2J\x9b1m\u202e\ud800")) == r"ValueError: \x1b[2J\x9b1m\u202e\ud800"
