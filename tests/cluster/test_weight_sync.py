"""What is made of an engine that is lost while new weights are brought to it, at each of the points where it may be.

The engines are records of what is asked of them: which call a real one is lost in cannot be chosen, and the loss of a
member may be noticed by the group first.
"""

from contextlib import contextmanager

import pytest

from dapo_rl.cluster.engine_replica import EngineLostError
from dapo_rl.cluster.weight_sync import Delivery
from dapo_rl.cluster.weights_ipc import BROKEN_OFF, END
from dapo_rl.config import ClusterSettings
from dapo_rl.errors import RankLostError

BUCKETS = ["first", "second"]


class Replica:
    """It is lost in the call of this number, or says that the weights have broken off."""

    timeout_s = 1.0

    def __init__(self, lost_in=None, breaks_in=None):
        self.lost_in, self.breaks_in = lost_in, breaks_in
        self.calls, self.in_service, self.actor = [], True, object()

    def send(self, *call):
        self.calls.append(call)
        return len(self.calls) - 1, call

    def result(self, ref, timeout_s):
        number, (method, *_) = ref
        if number == self.lost_in:
            raise EngineLostError("it was killed")
        return "here" if method == "memory" else number != self.breaks_in

    @property
    def fed(self):
        return [call[1] for call in self.calls if call[0] == "feed"]


class Source:
    """Notices nothing of a lost engine itself."""

    ranks_lost = False

    def __init__(self):
        self.address, self.borrowers = None, []

    def lenders(self):
        return ["there", "here"]

    def lent(self, nbytes, dtype, borrowers):
        for name in BUCKETS:
            self.borrowers.append(borrowers())
            yield [name.encode()] * len(self.borrowers[-1])

    def channel(self):
        return self.address

    def open_channel(self):
        self.address = ("host", 1)
        return self.address

    def join_channel(self, size, timeout_s):
        return True

    def layouts(self, nbytes, dtype):
        return BUCKETS

    def send(self, bucket):
        if self.ranks_lost:
            raise RankLostError("rank 0 was killed")
        return True

    def close_channel(self):
        self.address = None


def delivery(weights, replicas):
    @contextmanager
    def or_lost(replica):
        try:
            yield
        except EngineLostError:
            replica.in_service = False

    settings = ClusterSettings(backend="ray", engines=len(replicas), placement=PLACEMENT[weights], weights=weights)
    return Delivery(replicas, settings, None, "cpu", or_lost)


PLACEMENT = {"direct": "shared", "broadcast": "separate"}


def test_weights_that_are_sent_to_all_are_delivered():
    replicas, source = [Replica(), Replica()], Source()
    bringing = delivery("broadcast", replicas)
    assert bringing.bring(1, source)
    assert bringing.bring(2, source)
    for replica in replicas:
        assert [call[0] for call in replica.calls] == ["join", *["borrow", "feed", "feed", "feed"] * 2]
        assert replica.fed == [*BUCKETS, END] * 2


@pytest.mark.parametrize(("lost_in", "fed"), [(0, []), (2, ["first", BROKEN_OFF]), (3, [*BUCKETS, BROKEN_OFF])])
def test_the_others_need_the_weights_from_the_store_if_an_engine_is_lost_before_all_were_sent(lost_in, fed):
    replicas, source = [Replica(), Replica(lost_in)], Source()
    assert not delivery("broadcast", replicas).bring(1, source)
    assert replicas[0].fed == fed
    assert source.address is None, "the group is not used again"


def test_an_engine_that_is_lost_after_the_last_bucket_has_not_loaded_the_weights():
    replicas, source = [Replica(), Replica(lost_in=4)], Source()
    bringing = delivery("broadcast", replicas)
    assert not bringing.bring(1, source)
    replicas[1].in_service = True  # the engine that was started in its place has another actor
    replicas[1].actor, replicas[1].lost_in = object(), None
    assert bringing.bring(2, source)
    assert [call[0] for call in replicas[0].calls].count("join") == 2, "the group is formed again"


@pytest.mark.parametrize("breaks_in", [0, 2, 4])
def test_an_engine_that_did_not_get_the_weights_needs_them_from_the_store(breaks_in):
    assert not delivery("broadcast", [Replica(), Replica(breaks_in=breaks_in)]).bring(1, Source())


def test_a_group_is_not_used_again_if_the_ranks_were_lost_while_they_sent():
    replica, source = Replica(), Source()
    bringing = delivery("broadcast", [replica])
    assert bringing.bring(1, source)
    source.ranks_lost = True
    with pytest.raises(RankLostError):
        bringing.bring(2, source)
    assert replica.fed[-1] == BROKEN_OFF
    source.ranks_lost = False
    assert bringing.bring(3, source)
    assert [call[0] for call in replica.calls].count("join") == 2


def test_an_engine_that_is_lost_while_it_reads_does_not_keep_the_others_from_it():
    replicas, source = [Replica(), Replica(lost_in=2)], Source()
    assert delivery("direct", replicas).bring(1, source)
    assert replicas[0].fed == [b"first", b"second", END]
    assert replicas[1].fed == [b"first"]
    assert source.borrowers == [[1, 1], [1]]


def test_nothing_is_lent_if_an_engine_is_lost_before():
    replicas, source = [Replica(), Replica(lost_in=0)], Source()
    assert not delivery("direct", replicas).bring(1, source)
    assert source.borrowers == []


@pytest.mark.parametrize("weights", ["direct", "broadcast"])
def test_an_engine_that_is_starting_needs_them_from_the_store(weights):
    replicas = [Replica(), Replica()]
    replicas[1].in_service = False
    assert not delivery(weights, replicas).bring(1, Source())
    assert replicas[0].calls == []
