"""An environment of several turns: a chain of sums, each of which begins with the result of the last.

    dapo train guess env.name=examples/environment.py:Chain

The recipe `guess` has limits that fit: 4 turns of 24 tokens. `env.options={links: 4}` makes the chain longer.
"""

import random

from dapo_rl.envs import Observation


class Chain:
    """Every right answer earns a share of the reward. The first wrong one ends the episode."""

    deterministic = True  # given the same seed and turns, it answers the same: a resumed run replays it

    def __init__(self, links=3):
        self.links = links

    def open(self, prompt, seed):
        self.random = random.Random(seed)
        self.result = self.random.randint(1, 9)
        return self._next_sum()

    def step(self, turn):
        if turn.text.split()[-1:] != [str(self.result)]:
            return 0.0  # a number ends the episode
        if turn.number == self.links:
            return Observation(reward=1 / self.links, done=True, correct=True)
        return Observation(self._next_sum(), reward=1 / self.links)

    def _next_sum(self):
        before, change = self.result, self.random.randint(1, 9)
        self.result = before + change if before < 10 else before - change
        return f"{before}{'+' if before < 10 else '-'}{change}=?"
