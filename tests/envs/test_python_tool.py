"""The `python` tool runs hostile code and remains unharmed."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from patience import wait_until

from dapo_rl.envs import python_tool
from dapo_rl.envs.python_tool import PythonTool, containment, python, uncontained

pytestmark = pytest.mark.slow

WORKING = {
    "bwrap": python_tool._report("bwrap") is not None,
    "kernel": all((python_tool._report("kernel") or {"none": False}).values()),
    "limits": True,
}
SEALED = [
    pytest.param(means, marks=pytest.mark.skipif(not WORKING[means], reason=f"no {means} here"))
    for means in ("bwrap", "kernel")
]
ALL = [*SEALED, "limits"]
every_means = pytest.mark.parametrize("means", ALL)
sealed_means = pytest.mark.parametrize("means", SEALED)


def run(means, code, **limits):
    return PythonTool(**{"timeout_s": 20, **limits}, means=means)(textwrap.dedent(code))


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path, monkeypatch):
    """No file in the temporary directory, and no process."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(python_tool.tempfile, "tempdir", None)
    yield
    monkeypatch.setattr(python_tool.tempfile, "tempdir", None)
    assert not list(tmp_path.glob("dapo-python-*"))
    wait_until(lambda: not sandboxes(), 5)


def sandboxes():
    """The tool's processes that this one has started, and those without a parent."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, stat = (path / "cmdline").read_bytes(), (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"seals its own process" in command and int(stat[1]) in (1, os.getpid()) and stat[0] != "Z":
            found.append(int(path.name))
    return found


@every_means
def test_it_prints(means):
    assert run(means, "print(6 * 7)") == "42"
    assert run(means, "x = 1") == "(no output; print the results)"
    assert run(means, "import sys; print('a'); print('b', file=sys.stderr); print('c')") == "a\nb\nc"
    assert run(means, "if __name__ == '__main__': print(open(0).read() == '')") == "True"


@every_means
def test_the_same_code_prints_the_same(means):
    code = "print({str(n) for n in range(50)})"
    assert run(means, code) == run(means, code)


@every_means
def test_exceptions_are_shown_by_their_last_lines(means):
    text = run(means, "def f(n):\n    return 1 / n\nprint('before')\nf(0)")
    assert text.splitlines()[0] == "before"
    assert text.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert 'File "code.py", line 2, in f\n    return 1 / n' in text
    assert "python_sandbox" not in text
    assert "<string>" not in text
    assert run(means, "1 +").endswith("SyntaxError: invalid syntax")
    assert len(run(means, "def f(): f()\nf()").splitlines()) < 20
    assert "null bytes" in run(means, "print(1)\0")
    assert "code.py" in run(means, "print('\ud800')\n1/0")


@every_means
def test_exit_statuses_and_signals(means):
    assert run(means, "import sys; print('x'); sys.exit(3)") == "x\nerror: exit status 3"
    assert run(means, "import sys; sys.exit(0)") == "(no output; print the results)"
    aborted = run(means, "import os; os.abort()")
    # The first process of a namespace ignores the signal, and the C library then ends it by another.
    others = ("SIGTRAP", "SIGSEGV") if means == "limits" else ()
    assert aborted in [f"error: ended by {name}" for name in ("SIGABRT", *others)]
    assert run(means, "import ctypes; ctypes.string_at(0)").endswith("error: ended by SIGSEGV")


@every_means
def test_an_endless_loop_is_stopped(means):
    began = time.monotonic()
    text = run(means, "print('begun')\nwhile True: pass", timeout_s=0.7)
    assert text == "begun\nerror: stopped after 0.7 s"
    assert time.monotonic() - began < 5


@every_means
def test_code_that_ignores_signals_is_stopped(means):
    code = """
        import signal, time
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
        print("ready")
        while True: time.sleep(1)
    """
    assert run(means, code, timeout_s=1) == "ready\nerror: stopped after 1 s"


@every_means
def test_floods_of_output_are_cut(means):
    text = run(means, "print('a' * 5000 + 'b' * 5000, end='')", max_output=1000)
    assert text == "a" * 500 + "\n… (9,000 bytes cut) …\n" + "b" * 500
    text = run(means, "for _ in range(100): print('x' * 10**6)")
    assert text.endswith("error: stopped: it printed more than 16 MiB")
    assert len(text) < 9000


@every_means
def test_output_that_is_not_utf8(means):
    assert run(means, "import os; os.write(1, b'a\\xff\\xfeb')") == "a\ufffd\ufffdb"
    assert run(means, r"print('\ud800')") == r"\ud800"


@every_means
def test_memory_is_limited(means):
    assert run(means, "x = 'a' * 10**9").endswith("MemoryError")
    assert run(means, "x = []\nwhile True: x.append(bytearray(1 << 20))", memory_mb=200).endswith("MemoryError")
    code = "import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY, r.RLIM_INFINITY))"
    assert "ValueError" in run(means, code)


FILL = """
x, size = [], 1 << 20
while size > 4096:
    try:
        x.append(bytearray(size))
    except MemoryError:
        size //= 2
