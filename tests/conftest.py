"""Set before torch is imported: two test processes on two cores have one thread each, or they wait for each other."""

import gc
import os
import signal
import sys

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `nohup make test &`; processes that tests start inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

gc.disable()  # all that the tests import stays; to look through it again and again takes a quarter of the time
# Also where Python is told to write no bytecode: pytest would rewrite the assertions of all modules each time.
told_to_write_none, sys.dont_write_bytecode = sys.dont_write_bytecode, False

# The time of one example says nothing on a machine that has other work.
settings.register_profile("dapo", deadline=None)
settings.load_profile("dapo")


def pytest_collection_finish():
    sys.dont_write_bytecode = told_to_write_none
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Commands that a test runs in this process set a handler, with which Ctrl-C in a later test would end it."""
    before = signal.getsignal(signal.SIGINT)
    result = yield
    signal.signal(signal.SIGINT, before)
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") == "loadfile":
        from longest_first import LongestFirst

        return LongestFirst(config, log)
    return None
