"""How the processes of a cluster find each other beside Ray."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from typing import Any

from dapo_rl.cluster.ray_session import import_ray

SIOCGIFADDR = 0x8915


def tcp_store(host: str, port: int, **how: Any) -> Any:
    """A store of torch.distributed, where processes exchange their addresses."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, **how)


def open_tcp_store() -> tuple[Any, tuple[str, int]]:
    """A store in this process on a free port, and where others find it."""
    host = import_ray().util.get_node_ip_address()
    store = tcp_store(host, 0, is_master=True, wait_for_workers=False)
    return store, (host, store.port)


def use_interface() -> None:
    """Has this process talk over the interface that Ray talks over, whatever the name of the host resolves to."""
    address = import_ray().util.get_node_ip_address()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(packed[20:24]) == address:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
                return
