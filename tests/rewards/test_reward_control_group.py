"""Control groups: the limit on memory holds for all processes of a worker together, and no group is left behind."""

import functools
import mmap
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from test_reward_processes import (
    PROMPT,
    anonymous,
    by_text,
    daemonize,
    in_a_daemon,
    in_children,
    in_dev_shm,
    is_alive,
    keep,
    named,
    pid_in,
    samples,
    scores,
    wait_until,
)

from dapo_rl.workers import limits, supervisor
from dapo_rl.workers.limits import ControlGroup, ControlGroups

MIB = 1 << 20
TOGETHER = "was killed: with its children, it used more memory than reward.memory_mb allows"


@functools.cache
def can_make_groups():
    group = limits.find_groups().new(os.getpid(), 64 * MIB)
    if group is not None:
        group.remove()
    return group is not None


def real(test):
    """Marks a test that starts processes in control groups of this machine."""
    without_groups = pytest.mark.skipif(not can_make_groups(), reason="no memory control group can be made here")
    return pytest.mark.slow(without_groups(test))


def groups_of(supervisor_pid):
    directory = limits.find_groups().directory
    return [path.name for path in directory.iterdir() if path.name.startswith(f"dapo-verifier-{supervisor_pid}-")]


def supervisor_of(pool):
    return pool._workers.supervisor.pid


@pytest.fixture
def small(monkeypatch):
    """What the tests have loaded is more than the limits that they set."""
    monkeypatch.setattr(supervisor.processes, "private_bytes", lambda: 0)


def fill(size):
    memory = bytearray(size)
    memory[::4096] = b"x" * len(memory[::4096])
    return memory


# The limit.


@real
def test_the_memory_of_several_processes_adds_up(small):
    def act(text):
        children = []
        for _ in range(4):
            children.append(os.fork())
            if children[-1] == 0:
                kept = fill(60 * MIB)
                time.sleep(1000 if kept else 0)
        for child in children:
            os.waitpid(child, 0)

    with by_text(act, memory_mb=100) as pool:
        for n in range(2):
            (verdict,) = pool(PROMPT, samples("fork"))
            assert (verdict.status, verdict.score) == ("error", -1)
            assert TOGETHER in verdict.detail
            assert scores(pool, str(n)) == [n]


@real
def test_a_killed_child_is_no_answer(small, monkeypatch):
    monkeypatch.setattr(supervisor, "WATCH_S", 1000)  # the worker itself looks, before it replies

    def act(text):
        # Nothing is left for the children, of which the kernel kills one.
        code = "memory = bytearray(90 << 20); memory[::4096] = b'x' * len(memory[::4096]); input()"
        children = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) for _ in range(2)]
        wait_until(lambda: any(child.poll() is not None for child in children))
        return 1.0

    with by_text(act, memory_mb=100) as pool:
        (verdict,) = pool(PROMPT, samples("run"))
        assert (verdict.status, TOGETHER in verdict.detail) == ("error", True)
        assert scores(pool, "3") == [3]


@real
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_a_file_in_memory_counts_without_being_mapped(small):
    path = Path(f"/dev/shm/dapo-test-{os.getpid()}")

    def act(text):
        with path.open("wb") as file:
            for _ in range(300):
                file.write(bytes(MIB))
        time.sleep(1000)

    try:
        with by_text(act, memory_mb=100) as pool:
            (verdict,) = pool(PROMPT, samples("write"))
            assert (verdict.status, TOGETHER in verdict.detail) == ("error", True)
            assert path.stat().st_blocks * 512 <= 100 * MIB + supervisor.SLACK
            path.unlink()
            assert scores(pool, "3") == [3]
            assert len(groups_of(supervisor_of(pool))) == 1  # the one with the file is gone
    finally:
        path.unlink(missing_ok=True)


@real
@pytest.mark.parametrize("allocate", [anonymous, named, in_dev_shm, in_children, in_a_daemon])
def test_shared_memory_counts_before_the_next_look(allocate, small, monkeypatch):
    monkeypatch.setattr(limits, "shared_memory_exceeds", lambda *_: False)

    def act(text):
        allocate(200 * MIB)
        time.sleep(1000)

    with by_text(act, memory_mb=100) as pool:
        (verdict,) = pool(PROMPT, samples("take"))
        assert (verdict.status, TOGETHER in verdict.detail) == ("error", True)
        assert scores(pool, "3") == [3]


