"""A taskset of verifiers that the embedded model solves by chance: one question, one digit at the end."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["DigitsTaskset"]


class DigitsData(vf.TaskData):
    digit: int


class DigitsTask(vf.Task[DigitsData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip().endswith(str(self.data.digit)))


class DigitsTaskset(vf.Taskset[DigitsTask, vf.TasksetConfig]):
    def load(self) -> Iterable[DigitsTask]:
        for digit in (1, 2, 3):
            yield DigitsTask(DigitsData(prompt=f"{digit}+0=?", digit=digit), self.config.task)
