"""A rank that ends, hangs or fails gives one clear error, and no process is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_parts import Rank, RanksOfTests, make_samples

from dapo_rl.cluster.processes import RankLostError, RankProcesses

pytestmark = pytest.mark.slow


def lives(pid):
    """Whether a process runs; one that nobody has waited for yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def policy():
    with RanksOfTests(RankProcesses(Rank, 2, timeout_s=4)) as policy:
        yield policy.build(token_budget=8)


def assert_lost(policy, match, call):
    pids = policy.ranks.pids
    start = time.monotonic()
    with pytest.raises(RankLostError, match=match) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert not any(map(lives, pids))
    with pytest.raises(RankLostError, match="the ranks have been ended"):
        policy.score(make_samples())
    return time.monotonic() - start


def test_a_rank_that_ends_is_noticed(policy):
    taken = assert_lost(
        policy, r"^rank 1 ended with exit code 7 in end_one$", lambda: policy.ranks.call("end_one", [(1,)] * 2)
    )
    assert taken < 3


def test_a_rank_that_was_killed_is_noticed(policy):
    os.kill(policy.ranks.pids[0], signal.SIGKILL)
    taken = assert_lost(
        policy, r"^rank 0 was killed by signal 9 in update$", lambda: policy.update(make_samples(), 1e-4)
    )
    assert taken < 5


def test_a_rank_that_hangs_is_noticed(policy):
    taken = assert_lost(
        policy, r"^no progress for 4 s in hang, on rank 1$", lambda: policy.ranks.call("hang", [(1,)] * 2)
    )
    assert 4 <= taken < 8


def test_a_slow_rank_is_not_taken_for_one_that_hangs(policy):
    assert policy.ranks.call("work_slowly", [(6,)] * 2) == [0, 1]


def test_an_error_on_one_rank_ends_all(policy):
    pids = policy.ranks.pids
    with pytest.raises(RuntimeError, match=r"(?s)^rank 1:\n.*ZeroDivisionError: a bug"):
        policy.ranks.call("fail", [(1,)] * 2)
    assert not any(map(lives, pids))


DRIVER = """
import sys, time
from rank_parts import Rank
from dapo_rl.cluster.processes import RankProcesses
if __name__ == "__main__":
    ranks = RankProcesses(Rank, 2)
    ranks.call("build")
    print(*ranks.pids, flush=True)
    ranks.call("hang", [(1,)] * 2)
"""


def test_no_rank_outlives_a_driver_that_was_killed(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    paths = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "driver.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as driver:
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(lives, pids))
        time.sleep(1)  # they are inside a collective
        driver.kill()
    end = time.monotonic() + 5
    while any(map(lives, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(lives, pids))
