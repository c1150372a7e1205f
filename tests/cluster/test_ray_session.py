"""Connecting to Ray: what goes wrong is one line."""

import re
import socket
import sys
from contextlib import nullcontext

import forked
import pytest

from dapo_rl.cluster import ray_session as session
from dapo_rl.cluster.ray_session import import_ray, ray_cluster
from dapo_rl.config import ClusterSettings
from dapo_rl.errors import UserError


@pytest.fixture(autouse=True)
def not_connected(monkeypatch):
    """Other tests of this process share a cluster, which must not be taken for one that a test has started, and its
    environment."""
    monkeypatch.setattr(import_ray(), "is_initialized", lambda: False)
    monkeypatch.setattr(import_ray()._private.worker, "_global_node", None)
    monkeypatch.setattr(session, "_set_environment", lambda address: None)


@pytest.mark.parametrize(
    ("failures", "starts", "words"),
    [
        (["The current node timed out during startup."] * 2, 3, None),
        (["The current node timed out during startup."] * 3, 3, "Ray cannot be used on this host: The current node"),
        (["no space left on device"], 1, "Ray cannot be used on this host: no space left"),
    ],
)
def test_a_machine_that_is_too_busy_to_start_ray_gets_another_chance(monkeypatch, failures, starts, words):
    ray, calls = import_ray(), []

    def init(**how):
        calls.append(how)
        if len(calls) <= len(failures):
            raise Exception(failures[len(calls) - 1])  # Ray has no type of its own for it

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    expected = nullcontext() if words is None else pytest.raises(UserError, match=words)
    with expected, ray_cluster(ClusterSettings(backend="ray")):
        pass
    assert len(calls) == starts
    assert {how["address"] for how in calls} == {"local"}


def test_an_address_without_a_cluster_is_refused_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = ClusterSettings(backend="ray", address=address)
    with (
        pytest.raises(UserError, match=f"^cluster.address: there is no Ray cluster at {address}: ") as caught,
        ray_cluster(settings),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_the_address_of_a_client_is_refused():
    settings = ClusterSettings(backend="ray", address="ray://h:10001")
    said = r"^cluster.address: ray://h:10001: Ray Client is not supported"
    with pytest.raises(UserError, match=said), ray_cluster(settings):
        pass


@pytest.mark.parametrize(
    ("address", "tried"),
    [("10.0.0.7:6379", ("10.0.0.7", 6379)), ("[fd00::7]:6379", ("fd00::7", 6379)), ("auto", None)],
)
def test_a_host_that_does_not_answer_is_given_up_after_ten_seconds(monkeypatch, address, tried):
    waited = []

    def silent(place, timeout):
        waited.append((place, timeout))
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    monkeypatch.setattr(import_ray(), "init", lambda **_: None)
    monkeypatch.setattr(import_ray(), "shutdown", lambda: None)
    message = f"^cluster.address: there is no Ray cluster at {re.escape(address)}: timed out$"
    expected = nullcontext() if tried is None else pytest.raises(UserError, match=message)
    with expected, ray_cluster(ClusterSettings(backend="ray", address=address)):
        pass
    assert waited == ([] if tried is None else [(tried, 10)])


ONE_ACTOR = """
import os
from pathlib import Path
from dapo_rl.cluster.ray_session import import_ray, ray_cluster
from dapo_rl.config import ClusterSettings

def is_worker(process):
    command = (process / "cmdline").read_bytes()
    return b"default_worker.py" in command or command.startswith((b"ray::IDLE", b"ray::Actor"))

with ray_cluster(ClusterSettings(backend="ray")):
    ray = import_ray()

    @ray.remote
    class Actor:
        def workers_of_the_node(self):
            tasks = Path(f"/proc/{os.getppid()}/task").glob("*/children")
            children = [Path("/proc", pid) for task in tasks for pid in task.read_text().split()]
            return sum(map(is_worker, children))

    print(ray.get(Actor.remote().workers_of_the_node.remote()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ray_starts_a_process_for_each_actor_and_no_other(tmp_path):
    """By itself it starts one for each core as well."""
    result = forked.run([sys.executable, "-c", ONE_ACTOR], cwd=tmp_path, timeout=120)
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr
