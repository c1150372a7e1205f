"""Reads and writes the state of a part of a run as JSON, with a schema that is checked on reading.

A checksum detects damage, but not a file written by another program. Keys that a schema does not name are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dapo_rl.base.quote import cut, one_line
from dapo_rl.errors import UserError

LARGEST = 2**53
Count = Annotated[int, Field(ge=0, lt=LARGEST)]
Finite = Annotated[float, Field(ge=-1e30, le=1e30)]
AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""JSON turns tuples into lists; a strict tuple schema needs a tuple."""

_NOT_OURS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The exceptions that restoring raises for a state of the wrong shape."""


class Saved(BaseModel):
    """The schema of one part's state."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)

    def contradictions(self) -> Iterable[tuple[str, bool]]:
        """Checks beyond the schema: a key, and whether its value contradicts the rest."""
        return ()


Schema = TypeVar("Schema", bound=Saved)


def parse_state(schema: type[Schema], value: Any) -> Schema:
    """Validates a state; raises a ValueError with one line that names the invalid key."""
    try:
        state = schema.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        what = f"{first['msg'][0].lower()}{first['msg'][1:]}"
        raise ValueError(cut(f"{where}: {what}" if where else what, 300)) from None
    refuse(state.contradictions())
    return state


def refuse(contradictions: Iterable[tuple[str, bool]]) -> None:
    for where, wrong in contradictions:
        if wrong:
            raise ValueError(f"{where} is inconsistent")


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(state))


def read_state(path: Path) -> Any:
    return json.loads(path.read_text())


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Turns an error while restoring a state into a UserError that names the file and the fix."""
    try:
        yield
    except _NOT_OURS as error:
        raise not_of_this_run(path, one_line(error)) from error
    except OSError as error:
        raise not_of_this_run(path, f"it cannot be read: {error.strerror}") from error


def not_of_this_run(path: Path, why: str) -> UserError:
    return UserError(
        f"{path}: is not a valid state of this run: {why}; remove {path.parent} to resume from the previous checkpoint"
    )
