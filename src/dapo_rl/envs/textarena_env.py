"""`textarena:NAME`: TextArena's games for one player, such as `textarena:GuessTheNumber-v0`.

The policy gets the game's messages since its last move. The game's reward comes at its end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dapo_rl.base.quote import one_line
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.envs.opening import opening
from dapo_rl.envs.protocol import AssistantTurn, Observation, Opening
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

PREFIX = "textarena:"


class TextArena:
    """A game. `options` are the arguments of the game's class, such as `max_turns`."""

    deterministic = True

    def __init__(self, name: str, **options: Any) -> None:
        self._name, self._options = name, options
        self._registry, self._single = _registry(name)

    def open(self, prompt: Prompt, seed: int) -> Opening:
        self._random = random.Random(seed).getstate()
        with self._drawing():
            self._begin(seed)
            return opening(prompt, self._heard())

    def step(self, turn: AssistantTurn) -> Observation:
        with self._drawing():
            done, _ = self._game.step(turn.text)
            invalid = int(bool(getattr(self._inner.state, "error_count", 0)))
            if not done:
                return Observation(self._heard(), tool_calls=1, tool_errors=invalid)
            rewards, info = self._game.close()
        reason = str((info or {}).get(0, {}).get("reason") or "")
        reward = float((rewards or {}).get(0, 0.0))
        return Observation(reason, reward=reward, done=True, tool_calls=1, tool_errors=invalid)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Games draw from the module `random`, which other episodes of the process use too: each has its own state."""
        others = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(others)

    def _begin(self, seed: int) -> None:
        try:
            self._game = self._registry.make(self._name, **self._options)
            self._inner = self._game
            while hasattr(self._inner, "env"):  # wrappers repeat the whole conversation in each observation
                self._inner = self._inner.env
            self._game.reset(num_players=1, seed=seed)
        except Exception as error:  # a game's own checks may raise anything
            raise UserError(f"env.name: {PREFIX}{self._name} cannot be played here: {_reason(error)}") from None
        if not isinstance(self._inner.state, self._single):
            raise UserError(f"env.name: {PREFIX}{self._name} is a game for several players; the policy plays alone")

    def _heard(self) -> str:
        _, messages = self._inner.get_observation()
        return "\n".join(str(text).strip() for sender, text, _ in messages if sender == -1)


def _reason(error: Exception) -> str:
    if type(error) is LookupError:  # NLTK's
        return "it needs word lists: python -m nltk.downloader words averaged_perceptron_tagger_eng"
    return one_line(error)


def _registry(name: str) -> tuple[Any, type]:
    """The module that makes games, and the state that those for one player have."""
    try:
        from textarena import SinglePlayerState
        from textarena.envs import registration
    except ImportError:
        raise UserError(f"env.name: {PREFIX}{name} needs textarena: pip install 'dapo-rl[envs]'") from None
    games = registration.ENV_REGISTRY
    if name not in games:
        close = nearest(name, games)
        raise UserError(f"env.name: textarena has no game {name!r}{did_you_mean(close and PREFIX + close)}")
    return registration, SinglePlayerState
