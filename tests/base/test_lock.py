import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from dapo_rl.base import lock
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.runs.directory import RunDirectory

HOLDER = """
import os, sys, time
from pathlib import Path
from dapo_rl.base.lock import acquire
release = acquire(Path(sys.argv[1]))
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "run", Config())


@pytest.fixture
def holder(run):
    """Another process that has the directory."""
    started = []

    def start(how="alone"):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, run.path, how], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout.readline() == "held\n"
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_directory_in_use_names_the_process_and_the_host(run, holder):
    pid, before = holder().pid, sorted(run.path.iterdir())
    said = f"{run.path}: in use by process {pid} on {socket.gethostname()}; wait"
    with pytest.raises(UserError, match=re.escape(said)), run.locked():
        pytest.fail("two processes have it")
    assert sorted(run.path.iterdir()) == before
    with pytest.raises(UserError, match="in use by process"), run.locked():  # asking has not freed it
        pytest.fail("two processes have it")


@pytest.mark.parametrize("how", ["alone", "fork"])
@pytest.mark.slow
def test_a_killed_process_has_it_no_longer_though_its_child_lives(run, holder, how):
    process = holder(how)
    process.kill()
    process.wait()
    with run.locked():
        assert (run.path / lock.NAME).read_text().split()[0] == str(os.getpid())
    assert not (run.path / lock.NAME).exists()


def test_two_trainers_of_one_process(run, tmp_path):
    (tmp_path / "link").symlink_to(run.path)
    with run.locked():
        for path in (run.path, tmp_path / "link"):
            with pytest.raises(UserError, match="in use by another trainer of this process"):
                RunDirectory(path).locked().__enter__()
    with run.locked():
        pass


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(run, monkeypatch):
    """The one before removes the file after we opened it: a lock on a file without a name keeps no one out."""
    real, removed = lock.fcntl.lockf, []

    def lockf(descriptor, how):
        real(descriptor, how)
        if not removed:
            removed.append((run.path / lock.NAME).unlink())

    monkeypatch.setattr(lock.fcntl, "lockf", lockf)
    with run.locked():
        assert (run.path / lock.NAME).exists()
        assert removed


def test_a_file_system_without_locks_goes_without(run, monkeypatch):
    def lockf(descriptor, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", lockf)
    with run.locked():
        pass


def test_a_directory_that_cannot_be_written(tmp_path):
    for path in ("/proc/dapo-run", "/sys/dapo-run"):
        with pytest.raises(UserError, match=f"{path}: cannot be written: .*; name another with --run"):
            RunDirectory.create(path, Config())


def test_the_lock_is_free_after_an_error(run):
    with pytest.raises(KeyboardInterrupt), run.locked():
        raise KeyboardInterrupt
    started = time.monotonic()
    with run.locked():
        assert time.monotonic() - started < 5
