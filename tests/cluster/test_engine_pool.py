"""Engines in Ray actors: any number of them samples the same, and nothing is lost or counted twice if some are lost."""

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from stepping_engine import LONGEST, Numbers, SteppingEngine, stepping
from support import Prompts, TextVerifier, ids

from dapo_rl.cluster import engine_pool
from dapo_rl.cluster import weights_object_store as stored_weights
from dapo_rl.cluster.engine_pool import EnginePool
from dapo_rl.cluster.ray_session import import_ray
from dapo_rl.cluster.weights_object_store import pack_weight
from dapo_rl.config import ClusterSettings, SamplingSettings
from dapo_rl.engines.protocol import Request, SamplingParams, engine_metrics
from dapo_rl.errors import UserError
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.types import Trajectory

pytestmark = pytest.mark.slow

GROUP = 4
PARAMS = SamplingParams(max_new_tokens=LONGEST)


@pytest.fixture(scope="module", autouse=True)
def small_buckets():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_weights, "STORED_BYTES", 1)
        yield


@pytest.fixture(scope="module")
def three(ray_instance, warm_engines):
    """A pool of three engines that tests share. It recovers from what they do to it."""
    notes = []
    pool = EnginePool(
        stepping(0.01), Numbers(0), ClusterSettings(engines=3, restarts=1000, timeout_s=20), note=notes.append
    )
    pool.notes = notes
    yield pool
    pool.close()


@pytest.fixture
def pool(three):
    """The shared pool with version 0, no work, and all engines in service."""
    three.take_unfinished()
    three.poll()
    await_engines(three)
    three.receive(0, Numbers(0))
    three.notes.clear()
    return three


def await_engines(pool):
    end = time.monotonic() + 60
    while not all(replica.in_service for replica in pool._replicas):
        assert time.monotonic() < end
        pool._tend()
        time.sleep(0.05)


def request(number, count=GROUP):
    return Request(f"draw-{number}", np.array([1, 2, number]), count, PARAMS, seed=number)


def everything(engine):
    """All samples until the engine has no work."""
    samples = {}
    while completions := engine.poll():
        for completion in completions:
            assert (completion.request_id, completion.index) not in samples
            samples[completion.request_id, completion.index] = completion.sample
    return samples


def first(engine):
    """The first samples that finish; others have tokens by then."""
    return {(done.request_id, done.index): done.sample for done in engine.poll()}


def plain_samples(numbers):
    """What the engine samples in this process."""
    engine = SteppingEngine(Numbers(0))
    for number in numbers:
        engine.submit(request(number))
    return everything(engine)


def ray_get(refs):
    return import_ray().get(list(refs))


def kill(pool, index):
    """Kills the process of an engine, as a machine that runs out of memory does."""
    [(pid, _)] = ray_get([pool._replicas[index].send("about")])
    os.kill(pid, signal.SIGKILL)


def await_end(pids):
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_samples_do_not_depend_on_the_engine_and_the_load_is_shared(pool):
    for number in range(9):
        pool.submit(request(number))
    assert [replica.load for replica in pool._replicas] == [3 * GROUP] * 3
    samples = everything(pool)
    assert samples == plain_samples(range(9))
    assert all(sample.token_ids.flags.writeable and sample.token_ids.base is None for sample in samples.values())
    assert pool.pending == 0
    assert pool.poll(0.01) == []


def test_a_request_stays_together(pool):
    for number, count in enumerate((8, 1, 1)):
        pool.submit(request(number, count))
    assert [replica.load for replica in pool._replicas] == [8, 1, 1]
    pool.submit(request(3, 2))
    pool.submit(request(4, 1))
    assert [replica.load for replica in pool._replicas] == [8, 3, 2]
    assert len(everything(pool)) == 13


def test_new_weights_in_mid_generation_are_whole_and_begun_samples_go_on_with_them(pool):
    for number in range(6):
        pool.submit(request(number))
    samples = {}
    for version in (1, 2):
        samples |= first(pool)
        pool.receive(version, Numbers(version))
        assert pool.version == version
    samples |= everything(pool)
    assert {key: ids(sample) for key, sample in samples.items()} == {
        key: ids(sample) for key, sample in plain_samples(range(6)).items()
    }
    mixed = 0
    for sample in samples.values():
        assert (np.diff(sample.versions) >= 0).all()
        assert (sample.logps == -sample.versions).all(), "a token was sampled with other weights than its version says"
        mixed += len(set(sample.versions.tolist())) > 1
    assert mixed > 0


