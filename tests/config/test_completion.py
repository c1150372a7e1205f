"""Shell completion, by the protocol of typer's scripts and in a real shell."""

import io
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from contextlib import chdir, redirect_stdout
from unittest.mock import patch

import pytest

from dapo_rl import cli
from dapo_rl.config import known_keys
from dapo_rl.recipes import recipe_names

DAPO = [sys.executable, "-P", "-c", "from dapo_rl.cli import main; main()"]
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


def completed(line, cwd=".", shell="fish", **environment):
    environment |= {"_DAPO_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}
    environment["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    exits = pytest.raises(SystemExit, match=r"^0$")
    with patch.dict(os.environ, environment), chdir(cwd), redirect_stdout(io.StringIO()) as answer, exits:
        cli._invoke([])
    return answer.getvalue().splitlines()


def values(line, **options):
    return [answer.partition("\t")[0] for answer in completed(line, **options) if answer]


def in_bash(*words):
    return values("", shell="bash", COMP_WORDS="\n".join(words), COMP_CWORD=str(len(words) - 1))


def test_commands_and_options():
    assert {"train", "check", "recipes", "bench"} <= set(values("dapo "))
    (recipes,) = completed("dapo rec")
    assert recipes.startswith("recipes\tList the recipes of the package")
    assert values("dapo bench ro") == ["rollout"]
    assert values("dapo train --r") == ["--run", "--resume"]
    assert values("dapo --inst") == ["--install-completion"]


def test_recipes_settings_and_values(tmp_path):
    (tmp_path / "gsm8k-mine.yaml").touch()
    (tmp_path / "gsm8k-notes.txt").touch()
    (tmp_path / "gsm8k-runs").mkdir()
    ours = [name for name in recipe_names() if name.startswith("gsm8k")]
    assert values("dapo train gsm8k", cwd=tmp_path) == [*ours, "gsm8k-mine.yaml", "gsm8k-runs/"]
    assert values("dapo recipes d") == ["dapo-math-qwen2.5-32b", "demo"]
    assert values("dapo train algo.") == [f"{key}=" for key in known_keys() if key.startswith("algo.")]
    assert values("dapo train sampling.dynamic=") == ["sampling.dynamic=true", "sampling.dynamic=false"]
    assert values("dapo train preset=g") == ["preset=grpo"]
    assert values("dapo launch local preset=g") == ["preset=grpo"]
    assert values("dapo bench rollout preset=g") == ["preset=grpo"]
    assert values("dapo eval ti", cwd=tmp_path) == ["tiny"]
    assert values("dapo eval tiny data.chat_template=al") == ["data.chat_template=always"]
    assert values("dapo train data.train=gsm8k-n", cwd=tmp_path) == ["data.train=gsm8k-notes.txt"]
    assert values("dapo train no.such=") == values("dapo nonsense x") == []


def test_a_word_that_goes_on_has_a_second_candidate(tmp_path):
    """Shells add a space to a single candidate."""
    assert values("dapo train demo sampling.gr") == ["sampling.group_size=", "sampling.group_size=16"]
    assert values("dapo ablate --vary algo.clip_h") == ["algo.clip_high=", "algo.clip_high=0.28"]
    assert values("dapo check se", cwd=tmp_path) == ["seed=", "seed=0"]
    assert values("dapo verify samp")[:2] == ["sampling.", "sampling.prompts_per_step="]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "one.yaml").touch()
    assert values("dapo train mi", cwd=tmp_path) == ["mine/", "mine/one.yaml"]


def test_the_shell_completes_the_values_of_options():
    assert values("dapo train --run gsm8k-r") == []


def test_bash_gets_what_follows_its_word_break():
    assert in_bash("dapo", "train", "preset", "=", "g") == ["grpo"]
    assert in_bash("dapo", "train", "sampling.dynamic", "=") == ["true", "false"]
    assert in_bash("dapo", "train", "preset=g") == ["preset=grpo"], "COMP_WORDBREAKS without ="
    assert in_bash("dapo", "train", "seed", "=", "1", "sampling.gr")[0] == "sampling.group_size="


def test_it_imports_nothing_slow():
    asked = {"_DAPO_COMPLETE": "complete_fish", "_TYPER_COMPLETE_ARGS": "dapo train algo.clip_h"}
    asked |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "PYTHONPROFILEIMPORTTIME": "1"}
    result = subprocess.run(DAPO, env=os.environ | asked, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.startswith("algo.clip_high=\tClip-Higher")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "dapo_rl" in imported
    assert not imported & {"torch", "transformers", "numpy", "pyarrow", "ray", "matplotlib", "fastapi", "datasets"}


@pytest.mark.slow
@needs_bash
def test_tab_in_bash(tmp_path):
    program = tmp_path / "dapo"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -P -c 'from dapo_rl.cli import main; main()' \"$@\"\n")
    program.chmod(0o755)
    environment = os.environ | {"HOME": str(tmp_path), "TERM": "dumb", "INPUTRC": os.devnull}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    for _ in range(2):  # a second time changes nothing
        subprocess.run(["bash", "-c", "dapo --install-completion; exit $?"], env=environment, check=True, timeout=60)
    rc = (tmp_path / ".bashrc").read_text()
    assert rc.count("source") == 1
    (tmp_path / "rc").write_text(f"PS1='> '\n{rc}")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvpe("bash", ["bash", "--noprofile", "--rcfile", "rc", "-i"], environment)
    try:
        assert until(terminal, "> ")
        for typed, expected in (
            ("dapo train sampling.gr\t", "dapo train sampling.group_size=x"),
            ("dapo train sampling.dynamic=t\t", "dapo train sampling.dynamic=true x"),
            ("dapo train gsm8k-sm\t", "dapo train gsm8k-smollm2-135m x"),
        ):
            os.write(terminal, f"{typed}x".encode())
            assert until(terminal, expected)
            os.write(terminal, b"\x15")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def until(terminal, expected, seconds=30):
    """Reads a terminal until it shows a text."""
    shown, end = "", time.monotonic() + seconds
    while expected not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 4096).decode().replace("\a", "")  # a bell for several candidates
    return expected in shown
