"""Forked commands are what real ones are: exit codes, streams, directory, environment, limits and signals."""

import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import forked
import pytest
from support import DAPO, SMALL, dapo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the processes are real"),
]


def test_both_kinds_say_the_same(tmp_path):
    (tmp_path / "recipe.yaml").write_text("seed: 1\ntrain: {lr: 1}\n")
    words = [DAPO, "check", "recipe.yaml"], [DAPO, "train", "recipe.yaml", "seed=x"], [DAPO, "train", "--rezume"]
    for command in words:
        real = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        mine = forked.run(command, cwd=tmp_path, timeout=60)
        assert (mine.returncode, mine.stdout, mine.stderr) == (real.returncode, real.stdout, real.stderr)


def test_a_command_is_a_child_with_a_session_of_its_own(tmp_path):
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with forked.Popen(
        [DAPO, "train", *SMALL, "train.steps=500", "--run", "run"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline().startswith(b"dapo: tiny")
        assert f"\nPPid:\t{os.getpid()}\n" in Path(f"/proc/{process.pid}/status").read_text()
        assert os.getsid(process.pid) == process.pid
        assert os.readlink(f"/proc/{process.pid}/cwd") == str(tmp_path)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL


def test_the_end_of_a_command_is_the_end_of_its_output(tmp_path):
    """No other command holds its streams open."""

    def start(name):
        words = [DAPO, "train", *SMALL, "train.steps=500", "--run", name]
        return forked.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    with start("first") as first, start("second") as second:
        first.kill()
        first.communicate(timeout=20)
        assert second.poll() is None
        second.kill()


def test_limits_are_those_of_the_command(tmp_path):
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1, 1))
    result = dapo("train", *SMALL, "--run", "run", cwd=tmp_path, preexec_fn=limit)
    assert result.returncode == 2
    assert "File too large" in result.stderr
    assert dapo("--version", cwd=tmp_path).returncode == 0


def test_a_program_runs_as_in_python(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint(__name__, __file__, sys.argv[1:], sys.path[0])\nsys.exit(7)\n")
    result = forked.run([sys.executable, program, "a"], cwd=tmp_path, timeout=60)
    assert (result.returncode, result.stdout) == (7, f"__main__ {program} ['a'] {tmp_path}\n")
    failed = forked.run([sys.executable, "-c", "import sys; sys.argv[1] / 0", "a"], timeout=60)
    assert failed.returncode == 1
    assert failed.stderr.startswith("Traceback (most recent call last):\n")
    assert failed.stderr.endswith("TypeError: unsupported operand type(s) for /: 'str' and 'int'\n")


def test_other_programs_are_started_as_ever():
    assert forked.run(["echo", "1"], timeout=60).stdout == "1\n"
    assert forked.run(["false"], timeout=60).returncode == 1
