"""Weights that the first rank sends to all engines at once."""

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
from dapo_rl.cluster.network import open_tcp_store
from dapo_rl.cluster.ray_session import import_ray
from dapo_rl.cluster.weights_broadcast import ChannelBrokenError, WeightChannel, WeightLayout
from dapo_rl.config import ClusterSettings
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.errors import RankLostError

pytestmark = pytest.mark.slow

ENGINES = 2


class Sender(Numbers):
    """Sends its weights from this process, as the first rank does from its own."""

    sending = None
    """The group, which outlives a version."""
    formed = 0

    def __init__(self, value, before=lambda name: None):
        super().__init__(value)
        self.before = before

    def channel(self):
        return Sender.sending.address if Sender.sending else None

    def open_channel(self):
        self.close_channel()
        Sender.store, Sender.address = open_tcp_store()
        return Sender.address

    def join_channel(self, size, timeout_s):
        Sender.sending = WeightChannel(Sender.address, 0, size, "cpu", timeout_s, Sender.store)
        Sender.formed += 1
        return True

    def layouts(self, nbytes, dtype):
        return [[WeightLayout(name, tuple(tensor.shape), tensor.dtype)] for [(name, tensor)] in self.buckets(nbytes)]

    def send(self, bucket):
        [layout] = bucket
        self.before(layout.name)
        [tensor] = [tensor for [(name, tensor)] in self.buckets(1) if name == layout.name]
        try:
            Sender.sending.send([(layout, tensor)])
        except ChannelBrokenError:
            return False
        return True

    def close_channel(self):
        if Sender.sending:
            Sender.sending.close()
        Sender.sending = None


@pytest.fixture(scope="module")
def two(ray_instance, warm_engines):
    how = {"weights": "broadcast", "placement": "separate"}
    settings = ClusterSettings(backend="ray", engines=ENGINES, restarts=1000, timeout_s=20, **how)
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


def submit(pool, name, samples=1):
    for number in range(2 * ENGINES):
        params = SamplingParams(max_new_tokens=LONGEST)
        pool.submit(Request(f"{name}-{number}", np.array([1]), samples, params, seed=number))


def finish(pool):
    samples = []
    while done := pool.poll():
        samples += [completion.sample for completion in done]
    assert all((sample.logps == -sample.versions).all() for sample in samples)
    return samples


def version_sampled(pool):
    """The weights with which all engines sample, as their log-probabilities tell, and their version."""
    submit(pool, "draw")
    samples = finish(pool)
    assert len(samples) == 2 * ENGINES
    [version] = {int(version) for sample in samples for version in sample.versions}
    return version


def kill(pool, index):
    [(pid, _)] = import_ray().get([pool._replicas[index].send("about")])
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)


