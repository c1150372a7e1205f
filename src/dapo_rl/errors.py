"""The errors a user can meet. Everything else that escapes is a bug of ours."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave us: shown as one line, exit code 2.

    `more` goes below that line: the traceback of a function of the user's own.
    """

    exit_code = 2

    def __init__(self, message: str, more: str = "") -> None:
        super().__init__(message)
        self.more = more


class NonFiniteError(ArithmeticError):
    """A log-probability, loss or gradient that is not a number, met before the weights were touched."""


class DivergedError(Exception):
    """A run that met a number that is not finite stops with everything saved untouched, exit code 3."""

    exit_code = 3

    def __init__(self, step: int, what: str, checkpoint: str | None) -> None:
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint had been written yet"
        super().__init__(
            f"diverged at step {step}: {what}; {kept}. "
            "Lower train.lr or train.max_grad_norm, or look at the last rollouts of the run."
        )
        self.step, self.what, self.checkpoint = step, what, checkpoint


class CapReachedError(UserError):
    """Dynamic sampling drew `sampling.cap` groups and could not fill the batch, with `sampling.on_cap: error`."""
