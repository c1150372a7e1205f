"""What reward functions get of environments: TRL's argument `environments`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Never


class EnvironmentView(SimpleNamespace):
    """An environment after its episode, as reward functions get it: its attributes, without its methods."""

    def __getattr__(self, name: str) -> Never:
        raise AttributeError(
            f"environments: no attribute {name!r}; reward functions get the attributes of an environment that JSON can "
            f"express ({', '.join(vars(self)) or 'none'}), not its methods: set one, or write get_reward"
        )


def environment_views(states: Iterable[Mapping[str, Any]]) -> list[EnvironmentView]:
    """What reward functions get as `environments`, from the states of the episodes' last observations."""
    return [EnvironmentView(**state) for state in states]
