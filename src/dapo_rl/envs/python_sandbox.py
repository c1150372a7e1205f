"""The script of the `python` tool: it seals its own process, and then runs the code on its standard input.

It imports only modules of the standard library that load quickly, because every call starts a process. On Linux:

- limits on time, memory, files and open files, and no capabilities;
- Landlock: no files but those of Python and the system's libraries, which are read-only, and the working directory;
- a seccomp filter: no sockets, no other processes and no signals to them, no changes of owners and permissions.

Where the kernel has no such filter, a supervisor kills the processes that the code leaves, and the network is left by
entering another namespace, if that is permitted. The arguments are, in this order:

- the limits `cpu_s`, `memory` and `file_size`
- `parent`: its process id, or 0
- `bare`: 1 to set limits only
- `report`: 1 to print which limits hold, without running anything
- the readable paths
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PDEATHSIG, _SECCOMP, _CAPBSET_DROP, _CHILD_SUBREAPER, _NO_NEW_PRIVS = 1, 22, 24, 36, 38
_NEW_USER, _NEW_PIDS, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_EPERM, _ENOSYS = 1, 38
_SIGKILL = 9
_MAX_PROCESSES = 32

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's number of the architecture, and its column in the tables below."""


def _calls(table: str) -> dict[str, list[int]]:
    """The numbers of system calls for each architecture; 0 where there is no such call. Newer ones have one number."""
    entries = (entry.split() for entry in table.split(","))
    return {name: [int(number) for number in numbers] * (2 // len(numbers)) for name, *numbers in entries}


_DENIED = _calls("""
    socket 41 198, fork 57 0, vfork 58 0, execve 59 221, execveat 322 281, tkill 200 130, rt_sigqueueinfo 129 138,
    rt_tgsigqueueinfo 297 240, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272,
    migrate_pages 256 238, move_pages 279 239, unshare 272 97, setns 308 268, mount 165 40, umount2 166 39,
    pivot_root 155 41, chroot 161 51, add_key 248 217, request_key 249 218, keyctl 250 219, bpf 321 280,
    perf_event_open 298 241, userfaultfd 323 282, memfd_create 319 279, shmget 29 194, semget 64 190, msgget 68 186,
    mq_open 240 180, setpriority 141 140, ioprio_set 251 30, chmod 90 0, fchmod 91 52, fchmodat 268 53, chown 92 0,
    fchown 93 55, lchown 94 0, fchownat 260 54, utime 132 0, utimes 235 0, futimesat 261 0, utimensat 280 88,
    setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16,
    pidfd_send_signal 424, io_uring_setup 425, io_uring_enter 426, io_uring_register 427, open_tree 428,
    move_mount 429, fsopen 430, fsmount 432, pidfd_open 434, pidfd_getfd 438, process_madvise 440, mount_setattr 442,
    memfd_secret 447, fchmodat2 452, setxattrat 463, removexattrat 466, file_setattr 469
""")
_ON_ITSELF = _calls("""
    kill 62 129, tgkill 234 131, prlimit64 302 261, sched_setaffinity 203 122, sched_setscheduler 144 119,
    sched_setparam 142 118, sched_setattr 314 274
""")
"""Allowed if the first argument is the process itself, or 0 for those that are no signals."""
_CLONE, _CLONE3, _CLONE_THREAD = (56, 220), 435, 0x10000


def _system_call(*arguments: Any) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return int(libc.syscall(*(a if a is None else ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)))


def _prctl(option: int, *arguments: Any) -> bool:
    padded = [*arguments, 0, 0, 0, 0][:4]
    words = [a if not isinstance(a, int) else ctypes.c_ulong(a) for a in padded]
    return bool(ctypes.CDLL(None).prctl(option, *words) == 0)


def _limit(cpu_s: int, memory: int, file_size: int) -> None:
    """Limits on this process that it cannot raise again."""
    limits = {"CPU": cpu_s, "AS": memory, "DATA": memory, "FSIZE": file_size, "NOFILE": 64, "CORE": 0, "MEMLOCK": 0}
    for name, value in limits.items():
        with suppress(AttributeError, ValueError, OSError):  # not on this platform
            number = getattr(resource, f"RLIMIT_{name}")
            _, hard = resource.getrlimit(number)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))


def _limit_processes(count: int) -> None:
    """The kernel counts all processes and threads of the user, and none of root."""
    with suppress(OSError, ValueError):
        threads = 0
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                threads += len(os.listdir(f"/proc/{pid}/task")) if os.stat(f"/proc/{pid}").st_uid == os.getuid() else 0
        resource.setrlimit(resource.RLIMIT_NPROC, (threads + count, threads + count))


def _supervise() -> None:
    """For where no filter forbids other processes: returns in a child. Its descendants are killed when it ends, even
    those that became daemons, or at SIGTERM."""
    import signal

    _prctl(_CHILD_SUBREAPER, 1)
    child = os.fork()
    if not child:
        _drop_capabilities()  # a new namespace gives them all
        _die_with(0)
        os.nice(19)  # the supervisor gets its turn among many
        _limit_processes(_MAX_PROCESSES)
        return
    os.closerange(1, 3)
    status = None
    with suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        while status is None:
            ended, how = os.waitpid(child, os.WNOHANG)
            if ended:
                status = os.waitstatus_to_exitcode(how)
            elif len(_descendants()) > _MAX_PROCESSES:
                status = -_SIGKILL
            else:
                time.sleep(0.005)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline = time.monotonic() + 1
    while (left := _descendants()) and time.monotonic() < deadline:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, _SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(128 - status if status is not None and status < 0 else status or 0)


