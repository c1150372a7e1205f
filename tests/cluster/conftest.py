"""One Ray instance for all tests here of a process, and ranks that they share: to start them takes long. It ends after
them, because it takes time also when nothing happens."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import ray_workers
import torch
from rank_parts import Rank, RanksOfTests, WarmRanks
from warm_engines import WarmReplica

from dapo_rl.cluster import build_policy, engine_pool
from dapo_rl.cluster.ray_session import SLOW_START, STARTS, import_ray

_running: dict = {}
"""The Ray instance, and its policy on ranks."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    result = yield
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        end_ray()
    return result


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Ranks and this process share two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ray_instance(tmp_path_factory):
    """Ray on this host, which `ray_cluster` leaves running, as a cluster to which nodes can be added."""
    if "nodes" not in _running:
        with contextlib.ExitStack() as ends:
            start_ray(ends, tmp_path_factory)
            _running["ends"] = ends.pop_all()
    return _running["nodes"]


def start_ray(ends, tmp_path_factory):
    """Its workers find the modules of tests."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = import_ray()
    from ray.cluster_utils import Cluster

    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    if sys.platform == "linux":
        os.environ[ray_workers.SOCKET] = str(tmp_path_factory.mktemp("ray") / "workers")
    for left in reversed(range(STARTS)):
        nodes = Cluster()
        if sys.platform == "linux":
            nodes.add_node = partial(nodes.add_node, worker_path=ray_workers.__file__)
        try:
            nodes.add_node(
                num_cpus=1024,
                object_store_memory=200 << 20,
                include_dashboard=False,
                include_log_monitor=False,
                no_monitor=True,
            )
            break
        except Exception as error:
            if not left or SLOW_START not in str(error):
                raise
    ends.callback(nodes.shutdown)
    if sys.platform == "linux":
        workers = start_worker_server()  # later than the node, which has 30 s to start
        ends.callback(workers.wait)
        ends.callback(workers.kill)
    ray.init(address=nodes.address, **quiet)
    ends.callback(ray.shutdown)
    os.environ["PYTHONPATH"] = before
    _running["nodes"] = nodes


def end_ray():
    if "policy" in _running:
        _running["policy"].close()
    WarmRanks.actors.clear()
    WarmReplica.idle.clear()
    if "ends" in _running:
        _running["ends"].close()
    _running.clear()


def start_worker_server():
    # Each would start a thread, with which the server must not fork.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.environ[ray_workers.SOCKET])
        listening.listen()
        number = listening.fileno()
        words = [sys.executable, ray_workers.__file__, str(number)]
        return subprocess.Popen(words, env=environment, pass_fds=[number], stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def warm_engines(ray_instance):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_pool, "EngineReplica", WarmReplica)
        yield


@pytest.fixture(scope="module")
def warm_ranks(ray_instance):
    """Runs of a module share their ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_policy, "RayRanks", WarmRanks)
        yield


@pytest.fixture(scope="module")
def policy_on(ray_instance):
    """Policies by their number of ranks. Another number ends the one before."""

    def on(world_size, **how):
        policy = _running.get("policy")
        if policy is None or not policy.ranks.is_open or policy.ranks.world_size != world_size:
            policy = _running["policy"] = RanksOfTests(lambda: WarmRanks(Rank, world_size))
        return policy.build(**how)

    return on
