"""What an actor answers: a value, or an error in a form that can be sent."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from dapo_rl.errors import UnsavedError, UserError


@dataclass(frozen=True, slots=True)
class Answer:
    value: Any = None
    error: Exception | None = None


def sendable(error: BaseException, *known: type[Exception]) -> Exception:
    """A mistake of the user's, or an error of a known type, with its message; any other as a RuntimeError with its
    traceback."""
    if isinstance(error, UnsavedError):
        return UnsavedError(str(error), error.reason, error.remedy)
    if isinstance(error, UserError):
        return UserError(str(error), error.more)
    for kind in known:
        if isinstance(error, kind):
            return kind(str(error))
    return RuntimeError("".join(traceback.format_exception(error)))
