"""Engines in actors that were used before: to start a process and to import everything takes longer than most tests."""

from typing import ClassVar

from dapo_rl.cluster.engine_replica import EngineReplica


class WarmReplica(EngineReplica):
    idle: ClassVar = []

    def __init__(self, index, background, timeout_s, options):
        super().__init__(index, background, timeout_s, options)
        self._anywhere = not options

    def _new_actor(self):
        return self.idle.pop() if self._anywhere and self.idle else super()._new_actor()

    def _end_actor(self):
        if self._anywhere and self._answers():
            self.idle.append(self.actor)
        else:
            super()._end_actor()

    def _answers(self):
        """Whether it is alive and carries out commands."""
        try:
            return self._ray.get(self.send("cancel", [], []), timeout=2).error is None
        except self._ray.exceptions.RayError:
            return False