raise MemoryError
"""


@every_means
@pytest.mark.parametrize("code", [FILL, f"def fill():{FILL.replace(chr(10), chr(10) + '    ')}\nfill()"])
def test_a_program_that_has_used_up_its_memory_is_shown_its_error(means, code):
    """Nothing is left to load what formats a traceback."""
    said = run(means, code, memory_mb=200)
    assert said.endswith("    raise MemoryError\nMemoryError")
    assert "<string>" not in said


@every_means
def test_there_are_no_capabilities(means):
    code = """
        import ctypes, struct
        sets = ctypes.create_string_buffer(24)
        assert ctypes.CDLL(None).capget(struct.pack("Ii", 0x20080522, 0), sets) == 0
        print(sets.raw == bytes(24))
    """
    assert run(means, code) == "True"


@every_means
def test_files_are_limited(means):
    assert "File too large" in run(means, "open('big', 'wb').write(bytes(1 << 25))")
    assert "Too many open files" in run(means, "files = [open('/dev/null') for _ in range(100)]")
    code = "for n in range(50): open(str(n), 'wb').write(bytes(1 << 23))\nimport time; time.sleep(20)"
    assert run(means, code).splitlines()[-1].startswith(("OSError: [Errno 28]", "error: stopped: it wrote more"))


@every_means
def test_its_directory_is_empty_private_and_writable(means):
    code = "import os; print(os.listdir(), os.environ['HOME'] == os.getcwd()); open('a', 'w').write('x')"
    code += "; os.mkdir('d'); os.rename('a', 'd/b'); print(open('d/b').read()); os.remove('d/b')"
    assert run(means, code) == "[] True\nx"
    assert run(means, "import os; print(os.listdir())") == "[]"
    assert run(means, "import tempfile; print(tempfile.TemporaryFile().write(b'abc'))") == "3"


@every_means
def test_deep_directories_are_removed(means):
    code = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')"
    run(means, code, timeout_s=2)


@every_means
def test_the_environment_is_clean(means, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-secret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    text = run(means, "import os, sys; print(dict(os.environ), sys.path)")
    assert "a-secret" not in text
    assert "somewhere" not in text
    assert "site-packages" not in text


@sealed_means
def test_the_environment_of_other_processes_is_hidden(means):
    for pid in ("self", os.getpid(), 1):
        assert "Error" in run(means, f"print(open('/proc/{pid}/environ').read())")


@sealed_means
def test_files_outside_are_hidden(means, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a-secret")
    for path in (secret, "/etc/passwd", Path(__file__)):
        text = run(means, f"print(open({str(path)!r}).read())")
        assert text.splitlines()[-1].startswith(("PermissionError", "FileNotFoundError"))
    code = f"""
        import os
        for act in (lambda: open({str(secret)!r}, "w"), lambda: os.remove({str(secret)!r}),
                    lambda: os.chmod({str(secret)!r}, 0), lambda: os.utime({str(secret)!r}, (0, 0)),
                    lambda: os.truncate({str(secret)!r}, 0), lambda: os.link({str(secret)!r}, "here"),
                    lambda: os.symlink({str(secret)!r}, "there") or open("there"),
                    lambda: os.rename({str(secret)!r}, "here"), lambda: open({str(tmp_path / "new")!r}, "w"),
                    lambda: open({python_tool.sys.base_prefix!r} + "/x", "w"), lambda: open("/usr/x", "w")):
            try:
                act()
            except OSError as error:
                print("no")
    """
    before = secret.stat()
    assert run(means, code).split() == ["no"] * 11
    assert secret.read_text() == "a-secret"
    assert (secret.stat().st_mode, secret.stat().st_mtime) == (before.st_mode, before.st_mtime)
    assert not (tmp_path / "new").exists()


def can_connect(means, port):
    code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 3); print('connected')"
    return run(means, code) == "connected"


@every_means
def test_there_is_no_network(means):
    if not (python_tool._report(means) or {}).get("network"):
        pytest.skip("the network cannot be contained here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not can_connect(means, server.getsockname()[1])
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@sealed_means
def test_no_sockets_and_system_calls_around_them(means):
    for call in ("socket(socket.AF_UNIX)", "socket(socket.AF_NETLINK, socket.SOCK_RAW)", "create_server(('', 0))"):
        assert "PermissionError" in run(means, f"import socket; socket.{call}")
    code = "import ctypes; print(ctypes.CDLL(None).syscall({}, 0, 0))"
    for number in (425, 434, 435):  # io_uring_setup, pidfd_open, clone3
        assert run(means, code.format(number)) == "-1"


@sealed_means
def test_no_processes(means):
    for code in ("os.fork()", "os.system('true') == 0 or 1/0", "os.execv('/bin/true', ['true'])"):
        assert "Error" in run(means, f"import os; {code}")
    assert "Error" in run(means, "import subprocess; subprocess.run(['true'])")
    threads = "import threading; t = threading.Thread(target=print, args=('in a thread',)); t.start(); t.join()"
    assert run(means, threads) == "in a thread"
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(means, bomb, timeout_s=1) == "error: stopped after 1 s"


@sealed_means
def test_no_signals_to_others(means):
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        for pid in (victim.pid, -1, 0, os.getpid()):
            assert "Error" in run(means, f"import os, signal; os.kill({pid}, signal.SIGKILL)")
        assert "Error" in run(means, f"import resource as r; r.prlimit({victim.pid}, r.RLIMIT_CPU, (1, 1))")
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    assert run(means, "import os; os.kill(os.getpid(), 9)") == "error: ended by SIGKILL"


def test_daemons_are_killed_where_processes_can_be_started(tmp_path):
    mark = tmp_path / "alive"
    code = f"""
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while True:
                    open({str(mark)!r}, "a").write("x")
                    time.sleep(0.05)
            os._exit(0)
        time.sleep(0.5)
        print("begun")
        {{}}
    """
    for ending, shown in (("", "begun"), ("time.sleep(60)", "begun\nerror: stopped after 3 s")):
        assert run("limits", code.format(ending), timeout_s=3) == shown
        written = mark.stat().st_size
        assert written > 0
        time.sleep(0.3)
        assert mark.stat().st_size == written


def test_many_processes_are_killed():
    code = """
        import os, time
        for _ in range(150):
            if os.fork() == 0:
                time.sleep(60)
        time.sleep(60)
    """
    began = time.monotonic()
    text = run("limits", code, timeout_s=30)
    assert "SIGKILL" in text or "BlockingIOError" in text
    assert time.monotonic() - began < 20


@every_means
def test_closed_files_and_endings_do_not_confuse_it(means):
    assert run(means, "import os; print('x'); os.closerange(0, 100)").startswith("x")
    began = time.monotonic()
    assert "stopped after 1 s" in run(means, "import os, time; os.closerange(0, 100); time.sleep(60)", timeout_s=1)
    assert time.monotonic() - began < 8
    assert run(means, "import sys; sys.stdout = sys.stderr = None; 1/0") in ("", "error: exit status 1")
    assert run(
        means, "import threading, time; threading.Thread(target=lambda: time.sleep(60)).start()", timeout_s=1
    ) == ("error: stopped after 1 s")


@every_means
def test_it_ends_with_the_process_that_called_it(means, tmp_path):
    code = f"""
        from dapo_rl.envs.python_tool import PythonTool
        PythonTool(60, means={means!r})("import time; time.sleep(60)")
    """
    caller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        wait_until(lambda: children(caller.pid), 20)
        time.sleep(1)
        found = children(caller.pid)
    finally:
        caller.send_signal(signal.SIGKILL)
        caller.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in found), 5)
    for path in tmp_path.glob("dapo-python-*"):
        path.rmdir()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_containment_is_said_in_one_line():
    line = containment()
    assert "\n" not in line
    assert f"({python_tool._best_means()})" in line
    assert ("NOT contained" in line) == bool(uncontained())


def test_containment_of_limits_alone(monkeypatch):
    monkeypatch.setattr(python_tool, "_best_means", lambda: "limits")
    python_tool.uncontained.cache_clear()
    try:
        assert "NOT contained: " in containment()
        assert "reading and writing the user's files" in uncontained()
    finally:
        python_tool.uncontained.cache_clear()


def test_a_bubblewrap_that_is_not_permitted_is_not_used(tmp_path, monkeypatch):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    python_tool._best_means.cache_clear()
    try:
        assert python_tool._report("bwrap") is None
        assert python_tool._best_means() != "bwrap"
        assert python("print(1)") == "1"
    finally:
        python_tool._best_means.cache_clear()
