"""A small disk that fills up during a run."""

import os
import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest
from transformers import TrainerCallback

FULL = "No space left on device"
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to mount a small disk"
)


@contextmanager
def small_disk(path):
    """A disk of 160 MiB."""
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("cannot mount a disk here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(disk, leave):
    """Writes a file that leaves this many MiB free."""
    with (disk / "ballast").open("wb") as file:
        while (more := shutil.disk_usage(disk).free - int(leave * 2**20)) > 0:
            file.write(bytes(min(more, 1 << 20)))
            file.flush()


class FillUp(TrainerCallback):
    """Leaves `leave` MiB after a step, and frees the disk after another."""

    def __init__(self, disk, at, leave, free_at=None):
        self.disk, self.at, self.leave, self.free_at = disk, at, leave, free_at

    def on_step_begin(self, args, state, control, **_):
        while any((self.disk / "run" / "checkpoints").glob(".*.part")):  # the last one is complete
            time.sleep(0.01)
        if state.global_step == self.at:
            fill(self.disk, self.leave)
        if state.global_step == self.free_at:
            (self.disk / "ballast").unlink()
