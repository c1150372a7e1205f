"""Calls of servers that do not behave: each ends in one line, in time."""

import socket
import threading
import time
from contextlib import contextmanager

import pytest

from dapo_rl.base.http_client import CallError, HttpClient, key_in

BODY = b'{"a": 1}'
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def raw_server(reply, pause_s=0.0):
    """Sends these bytes to every client, one after the other if there is a pause; its base URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    try:
                        asked = b""
                        while not asked.endswith(BODY):  # closing with unread data would reset the connection
                            asked += client.recv(1 << 16)
                        for part in [reply[i : i + 1] for i in range(len(reply))] if pause_s else [reply]:
                            client.sendall(part)
                            time.sleep(pause_s)
                    except OSError:
                        pass  # the client has gone

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        finally:
            server.shutdown(socket.SHUT_RDWR)


def call(url, *, timeout_s=5.0, key=None, retries=0):
    client = HttpClient(timeout_s=timeout_s, retries=retries, api_key=lambda: key)
    return client.call(url, {"a": 1}, bytes)


def test_a_reply():
    with raw_server(GOOD) as url:
        assert call(url) == b"{}"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"hello world\r\n\r\n", "BadStatusLine: hello world"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc", "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc", "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", "LineTooLong"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 300 + b"\r\n", "got more than 100 headers"),
        (b"", "closed connection"),
        (b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "the server answered 500 No"),
    ],
)
def test_what_is_not_http_is_one_line(reply, said):
    with raw_server(reply) as url, pytest.raises(CallError, match=said) as error:
        call(url)
    assert "\n" not in str(error.value)
    assert error.value.again, "another try may succeed"


def test_a_url_that_cannot_be_asked_is_one_line():
    with pytest.raises(CallError, match="control characters"):
        call("http://127.0.0.1:1/v 1")


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 50,
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n" + b" " * 500,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 100,
        b"HTTP/1.1 500 No\r\n\r\n" + b"x" * 500,
    ],
)
def test_a_reply_that_never_ends_takes_no_longer_than_the_limit(reply):
    """Each read alone is quick."""
    started = time.monotonic()
    with raw_server(reply, pause_s=0.02) as url, pytest.raises(CallError) as error:
        call(url, timeout_s=1)
    assert 0.9 < time.monotonic() - started < 3
    assert error.value.slow == (error.value.status == 0)


def test_a_slow_reply_in_time():
    with raw_server(GOOD, pause_s=0.01) as url:
        assert call(url) == b"{}"


@pytest.mark.parametrize("key", ["sk-secret\nX: y", "sk-secret…", "sk-\x7fsecret"])
def test_a_key_that_no_header_can_have_is_not_shown(key):
    with raw_server(GOOD) as url, pytest.raises(CallError, match="the API key has characters") as error:
        call(url, key=key)
    assert "secret" not in str(error.value)
    assert not error.value.again


def test_a_key_has_no_line_break(monkeypatch):
    monkeypatch.setenv("SECRET", " sk-secret\n")
    assert key_in("SECRET") == "sk-secret"
    monkeypatch.setenv("SECRET", "\n")
    assert key_in("SECRET") is None
    assert key_in("NO_SUCH_SECRET") is None
    assert key_in(None) is None
