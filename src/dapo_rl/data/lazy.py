"""Prompts of a stream: read as they are needed, in its order, and resumable at any draw.

A checkpoint has the number of rows that were used. To resume, the stream is read again up to there, and its rows are
compared with those of the run by a digest. The prompts of unfinished groups are found on the way.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from dapo_rl.base.format import counted
from dapo_rl.base.quote import one_line, shown
from dapo_rl.base.saved import Count, Saved, parse_state
from dapo_rl.data.media import MediaError
from dapo_rl.data.pass_rate import check_scored
from dapo_rl.data.prompts import PromptBuilder, PromptSet, Unfit, nothing_left, prompt_set
from dapo_rl.data.rows import BadRow, Row, RowStream
from dapo_rl.data.stream import REMEDY, Stream, refuse_wrapped, type_name
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

AHEAD = 64
"""Prompts that are read before a run starts, so that mistakes in the rows are found early."""
MOST_UNUSABLE = 10_000
"""Rows in succession that may be dropped before the run stops."""


class SavedLazyStream(Saved):
    epoch: Count
    used: Count
    digest: str
    prompts: Count
    too_long: Count
    bad: Count
    outside: Count = 0
    front: list[str]
    unfinished: list[str]


class LazyStream(Stream):
    def __init__(self, rows: RowStream, builder: PromptBuilder) -> None:
        super().__init__()
        self.check: Callable[[Prompt], None] = lambda prompt: None
        """Called with every prompt before it is drawn; raises a UserError for one that the run cannot use."""
        self.note: Callable[[str], None] = lambda line: None
        """Called with lines for the user."""
        self._rows, self._builder = rows, builder
        self._reading = rows.open()
        self._ahead: deque[tuple[Row | BadRow, Prompt | BadRow | Unfit]] = deque()
        """Rows that were read and not yet used, with their prompt, or the reason why they have none."""
        self._found: dict[str, Prompt] = {}
        """The prompts of unfinished groups, after `load`."""
        self._epoch, self._used, self._digest = 0, 0, ""
        self._counts = dict.fromkeys(("prompts", "too_long", "bad", "outside"), 0)
        self._unusable = 0

    @property
    def epochs_drawn(self) -> float:
        """How often the stream has ended."""
        return float(self._epoch)

    def counts(self) -> dict[str, int]:
        names = {"prompts": "train_prompts", "too_long": "too_long", "bad": "bad_rows"}
        if self._builder.settings.pass_rate is not None:
            names["outside"] = "outside_pass_rate"
        return {public: self._counts[name] for name, public in names.items()}

    def watch(self, check: Callable[[Prompt], None], note: Callable[[str], None]) -> None:
        self.check, self.note = check, note

    def look_ahead(self, most: int = AHEAD) -> PromptSet:
        """The first prompts, which are drawn later. Raises a UserError if there are none."""
        prompts = 0
        while prompts < most and len(self._ahead) < MOST_UNUSABLE + prompts and (row := self._next_row()) is not None:
            (made_of_row,) = self._builder.build([row])
            self._ahead.append((row, made_of_row))
            prompts += isinstance(made_of_row, Prompt)
        made = [each for _, each in self._ahead]
        bad = [each for each in made if isinstance(each, BadRow)]
        unfit, settings = [each for each in made if isinstance(each, str)], self._builder.settings
        if not prompts:
            check_scored(self._rows.key, self._rows.source, [row for row, _ in self._ahead], settings)
            raise UserError(nothing_left(self._rows, bad, unfit, settings))
        found = [each for each in made if isinstance(each, Prompt)]
        return prompt_set(self._rows.key, found, bad, unfit, settings, stream=self)

    def _next_prompt(self) -> Prompt:
        while True:
            if self._ahead:
                row, made = self._ahead.popleft()
            elif (next_row := self._next_row()) is None:
                self._start_again()
                continue
            else:
                row, (made,) = next_row, self._builder.build([next_row])
            self._use(row)
            if isinstance(made, Prompt):
                self.check(made)
                self._counts["prompts"] += 1
                self._unusable = 0
                return made
            self._drop(made)

    def find(self, prompt_id: str) -> Prompt:
        if prompt_id not in self._found:
            raise ValueError(f"there is no prompt {shown(prompt_id)}")
        return self._found[prompt_id]

    def skip(self, prompt: Prompt, epochs: int) -> None:
        raise RuntimeError("a stream has no epochs in which a prompt could be left out")

    def state(self, unfinished: Iterable[str] = ()) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "used": self._used,
            "digest": self._digest,
            **self._counts,
            "front": [prompt.id for prompt in self._front],
            "unfinished": list(unfinished),
        }

    def restore(self, written: Any) -> None:
        refuse_wrapped(written)
        if isinstance(written, dict) and "fingerprint" in written:
            raise UserError(
                f"{self._rows.key} is a stream, but the checkpoint was written with data of known length; {REMEDY}"
            )
        state = parse_state(SavedLazyStream, written)
        self._rewind()
        found = self._skip(state)
        self._found = {name: found[name] for name in state.unfinished}
        self._front = deque(found[name] for name in state.front)
        self._epoch, self._unusable = state.epoch, 0
        self._counts = {name: getattr(state, name) for name in self._counts}

    def _rewind(self) -> None:
        if self._rows.repeats:
            self._reading = self._rows.open()
            self._ahead.clear()
        elif self._used or self._epoch:
            raise UserError(
                f"{self._rows.key}: an iterator cannot be read again; resume in a new trainer, with a new iterator"
            )
        self._used, self._digest = 0, ""

    def _skip(self, state: SavedLazyStream) -> dict[str, Prompt]:
        """Uses the rows up to the saved place; returns the prompts that are needed again."""
        key, wanted = self._rows.key, {*state.front, *state.unfinished}
        if state.used:
            self.note(f"{key}: reading the stream again, up to row {state.used:,}")
        found: dict[str, Prompt] = {}
        for _ in range(state.used):
            row = self._ahead.popleft()[0] if self._ahead else self._next_row()
            if row is None:
                raise UserError(
                    f"{key} ends after {counted(self._used, 'row')}, and the run has used {state.used}; {REMEDY}"
                )
            self._use(row)
            self._collect(row, wanted, found)
        if self._digest != state.digest:
            raise UserError(f"{key} has different rows than the checkpoint was written with; {REMEDY}")
        if wanted - found.keys() and state.epoch:  # drawn before the stream started again
            for row in self._rows.open():
                self._collect(row, wanted, found)
                if not wanted - found.keys():
                    break
        if missing := wanted - found.keys():
            raise ValueError(f"there is no prompt {shown(min(missing))}")
        return found

    def _collect(self, row: Row | BadRow, wanted: set[str], found: dict[str, Prompt]) -> None:
        if isinstance(row, Row) and row.id in wanted:
            found |= {made.id: made for made in self._builder.build([row]) if isinstance(made, Prompt)}

    def _next_row(self) -> Row | BadRow | None:
        """None at the end of the stream."""
        try:
            return next(self._reading, None)
        except MediaError as error:
            raise UserError(f"{self._rows.key}: {error}") from None
        except UserError:
            raise
        except Exception as error:  # of the user's iterator, or of the network
            place = f"{self._rows.key}: row {self._used + len(self._ahead)} of the stream cannot be read"
            raise UserError(f"{place}: {type(error).__name__}: {one_line(error)}") from error

    def _use(self, row: Row | BadRow) -> None:
        self._used += 1
        content = row.columns if isinstance(row, Row) else row.why
        # Objects that JSON cannot represent count by their type: their text may contain an address.
        written = json.dumps([self._digest, row.number, content], default=type_name, skipkeys=True)
        self._digest = hashlib.sha256(written.encode()).hexdigest()[:16]

    def _drop(self, why: BadRow | Unfit) -> None:
        kind = "bad" if isinstance(why, BadRow) else why
        said = {
            "bad": f"skipped {why}",
            "outside": "a prompt outside data.pass_rate dropped",
            "too_long": f"a prompt over data.max_prompt_tokens {self._builder.settings.max_prompt_tokens} dropped",
        }[kind]
        self._counts[kind] += 1
        if self._counts[kind] == 1:
            self.note(f"{self._rows.key}: {said}; summary.json counts all of them")
        self._unusable += 1
        if self._unusable >= MOST_UNUSABLE:
            raise UserError(f"{self._rows.key}: {MOST_UNUSABLE:,} rows in succession give no prompt; the last: {said}")

    def _start_again(self) -> None:
        read = counted(self._used, "row")
        if not self._rows.repeats:
            raise UserError(
                f"{self._rows.key}: the iterator ended after {read}; give a list, or an object that can be iterated "
                "again, such as a datasets.IterableDataset"
            )
        if self._unusable >= self._used:
            raise UserError(f"{self._rows.key}: none of {read} of the stream gives a prompt")
        self._epoch, self._used, self._digest = self._epoch + 1, 0, ""
        self._reading = self._rows.open()
