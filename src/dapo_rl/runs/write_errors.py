"""Failed writes, for example on a full disk. The run continues and tries again; it ends with an error only if a file is
still missing at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dapo_rl.errors import RankLostError, UnsavedError, UserError


class WriteErrors:
    """Everything that could not be written when it was last tried. A note tells of each cause once, and of its end."""

    def __init__(self, note: Callable[[str], None] = lambda line: None) -> None:
        self._note = note
        self._errors: dict[str, UserError] = {}

    def __contains__(self, what: str) -> bool:
        return what in self._errors

    def add(self, what: str, error: UnsavedError, then: str) -> None:
        """`then` describes how the run continues."""
        before = self._errors.get(what)
        self._errors[what] = error
        if not isinstance(before, UnsavedError) or before.reason != error.reason:
            self._note(f"{error}; {then}{f'; {error.remedy}' if error.remedy else ''}")

    def written(self, what: str) -> None:
        if self._errors.pop(what, None) is not None:
            self._note(f"{what}: can be written again")

    @contextmanager
    def trying(self, what: str, then: str) -> Iterator[None]:
        """Notes that the block cannot write something; the run continues."""
        try:
            yield
        except UnsavedError as error:
            self.add(what, error, then)
        else:
            self.written(what)

    @contextmanager
    def at_the_end(self, what: str) -> Iterator[None]:
        """Keeps the error of a block that writes a result, so that the other results are still written."""
        try:
            yield
        except RankLostError:
            raise
        except UserError as error:
            self._errors[what] = error

    def raise_errors(self, rest: str) -> None:
        """Raises one error that names everything that is missing; `rest` names the files that exist."""
        if not self._errors:
            return
        remedies = dict.fromkeys(e.remedy for e in self._errors.values() if isinstance(e, UnsavedError) and e.remedy)
        raise UserError("; ".join([*dict.fromkeys(map(str, self._errors.values())), *remedies, rest])) from next(
            iter(self._errors.values())
        )
