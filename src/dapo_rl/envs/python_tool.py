"""The built-in tool `python`: runs code in a new process that is sealed off.

Bubblewrap (`bwrap`), where it is installed and permitted, shows the process no files but Python's own and no network.
In any case the process seals itself (`python_sandbox.py`), as far as the kernel allows. `containment()` says how far.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Literal

FILE_SIZE, DISK_SIZE, MAX_FILES = 16 << 20, 64 << 20, 1000
"""Limits on one file, and on the size and number of all that the code writes."""
FLOOD = 16 << 20
"""Bytes of output after which the process is killed."""
_POLL_S, _END_S = 0.05, 2.0
_BELOW_ROOT = ("usr", "lib", "lib64", "lib32", "bin", "etc/ld.so.cache", "etc/localtime", "nix/store", "gnu/store")

Means = Literal["bwrap", "kernel", "limits"]


class PythonTool:
    """The tool with limits of your own: `PythonTool(timeout_s=20)` is a tool named `python`."""

    __name__ = "python"
    __qualname__: str

    def __init__(
        self, timeout_s: float = 5, memory_mb: int = 512, max_output: int = 8192, means: Means | None = None
    ) -> None:
        """`means`: what to seal the process with, instead of the best there is."""
        self.timeout_s, self.memory_mb, self.max_output, self._means = timeout_s, memory_mb, max_output, means

    def __call__(self, code: str) -> str:
        """Runs Python code in a new process, and returns what it prints. There is only the standard library; no network,
        and no files or variables of earlier calls.

        Args:
            code: The code. Print the results.

        Returns:
            The output and, if there is one, the exception.
        """  # noqa: E501
        with _directory() as directory, tempfile.TemporaryFile() as source:
            source.write(code.encode("utf-8", "backslashreplace"))
            source.seek(0)
            means = self._means or _best_means()
            process = subprocess.Popen(
                _command(means, self.timeout_s, self.memory_mb),
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=_environment("/tmp" if means == "bwrap" else directory),
                start_new_session=True,
            )
            output = _Output(self.max_output)
            try:
                why = _follow(process, output, directory, time.monotonic() + self.timeout_s)
            finally:
                _end(process, output, _is_supervised(means))
        if why == "time":
            why = f"stopped after {self.timeout_s:g} s"
        return _shown(output.text(), why or _ending(process.returncode))


python = PythonTool()
python.__qualname__ = "python"  # for the files of a run, which name it


_KINDS = {
    "network": "the network",
    "files": "reading and writing the user's files",
    "processes": "starting processes and sending them signals",
}


def containment() -> str:
    """What the tool's code is kept from on this machine, and what not, in one line."""
    outside = uncontained()
    inside = [*(name for name in _KINDS.values() if name not in outside), "time", "memory", "size of files and output"]
    line = f"the python tool ({_best_means()}) contains: {', '.join(inside)}"
    return f"{line}; NOT contained: {', '.join(outside)}" if outside else line


@cache
def uncontained() -> tuple[str, ...]:
    """What the tool's code is not kept from on this machine; empty if all is well."""
    means = _best_means()
    found = _report(means) or {}
    if means == "bwrap":
        found |= {"network": True, "files": True}
    return tuple(name for kind, name in _KINDS.items() if not found.get(kind))


@cache
def _best_means() -> Means:
    """Bubblewrap may be installed and not permitted, as in most containers."""
    if shutil.which("bwrap") and _report("bwrap") is not None:
        return "bwrap"
    report = _report("kernel") or {}
    return "kernel" if any(report.values()) else "limits"


@cache
def _is_supervised(means: Means) -> bool:
    """Whether the code may start processes, which a supervisor has to kill."""
    return means != "bwrap" and not (_report(means) or {}).get("processes")


