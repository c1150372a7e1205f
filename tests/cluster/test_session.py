"""Connecting to Ray: what goes wrong is one line."""

import socket

import pytest

from dapo_rl.cluster import session
from dapo_rl.cluster.session import import_ray, ray_cluster
from dapo_rl.config import ClusterSettings
from dapo_rl.errors import UserError


def test_an_address_without_a_cluster_is_refused_at_once(monkeypatch):
    # Other tests of this process share a cluster, and its environment.
    monkeypatch.setattr(import_ray(), "is_initialized", lambda: False)
    monkeypatch.setattr(session, "_set_environment", lambda address: None)
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
