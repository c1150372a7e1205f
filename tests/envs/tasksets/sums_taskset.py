"""A taskset of verifiers: one question, one answer."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsConfig(vf.TasksetConfig):
    size: int = 3


class SumsData(vf.TaskData):
    answer: int


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == str(self.data.answer))


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> Iterable[SumsTask]:
        for number in range(self.config.size):
            data = SumsData(prompt=f"{number}+1=", system_prompt="Add.", answer=number + 1)
            yield SumsTask(data, self.config.task)
