"""A server of OpenEnv's own server library: `python openenv_server.py words|tools PORT SESSIONS`."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Say(Action):
    message: str
    loud: bool = False


class Heard(Observation):
    text: str
    turns: int | None = None


class Words(Environment):
    """Wants the word that its seed and its row decide."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, word: str = "go", **rest: Any) -> Heard:
        self._word, self._state = f"{word}{seed}", State()
        return Heard(text=f"Say {self._word}.")

    def step(self, action: Say, **rest: Any) -> Heard:
        if action.message == "raise":
            raise RuntimeError("the world ended")
        self._state.step_count += 1
        right = action.message == self._word
        said = action.message.upper() if action.loud else action.message
        return Heard(text=f"heard {said}", turns=self._state.step_count, reward=1.0 if right else -0.25, done=right)

    @property
    def state(self) -> State:
        return self._state


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("tools")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        super().__init__(mcp)

    def reset(self, seed: int | None = None, **rest: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, **rest: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    kinds = {"words": (Words, Say, Heard), "tools": (Tools, CallToolAction, CallToolObservation)}
    app = create_fastapi_app(*kinds[sys.argv[1]], max_concurrent_envs=int(sys.argv[3]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", ws="websockets-sansio")
