"""Builds prompts from rows: the text, the ground truth, and the columns for verifiers.

Rows may have the format of verl (`prompt` as messages, `reward_model.ground_truth`, `data_source`, `extra_info`), TRL
(`prompt` as a string or as messages, any other columns) or GSM8K (`question`, `answer`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from dapo_rl.base.format import counted
from dapo_rl.config import DataSettings, Window
from dapo_rl.data.chat import Messages, PromptReader, Reading, Tokenizer
from dapo_rl.data.ground_truth import answer_text, decoded
from dapo_rl.data.pass_rate import check_scored, is_outside, window_text
from dapo_rl.data.rows import MISSING, BadRow, BadRowError, Row, Rows, RowStream, column
from dapo_rl.data.stream import Stream
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

PROMPT_KEYS = ("prompt", "question", "problem")
ANSWER_KEYS = ("reward_model.ground_truth", "answer", "solution", "ground_truth")
LINES_OF_REPORT = 10
Unfit = Literal["too_long", "outside"]
"""Why a row that can be used gives no prompt: its length, or its pass rate."""


Fits = Callable[[Prompt], bool]


def always_fits(prompt: Prompt) -> bool:
    """Without an environment, the tokens of the row are those of the prompt."""
    return True


@dataclass(frozen=True, slots=True)
class PromptSet:
    key: str
    rows: int
    """Number of rows in the source, including bad ones."""
    prompts: list[Prompt]
    too_long: int
    max_prompt_tokens: int
    bad: list[BadRow]
    stream: Stream | None = None
    """Where prompts are drawn from if there is no end to them. All of the above is then about its first rows."""
    parts: tuple[PromptSet, ...] = ()
    """The entries of a list with weights, in its order. The prompts above are those of all of them."""
    weight: float = 1.0
    """The share of the draws that an entry gets, relative to the other weights."""
    outside: int = 0
    """Rows whose pass rate is outside the window."""
    window: Window | None = None
    """The pass rates of the prompts that are used; None: all."""

    @property
    def is_stream(self) -> bool:
        """Whether prompts are read as they are needed, so that their number is not known."""
        return self.stream is not None or any(part.is_stream for part in self.parts)

    def counts(self) -> dict[str, int]:
        if self.parts:
            each = [part.counts() for part in self.parts]
            return {name: sum(counts[name] for counts in each) for name in each[0]}
        if self.stream is not None:
            return self.stream.counts()
        counts = {"train_prompts": len(self.prompts), "too_long": self.too_long, "bad_rows": len(self.bad)}
        return counts if self.window is None else counts | {"outside_pass_rate": self.outside}

    def report(self) -> str | None:
        """The rows that were left out, and why, for the user; None if every row was used."""
        if self.parts:
            return "\n".join(filter(None, (part.report() for part in self.parts))) or None
        if self.stream is not None:
            return f"{self.key}: a stream without a length: its rows are read as needed, in their order, unshuffled"
        if not self.bad and not self.too_long and self.window is None:
            return None
        parts = []
        if self.window is not None:
            parts.append(
                f"{self.rows - len(self.bad) - self.outside} of {counted(self.rows - len(self.bad), 'prompt')} with a "
                f"pass rate in data.pass_rate {window_text(self.window)}"
            )
        if self.bad:
            parts.append(f"{len(self.bad)} of {counted(self.rows, 'row')} skipped")
        if self.too_long:
            parts.append(
                f"{counted(self.too_long, 'prompt')} over data.max_prompt_tokens {self.max_prompt_tokens} dropped"
            )
        origins = {prompt.origin for prompt in self.prompts}
        own = f"{origins.pop()}: " if self.window is not None and len(origins) == 1 and "" not in origins else ""
        lines = [f"{self.key}: {own}{', '.join(parts)}", *(f"  {bad}" for bad in self.bad[:LINES_OF_REPORT])]
        if len(self.bad) > LINES_OF_REPORT:
            lines.append(f"  and {len(self.bad) - LINES_OF_REPORT} more")
        return "\n".join(lines)


def build_prompts(
    rows: Rows, tokenizer: Tokenizer, settings: DataSettings, needs_answer: bool = False, fits: Fits = always_fits
) -> PromptSet:
    """Every usable row as a prompt, in the order of the source; its id is the row's number there.

    If the verifier compares with a ground truth (`needs_answer`), a row without one is a bad row. `fits` says whether a
    prompt is short enough with what an environment adds to it.
    """
    reader = PromptReader(tokenizer, settings, rows.key)
    for origin in rows.origins or ("",):
        check_scored(rows.key, origin or rows.source, [row for row in rows.good if row.origin == origin], settings)
    built = PromptBuilder(reader, rows.source, settings, needs_answer, fits).build(rows.good)
    prompts = [each for each in built if isinstance(each, Prompt)]
    bad = [*rows.bad, *(each for each in built if isinstance(each, BadRow))]
    unfit = [(row.origin, made) for row, made in zip(rows.good, built, strict=True) if isinstance(made, str)]
    order = {origin: at for at, origin in enumerate(rows.origins)}
    bad.sort(key=lambda row: (order.get(row.origin, 0), row.number))
    if not prompts:
        raise UserError(nothing_left(rows, bad, [why for _, why in unfit], settings))
    if empty := next((origin for origin in rows.origins if not any(p.origin == origin for p in prompts)), None):
        own = [row for row in bad if row.origin == empty]
        raise UserError(
            nothing_left(replace(rows, source=empty), own, [why for origin, why in unfit if origin == empty], settings)
        )
    return prompt_set(rows.key, prompts, bad, [why for _, why in unfit], settings)


def prompt_set(
    key: str,
    prompts: list[Prompt],
    bad: list[BadRow],
    unfit: Sequence[Unfit],
    settings: DataSettings,
    stream: Stream | None = None,
) -> PromptSet:
    total, too_long, outside = len(prompts) + len(bad) + len(unfit), unfit.count("too_long"), unfit.count("outside")
    limit, window = settings.max_prompt_tokens, settings.pass_rate
    return PromptSet(key, total, prompts, too_long, limit, bad, stream, outside=outside, window=window)


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    reader: PromptReader
    source: str
    settings: DataSettings
    needs_answer: bool
    fits: Fits = always_fits

    def build(self, rows: Sequence[Row | BadRow]) -> list[Prompt | BadRow | Unfit]:
        given = [self._given(row) for row in rows]
        readings = iter(self.reader.read([each[2] for each in given if isinstance(each, tuple)]))
        return [self._prompt(*each[:2], next(readings)) if isinstance(each, tuple) else each for each in given]

    def _given(self, row: Row | BadRow) -> tuple[Row, str, str | Messages] | BadRow | Unfit:
        """The row with the name and the content of its prompt's column."""
        if isinstance(row, BadRow):
            return row
        try:
            name, value = _prompt_column(row.columns, self.settings.prompt_key)
            return "outside" if is_outside(row, self.settings) else (row, name, _text_or_messages(name, value))
        except BadRowError as error:
            return row.bad(error)

    def _prompt(self, row: Row, name: str, reading: Reading | BadRowError) -> Prompt | BadRow | Unfit:
        try:
            if isinstance(reading, BadRowError):
                raise reading
            data_source = decoded(row.columns.get("data_source"), "'data_source'")
            answer = _answer(row.columns, self.settings.answer_key)
            if self.needs_answer and not (answer or "").strip():
                raise BadRowError("no ground truth to compare with; data.answer_key names its column")
        except BadRowError as error:
            return row.bad(error)
        if len(reading.token_ids) > self.settings.max_prompt_tokens:
            return "too_long"
        prompt = Prompt(
            id=row.id,
            text=reading.text,
            token_ids=np.asarray(reading.token_ids, np.int32),
            answer=answer,
            data_source=data_source if isinstance(data_source, str) else row.origin or self.source,
            messages=reading.messages,
            # A prompt with another name (`question`) stays a column: reward functions ask for it by that name.
            columns={k: v for k, v in row.columns.items() if k != "prompt" or name != "prompt"},
            origin=row.origin,
            question=reading.question,
        )
        try:
            return prompt if self.fits(prompt) else "too_long"
        except UserError as error:  # a template rejects it
            return row.bad(BadRowError(str(error)))


