"""error.json: why a run failed. It exists from the failure until the run is resumed or started again.

`time` is in seconds since 1970, `step` is the step in progress, `kind` the class of the exception, and `message` one
line. `traceback` is there for unexpected exceptions and for those of a user's own functions.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dapo_rl.base.files import atomic_write
from dapo_rl.base.os_errors import explain_os_error
from dapo_rl.base.quote import TRACEBACK_LIMIT, describe, describe_traceback, one_line, printable, shorten
from dapo_rl.errors import DivergedError, UserError

NAME = "error.json"
LONGEST_MESSAGE = 2000
"""Characters of the message."""


def write_failure(directory: Path, step: int, error: Exception) -> None:
    """Records the exception that ends a run. A failure to write it must not hide the exception."""
    with suppress(OSError):
        atomic_write(directory / NAME, json.dumps(_record(step, error), indent=2) + "\n")


def forget_failure(directory: Path) -> None:
    (directory / NAME).unlink(missing_ok=True)


def _record(step: int, error: Exception) -> dict[str, Any]:
    record: dict[str, Any] = {"time": time.time(), "step": step, "kind": type(error).__name__}
    if isinstance(error, UserError | DivergedError):
        more = printable(shorten(getattr(error, "more", ""), TRACEBACK_LIMIT))
        line = printable(one_line(error, LONGEST_MESSAGE))
        return record | {"message": line} | ({"traceback": more} if more else {})
    if isinstance(error, OSError) and (explained := explain_os_error(error)):
        return record | {"message": printable(one_line(explained, LONGEST_MESSAGE))}
    return record | {"message": describe(error), "traceback": describe_traceback(error)}
