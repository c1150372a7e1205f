"""A rank without a model, which hangs or fails when told to."""

import time

import torch.distributed as dist

from dapo_rl.cluster.ray_ranks import Place


class PlainRank:
    def __init__(self, place: Place):
        self._place = place

    def hang(self, rank):
        """This rank hangs while the others wait for it."""
        self._place.alive()
        if self._place.rank == rank:
            time.sleep(3600)
        self._place.alive()
        dist.barrier()

    def fail(self, rank):
        """This rank meets an error while the others wait for it."""
        if self._place.rank == rank:
            raise ZeroDivisionError("a bug")
        dist.barrier()

    def work_slowly(self, seconds):
        for _ in range(10):
            time.sleep(seconds / 10)
            self._place.alive()
        return self._place.rank

    def write_slowly(self, seconds):
        """Says nothing of its progress."""
        time.sleep(seconds)
        return self._place.rank

    def add(self, number):
        """A collective, so that it needs all ranks."""
        numbers = [None] * self._place.world_size
        dist.all_gather_object(numbers, number)
        return sum(numbers), self._place.on_host, self._place.of_host