def copies(prompts: Iterable[Prompt]) -> int:
    """How often every problem is repeated (the greatest common divisor of their counts): 32 for an avg@32 file."""
    counts = Counter((prompt.text, prompt.answer) for prompt in prompts)
    return math.gcd(*counts.values()) or 1


def once_each(prompts: Sequence[Prompt], most: int | None = None) -> list[Prompt]:
    """Removes the repetitions from a file in which every problem is repeated; other files stay as they are. Keeps the
    first `most` prompts of each entry of a list of sources."""
    by_origin: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_origin.setdefault(prompt.origin, []).append(prompt)
    return [prompt for own in by_origin.values() for prompt in _without_copies(own)[:most]]


def _without_copies(prompts: list[Prompt]) -> list[Prompt]:
    if copies(prompts) == 1:
        return prompts
    first: dict[tuple[str, str | None], Prompt] = {}
    for prompt in prompts:
        first.setdefault((prompt.text, prompt.answer), prompt)
    return list(first.values())


def _prompt_column(columns: Mapping[str, Any], key: str) -> tuple[str, Any]:
    for name in PROMPT_KEYS if key == "prompt" else (key,):
        value = column(columns, name)
        if value is not MISSING and value is not None:
            return name, value
    raise BadRowError(f"no {key!r} column; it has {', '.join(columns) or 'no column at all'}")


