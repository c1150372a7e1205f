"""A rank that ends, hangs or fails gives one clear error, and no process is left behind."""

import os
import signal
import threading
import time

import pytest
from patience import lives
from plain_ranks import PlainRank

from dapo_rl.cluster import ray_ranks
from dapo_rl.cluster.ray_ranks import RayRanks
from dapo_rl.errors import RankLostError

pytestmark = pytest.mark.slow


def assert_end(pids, within=10):
    end = time.monotonic() + within
    while any(map(lives, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(lives, pids))


@pytest.fixture
def ranks(ray_instance):
    ranks = RayRanks(PlainRank, 2, timeout_s=2)
    yield ranks
    ranks.close(kill=True)


def assert_lost(ranks, match, call):
    start = time.monotonic()
    with pytest.raises(RankLostError, match=match) as raised:
        call()
    taken = time.monotonic() - start
    assert "\n" not in str(raised.value)
    assert_end(ranks.pids)
    with pytest.raises(RankLostError, match=match):
        ranks.call("add", 1)
    return taken


def test_a_rank_that_was_killed_is_noticed_at_once(ranks):
    ranks._timeout_s = 60
    assert ranks.call_each("add", [(1,), (2,)]) == [(3, 0, 2), (3, 1, 2)]
    killer = threading.Timer(0.5, lambda: os.kill(ranks.pids[0], signal.SIGKILL))
    killer.start()
    taken = assert_lost(ranks, r"^rank 0 was killed or crashed, in hang$", lambda: ranks.call("hang", 1))
    assert taken < 30


def test_a_rank_that_hangs_is_noticed(ranks):
    """A slow one is not taken for one."""
    assert ranks.call("work_slowly", 3) == [0, 1]
    assert ranks.call_aside("write_slowly", 3) == [0, 1]
    taken = assert_lost(ranks, r"^no progress for \d+ s in hang, on rank 1$", lambda: ranks.call("hang", 1))
    assert 2 <= taken < 30


def test_a_driver_that_was_stopped_does_not_take_it_for_silence_of_the_ranks(ranks):
    pauses = iter([3])
    answers = ranks.call_aside("write_slowly", 5, check=lambda: time.sleep(next(pauses, 0)))
    assert answers == [0, 1]


def test_a_rank_that_is_stopped_is_noticed_while_it_writes(ranks):
    os.kill(ranks.pids[1], signal.SIGSTOP)
    match = r"^no progress for \d+ s in write_slowly, on rank 1$"
    taken = assert_lost(ranks, match, lambda: ranks.call_aside("write_slowly", 0.1))
    assert 2 <= taken < 30


def test_an_error_on_one_rank_ends_all(ranks, monkeypatch):
    monkeypatch.setattr(ray_ranks, "GRACE_S", 1)
    with pytest.raises(RuntimeError, match=r"(?s)^rank 1:\n.*ZeroDivisionError: a bug"):
        ranks.call("fail", 1)
    assert_end(ranks.pids)
