"""Extracts the final answer of a response: the last `Answer:`, DAPO's rule, without what models write around it."""

from __future__ import annotations

import re

MAX_ANSWER_CHARS = 1000
"""A longer line is not an answer. Responses can be a megabyte of any text, so every search here is linear."""
MAX_BLANK_LINES = 3

_ANSWER = re.compile(r"(?<![A-Za-z])answer[ \t*_]{0,8}[:：]", re.IGNORECASE)
_LINE = re.compile(rf"[^\r\n]{{0,{MAX_ANSWER_CHARS + 1}}}")
_NEXT_LINE = re.compile(rf"(?:\r?\n[ \t]{{0,80}}){{1,{MAX_BLANK_LINES + 1}}}(?=[^\s])")
_WRAPPERS = (
    ("**", "**"),
    ("__", "__"),
    ("_", "_"),
    ("`", "`"),
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
)
_DISPLAYS = ((r"\[", r"\]"), ("$$", "$$"))
_BRACES = re.compile(r"(\\(?:boxed|fbox)[ \t]{0,4}\{)|\\.|[{}]", re.DOTALL)
_LEAD_IN = re.compile(
    r"(?:(?:so|thus|hence|therefore)[, ] ?)?(?:(?:the|my|our) )?(?:(?:final|correct) )?"
    r"(?:(?:answer|result|solution|value) (?:is|equals)|it is|this is)[: ] ?(?=\S)",
    re.IGNORECASE,
)
_CELL = re.compile(r"\| ([^|]*) \|")
"""A cell of a table; an absolute value has no spaces inside."""
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
MAX_WORDS = 3
"""Maximum words on the line below `Answer:`; more are a sentence, and the answer is elsewhere."""


def extract_answer(text: str, boxed: bool = False) -> str | None:
    """What follows the last `Answer:`, on its line or, if that is empty, on the next. With `boxed`, falls back to the
    last `\\boxed{…}` of the text."""
    end = None
    for match in _ANSWER.finditer(text):
        end = match.end()
    answer = _after(text, end) if end is not None else None
    return answer if answer is not None or not boxed else last_boxed(text)


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` whose braces are balanced."""
    boxes = _boxes(text)
    if not boxes:
        return None
    _, start, end = boxes[-1]
    return text[start:end].strip() or None if end - start <= MAX_ANSWER_CHARS else None


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Where each `\\boxed{…}` starts, and where its content starts and ends, in the order of the text."""
    if r"\boxed" not in text and r"\fbox" not in text:
        return []
    boxes: list[tuple[int, int, int]] = []
    open_braces: list[tuple[int, int, bool]] = []
    for match in _BRACES.finditer(text):
        if match[0].endswith("{") and (match[1] or match[0] == "{"):
            open_braces.append((match.start(), match.end(), match[1] is not None))
        elif match[0] == "}" and open_braces:
            start, opened, is_box = open_braces.pop()
            if is_box:
                boxes.append((start, opened, match.start()))
    return sorted(boxes)


def _after(text: str, start: int) -> str | None:
    line = _line_at(text, start)
    content = line.strip(" \t*_")
    if content and content not in (opening for opening, _ in _DISPLAYS):
        return _strip_markup(line)
    if content:  # start of display math
        return _strip_markup(_display(text, text.index(content, start)) or line)
    below = _NEXT_LINE.match(text, start + len(line))
    if below is None or len(line) > MAX_ANSWER_CHARS:
        return None
    line = _display(text, below.end()) or _line_at(text, below.end())
    answer = _strip_markup(line)
    is_marked = answer is not None and answer != line.strip()
    return answer if answer is not None and (is_marked or len(_PROSE.findall(answer)) <= MAX_WORDS) else None


def _line_at(text: str, start: int) -> str:
    match = _LINE.match(text, start)
    return match[0] if match is not None else ""


def _display(text: str, start: int) -> str | None:
    """Display math that starts here, over any number of lines."""
    for opening, closing in _DISPLAYS:
        if text.startswith(opening, start):
            end = text.find(closing, start + len(opening), start + MAX_ANSWER_CHARS)
            return " ".join(text[start : end + len(closing)].split()) if end >= 0 else None
    return None


def _strip_markup(line: str) -> str | None:
    if len(line) > MAX_ANSWER_CHARS:
        return None
    # One of the bold marks may precede the content: **Answer:** 42, **Answer: 42**.
    line = line.strip().removeprefix("**").removesuffix("**").strip()
    if cell := _CELL.fullmatch(line):
        line = cell[1].strip()
    if lead_in := _LEAD_IN.match(line):
        line = line[lead_in.end() :]
    for opening, closing in _WRAPPERS:
        inside = line.removesuffix(".")
        if inside.startswith(opening) and inside.endswith(closing) and len(inside) > len(opening + closing):
            inside = inside[len(opening) : -len(closing)]
            line = line if closing in inside else inside.strip()
    line = _without_boxes(line)
    return line if line.strip("$*_.` ") else None


def _without_boxes(line: str) -> str:
    """The line with each `\\boxed{…}` replaced by its content, in braces unless it is all there is."""
    while boxes := _boxes(line):
        start, opened, end = boxes[-1]
        content, before, after = line[opened:end].strip(), line[:start], line[end + 1 :]
        if not content and not (before + after).strip():
            return ""
        is_all = not before.strip() and not after.strip(" .")
        is_braced = before.endswith("{") and after.startswith("}")
        line = content if is_all else before + (content if is_braced else f"{{{content}}}") + after
    return line