def _descendants() -> list[int]:
    """All processes below this one; empty without /proc."""
    children: dict[int, list[int]] = {}
    with suppress(OSError):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found = children.get(os.getpid(), [])
    for pid in found:
        found += children.get(pid, ())
    return found


def _drop_capabilities() -> None:
    """Root without capabilities is an ordinary user that owns root's files."""
    for capability in range(64):
        _prctl(_CAPBSET_DROP, capability)
    _prctl(_NO_NEW_PRIVS, 1)
    with suppress(AttributeError):
        ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24))


def _die_with(parent: int) -> None:
    _prctl(_PDEATHSIG, _SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)


def _unshare() -> bool:
    """Enters a network namespace without devices, and its children one of processes, if that is permitted."""
    libc = ctypes.CDLL(None)
    return hasattr(libc, "unshare") and libc.unshare(_NEW_USER | _NEW_PIDS | _NEW_NETWORK) == 0


def _restrict_files(readable: list[str], directory: str) -> bool:
    """Landlock; whether the kernel has it."""
    create, add, restrict = 444, 445, 446
    version = _system_call(create, None, 0, 1)
    if version < 1:
        return False
    every = (1 << (13 + (version > 1) + (version > 2) + (version > 4))) - 1
    read, of_a_file = 1 | 4 | 8, 1 | 2 | 4 | 1 << 14 | 1 << 15
    scopes = struct.pack("QQQ", every, 3 if version > 3 else 0, 3 if version > 5 else 0)
    size = 8 + 8 * (version > 3) + 8 * (version > 5)
    rules = _system_call(create, scopes[:size], size, 0)
    if rules < 0:
        return False
    devices = [f"/dev/{name}" for name in ("null", "zero", "random", "urandom")]
    allowed = [*((path, read) for path in readable), *((path, 4 | 2) for path in devices), (directory, every)]
    for path, access in allowed:
        with suppress(OSError):
            file = os.open(path, os.O_PATH)
            access &= every if os.path.isdir(path) else every & of_a_file
            _system_call(add, rules, 1, struct.pack("=Qi", access, file), 0)
            os.close(file)
    done = _prctl(_NO_NEW_PRIVS, 1) and _system_call(restrict, rules, 0) == 0
    os.close(rules)
    return done


def _filter_calls() -> bool:
    """The seccomp filter; whether there is one for this machine."""
    machine = os.uname().machine if sys.platform == "linux" else ""
    if machine not in _ARCHITECTURES or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    architecture, column = _ARCHITECTURES[machine]
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, kill = 0x7FFF0000, 0x00050000 | _EPERM, 0x80000000
    number, first_argument = 0, 16
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, number)]
    if column == 0:  # the calls of the x32 ABI
        program += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, deny)]
    for call in filter(None, (numbers[column] for numbers in _DENIED.values())):
        program += [(equal, 0, 1, call), (answer, 0, 0, deny)]
    for name, numbers in _ON_ITSELF.items():
        itself = [os.getpid()] if name in ("kill", "tgkill") else [os.getpid(), 0]
        program += [(equal, 0, 2 + 2 * len(itself), numbers[column]), (load, 0, 0, first_argument)]
        for pid in itself:
            program += [(equal, 0, 1, pid), (answer, 0, 0, allow)]
        program += [(answer, 0, 0, deny)]
    program += [(equal, 0, 1, _CLONE3), (answer, 0, 0, 0x00050000 | _ENOSYS)]  # the C library then uses clone
    program += [(equal, 0, 4, _CLONE[column]), (load, 0, 0, first_argument)]
    program += [(any_bit, 0, 1, _CLONE_THREAD), (answer, 0, 0, allow), (answer, 0, 0, deny)]
    program += [(answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    description = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    return _prctl(_NO_NEW_PRIVS, 1) and _prctl(_SECCOMP, 2, ctypes.c_char_p(description))


def _run(code: bytes) -> None:
    """Runs the code as `__main__`, and shows the end of a traceback."""
    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = ["code.py"]
    try:
        exec(compile(code, "code.py", "exec", dont_inherit=True), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        with suppress(BaseException):
            sys.stdout.flush()
        if isinstance(error, MemoryError):
            _free(error, module.__dict__)
        _show(error, code)
        sys.exit(1)


def _free(error: BaseException, names: dict[str, object]) -> None:
    """Frees the program's objects, so that there is memory to print its error."""
    step = error.__traceback__
    while step is not None:
        with suppress(RuntimeError):  # the frame of `_run` still runs
            step.tb_frame.clear()
        step = step.tb_next
    names.clear()


def _show(error: BaseException, code: bytes) -> None:
    import linecache
    import traceback

    lines = code.decode("utf-8", "replace").splitlines(keepends=True)
    linecache.cache["code.py"] = (len(code), None, lines, "code.py")
    kept = None if isinstance(error, SyntaxError) or error.__traceback__ is None else error.__traceback__.tb_next
    traceback.print_exception(type(error), error, kept, limit=-4, chain=False)


def main() -> None:
    cpu_s, memory, file_size, parent, bare, report = map(int, sys.argv[1:7])
    with open(0, "rb", closefd=False) as stream:
        code = stream.read()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    contained = []
    if sys.platform == "linux":
        _drop_capabilities()
        _die_with(parent)
        if not bare and _restrict_files(sys.argv[7:], os.getcwd()):
            contained.append("files")
    _limit(cpu_s, memory, file_size)
    if not bare and _filter_calls():
        contained += ["network", "processes"]
    else:
        if _unshare():
            contained.append("network")
        _supervise()
    if report:
        print(*contained)
    else:
        _run(code)


if __name__ == "__main__":
    main()