@real
def test_what_was_loaded_before_the_fork_does_not_count():
    ballast = fill(150 * MIB)

    def act(text):
        ballast[::4096] = b"y" * len(ballast[::4096])  # copies each page
        return float(len(fill(80 * MIB)) >> 20)

    with by_text(act, memory_mb=100) as pool:
        assert scores(pool, "copy") == [80]


@real
def test_shared_memory_of_the_run_does_not_count_where_a_worker_writes_first(small):
    with mmap.mmap(-1, 200 * MIB) as ours:

        def act(text):
            keep(ours)
            return 5.0

        with by_text(act, memory_mb=100) as pool:
            assert scores(pool, "write") == [5]


@real
def test_one_process_still_has_a_memory_error_of_its_own(small):
    with by_text(lambda text: len(fill(200 * MIB)), memory_mb=100) as pool:
        (verdict,) = pool(PROMPT, samples("take"))
        assert (verdict.status, "ran out of memory (reward.memory_mb)" in verdict.detail) == ("error", True)


@real
def test_a_worker_that_something_else_kills_is_not_said_to_take_too_much():
    with by_text(lambda text: os.kill(os.getpid(), signal.SIGKILL)) as pool:
        assert "is the machine out of memory?" in pool(PROMPT, samples("kill"))[0].detail


@real
def test_a_worker_is_in_its_group_before_the_verifier_runs():
    def act(text):
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        return float(f"dapo-verifier-{text.split()[1]}-" in own)

    with by_text(act, workers=2) as pool:
        assert scores(pool, f"supervisor {supervisor_of(pool)}") == [1]
        assert len(groups_of(supervisor_of(pool))) == 1


# What is left.


@real
def test_a_daemon_dies_with_its_worker_where_no_process_adopts_it(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor.processes, "adopt_orphans", lambda: None)
    monkeypatch.setattr("dapo_rl.workers.worker.adopt_orphans", lambda: None)

    def act(text):
        daemonize(tmp_path / text)
        os._exit(7)

    with by_text(act) as pool:
        assert "exited with code 7" in pool(PROMPT, samples("a"))[0].detail
        wait_until(lambda: not is_alive(pid_in(tmp_path / "a")))
        assert groups_of(supervisor_of(pool)) == []


@real
def test_no_group_is_left_when_the_pool_closes(tmp_path):
    with by_text(lambda text: daemonize(tmp_path / text), workers=2) as pool:
        tickets = [pool.submit(PROMPT, samples(text)) for text in ("a", "b")]
        assert [ticket.result()[0].score for ticket in tickets] == [1, 1]
        supervisor_pid = supervisor_of(pool)
        assert groups_of(supervisor_pid)
    assert groups_of(supervisor_pid) == []


@real
def test_no_group_is_left_when_the_fork_server_dies(tmp_path):
    with by_text(lambda text: daemonize(tmp_path / text)) as pool:
        for text in ("a", "b"):
            assert scores(pool, text) == [1]
            os.kill(pool.pids[0], signal.SIGKILL)
            wait_until(lambda: groups_of(supervisor_of(pool)) == [])
            assert not is_alive(pid_in(tmp_path / text))


@real
def test_no_group_is_left_when_the_supervisor_dies(tmp_path):
    with by_text(lambda text: daemonize(tmp_path / text)) as pool:
        assert scores(pool, "a") == [1]
        supervisor_pid = supervisor_of(pool)
        os.kill(supervisor_pid, signal.SIGKILL)
    wait_until(lambda: groups_of(supervisor_pid) == [])
    wait_until(lambda: not is_alive(pid_in(tmp_path / "a")))


