"""The environment `calculator`, which completes the equations that the policy begins; `sampling.stop: ["="]` ends its
turns."""

from __future__ import annotations

from dapo_rl.envs.calculator import calculator
from dapo_rl.envs.protocol import AssistantTurn, Observation


class InlineCalculator:
    """Appends the result to a turn that ends in an expression and `=`. Any other turn is the last."""

    deterministic = True
    stateless = True
    rewards = False

    def step(self, turn: AssistantTurn) -> Observation:
        expression = turn.text.rstrip().rpartition("\n")[2]
        if not expression.endswith("="):
            return Observation(done=True)
        try:
            return Observation(f"{calculator(expression[:-1])}\n", inline=True, tool_calls=1)
        except ValueError:
            return Observation("?\n", inline=True, tool_calls=1, tool_errors=1)
