"""The game `guess`, whose steps take long while there is a file `asleep` in the working directory."""

import time
from pathlib import Path

from dapo_rl.envs.guess import Guess

MARK = Path("asleep").absolute()


class Sleeping(Guess):
    def step(self, turn):
        if MARK.exists() and turn.number == 2:
            MARK.write_text("now")
            time.sleep(3)
        return super().step(turn)


class Forgetful(Sleeping):
    deterministic = False