def in_a_group(members, work, timeout_s=10.0):
    """What each member of a group in this process returns or raises."""
    store, address = open_tcp_store()
    results = {}

    def take_part(index):
        channel = None
        try:
            channel = WeightChannel(address, index, members, "cpu", timeout_s, store if index == 0 else None)
            results[index] = work(index, channel)
        except ChannelBrokenError as error:
            results[index] = error
            if channel:
                channel.close()

    threads = [Thread(target=take_part, args=(index,)) for index in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_every_type_and_shape_arrives(ray_instance):
    torch.manual_seed(0)
    weights = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "none": torch.zeros(0, 4),
        "count": torch.arange(3),
        "flag": torch.tensor([True, False, True]),
    }
    layouts = [WeightLayout(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()]

    def work(index, channel):
        if index > 0:
            return [channel.receive(layouts), channel.receive(layouts[:1])]
        channel.send([(layout, weights[layout.name]) for layout in layouts])
        return channel.send([(layouts[0], weights["a"] + 1)])

    results = in_a_group(3, work)
    for index in (1, 2):
        first, [(_, second)] = results[index]
        assert [name for name, _ in first] == list(weights)
        for name, tensor in first:
            assert (tensor.dtype, tensor.shape) == (weights[name].dtype, weights[name].shape)
            assert torch.equal(tensor, weights[name])
        assert torch.equal(second, weights["a"] + 1)


def test_weights_are_rounded_where_they_are_sent(ray_instance):
    weight, count = torch.randn(9), torch.arange(3)
    layouts = [WeightLayout("w", (9,), torch.float32), WeightLayout("n", (3,), torch.int64)]
    sent = [layout.sent_as(torch.bfloat16) for layout in layouts]
    assert [layout.dtype for layout in sent] == [torch.bfloat16, torch.int64]
    assert [layout.nbytes for layout in sent] == [18, 24]
    assert layouts[0].sent_as(None) == layouts[0]

    def work(index, channel):
        return channel.receive(sent) if index else channel.send(list(zip(sent, (weight, count), strict=True)))

    [(_, rounded), (_, same)] = in_a_group(2, work)[1]
    assert torch.equal(rounded, weight.to(torch.bfloat16))
    assert torch.equal(same, count)


def test_a_bucket_that_does_not_come_is_an_error(ray_instance):
    layout, calls = WeightLayout("w", (4,), torch.float32), []

    def leaves(index, channel):
        if index == 0:
            return channel.close()
        return channel.receive([layout])

    assert isinstance(in_a_group(2, leaves)[1], ChannelBrokenError)

    def waits(index, channel):
        if index == 0:
            return channel.send([(layout, torch.ones(4))], lambda: calls.append(1))
        time.sleep(0.2)
        return channel.receive([layout])

    assert torch.equal(in_a_group(2, waits)[1][0][1], torch.ones(4))
    store, address = open_tcp_store()
    with pytest.raises(ChannelBrokenError):
        WeightChannel(address, 0, 2, "cpu", 0.5, store)


def test_engines_load_what_is_sent(pool):
    Sender.formed = 0
    pool.receive(1, Sender(1))
    assert version_sampled(pool) == 1
    pool.receive(2, Sender(2))
    assert version_sampled(pool) == 2
    assert Sender.formed == 1, "the group stays"
    assert pool._stored is None
    assert pool.notes == []


def test_samples_go_on_with_new_weights(pool):
    pool.receive(3, Sender(3))
    submit(pool, "long", samples=8)
    pool.flush()
    time.sleep(0.03)
    pool.receive(4, Sender(4))
    samples = finish(pool)
    assert len(samples) == 8 * 2 * ENGINES
    assert {int(version) for sample in samples for version in sample.versions} == {3, 4}


def test_an_engine_that_is_lost_while_it_loads_leaves_the_others_in_service(pool):
    pool.receive(5, Sender(5))
    pool.receive(6, Sender(6, before=lambda name: name == "second" and kill(pool, 0)))
    assert [note.partition(":")[0] for note in pool.notes] == ["engine 0 was lost"]
    assert version_sampled(pool) == 6
    assert Sender.sending is None
    while not pool._replicas[0].in_service:
        pool._tend()
    pool.receive(7, Sender(7))
    assert Sender.sending is not None, "the group is formed again"
    assert version_sampled(pool) == 7
    assert len(pool.notes) == 1


def test_engines_do_not_sample_with_half_a_version_that_was_sent(pool):
    def lose(name):
        if name == "second":
            Sender.close_channel(Sender)
            raise RankLostError("rank 0 was killed")

    pool.receive(8, Sender(8))
    submit(pool, "unfinished", samples=4)
    pool.flush()
    with pytest.raises(RankLostError):
        pool.receive(9, Sender(9, before=lose))
    pool.receive(10, Sender(10))
    samples = finish(pool)
    assert len(samples) == 4 * 2 * ENGINES
    assert 9 not in {int(version) for sample in samples for version in sample.versions}
    assert version_sampled(pool) == 10
    assert pool.notes == [], "no engine is lost with the ranks"


def test_a_source_that_cannot_send_stores_its_weights(pool):
    pool.receive(11, Numbers(11))
    assert pool._stored is not None
    assert version_sampled(pool) == 11
