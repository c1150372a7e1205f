"""Weights that engines read from a rank on the same GPU or host."""

import os
import signal
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from stepping_engine import LONGEST, Numbers, stepping

from dapo_rl.cluster.engine_pool import EnginePool
from dapo_rl.cluster.ray_session import import_ray
from dapo_rl.cluster.weights_ipc import BROKEN_OFF, END, BorrowedWeights, BrokenOffError, borrow, lend, memory_of
from dapo_rl.config import ClusterSettings
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.errors import RankLostError

pytestmark = pytest.mark.slow

ENGINES = 2


class Lender(Numbers):
    """Lends its weights from this process, as a rank does from its own."""

    def __init__(self, value, memory=None, before=lambda name: None):
        super().__init__(value)
        self.memory, self.before = memory, before
        self.borrowers = []

    def lenders(self):
        return ["nowhere", self.memory or memory_of("cpu")]

    def lent(self, nbytes, dtype, borrowers):
        for bucket in self.buckets(nbytes):
            self.before(bucket[0][0])
            self.borrowers.append(list(borrowers()))
            yield lend(bucket, len(self.borrowers[-1]))


@pytest.fixture(scope="module")
def two(ray_instance, warm_engines):
    settings = ClusterSettings(backend="ray", engines=ENGINES, weights="direct", restarts=1000, timeout_s=20)
    pool = EnginePool(stepping(0.002), Numbers(0), settings, note=(notes := []).append)
    pool.notes = notes
    yield pool
    pool.close()


@pytest.fixture
def pool(two):
    while not all(replica.in_service for replica in two._replicas):
        two._tend()
    two.notes.clear()
    return two


def version_sampled(pool):
    """The weights with which all engines sample, as their log-probabilities tell, and their version."""
    for number in range(2 * ENGINES):
        pool.submit(Request(f"draw-{number}", np.array([1]), 1, SamplingParams(max_new_tokens=LONGEST), seed=number))
    samples = []
    while done := pool.poll():
        samples += [completion.sample for completion in done]
    assert len(samples) == 2 * ENGINES
    [version] = {int(version) for sample in samples for version in sample.versions}
    assert all((sample.logps == -version).all() for sample in samples)
    return version


def kill(pool, index):
    [(pid, _)] = import_ray().get([pool._replicas[index].send("about")])
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)


def test_what_is_lent_is_shared():
    weight = torch.arange(6.0).reshape(2, 3)
    first, second = lend([("a", weight), ("b", torch.ones(1, dtype=torch.bfloat16))], 2)
    [(name, borrowed), (_, other)] = borrow(first)
    assert (name, other.dtype) == ("a", torch.bfloat16)
    assert torch.equal(borrowed, weight)
    weight[0, 0] = 7.0
    assert borrowed[0, 0] == borrow(second)[0][1][0, 0] == 7.0
    assert lend([("a", weight)], 0) == []


def test_buckets_are_read_in_turn():
    weights, fed = BorrowedWeights(), []

    def feed():
        for number in range(3):
            fed.append(weights.feed(lend([("a", torch.full((1,), float(number)))], 1)[0]))
        fed.append(weights.feed(END))

    thread = Thread(target=feed)
    thread.start()
    seen = []
    for bucket in weights.buckets(1):
        seen.append(float(bucket[0][1][0]))
        assert len(fed) == len(seen) - 1, "the next bucket comes when this one has been read"
    weights.close()
    thread.join(10)
    assert (seen, fed) == ([0.0, 1.0, 2.0], [True, True, True, False])


def test_a_reader_learns_that_no_more_will_come():
    weights = BorrowedWeights()
    weights._handles.put((BROKEN_OFF, None))
    with pytest.raises(BrokenOffError):
        list(weights.buckets(1))


def test_engines_read_the_weights_of_their_rank(pool):
    source = Lender(1)
    pool.receive(1, source)
    assert source.borrowers == [[1, 1], [1, 1]]
    assert version_sampled(pool) == 1
    assert pool._stored is None
    assert pool.notes == []


def test_an_engine_without_a_rank_takes_them_from_the_store(pool):
    source = Lender(2, memory="elsewhere")
    pool.receive(2, source)
    assert source.borrowers == []
    assert version_sampled(pool) == 2


def test_an_engine_that_is_lost_while_it_reads_gets_them_from_the_store(pool):
    source = Lender(3, before=lambda name: name == "second" and kill(pool, 0))
    pool.receive(3, source)
    assert [note.partition(":")[0] for note in pool.notes] == ["engine 0 was lost"]
    assert version_sampled(pool) == 3


def test_engines_do_not_sample_with_half_a_version(pool):
    def lose(name):
        if name == "second":
            raise RankLostError("rank 0 was killed")

    with pytest.raises(RankLostError):
        pool.receive(4, Lender(4, before=lose))
    pool.receive(5, Lender(5))
    assert version_sampled(pool) == 5
    assert pool.notes == [], "no engine is lost with the ranks"


class Gone(Lender):
    """Its ranks are lost after they lent their weights."""

    def buckets(self, nbytes):
        if len(self.borrowers) == 2:
            raise RankLostError("rank 0 was killed")
        yield from super().buckets(nbytes)


def test_engines_that_are_lost_with_the_ranks_wait_for_new_weights(pool):
    pool.receive(6, Gone(6))
    kill(pool, 0)
    assert version_sampled(pool) == 6, "the other engine takes the samples"
    assert [replica.absent for replica in pool._replicas] == [True, False]
    kill(pool, 1)
    with pytest.raises(RankLostError, match="rank 0 was killed"):
        version_sampled(pool)
    assert pool.take_unfinished()
    pool.release_memory()
    pool.receive(7, Lender(7))
    assert version_sampled(pool) == 7