def _text_or_messages(name: str, value: Any) -> str | Messages:
    value = decoded(value, repr(name))
    if isinstance(value, str):
        if not value.strip():
            raise BadRowError(f"{name!r} is empty")
        return value
    if not isinstance(value, Sequence):
        raise BadRowError(f"{name!r} is a {type(value).__name__}, not a string or a list of messages")
    if not value:
        raise BadRowError(f"{name!r} is empty")
    messages = tuple(_message(f"message {at} of {name!r}", message) for at, message in enumerate(value))
    if not any(message["content"].strip() for message in messages):
        raise BadRowError(f"{name!r} is empty")
    return messages


def _message(what: str, value: Any) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise BadRowError(f"{what} is a {type(value).__name__}, not {{role, content}}")
    message = dict(value)
    for part in ("role", "content"):
        message[part] = decoded(message.get(part), f"the {part!r} of {what}")
        if not isinstance(message[part], str):
            raise BadRowError(f"{what} has no text as its {part!r}")
    # In Parquet every message has the fields of all others, as nulls.
    return {name: inner for name, inner in message.items() if isinstance(inner, str)}


def _answer(columns: Mapping[str, Any], key: str | None) -> str | None:
    if key is not None:
        value = column(columns, key)
        if value is MISSING:
            raise BadRowError(f"no {key!r} column (data.answer_key); it has {', '.join(columns)}")
        return answer_text(value)
    for name in ANSWER_KEYS:
        value = column(columns, name)
        if value is not MISSING and value is not None:
            return answer_text(value)
    return None


def nothing_left(rows: Rows | RowStream, bad: list[BadRow], unfit: Sequence[Unfit], settings: DataSettings) -> str:
    what = f"{rows.key}: {rows.source}" if rows.source else rows.key
    if not (total := len(bad) + len(unfit)):
        return f"{what}: no rows"
    reasons = []
    if settings.pass_rate is not None and (outside := unfit.count("outside")):
        rates = f"{counted(outside, 'prompt')} {'has a pass rate' if outside == 1 else 'have pass rates'}"
        reasons.append(f"{rates} outside data.pass_rate {window_text(settings.pass_rate)}, which can be widened")
    if too_long := unfit.count("too_long"):
        is_over = f"{counted(too_long, 'prompt')} {'is' if too_long == 1 else 'are'} over"
        reasons.append(f"{is_over} data.max_prompt_tokens {settings.max_prompt_tokens}")
    if bad:
        first = "; ".join(str(row) for row in bad[:3])
        reasons.append(
            f"{counted(len(bad), 'row')} {'is' if len(bad) == 1 else 'are'} bad: {first}{'; …' if len(bad) > 3 else ''}"
        )
    return f"{what}: none of {counted(total, 'row')} gives a prompt: {'; '.join(reasons)}"
