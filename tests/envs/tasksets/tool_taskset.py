"""A taskset of verifiers whose tasks have a tool server."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["ToolTaskset"]


class Numbers(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)


class ToolTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Numbers(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "") == "It is 42.")


class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):
    def load(self) -> Iterable[ToolTask]:
        yield ToolTask(vf.TaskData(prompt="2+40?"), self.config.task)


if __name__ == "__main__":
    Numbers.run()
