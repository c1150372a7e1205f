"""What the system refuses: a line where the user can mend it, a traceback where it is a bug of ours."""

import errno
import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import forked
import pytest
from support import DAPO

from dapo_rl import Config, cli
from dapo_rl.base.os_errors import explain_os_error

pytestmark = pytest.mark.slow


def run(monkeypatch, error):
    """`dapo check`, which meets an error: exit code and standard error."""

    def fail(*_arguments, **_named):
        raise error

    monkeypatch.setattr(Config, "load", fail)
    monkeypatch.setattr(sys, "argv", ["dapo", "check"])
    err = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, err.getvalue()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; free some space"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "a/b: No space left on device; free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "a"), "a: Permission denied; check its permissions, or"),
        (OSError(errno.EROFS, "Read-only file system", "a"), "a: Read-only file system; name a path that can be"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a"), "a: No such file or directory; check"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "a"), "a: Is a directory; check the path"),
        (OSError(errno.EMFILE, "Too many open files", "a"), "a: Too many open files; raise the limit on open files"),
    ],
)
def test_what_a_user_can_mend_is_one_line(monkeypatch, error, line):
    code, err = run(monkeypatch, error)
    assert code == 2
    assert err.startswith(f"dapo: {line}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EBADF, "Bad file descriptor"),
        OSError(errno.EINVAL, "Invalid argument", "a"),
        ChildProcessError(errno.ECHILD, "No child processes"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        TimeoutError("timed out"),
        OSError("something else"),
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
    ],
    ids=repr,
)
def test_a_bug_of_ours_is_raised(monkeypatch, error):
    assert explain_os_error(error) is None
    with pytest.raises(type(error)) as caught:
        run(monkeypatch, error)
    assert caught.value.__context__ is not None or caught.value is error


def test_a_pipe_of_our_own_that_breaks_is_a_traceback_and_not_taken_for_the_output():
    """Typer, left alone, ends the process for it without a word."""
    code = "from dapo_rl import Config, cli\n"
    code += "def load(*_): raise BrokenPipeError(32, 'Broken pipe')\n"
    code += "Config.load = load\nimport sys\nsys.argv = ['dapo', 'check']\ncli.main()\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "Traceback" in result.stderr


@pytest.mark.parametrize(
    ("words", "start"), [(["check"], forked.Popen), (["check", "--json"], subprocess.Popen)], ids=["rich", "print"]
)
def test_output_that_nobody_reads_ends_quietly(words, start, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as nobody:
        assert outcome([DAPO, *words], start, nobody, tmp_path) == (141, b"")


def outcome(words, start, stdout, cwd):
    """The exit code, and what is printed as an error."""
    with start(words, stdout=stdout, stderr=subprocess.PIPE, cwd=cwd) as process:
        _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def test_output_that_cannot_be_written_is_one_line(tmp_path):
    with open("/dev/full", "wb") as full:
        found = outcome([DAPO, "check", "--json"], forked.Popen, full, tmp_path)
    assert found == (2, b"dapo: No space left on device; free some space\n")


def test_streams_that_the_shell_has_closed():
    closed = subprocess.run(["bash", "-c", f"'{DAPO}' check >&- 2>&-"], timeout=120)
    assert closed.returncode == 0


def test_a_working_directory_that_is_gone(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, err = run(monkeypatch, None)
    assert (code, err) == (2, "dapo: the working directory has been removed; change to another\n")
