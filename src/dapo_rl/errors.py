"""The errors that users may see. Any other exception that escapes is a bug."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in the user's input: shown as one line, exit code 2.

    `more` is printed below that line: the traceback of a user-defined function.
    """

    exit_code = 2

    def __init__(self, message: str, more: str = "") -> None:
        super().__init__(message)
        self.more = more


class UnsavedError(UserError):
    """Something of a run cannot be written, for example because the disk is full. The run continues without it; if it
    is still missing at the end, the run ends with this error."""

    def __init__(self, message: str, reason: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.reason, self.remedy = reason, remedy

    @classmethod
    def of(cls, what: str, reason: str, remedy: str) -> UnsavedError:
        return cls(f"{what} cannot be written: {reason}", reason, remedy)


class NonFiniteError(ArithmeticError):
    """A log-probability, loss or gradient is not finite. Raised before the weights change."""


class DivergedError(Exception):
    """The run met a number that is not finite. It stops and leaves everything saved untouched; exit code 3."""

    exit_code = 3

    def __init__(self, step: int, what: str, checkpoint: str | None) -> None:
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint had been written yet"
        super().__init__(
            f"diverged at step {step}: {what}; {kept}. "
            "Lower train.lr or train.max_grad_norm, or look at the last rollouts of the run."
        )
        self.step, self.what, self.checkpoint = step, what, checkpoint


class StopRequested(Exception):  # noqa: N818
    """A stop was requested during sampling or an evaluation, which is abandoned. It ends a run, and is not an error."""


class VerifierStopError(StopRequested, UserError):
    """A verifier cannot go on: its budget is spent, or a file of it cannot be written. The run stops with a checkpoint,
    and says why."""


class TeacherStopError(StopRequested, UserError):
    """The teacher's server does not answer. The run stops with a checkpoint, and says why."""


class CapReachedError(UserError):
    """Dynamic sampling reached `sampling.cap` before the batch was full, with `sampling.on_cap: error`."""


class RankLostError(UserError):
    """A training rank ended or made no progress, and all others have been ended. The run continues from its last
    checkpoint, `cluster.restarts` times. `advice` is what to do if it happens again, if that is known."""

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice


class RayLostError(UserError):
    """A process of Ray has ended without which the run cannot go on. `--resume` continues it."""
