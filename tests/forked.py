"""`dapo`, or a Python program, as a process that starts in milliseconds: `Popen` and `run` stand in for those of
subprocess.

A server process imports everything once and forks itself for each command. The command is then a real child process of
the one that started it, with its own process id, streams, directory, environment, limits and signals; what it leaves
out is the start of Python and the imports, and with them what libraries read from the environment at that time. Tests
of those, and of the installed script, use subprocess itself, and so does any other program that is started here.
`dapo` commands that start others (ablate, bench, board, launch) have a server of their own.

Forking is safe because the server has a single thread, and checks that before each fork.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

DAPO = Path(sys.executable).with_name("dapo")
MAIN_MODULES = ("dapo_rl.cli", "dapo_rl.lab.bench.contender")
STARTS_OTHERS = ("ablate", "bench", "board", "launch")
PRELOADED = (
    "dapo_rl.cli",
    "dapo_rl.trainer",
    "dapo_rl.evals.run",
    "dapo_rl.runs.report_plot",
    "dapo_rl.lab.ablate.ablation",
    "dapo_rl.lab.bench.compare",
    "dapo_rl.lab.bench.contender",
    "matplotlib.backends.backend_agg",
    "mpmath",
    "pandas",
    "pyarrow.compute",
    "pyarrow.pandas_compat",
    "transformers.conversion_mapping",
    "transformers.models.llama.modeling_llama",
)
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
_LENGTH = struct.Struct("<Q")
_PID = struct.Struct("<q")
_READY = b"!"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Command:
    module: str
    """The module whose `main` is called, or `__main__` for a program."""
    argv: list[str]
    path: list[str]
    """What the real start would put in front of `sys.path`."""
    cwd: str
    env: dict[str, str]
    new_session: bool
    prepare: Callable[[], Any] | None


def _parse(args: Any, cwd: str) -> tuple[str, list[str], list[str]] | None:
    """Module, argv and path of a command that the server can run."""
    match [os.fspath(word) for word in args] if isinstance(args, (list, tuple)) else []:
        case [program, *_] as words if program == str(DAPO):
            return "dapo_rl.cli", words, [str(DAPO.parent)]
        case [sys.executable, "-m", module, *words] if module in MAIN_MODULES:
            return module, [module, *words], [cwd]
        case [sys.executable, "-P", "-m", module, *words] if module in MAIN_MODULES:
            return module, [module, *words], []
        case [sys.executable, "-c", _, *_] as words:
            return "__main__", words[1:], [""]
        case [sys.executable, program, *_] as words if program.endswith(".py"):
            return "__main__", words[1:], [os.path.dirname(os.path.abspath(program))]
    return None


class Popen(subprocess.Popen):
    """As subprocess.Popen; `preexec_fn` must be picklable."""

    programs = True
    """Whether Python programs are run, too."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others) -> None:  # type: ignore[no-untyped-def]
        where = os.path.abspath(cwd or os.curdir)
        known = _parse(args, where) if sys.platform == "linux" else None
        if known is None or (known[0] == "__main__" and not self.programs):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)
            return
        pipes, new_session = others[3:9], others[14]
        streams = [number if end == -1 else end for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        command = Command(*known, where, dict(os.environ if env is None else env), new_session, preexec_fn)
        self.pid = _server().start(command, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(args: list[Any], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run with its output captured as text."""
    with Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, err)


class Server:
    """The end of the one who starts commands."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._channel, self._process, self._lock = channel, process, threading.Lock()
        _read(channel, len(_READY))

    @property
    def has_ended(self) -> bool:
        """Also a command that writes to each of its open files can end it."""
        return self._process is not None and self._process.poll() is not None

    def start(self, command: Command, streams: list[int]) -> int:
        message = pickle.dumps(command)
        with self._lock, _adopting():
            socket.send_fds(self._channel, [_LENGTH.pack(len(message))], streams)
            self._channel.sendall(message)
            return _PID.unpack(_read(self._channel, _PID.size))[0]


_started: list[tuple[int, Server]] = []


def _server() -> Server:
    """This process's own server."""
    if not _started or _started[-1][0] != os.getpid() or _started[-1][1].has_ended:
        ours, theirs = socket.socketpair()
        words = [sys.executable, __file__, str(theirs.fileno())]
        environment = os.environ | ONE_THREAD
        with theirs:
            process = subprocess.Popen(
                words, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        _started.append((os.getpid(), Server(ours, process)))
    return _started[-1][1]


@contextlib.contextmanager
def _adopting():
    """Meanwhile this process is the parent of any process below it that loses its own."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _read(channel: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = channel.recv(count - len(data))
        if not part:
            raise EOFError("the server of forked commands has ended")
        data += part
    return data


# In the server.


def serve(channel: socket.socket) -> Command:
    """Forks a process for each command, in which it returns; in the server itself it never does."""
    channel.sendall(_READY)
    while True:
        header, streams, _, _ = socket.recv_fds(channel, _LENGTH.size, 3)
        if not header:
            os._exit(0)
        header += _read(channel, _LENGTH.size - len(header))
        command: Command = pickle.loads(_read(channel, _LENGTH.unpack(header)[0]))
        assert len(os.listdir("/proc/self/task")) == 1, "the server has threads and must not fork"
        ends, said = os.pipe()
        between = os.fork()
        if between == 0:  # its end hands its child over to the one who asked
            child = os.fork()
            if child:
                os.write(said, _PID.pack(child))
                os._exit(0)
            channel.close()
            os.close(ends)
            os.close(said)
            _become(command, streams)
            return command
        os.waitpid(between, 0)
        channel.sendall(os.read(ends, _PID.size))
        for fd in (ends, said, *streams):
            os.close(fd)


def _become(command: Command, streams: list[int]) -> None:
    """What a new process has of its own."""
    if command.new_session:
        os.setsid()
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(command.cwd)
    os.environ.clear()
    os.environ.update(command.env)
    if command.prepare is not None:
        command.prepare()
    more = [path for path in command.env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path[1:]]
    sys.argv, sys.path[:1] = command.argv, [*command.path, *more]
    sys.stdout.reconfigure(line_buffering=bool(command.env.get("PYTHONUNBUFFERED")))
    import torch

    torch.set_num_threads(int(command.env.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))


def _fork_server() -> None:
    """A server for the commands that this one starts; this process becomes one of them or goes on."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _run(serve(theirs))
    theirs.close()
    _started.append((os.getpid(), Server(ours)))
    Popen.programs = False  # those are not of the tests
    subprocess.Popen = Popen  # type: ignore[misc]


def _run(command: Command) -> NoReturn:
    if command.module == "dapo_rl.cli" and command.argv[1:2] and command.argv[1] in STARTS_OTHERS:
        _fork_server()
    try:
        code = _run_program() if command.module == "__main__" else sys.modules[command.module].main()
    except SystemExit as end:
        code = end.code
    except Exception:
        traceback.print_exc()
        code = 1
    # As the interpreter ends, except that it does not take apart what the server has imported.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _run_program() -> None:
    """The program in `sys.argv`, as a module `__main__` of its own."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if sys.argv[0] == "-c":
        source, name = sys.argv.pop(1), "<string>"
    else:
        source, name = Path(sys.argv[0]).read_text(), sys.argv[0]
        module.__file__ = name
    exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)


def main() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the tests
    channel = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # nothing that is imported goes away
    for name in PRELOADED:
        importlib.import_module(name)
    # What a process makes once, when it is first asked for.
    sys.modules["dapo_rl.cli"].root_command()
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("llama")
    gc.freeze()  # a collection in a command then copies no page of these
    gc.enable()
    _run(serve(channel))


if __name__ == "__main__":
    import forked  # commands are pickled, and name the module

    forked.main()
