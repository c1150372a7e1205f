"""The game `guess` and the tool `calculator`, which take long while there is a file `asleep` in the working
directory."""

import time
from pathlib import Path

from dapo_rl.envs import calculator as built_in
from dapo_rl.envs.guess import Guess

SLEEP_S = 600
MARK = Path("asleep").absolute()


def sleep():
    if MARK.exists():
        MARK.write_text("now")
        time.sleep(SLEEP_S)


class Sleeping(Guess):
    def step(self, turn):
        if turn.number == 2:
            sleep()
        return super().step(turn)


class Forgetful(Sleeping):
    deterministic = False


def calculator(expression: str) -> str:
    """Computes an expression.

    Args:
        expression: The expression.
    """
    sleep()
    return built_in.calculator(expression)


calculator.deterministic = True


def forgetful_calculator(expression: str) -> str:
    """Computes an expression, and does not say that it always gives the same.

    Args:
        expression: The expression.
    """
    return calculator(expression)


forgetful_calculator.__name__ = "calculator"