def _report(means: Means) -> dict[str, bool] | None:
    """What can be sealed in this way; None if it does not work."""
    with _directory() as directory:
        try:
            done = subprocess.run(
                _command(means, 10, 512, report=True),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                cwd=directory,
                env=_environment(directory),
                timeout=20,
                check=True,
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
    contained = done.stdout.decode("utf-8", "replace").split()
    return {kind: kind in contained for kind in _KINDS}


@cache
def _script() -> str:
    return files("dapo_rl.envs").joinpath("python_sandbox.py").read_text(encoding="utf-8")


@cache
def _python() -> str:
    """The interpreter itself, outside of a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def _readable() -> list[str]:
    """Python and the system's libraries."""
    paths = [f"/{name}" for name in _BELOW_ROOT]
    paths += [sys.base_prefix, sys.base_exec_prefix, sysconfig.get_path("stdlib"), _python()]
    return sorted({path for path in paths if os.path.exists(path)})


def _command(means: Means, timeout_s: float, memory_mb: int, report: bool = False) -> list[str]:
    parent = 0 if means == "bwrap" else os.getpid()
    options = [math.ceil(timeout_s) + 1, memory_mb << 20, FILE_SIZE, parent, int(means == "limits"), int(report)]
    # As with -I, since the environment is clean, except that it sets the seed of hashes.
    command = [_python(), "-s", "-S", "-P", "-B", "-u", "-X", "utf8", "-c", _script(), *map(str, options), *_readable()]
    if means != "bwrap":
        return command
    shown = [word for path in _readable() for word in ("--ro-bind", path, path)]
    bwrap = shutil.which("bwrap") or "bwrap"
    wrapped = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", *shown]
    wrapped += ["--dev", "/dev", "--size", str(DISK_SIZE), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
    return [*wrapped, "--", *command]


def _environment(home: str) -> dict[str, str]:
    """Of the run's environment, nothing: it has secrets."""
    constant = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8:backslashreplace"}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "TMPDIR": home, **constant}


class _Output:
    """The beginning and the end of what a process writes."""

    def __init__(self, limit: int) -> None:
        self._head_limit, self._tail_limit = limit - limit // 2, limit // 2
        self._head, self._tail, self.size = b"", b"", 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        if rest := data[room:]:
            self._tail = (self._tail + rest)[-self._tail_limit :] if self._tail_limit else b""

    def text(self) -> str:
        cut = self.size - len(self._head) - len(self._tail)
        if not cut:
            return (self._head + self._tail).decode("utf-8", "replace")
        head, tail = (part.decode("utf-8", "replace") for part in (self._head, self._tail))
        return f"{head}\n… ({cut:,} bytes cut) …\n{tail}"


def _follow(process: subprocess.Popen[bytes], output: _Output, directory: str, deadline: float) -> str:
    """Reads the output until the process ends; why it must be killed, or nothing."""
    assert process.stdout is not None
    stream = process.stdout.fileno()
    os.set_blocking(stream, False)
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        is_open, checked = True, time.monotonic()
        while process.poll() is None:
            now = time.monotonic()
            if now > deadline:
                return "time"
            if now - checked > _POLL_S:
                checked = now
                if _fills_disk(directory):
                    return f"stopped: it wrote more than {DISK_SIZE >> 20} MiB or {MAX_FILES} files"
            if not is_open:  # closed by the code, which goes on, or ends right now
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(_POLL_S, deadline - now))
            elif selector.select(min(_POLL_S, deadline - now)):
                is_open = _read(stream, output)
                if output.size > FLOOD:
                    return f"stopped: it printed more than {FLOOD >> 20} MiB"
    return ""


def _read(stream: int, output: _Output) -> bool:
    """Reads what is there; whether there may be more."""
    try:
        data = os.read(stream, 1 << 20)
    except BlockingIOError:
        return True
    output.add(data)
    return bool(data)


def _end(process: subprocess.Popen[bytes], output: _Output, supervised: bool) -> None:
    """Ends the process with all that it has started, and reads the rest of its output."""
    assert process.stdout is not None
    if supervised and process.poll() is None:
        process.terminate()  # the supervisor then kills the others
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with contextlib.suppress(BlockingIOError):
        while output.size <= FLOOD and (data := os.read(process.stdout.fileno(), 1 << 20)):
            output.add(data)
    process.stdout.close()


def _fills_disk(directory: str) -> bool:
    size, count, directories = 0, 0, [directory]
    for path in directories:
        try:
            for entry in os.scandir(path):
                count += 1
                size += entry.stat(follow_symlinks=False).st_size
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.path)
                if size > DISK_SIZE or count > MAX_FILES:
                    return True
        except FileNotFoundError:
            continue
        except OSError:  # such as a path that is too long
            return True
    return False


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    """An empty private directory, removed with whatever the code has made in it."""
    path = tempfile.mkdtemp(prefix="dapo-python-")
    try:
        yield path
    finally:
        try:
            shutil.rmtree(path, ignore_errors=True)
        except RecursionError:
            subprocess.run(["rm", "-rf", "--", path], check=False, stderr=subprocess.DEVNULL)


def _ending(status: int) -> str:
    """How a process ended, if not as it should; bubblewrap and the supervisor report signals as shells do."""
    number = -status if status < 0 else status - 128
    if 0 < number <= 64:
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(number).name}"
    return f"exit status {status}" if status else ""


def _shown(text: str, why: str) -> str:
    text = text.rstrip("\n")
    if why == "exit status 1" and text:  # after a traceback
        return text
    if why:
        return f"{text}\nerror: {why}".lstrip("\n")
    return text or "(no output; print the results)"
