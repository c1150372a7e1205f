"""`gymnasium:ID`: environments of Gymnasium whose actions can be written: texts, or numbers of a Discrete space.

A number is the policy's text, or the last whole number in it. With `env.options={actions: [left, down, right, up]}` an
action is also its name. Observations are texts as they are and others as JSON, or `env.options={render: true}` shows
what the environment draws as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_rl.base.quote import one_line, shown
from dapo_rl.envs.opening import opening
from dapo_rl.envs.protocol import AssistantTurn, Observation, Opening
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

PREFIX = "gymnasium:"


class Gymnasium:
    """An episode of a Gymnasium environment.

    - `actions`: names of the actions of a Discrete space, in its order
    - `render`: show `render()` in the mode `ansi` instead of the observation
    - `make`, `reset`: arguments of `gymnasium.make`, and the `options` of `reset`
    """

    deterministic = True

    def __init__(
        self,
        name: str,
        *,
        actions: Sequence[str] = (),
        render: bool = False,
        make: Mapping[str, Any] | None = None,
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        self._actions = [str(action) for action in actions]
        self._render, self._reset = render, dict(reset or {})
        self._env = _made(name, {**({"render_mode": "ansi"} if render else {}), **(make or {})})
        self._space = self._env.action_space
        self._takes_text, self._numbers = _kinds(name, self._space)
        if self._actions and len(self._actions) != (size := len(self._numbers)):
            raise UserError(f"env.options.actions has {len(self._actions)} names; {PREFIX}{name} has {size} actions")

    def open(self, prompt: Prompt, seed: int) -> Opening:
        observed, _ = self._env.reset(seed=seed, options=self._reset or None)
        return opening(prompt, self._text_of(observed))

    def step(self, turn: AssistantTurn) -> Observation:
        action = self._action_of(turn.text)
        if action is None:
            return Observation(text=f"not a valid action: {self._expected}", tool_calls=1, tool_errors=1)
        observed, reward, terminated, truncated, _ = self._env.step(action)
        done = bool(terminated or truncated)
        return Observation(self._text_of(observed), reward=float(reward), done=done, tool_calls=1)

    def close(self) -> None:
        self._env.close()

    @property
    def _expected(self) -> str:
        if self._takes_text:
            return f"write {self._space.min_length} to {self._space.max_length} of its characters"
        if self._actions:
            return f"write one of {', '.join(self._actions)}"
        return f"write a number from {self._numbers[0]} to {self._numbers[-1]}"

    def _action_of(self, text: str) -> Any:
        """The action, or None."""
        text = text.strip()
        if self._takes_text:
            return text if self._space.contains(text) else None
        named = self._named(text)
        if len(named) == 1:
            return self._numbers[named[0]]
        written = re.findall(r"(?<![\w.])-?\d{1,18}(?![\w.]*\d)", text)
        number = int(written[-1]) if written and not named else None
        return number if number in self._numbers else None

    def _named(self, text: str) -> list[int]:
        """The actions whose names are in the text. A name inside a longer one, as in `up left`, is not meant."""
        longest = sorted(filter(None, self._actions), key=len, reverse=True)
        if not longest:
            return []
        either = "|".join(map(re.escape, longest))
        found = {name.casefold() for name in re.findall(rf"(?<!\w)(?:{either})(?!\w)", text, re.IGNORECASE)}
        return [number for number, name in enumerate(self._actions) if name.casefold() in found]

    def _text_of(self, observed: Any) -> str:
        if self._render:
            return str(self._env.render()).strip()
        return observed if isinstance(observed, str) else json.dumps(_plain(observed), ensure_ascii=False)


def _kinds(name: str, space: Any) -> tuple[bool, range]:
    """Whether actions are texts, or else their numbers."""
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return True, range(0)
    if isinstance(space, spaces.Discrete):
        return False, range(int(space.start), int(space.start) + int(space.n))
    raise UserError(
        f"env.name: {PREFIX}{name} has actions in {shown(space)}, which a text does not choose; "
        "Discrete and Text do, and an environment of your own can wrap it"
    )


def _made(name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        import gymnasium
    except ImportError:
        raise UserError(f"env.name: {PREFIX}{name} needs gymnasium: pip install 'dapo-rl[envs]'") from None
    try:
        return gymnasium.make(name, **arguments)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise UserError(f"env.name: {PREFIX}{name} cannot be made: {one_line(error)}") from None


def _plain(value: Any) -> Any:
    """Arrays and numbers of NumPy, also inside tuples and dicts, as JSON has them."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