@pytest.fixture
def run(tmp_path):
    """A run that has a worker and a daemon, and the pids of both, of the fork server and of the supervisor."""
    code = f"""
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {os.path.dirname(__file__)!r})
    from test_reward_processes import PROMPT, by_text, daemonize, samples
    pool = by_text(lambda text: daemonize(Path({str(tmp_path)!r}, text)))
    pool(PROMPT, samples("a"))
    print(pool._workers.supervisor.pid, *pool.pids, flush=True)
    time.sleep(1000)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    supervisor_pid, *pids = map(int, process.stdout.readline().split())
    assert len(groups_of(supervisor_pid)) == 1
    yield process, supervisor_pid, [*pids, pid_in(tmp_path / "a")]
    process.kill()
    process.wait()


@real
def test_no_group_is_left_when_the_run_is_killed(run):
    process, supervisor_pid, pids = run
    process.kill()
    wait_until(lambda: groups_of(supervisor_pid) == [])
    assert not any(map(is_alive, pids))


@real
def test_the_next_run_removes_what_a_killed_run_and_supervisor_left(run):
    process, supervisor_pid, pids = run
    os.kill(process.pid, signal.SIGSTOP)  # it cannot clean up
    os.kill(supervisor_pid, signal.SIGKILL)
    process.kill()
    process.wait()
    assert len(groups_of(supervisor_pid)) == 1
    wait_until(lambda: not os.path.exists(f"/proc/{supervisor_pid}"))
    assert is_alive(pids[-1])  # the daemon, which nothing else can reach
    with by_text(None) as pool:
        assert scores(pool, "3") == [3]
        assert groups_of(supervisor_pid) == []
        wait_until(lambda: not is_alive(pids[-1]))


@real
def test_the_groups_of_a_living_run_are_left_alone():
    with by_text(None) as first:
        assert scores(first, "1") == [1]
        before = groups_of(supervisor_of(first))
        with by_text(None) as second:
            assert scores(second, "2") == [2]
        assert groups_of(supervisor_of(first)) == before != []
        assert scores(first, "3") == [3]


@real
def test_groups_that_the_verifier_made_are_removed_too():
    def act(text):
        group = ControlGroup(Path(text) / "its own")
        group.path.mkdir()
        if os.fork() == 0:
            group.enter()
            time.sleep(1000)
        wait_until(group.pids)
        return 1.0

    with by_text(act) as pool:
        assert scores(pool, "0") == [0]
        supervisor_pid = supervisor_of(pool)
        (name,) = groups_of(supervisor_pid)
        assert scores(pool, str(limits.find_groups().directory / name)) == [1]
    assert groups_of(supervisor_pid) == []


@pytest.mark.slow
def test_without_groups_everything_else_is_as_it_was(monkeypatch, tmp_path):
    for groups in (ControlGroups(None), ControlGroups(tmp_path / "none"), ControlGroups(Path("/proc"))):
        monkeypatch.setattr(limits, "find_groups", lambda groups=groups: groups)
        with by_text(lambda text: os._exit(7)) as pool:
            assert scores(pool, "1") == [1]
            assert "exited with code 7" in pool(PROMPT, samples("exit"))[0].detail


# Where the own group is.

V1 = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / {}/cpu rw,relatime shared:5 - cgroup cgroup rw,cpu
35 31 0:32 {} {}/memory rw,relatime shared:9 master:2 - cgroup cgroup rw,memory
41 31 0:38 / {}/unified rw,relatime - cgroup2 cgroup2 rw
"""


def find_in(tmp_path, groups, mounts):
    (tmp_path / "cgroup").write_text(groups, encoding="utf-8")
    (tmp_path / "mountinfo").write_text(mounts, encoding="utf-8")
    return limits.find_groups(tmp_path).directory


@pytest.mark.parametrize(
    ("root", "own", "below"),
    [
        ("/", "/", ""),
        ("/", "/a/b c", "a/b c"),
        ("/docker/1", "/docker/1", ""),
        ("/docker/1", "/docker/1/x:y", "x:y"),
        ("/with\\040blank", "/with blank/x", "x"),
        ("/docker/1", "/docker/12", None),
        ("/docker/1", "/", None),
        ("/", "/../elsewhere", None),
    ],
)
def test_the_own_group_of_version_1(tmp_path, root, own, below):
    mounts = V1.format("/sys/fs/cgroup", root, "/sys/fs/cgroup", "/sys/fs/cgroup")
    found = find_in(tmp_path, f"5:cpu:/cpu\n4:blkio,memory:{own}\n0::/\n", mounts)
    assert found == (None if below is None else Path("/sys/fs/cgroup/memory", below))


@pytest.mark.parametrize("text", ["", "nonsense", "0::/\n", "4:memory:/\n", "\n", "0:::::\n"])
def test_no_own_group(tmp_path, text):
    assert find_in(tmp_path, text, "") is None
    assert find_in(tmp_path, text, "nonsense\n") is None
    assert limits.find_groups(tmp_path / "none").directory is None


