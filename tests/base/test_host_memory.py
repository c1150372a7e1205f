"""The memory of the host, and what control groups leave of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_rl.base.host_memory import MemoryGroup, host_memory, own_group
from dapo_rl.workers import limits

MIB, GIB = 1 << 20, 1 << 30
PHYSICAL = 64 * GIB
V1_NO_LIMIT = 9223372036854771712
FILE = {1: "memory.limit_in_bytes", 2: "memory.max"}


class Host:
    """The files of a process and of its control groups, as Linux has them."""

    def __init__(self, root, version, own="/", mount_root="/"):
        self.version, self.proc, self.mount = version, root / "proc", root / "sys" / "memory"
        self.proc.mkdir()
        self.mount.mkdir(parents=True)
        kind = "cgroup rw,memory" if version == 1 else "cgroup2 rw,nsdelegate"
        line = f"4:memory:{own}\n0::/elsewhere\n" if version == 1 else f"0::{own}\n"
        (self.proc / "cgroup").write_text(f"9:name=systemd:/\n{line}")
        (self.proc / "mountinfo").write_text(
            f"31 23 0:28 / {root}/sys rw,relatime - tmpfs tmpfs rw,mode=755\n"
            f"32 31 0:29 / {root}/sys/cpu rw shared:5 - cgroup cgroup rw,cpu\n"
            f"35 31 0:32 {mount_root} {self.mount} rw shared:9 - {kind.split()[0]} {kind}\n"
        )

    def limit(self, group, text):
        directory = self.mount / group
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FILE[self.version]).write_text(f"{text}\n")

    def memory(self):
        return host_memory(self.proc, PHYSICAL)


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def version(request):
    return request.param


def test_a_limit_below_the_machines_memory(tmp_path, version):
    host = Host(tmp_path, version, "/user/run")
    host.limit("user/run", 3 * GIB)
    assert host.memory() == 3 * GIB
    host.limit("user/run", PHYSICAL + 1)
    assert host.memory() == PHYSICAL


@pytest.mark.parametrize(
    ("run", "user", "top", "expected"),
    [
        (5 * GIB, 7 * GIB, 9 * GIB, 5 * GIB),
        (7 * GIB, 5 * GIB, 9 * GIB, 5 * GIB),
        (9 * GIB, 7 * GIB, 5 * GIB, 5 * GIB),
        (None, 7 * GIB, None, 7 * GIB),
        (None, None, 9 * GIB, 9 * GIB),
        (None, None, None, PHYSICAL),
    ],
)
def test_the_limits_of_the_groups_above_hold_too(tmp_path, version, run, user, top, expected):
    host = Host(tmp_path, version, "/user/run")
    for group, limit in {"user/run": run, "user": user, "": top}.items():
        if limit is not None:
            host.limit(group, limit)
    host.limit("user/run/below", MIB)
    host.limit("user/other", MIB)
    (tmp_path / "sys" / FILE[version]).write_text(str(MIB))  # above the mount there are no groups
    assert host.memory() == expected


@pytest.mark.parametrize("text", ["max", "", "0", "-1", "nonsense", "1.5", "0x10", V1_NO_LIMIT, 2**64 - 1])
def test_what_is_no_limit(tmp_path, version, text):
    host = Host(tmp_path, version, "/run")
    host.limit("run", text)
    assert host.memory() == PHYSICAL
    host.limit("", 2 * GIB)
    assert host.memory() == 2 * GIB


def test_a_container_sees_its_own_group_at_the_mount(tmp_path, version):
    host = Host(tmp_path, version, "/docker/1", mount_root="/docker/1")
    host.limit("", 2 * GIB)
    assert own_group(host.proc) == MemoryGroup(version, host.mount, host.mount)
    assert host.memory() == 2 * GIB


@pytest.mark.parametrize(("own", "root"), [("/docker/12", "/docker/1"), ("/", "/docker/1"), ("/../outside", "/")])
def test_a_group_that_is_not_under_the_mount_has_no_limits(tmp_path, version, own, root):
    host = Host(tmp_path, version, own, mount_root=root)
    host.limit("", 2 * GIB)
    assert own_group(host.proc) is None
    assert host.memory() == PHYSICAL


def test_a_group_whose_directory_cannot_be_seen(tmp_path, version):
    host = Host(tmp_path, version, "/user/run")
    host.limit("", 2 * GIB)
    assert host.memory() == 2 * GIB


@pytest.mark.parametrize("missing", ["cgroup", "mountinfo"])
def test_missing_files(tmp_path, version, missing):
    host = Host(tmp_path, version)
    host.limit("", 2 * GIB)
    (host.proc / missing).unlink()
    assert host.memory() == PHYSICAL
    (host.proc / missing).write_text("nonsense\n")
    assert host.memory() == PHYSICAL
    assert host_memory(tmp_path / "none", PHYSICAL) == PHYSICAL


def test_version_2_counts_nothing_where_version_1_does(tmp_path):
    host = Host(tmp_path, 1, "/run")
    host.limit("run", 3 * GIB)
    unified = tmp_path / "unified"
    unified.mkdir()
    (unified / "memory.max").write_text(str(MIB))
    with (host.proc / "mountinfo").open("a") as file:
        file.write(f"41 31 0:38 /elsewhere {unified} rw - cgroup2 cgroup2 rw\n")
    assert host.memory() == 3 * GIB


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="the kernel's own count is in /proc")
def test_this_machine():
    total = 1024 * int(re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1])
    memory = host_memory()
    assert 64 * MIB < memory <= total
    group = own_group()
    if group is None or not any(limit < total for limit in group.limits()):
        assert memory == total


@pytest.mark.slow
def test_a_process_in_a_real_group():
    """The limit of a group that the kernel keeps, also as the share that is for keys and values."""
    group = limits.find_groups().new(os.getpid(), 512 * MIB)
    if group is None:
        pytest.skip("no memory control group can be made here")
    code = (
        f"from pathlib import Path; Path({str(group.path / 'cgroup.procs')!r}).write_text('0')\n"
        "import torch\n"
        "from dapo_rl.base.host_memory import host_memory\n"
        "from dapo_rl.engines.native.kv_cache import memory_share\n"
        "print(host_memory(), memory_share(torch.device('cpu')))"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    finally:
        group.remove()
    assert done.stdout.split() == [str(512 * MIB), str(128 * MIB)], done.stderr