def test_unfinished_requests_come_out_with_their_tokens_and_continue(pool):
    for number in range(6):
        pool.submit(request(number))
    samples = first(pool)
    unfinished = pool.take_unfinished()
    samples |= everything(pool)  # what had finished already
    assert sum(one.samples for one in unfinished) + len(samples) == 6 * GROUP
    assert sum(one.tokens for one in unfinished) > 0
    assert all(replica.load == 0 for replica in pool._replicas)
    for one in reversed(unfinished):
        pool.submit(one)
    assert samples | everything(pool) == plain_samples(range(6))


def test_cancelled_requests_do_not_come_back(pool):
    for number in range(6):
        pool.submit(request(number))
    samples = first(pool)
    assert pool.cancel(["draw-1", "draw-4", "draw-99"]) > 0
    samples = {key: sample for key, sample in samples.items() if key[0] not in ("draw-1", "draw-4")}
    assert pool.pending == 4 * GROUP - len(samples)
    pool.submit(request(1))
    assert samples | everything(pool) == plain_samples([0, 1, 2, 3, 5])


def test_samples_that_came_back_before_an_engine_was_lost_are_not_counted_as_cancelled(pool):
    pool.submit(request(0))
    begun = pool.take_unfinished()[0].left([Trajectory.nothing(i).then([1] * (i + 1), 0.0, 0) for i in range(GROUP)])
    pool.submit(begun)
    done = {index for _, index in first(pool)}
    assert 0 < len(done) < GROUP
    for index in range(3):
        kill(pool, index)
    while not pool._waiting:
        pool._tend()
        pool._collect([replica for replica in pool._replicas if replica.orders], 0.1)
    assert pool.cancel(["draw-0"]) == sum(index + 1 for index in range(GROUP) if index not in done)


@pytest.mark.parametrize("taken", [False, True])
def test_an_engine_that_is_killed_loses_nothing(pool, taken):
    """Nor does a sample come twice that had come back before others of its request."""
    lost = sum(replica.lost for replica in pool._replicas)
    for number in range(9):
        pool.submit(request(number))
    samples = first(pool)
    while pool.pending and all(len(order.missing) in (0, GROUP) for order in pool._replicas[1].orders.values()):
        samples |= first(pool)
    kill(pool, 1)
    for one in pool.take_unfinished() if taken else ():
        pool.submit(one)
    others = everything(pool)
    assert samples.keys().isdisjoint(others)
    assert samples | others == plain_samples(range(9))
    assert sum(replica.lost for replica in pool._replicas) == lost + 1
    assert [note.partition(";")[0] for note in pool.notes] == ["engine 1 was lost: it was killed or crashed"]
    assert "will be sampled again" in pool.notes[0]


def test_engines_killed_at_random_moments(pool):
    """A sampler trains three steps while engines are killed; the groups are those of one engine that is not."""
    chance = random.Random(0)
    stop = threading.Event()

    def killer():
        for _ in range(6):
            if stop.wait(chance.uniform(0.0, 0.4)):
                break
            with suppress(Exception):  # it is not in service
                kill(pool, chance.randrange(3))

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        with_kills = steps_of(pool, max_staleness=0)
    finally:
        stop.set()
        thread.join()
    assert len(pool.notes) > 0
    assert with_kills == steps_of(SteppingEngine(Numbers(0)), max_staleness=0)


def test_the_same_groups_are_admitted_in_the_same_order_by_any_number_of_engines(pool):
    """One engine at a time with the driver does the same as in its process, step by step; several do if a step's groups
    depend on verdicts alone, and not on when they are known."""
    alone = EnginePool(stepping(), Numbers(0), ClusterSettings(engines=1), background=False)
    try:
        assert steps_of(alone) == steps_of(SteppingEngine(Numbers(0)))
    finally:
        alone.close()
    assert steps_of(pool, max_staleness=0) == steps_of(SteppingEngine(Numbers(0)), max_staleness=0)


def steps_of(engine, **settings):
    """Three steps: the kept groups with their tokens, the dropped ones, and what is left over."""
    sampler = sampler_on(engine, **settings)
    steps = []
    generated = decided = 0
    for version in (1, 2, 3):
        fill = sampler.fill(5)
        assert len(fill.kept) >= 5
        generated += fill.tokens_generated
        decided += sum(group.tokens for group in fill.kept) + sum(group.tokens for group, _ in fill.dropped)
        assert generated == decided + fill.tokens_cancelled + sampler.carried_tokens, "counted twice, or not at all"
        kept = [(group.draw, group.prompt.id, list(group.samples)) for group in fill.kept]
        left = (sampler.carried_tokens, sampler.in_flight_tokens)
        steps.append((kept, [(group.draw, outcome) for group, outcome in fill.dropped], left))
        engine.receive(version, Numbers(version))
    return steps


