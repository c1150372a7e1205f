"""The Ray cluster of a run: one on this host that ends with the run, or one that is already running."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from dapo_rl.base.quote import one_line
from dapo_rl.cluster.local_ray import OwnRay
from dapo_rl.cluster.ray_watch import RayWatch
from dapo_rl.config import ClusterSettings
from dapo_rl.errors import UserError

CPUS = 1024
"""Logical CPUs of a cluster on this host. Actors are placed by GPUs; they share the CPUs there are."""
NO_IDLE_WORKERS = ("RAY_prestart_worker_first_driver", "0")
"""Otherwise a node starts a Python process for each of its cores when the run connects. A run has use for its actors
alone, and each of them gets a process when it is placed."""
CONNECT_S = 10.0
STARTS = 3
SLOW_START = "timed out during startup"
"""What Ray says of a node that needs too long."""


_own: OwnRay | None = None
"""The Ray that this process has started."""


@contextmanager
def ray_cluster(settings: ClusterSettings) -> Iterator[None]:
    """Connects this process to Ray, and disconnects it at the end, which ends all actors of the run."""
    _set_environment(settings.address)
    ray = import_ray()
    if ray.is_initialized():  # the caller's own connection, which stays
        yield
        return
    how: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    _check_reachable(settings.address)
    # It warns that a cluster on this host has a token, which is the default.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    with ExitStack() as ends:
        try:
            own = _own_ray(ends) if settings.address is None else None
            if own is not None:
                how |= {"num_cpus": CPUS, "include_dashboard": False, "_temp_dir": str(own.directory)}
            ends.callback(ray.shutdown)
            _connect(ray, settings.address, how)
            if (node := ray._private.worker._global_node) is not None:  # None for a client
                if own is not None:
                    own.started(node)
                ends.callback(RayWatch(node, ray_logs).close)
        except Exception as error:
            where = "on this host" if settings.address is None else f"at {settings.address}"
            raise UserError(f"cluster.address: Ray cannot be used {where}: {one_line(error)}") from error
        yield


def work_in(directory: str) -> None:
    """Has an actor work where the driver does, if its host has that: settings name files relative to it."""
    with suppress(OSError):
        os.chdir(directory)


def ray_logs() -> str:
    """Where to look for what Ray knows of a loss. The logs of the run's own Ray stay for that."""
    return "Ray's logs" if _own is None else f"Ray's logs, {_own.keep_logs()}"


def _own_ray(ends: ExitStack) -> OwnRay:
    def forget() -> None:
        global _own
        _own = None

    global _own
    _own = OwnRay()
    ends.callback(forget)
    ends.callback(_own.close)
    return _own


def _connect(ray: Any, address: str | None, how: dict[str, Any]) -> None:
    """Connects to a cluster, or starts one on this host. A node has 30 s to start, which on a busy machine may not be
    enough."""
    for started in range(1, STARTS + 1):
        try:
            with _in_groups_of_their_own(ray) if address is None else nullcontext():
                ray.init(address=address or "local", **how)
            return
        except Exception as error:
            if started == STARTS or SLOW_START not in str(error):
                raise


@contextmanager
def _in_groups_of_their_own(ray: Any) -> Iterator[None]:
    """Starts Ray's processes outside this process group. A signal to the group, such as that of `timeout`, asks the
    run to save and stop, for which it still needs them."""
    services = ray._private.services
    plain = services.ConsolePopen
    services.ConsolePopen = partial(plain, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = plain


def _set_environment(address: str | None) -> None:
    """Ray reads these when it is imported; what the user has set stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault(*NO_IDLE_WORKERS)
    has_token = os.environ.get("RAY_AUTH_TOKEN") or (Path.home() / ".ray" / "auth_token").exists()
    if address is not None and has_token:  # a cluster asks for a token where there is one; a client does not send it
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _check_reachable(address: str | None) -> None:
    """Ray itself would try for a minute. Other addresses than HOST:PORT are left to it."""
    if (address or "").startswith("ray://"):
        raise UserError(
            f"cluster.address: {address}: Ray Client is not supported; start the run on a host of the cluster with "
            "cluster.address=auto, or with `dapo launch ray`"
        )
    host, colon, port = (address or "").rpartition(":")
    if not colon or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        reason = one_line(error.strerror or error)
        raise UserError(f"cluster.address: there is no Ray cluster at {address}: {reason}") from error


def import_ray() -> Any:
    # Ray would print that an actor was lost, which its caller reports.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "worker died or was killed")
    try:
        import ray
    except ImportError as error:
        raise UserError("cluster.backend: ray is not installed; run `pip install dapo-rl[cluster]`") from error
    return ray