# Version 2, as a tree of plain files.


@pytest.fixture
def v2(tmp_path, monkeypatch):
    """A group with the files of version 2, in which each new directory has them too."""
    names = ("cgroup.procs", "cgroup.kill", "memory.max", "memory.swap.max", "memory.oom.group", "memory.events")

    def mkdir(path):
        Path(path).mkdir()
        for name in names:
            Path(path, name).touch()

    def rmdir(path):
        if Path(path, "cgroup.procs").read_text(encoding="utf-8"):
            raise OSError(16, "busy")
        shutil.rmtree(path)

    monkeypatch.setattr(limits, "os", Replaced(os, mkdir=mkdir, rmdir=rmdir))
    own = tmp_path / "mount" / "user.slice"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("", encoding="utf-8")
    return own


class Replaced:
    def __init__(self, module, **given):
        self.__dict__.update(vars(module), **given)


def find_v2(own):
    mounts = f"30 23 0:27 / {own.parent} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    return find_in(own.parent.parent, "0::/user.slice\n", mounts)


def test_version_2_counts_memory_below_the_own_group(v2):
    control = v2 / "cgroup.subtree_control"
    assert find_v2(v2) == v2
    assert control.read_text(encoding="utf-8") == "+memory"
    control.write_text("cpu memory pids\n", encoding="utf-8")
    assert find_v2(v2) == v2
    assert control.read_text(encoding="utf-8") == "cpu memory pids\n"


def test_version_2_has_no_groups_where_processes_stand_in_the_way(v2, monkeypatch):
    def write(*_):
        raise OSError(16, "busy")

    limits.os.write = write
    assert find_v2(v2) is None
    (v2 / "cgroup.subtree_control").unlink()
    assert find_v2(v2) is None


def test_a_group_of_version_2(v2):
    groups = ControlGroups(v2)
    group = groups.new(12, 100 * MIB)
    group.enter()
    written = {path.name: path.read_text(encoding="utf-8") for path in group.path.iterdir()}
    assert group.path == v2 / "dapo-verifier-12-0"
    assert groups.new(12, 1).path == v2 / "dapo-verifier-12-1"
    assert written == {
        "cgroup.procs": "0",
        "cgroup.kill": "",
        "memory.max": str(100 * MIB),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "memory.events": "",
    }


@pytest.mark.parametrize(
    ("oom", "oom_kill", "exceeded"),
    [(0, 0, False), (3, 0, False), (3, 1, True), (0, 1, False)],  # the last: killed for the machine's sake
)
def test_the_events_of_version_2(v2, oom, oom_kill, exceeded):
    group = ControlGroups(v2).new(12, MIB)
    text = f"low 0\nhigh 0\nmax 9\noom {oom}\noom_kill {oom_kill}\noom_group_kill 0\n"
    (group.path / "memory.events").write_text(text, encoding="utf-8")
    assert group.was_exceeded() is exceeded


def test_a_group_of_version_2_is_killed_as_a_whole(v2, monkeypatch):
    monkeypatch.setattr(limits, "PATIENCE_S", 0.01)
    group = ControlGroups(v2).new(12, MIB)
    (group.path / "cgroup.procs").write_text("0\n", encoding="utf-8")  # it cannot be killed
    group.remove()
    assert (group.path / "cgroup.kill").read_text(encoding="utf-8") == "1"
    (group.path / "cgroup.procs").write_text("", encoding="utf-8")
    group.remove()
    assert not group.path.exists()


def test_groups_of_dead_supervisors_are_removed_and_no_others(v2):
    dead = subprocess.Popen(["true"])
    dead.wait()
    groups = ControlGroups(v2)
    owners = [dead.pid, os.getpid(), os.getppid(), dead.pid]
    made = [groups.new(owner, MIB).path for owner in owners]
    (made[-1] / "cgroup.procs").write_text("0\n", encoding="utf-8")  # its processes are in another namespace
    others = [v2 / name for name in ("dapo-verifier-", "dapo-verifier-999999-0-x", "system.slice")]
    for path in others:
        path.mkdir()
    groups.remove_abandoned()
    assert sorted(path for path in v2.iterdir() if path.is_dir()) == sorted([*made[2:], *others])
    groups.remove(os.getppid())
    assert not made[2].exists()
