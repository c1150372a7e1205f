"""A run continues from its last checkpoint by itself after a rank was lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from dapo_rl.base.format import counted
from dapo_rl.cluster.policy import RankedPolicy
from dapo_rl.errors import RankLostError, UserError
from dapo_rl.train.checkpoint import Checkpoints, Part


@dataclass(slots=True)
class Restarts:
    """Starts the ranks again, at most `most` times, and restores the run."""

    policy: RankedPolicy
    others: Sequence[Part]
    """The parts of the run besides the policy."""
    checkpoints: Checkpoints
    most: int
    resume: Callable[[], None]
    """Restores the last checkpoint, if there is one, into the parts and the engine."""
    note: Callable[[str], None]
    _made: int = 0
    _beginning: TemporaryDirectory[str] = field(default_factory=lambda: TemporaryDirectory(prefix="dapo-begin-"))

    def __post_init__(self) -> None:
        # What the parts are without a checkpoint. The ranks load the model as it was.
        for part in self.others:
            part.save(Path(self._beginning.name))

    def __call__(self, error: RankLostError) -> None:
        if self._made == self.most:
            raise UserError(
                f"{error}, after {counted(self.most, 'restart')}; look for the cause in Ray's logs, continue with "
                "--resume, or raise cluster.restarts"
            ) from error
        self._made += 1
        self.note(f"{error}; starting the ranks again ({self._made} of {self.most})")
        with suppress(Exception):  # a checkpoint that ranks were writing is lost with them
            self.checkpoints.wait()
        self.policy.restart()
        for part in self.others:
            part.load(Path(self._beginning.name))
        self.resume()
        # Notes on steps after the checkpoint are forgotten, also the one above.
        self.note(f"the ranks were started again ({self._made} of {self.most}), because {error}")

    def close(self) -> None:
        self._beginning.cleanup()