def sampler_on(engine, during_updates=False, **settings):
    chosen = SamplingSettings(group_size=GROUP, prompts_per_step=5, max_new_tokens=LONGEST, **settings)
    return Sampler(Prompts(), engine, TextVerifier(), PARAMS, chosen, cap=1000, seed=0, during_updates=during_updates)


def test_an_engine_that_fails_while_it_loads_is_replaced(warm_engines, tmp_path):
    notes = []
    make = stepping(0.002, load=7.0, flag=str(tmp_path / "failed"))
    pool = EnginePool(make, Numbers(0), ClusterSettings(engines=1, restarts=1, timeout_s=20), note=notes.append)
    try:
        for number in range(3):
            pool.submit(request(number))
        pool.receive(1, Numbers(7))
        assert notes[0].startswith(
            "engine 0 was lost: it failed with RuntimeError: the second half is missing; 3 groups"
        )
        samples = everything(pool)
        assert all((sample.logps == -7).all() and (sample.versions == 1).all() for sample in samples.values())
        assert len(samples) == 3 * GROUP
        pool.submit(request(4))
        kill(pool, 0)
        with pytest.raises(
            UserError, match=r"engine 0 was lost 2 times, and cluster.restarts is 1; .* it was killed or crashed; look"
        ):
            everything(pool)
    finally:
        pool.close()


def test_an_engine_that_is_lost_in_a_long_update_has_its_time_to_start_again(warm_engines):
    pool = EnginePool(stepping(0.002), Numbers(0), ClusterSettings(engines=1, timeout_s=20))
    try:
        pool._served -= engine_pool.START_S  # nothing was asked of the engine for so long
        kill(pool, 0)
        pool.receive(1, Numbers(7))
        pool.submit(request(0))
        assert all((sample.logps == -7).all() for sample in everything(pool).values())
    finally:
        pool.close()


def test_an_engine_whose_weights_were_lost_gets_them_again_and_does_not_count_as_lost(warm_engines, tmp_path):
    notes = []
    make = stepping(0.002, lost_weights=7.0, flag=str(tmp_path / "lost"))
    pool = EnginePool(make, Numbers(0), ClusterSettings(engines=1, restarts=0, timeout_s=20), note=notes.append)
    try:
        pool.submit(request(0))
        pool.receive(1, Numbers(7))
        samples = everything(pool)
        assert len(samples) == GROUP
        assert all((sample.logps == -7).all() for sample in samples.values())
        assert notes == []
        assert (tmp_path / "lost").exists()
    finally:
        pool.close()


def test_an_engine_that_hangs_is_noticed_and_a_mistake_of_the_users_is_raised(warm_engines, tmp_path):
    notes = []
    make = stepping(0.002, hang="draw-2", refuse="draw-5", flag=str(tmp_path / "hung"))
    pool = EnginePool(make, Numbers(0), ClusterSettings(engines=2, timeout_s=2), note=notes.append)
    try:
        for number in (10, 11):
            pool.submit(request(number))
        everything(pool)  # the first samples may take longer
        for number in range(4):
            pool.submit(request(number))
        assert everything(pool) == plain_samples(range(4))
        assert notes[0].startswith("engine 0 was lost: no progress for")
        pool.submit(request(5))
        with pytest.raises(UserError, match=r"^engine: this request is refused$"):
            everything(pool)
    finally:
        pool.close()


def test_engines_for_which_there_is_no_room_are_one_line(ray_instance, monkeypatch):
    monkeypatch.setattr(engine_pool, "START_S", 0.5)
    with pytest.raises(
        UserError, match=r"^cluster.engines: engine 0 of 1 did not start within 0 s; the cluster may not"
    ):
        EnginePool(stepping(), Numbers(0), ClusterSettings(), options={"resources": {"nowhere": 1}})


