"""A rank or an engine that Ray kills because its host runs out of memory counts as lost, with advice of its own."""

import os
import sys

import forked
import pytest

from dapo_rl.cluster.exit_reason import describe_loss
from dapo_rl.cluster.ray_session import import_ray

NO_MEMORY = """
from plain_ranks import PlainRank
from stepping_engine import Numbers, stepping

from dapo_rl.cluster.engine_pool import EnginePool
from dapo_rl.cluster.ray_ranks import RayRanks
from dapo_rl.cluster.ray_session import ray_cluster
from dapo_rl.config import ClusterSettings
from dapo_rl.errors import RankLostError, UserError

settings = ClusterSettings(backend="ray", restarts=1)
with ray_cluster(settings):
    try:
        RayRanks(PlainRank, 1)
    except RankLostError as error:
        print(error, error.advice, sep="; ")
    try:
        EnginePool(stepping(), Numbers(0), settings, note=print)
    except UserError as error:
        print(error)
"""


@pytest.mark.slow
def test_ranks_and_engines_that_ray_kills_for_want_of_memory_are_lost(tmp_path):
    """Ray's monitor is told that 1 % of the memory is all there is."""
    environment = os.environ | {"RAY_memory_usage_threshold": "0.01", "PYTHONPATH": os.path.dirname(__file__)}
    result = forked.run([sys.executable, "-c", NO_MEMORY], cwd=tmp_path, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    monitor = "was killed by Ray because its host ran out of memory ("
    assert [line.partition("process ")[0] for line in lines] == [
        f"rank 0 {monitor}",
        f"engine 0 was lost: it {monitor}",
        f"engine 0 was lost 2 times, and cluster.restarts is 1; the last time: it {monitor}",
    ]
    assert "train.token_budget" in lines[0]
    assert "sampling.kv_memory_gib" in lines[2]
    assert all(line.endswith("raise RAY_memory_usage_threshold") for line in (lines[0], lines[2]))


MANY = """2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 4eba) \
was 22.90GB used / 23.54GB limit (0.972)
Selected to kill: (Actor(87e2): job ID=01, required resources={CPU: 1}, pid=1172, actual memory used=9.04GB)
Not selected: (Actor(87e2): job ID=01, required resources={CPU: 1}, pid=1180, actual memory used=1.04GB)
Selected to kill: (Actor(87e3): job ID=01, required resources={CPU: 1}, pid=1173, actual memory used=8.50GB)
"""


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (
            "OutOfMemoryError",
            MANY,
            "was killed by Ray because its host ran out of memory (process 1172 had 9.04 GB and process 1173 had 8.50 "
            "GB, 22.90 of 23.54 GB were in use)",
        ),
        ("OutOfMemoryError", "in other words", "was killed by Ray because its host ran out of memory"),
        ("NodeDiedError", "unreachable", "was lost with its host"),
        ("WorkerCrashedError", None, "was killed or crashed"),
        ("LocalRayletDiedError", None, "was killed or crashed"),
    ],
)
def test_a_loss_is_described_in_a_few_words(kind, text, words):
    ray = import_ray()
    error = getattr(ray.exceptions, kind)
    assert describe_loss(ray, error() if text is None else error(text)) == words
