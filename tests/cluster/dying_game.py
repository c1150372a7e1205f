"""A game that can be killed in the middle of an episode."""

import time
from pathlib import Path

from dapo_rl.envs.guess import Guess


class DyingGame(Guess):
    """Once, it says by a file that it is in its second turn, and waits for its end."""

    def __init__(self, marker, **options):
        super().__init__(**options)
        self._marker = Path(marker)

    def step(self, turn):
        if turn.number == 2 and not self._marker.exists():
            self._marker.touch()
            time.sleep(60)
        return super().step(turn)