def test_sampling_goes_on_during_updates(pool):
    sampler = sampler_on(pool, during_updates=True, max_staleness=1, ahead=1.0, dynamic=False)
    total = trained = 0
    for version in (1, 2, 3):
        fill = sampler.fill(5)
        total += fill.tokens_generated
        trained += sum(group.tokens for group in fill.kept)
        assert [group.draw for group in fill.kept] == list(range(5 * version - 5, 5 * version))
        assert fill.in_flight + fill.carried_over == 5
        assert not any(replica._unsent for replica in pool._replicas)
        _update(pool)
        pool.receive(version, Numbers(version))
        versions = {int(v) for group in fill.kept for sample in group.samples for v in sample.versions}
        assert versions == {max(0, version - 2)}, "they were not generated during the update before"
    sampler.drain()
    finished = sampler.so_far.tokens_generated
    assert total + finished + sampler.in_flight_tokens == trained + sampler.carried_tokens + sampler.in_flight_tokens
    assert pool.pending == 0
    fill = sampler.fill(5)
    assert [group.draw for group in fill.kept] == list(range(15, 20))


def _update(pool):
    """Takes until the engines have finished, without a word from the driver."""
    ray_get(replica.send("cancel", (), ()) for replica in pool._replicas)  # they have what was sent to them
    end = time.monotonic() + 30
    while any(unfinished for _, unfinished in ray_get(replica.send("about") for replica in pool._replicas)):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_figures_of_each_engine(pool):
    engine_metrics(pool)
    for number in range(9):
        pool.submit(request(number))
    everything(pool)
    pool.receive(4, Numbers(4))
    metrics = engine_metrics(pool)
    assert {name.split("/")[1] for name in metrics} == {"0", "1", "2"}
    assert all(metrics[f"engine/{i}/version"] == 4 and metrics[f"engine/{i}/queue"] == 0 for i in range(3))
    assert all(metrics[f"engine/{i}/tokens_per_s"] > 0 and 0 < metrics[f"engine/{i}/busy"] <= 1 for i in range(3))


class WeightsElsewhere(Numbers):
    """A source that stores its weights on another node for the first time, and then here."""

    def __init__(self, value):
        super().__init__(value)
        self.keeper = import_ray().remote(Keeper).options(resources={"spot": 1}).remote()

    def stored(self, nbytes, dtype):
        keeper, self.keeper = self.keeper, None
        for bucket in self.buckets(nbytes):
            # Ray sends small objects to their owner.
            packed = [pack_weight(name, tensor.repeat(1 << 18), dtype) for name, tensor in bucket]
            yield import_ray().put(packed) if keeper is None else keeper.keep.remote(packed)


class Keeper:
    def keep(self, packed):
        return packed


def test_a_node_is_removed_and_another_is_added(ray_instance):
    """Weights that were stored there are stored again."""
    notes = []
    node = ray_instance.add_node(num_cpus=3, resources={"spot": 3}, object_store_memory=80 << 20)
    settings = ClusterSettings(engines=2, timeout_s=20, restarts=2)
    pool = EnginePool(stepping(0.01), Numbers(0), settings, options={"resources": {"spot": 1}}, note=notes.append)
    try:
        pool.receive(0, WeightsElsewhere(0))
        for number in range(6):
            pool.submit(request(number))
        samples = first(pool)
        pids = [pid for pid, _ in ray_get(replica.send("about") for replica in pool._replicas)]
        ray_instance.remove_node(node, allow_graceful=False)
        await_end(pids)  # an actor outlives its node by a moment
        assert len(samples) < 6 * GROUP
        end = time.monotonic() + 30
        while len(notes) < 2 and time.monotonic() < end:
            samples |= {(done.request_id, done.index): done.sample for done in pool.poll(0.2)}
        assert [note.partition(":")[0] for note in sorted(notes)] == ["engine 0 was lost", "engine 1 was lost"]
        node = ray_instance.add_node(num_cpus=2, resources={"spot": 2}, object_store_memory=80 << 20)
        assert samples | everything(pool) == plain_samples(range(6))
    finally:
        pool.close()
        if node in ray_instance.worker_nodes:
            ray_instance.remove_node(node)


def test_a_long_report_from_another_host_that_nobody_fetched_is_no_silence(ray_instance):
    """The driver is in an update meanwhile."""
    notes = []
    node = ray_instance.add_node(num_cpus=3, resources={"spot": 3}, object_store_memory=80 << 20)
    settings = ClusterSettings(engines=1, timeout_s=1, restarts=2)
    pool = EnginePool(stepping(0.01), Numbers(0), settings, options={"resources": {"spot": 1}}, note=notes.append)
    try:
        pool.submit(request(0))
        everything(pool)
        pool.submit(request(1, count=1024))
        pool.flush()
        _update(pool)
        pool._replicas[0].asks()
        time.sleep(3)
        assert len(everything(pool)) == 1024
        assert notes == []
    finally:
        pool.close()
        ray_instance.remove_node(node)
