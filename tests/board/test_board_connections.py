"""Clients that connect and do not go on, in numbers, and requests that are none."""

import re
import resource
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn
from board_runs import make_run

from dapo_rl.board import server
from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.routes import create_app
from dapo_rl.board.server import BoardProtocol, LoopErrors, Server, most_connections


@pytest.fixture
def port(tmp_path):
    """A board in a thread."""
    make_run(tmp_path / "runs" / "a")
    app = create_app(Catalogue([tmp_path / "runs"]), None, "token")
    settings = uvicorn.Config(app, http=BoardProtocol, ws="none", lifespan="off", log_level="error")
    server = Server(settings, app.state.watcher)
    server.install_signal_handlers = lambda: None
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()


def connect(port: int, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(60)
    client.sendall(sent)
    return client


def is_closed(client: socket.socket) -> bool:
    """Waits until the board has closed the connection."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def is_open(client: socket.socket) -> bool:
    """Whether nothing but messages comes for a while."""
    client.settimeout(0.3)
    try:
        while client.recv(1 << 16):
            pass
    except TimeoutError:
        return True
    return False


def get(port: int, path: str = "/api/runs") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.read().decode()


HEAD = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n"
BODY = b"POST /api/lab HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf"


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"GE", HEAD, HEAD + b"\r\n" + HEAD[:9], BODY])
def test_a_request_that_does_not_come_is_not_waited_for(port, monkeypatch, sent):
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.3)
    with connect(port, sent) as client:
        assert is_closed(client)
    assert '"name":"a"' in get(port)


def test_a_live_page_stays_connected(port, monkeypatch):
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)
    with connect(port, b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n") as live:
        assert b"200 OK" in live.recv(1 << 16)
        with connect(port) as other:
            assert is_closed(other)  # by then its own time is over too
        assert is_open(live)


def test_those_that_keep_the_board_waiting_make_room(port, monkeypatch):
    monkeypatch.setattr(server, "most_connections", lambda: 4)
    with ExitStack() as stack:
        live = stack.enter_context(connect(port, b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        assert b"200 OK" in live.recv(1 << 16)
        silent = [stack.enter_context(connect(port)) for _ in range(8)]
        assert all(is_closed(client) for client in silent[:5])
        assert '"name":"a"' in get(port)
        assert is_open(live)


def test_where_none_makes_room_a_new_one_is_closed(port, monkeypatch):
    monkeypatch.setattr(server, "most_connections", lambda: 2)
    with ExitStack() as stack:
        for _ in range(2):
            live = stack.enter_context(connect(port, b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n"))
            assert b"200 OK" in live.recv(1 << 16)
        assert is_closed(stack.enter_context(connect(port)))


@pytest.mark.parametrize(
    "request_line",
    [b"GET http://evil.example/api/runs HTTP/1.1", b"GET http://localhost/api/runs HTTP/1.1", b"OPTIONS * HTTP/1.1"],
)
def test_a_target_that_is_not_a_path_is_refused(port, request_line):
    with connect(port, request_line + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n") as client:
        assert client.recv(100).startswith(b"HTTP/1.1 421 ")


def test_two_hosts_are_refused(port):
    with connect(port, HEAD + b"Host: evil.example\r\nConnection: close\r\n\r\n") as client:
        assert client.recv(100).split()[1] in (b"400", b"421")


def test_the_number_of_connections_leaves_files_for_reading(monkeypatch):
    for files, most in ((256, 96), (20, 16), (1 << 20, 512), (resource.RLIM_INFINITY, 512)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert most_connections() == most


def test_running_out_of_files_is_one_line_a_minute(capsys):
    handle, passed = LoopErrors(), []

    class Loop:
        default_exception_handler = staticmethod(passed.append)

    for _ in range(1000):
        context = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
        handle(Loop, context)
    handle(Loop, {"message": "another"})
    assert capsys.readouterr().err == "board   connections wait: Too many open files; `ulimit -n` raises the limit\n"
    assert passed == [{"message": "another"}]


def test_that_line_comes_at_once_even_if_the_machine_has_just_started(capsys, monkeypatch):
    handle, since_boot = LoopErrors(), [5.0]
    monkeypatch.setattr(server.time, "monotonic", lambda: since_boot[0])
    lines = []
    for now in (5.0, 6.0, 64.0, 66.0):
        since_boot[0] = now
        handle(None, {"message": "socket.accept() out of system resource"})
        lines.append(len(capsys.readouterr().err.splitlines()))
    assert lines == [1, 0, 0, 1]


@contextmanager
def board_with_few_files(runs):
    command = f"ulimit -n 256; exec {sys.executable} -m dapo_rl.cli board {runs} --port 0"
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as board:
        try:
            yield board, int(re.search(r":(\d+)/", board.stdout.readline())[1])
        finally:
            board.terminate()


@pytest.mark.slow
def test_300_half_open_connections_do_not_block_a_board_of_256_files(tmp_path):
    make_run(tmp_path / "runs" / "a")
    with board_with_few_files(tmp_path / "runs") as (board, port), ExitStack() as stack:
        for number in range(300):
            stack.enter_context(connect(port, b"GET / HTTP/1.1\r\n" if number % 2 else b""))
        assert '"name":"a"' in get(port)
        for _ in range(50):  # each would be a warning
            with connect(port, b"\0\0\0\r\n\r\n") as client:
                assert is_closed(client)
        assert '"name":"a"' in get(port)
        board.terminate()
        assert len(board.stderr.read()) < 1000
