"""Connecting to Ray: what goes wrong is one line."""

import socket
from contextlib import nullcontext

import pytest

from dapo_rl.cluster import session
from dapo_rl.cluster.session import import_ray, ray_cluster
from dapo_rl.config import ClusterSettings
from dapo_rl.errors import UserError


@pytest.fixture(autouse=True)
def not_connected(monkeypatch):
    """Other tests of this process share a cluster, and its environment."""
    monkeypatch.setattr(import_ray(), "is_initialized", lambda: False)
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
