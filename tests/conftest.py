"""Set before torch is imported: two test processes on two cores have one thread each, or they wait for each other."""

import gc
import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

HERE = Path(__file__).parent

gc.disable()  # all that the tests import stays; to look through it again and again takes a quarter of the time

# The time of one example says nothing on a machine that has other work.
settings.register_profile("dapo", deadline=None)
settings.load_profile("dapo")


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


# What takes long is begun first, or one process works on it alone at the end.
LONG = ("cluster", "e2e", "launch", "lab", "board")


def pytest_collection_modifyitems(items):
    ranks = {name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(item.path.relative_to(HERE).parts[0], len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A process takes a file at a time, so that what its tests share is made once; those that share Ray are one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "cluster" if "/cluster/" in file else file

    config.option.loadscopereorder = False  # the order of `LONG` stays
    return Scheduling(config, log)
