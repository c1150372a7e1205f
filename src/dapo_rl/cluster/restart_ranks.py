"""A run continues from its last checkpoint by itself after a rank was lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from dapo_rl.base.format import counted
from dapo_rl.cluster.ray_session import ray_logs
from dapo_rl.errors import RankLostError, UserError
from dapo_rl.train.checkpoint import Checkpoints, Part


class Restarts:
    def __init__(
        self,
        restart: Callable[[], None],
        others: Sequence[Part],
        checkpoints: Checkpoints,
        most: int,
        resume: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        """`restart` starts the ranks; `others` are the parts of the run that are not on ranks. `resume` restores the
        last checkpoint, if there is one, and gives the policy's weights to the engine."""
        self._restart, self._others, self._checkpoints = restart, others, checkpoints
        self._most, self._resume, self._note = most, resume, note
        self._made = 0
        self._beginning = _saved(others)
        """What the other parts are without a checkpoint. The ranks load the model as it was."""

    def __call__(self, error: RankLostError) -> None:
        if self._made == self._most:
            advice = error.advice or f"look for the cause in {ray_logs()}, or raise cluster.restarts"
            raise UserError(
                f"{error}, after {counted(self._most, 'restart')}; continue with --resume; {advice}"
            ) from error
        self._made += 1
        count = f"({self._made} of {self._most})"
        self._note(f"{error}; starting the ranks again {count}")
        with suppress(Exception):  # a checkpoint that ranks were writing is lost with them
            self._checkpoints.wait()
        self._restart()
        _restore(self._others, self._beginning)
        self._resume()
        # Notes on steps after the checkpoint are forgotten, also the one above.
        self._note(f"the ranks were started again {count}, because {error}")


def _saved(parts: Sequence[Part]) -> dict[str, bytes]:
    """The files of parts that write all of them at once, by their names."""
    with TemporaryDirectory(prefix="dapo-begin-") as folder:
        for part in parts:
            part.save(Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _restore(parts: Sequence[Part], files: dict[str, bytes]) -> None:
    with TemporaryDirectory(prefix="dapo-begin-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        for part in parts:
            part.load(Path(folder))
