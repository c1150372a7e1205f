"""Nothing is left behind by a driver that was killed."""

import os
import re
import subprocess
from pathlib import Path

import forked
import pytest
from forked import DAPO
from patience import lives
from support import SMALL
from test_rank_failures import assert_end

pytestmark = pytest.mark.slow


def descendants(pid):
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, new = set(), {pid}
    while new:
        found |= new
        new = {child for child, parent in parents.items() if parent in new} - found
    return found - {pid}


def shared_memory(pids):
    """The files in shared memory that these processes use."""
    maps = (Path(f"/proc/{pid}/maps").read_text() for pid in pids if lives(pid))
    return {name for text in maps for name in re.findall(r"/dev/shm/\S+(?! \(deleted\))$", text, re.M)}


def test_no_process_and_no_shared_memory_outlive_the_driver(tmp_path):
    settings = [*SMALL, "data.eval=null", "eval.every=null", "train.steps=99", "cluster.backend=ray", "cluster.ranks=2"]
    words = [DAPO, "train", *settings, "--run", tmp_path / "run"]
    with forked.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        for line in driver.stdout:
            if re.match(r"step +1/", line):
                break
        pids = descendants(driver.pid)
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if lives(pid)}
        assert sum(b"RankActor" in command for command in commands.values()) == 2
        assert any(b"raylet" in command for command in commands.values())
        shared = shared_memory(pids)
        driver.kill()
    assert_end(pids, within=30)
    assert not [name for name in shared if os.path.exists(name)]
