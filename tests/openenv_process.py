"""Servers of OpenEnv's own server library. They need their own interpreter, because OpenEnv 0.10 needs `mcp<2`."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import REPOSITORY

ENVIRONMENT = REPOSITORY / "build" / "openenv"
SCRIPT = Path(__file__).parent / "envs" / "openenv_server.py"


def serve_openenv(kind: str, sessions: int = 2) -> Iterator[str]:
    """Yields the URL; `sessions` is how many episodes are open at a time."""
    if not (ENVIRONMENT / ".set-up").exists():
        pytest.skip("needs OpenEnv's server; `make openenv` installs it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([ENVIRONMENT / "bin" / "python", str(SCRIPT), kind, str(port), str(sessions)])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait(10)
