"""Shell completion, by the protocol of the scripts and in a real shell."""

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
import typer

from dapo_rl import cli
from dapo_rl.completion import SCRIPTS, print_candidates, split_line
from dapo_rl.config import known_keys
from dapo_rl.recipes import recipe_names

DAPO = [sys.executable, "-P", "-c", "from dapo_rl.cli import main; main()"]


COMMAND = typer.main.get_command(cli.app)


def completed(line, shell="fish", cwd=".", **env):
    asked = {"_DAPO_COMPLETE": f"complete_{shell}", "_DAPO_LINE": line, **env}
    with patch.dict(os.environ, asked), chdir(cwd), redirect_stdout(io.StringIO()) as answer:
        print_candidates(COMMAND)
    return answer.getvalue().splitlines()


def values(line, **options):
    return [answer.partition("\t")[0] for answer in completed(line, **options)]


def test_commands_and_options():
    assert {"train", "check", "recipes", "bench"} <= set(values("dapo "))
    assert completed("dapo rec") == ["recipes\tList the recipes of the package, or print one."]
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
    assert values("dapo train demo sampling.gr") == ["sampling.group_size="]
    assert values("dapo verify samp") == ["sampling."]
    assert values("dapo check se", cwd=tmp_path) == ["seed="]
    assert values("dapo train algo.") == [f"{key}=" for key in known_keys() if key.startswith("algo.")]
    assert values("dapo train sampling.dynamic=") == ["sampling.dynamic=true", "sampling.dynamic=false"]
    assert values("dapo train preset=g") == ["preset=grpo"]
    assert values("dapo eval tiny data.chat_template=al") == ["data.chat_template=always"]
    assert values("dapo ablate --vary algo.clip_h") == ["algo.clip_high="]
    assert values("dapo train data.train=gsm8k-n", cwd=tmp_path) == ["data.train=gsm8k-notes.txt"]
    assert values("dapo train --run gsm8k-r", cwd=tmp_path) == ["gsm8k-runs/"]
    assert completed("dapo train no.such=") == completed("dapo nonsense x") == []


def test_bash_gets_what_follows_its_word_break_and_zsh_its_escapes():
    assert values("dapo train preset=g", shell="bash", _DAPO_BREAKS=" =:") == ["grpo"]
    assert values("dapo train preset=g", shell="bash", _DAPO_BREAKS=" ") == ["preset=grpo"]
    assert values("dapo train data.train=reas", shell="zsh") == ["data.train=reasoning_gym\\:"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ([], "")),
        ("dapo", ([], "dapo")),
        ("dapo ", (["dapo"], "")),
        ("dapo 'a b' c", (["dapo", "a b"], "c")),
        ("dapo 'a b", (["dapo"], "a b")),
        ('dapo train x="', (["dapo", "train"], "x=")),
        ("dapo # x", (["dapo", "#"], "x")),
    ],
)
def test_the_line_is_split_as_a_shell_does(line, expected):
    assert split_line(line) == expected


def test_it_imports_nothing_slow():
    asked = {"_DAPO_COMPLETE": "complete_fish", "_DAPO_LINE": "dapo train algo.clip_h", "PYTHONPROFILEIMPORTTIME": "1"}
    result = subprocess.run(DAPO, env=os.environ | asked, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.startswith("algo.clip_high=\tClip-Higher")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "dapo_rl" in imported
    assert not imported & {"torch", "transformers", "numpy", "pyarrow", "ray", "matplotlib", "fastapi", "datasets"}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_installing_twice_changes_nothing(shell, tmp_path):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
    environment |= {"HOME": str(tmp_path), "SHELL": f"/bin/{shell}"}
    files = []
    for _ in range(2):
        result = subprocess.run(
            [*DAPO, "--install-completion"], env=environment, capture_output=True, text=True, check=True
        )
        assert result.stdout.startswith(f"completion for {shell} is in {tmp_path}/")
        files.append({path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()})
    assert files[0] == files[1]
    assert SCRIPTS[shell] in files[0].values()
    assert len(files[0]) == (1 if shell == "fish" else 2)
    shown = subprocess.run([*DAPO, "--show-completion"], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == SCRIPTS[shell]


def test_an_unknown_shell_is_one_line():
    result = subprocess.run(
        [*DAPO, "--install-completion"], env=os.environ | {"SHELL": "/bin/tcsh"}, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr == "dapo: completion: $SHELL is tcsh; set it to bash, zsh, fish\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_tab_in_bash(tmp_path):
    program = tmp_path / "dapo"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -P -c 'from dapo_rl.cli import main; main()' \"$@\"\n")
    program.chmod(0o755)
    (tmp_path / "rc").write_text(f"PS1='> '\n{SCRIPTS['bash']}")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "dumb", "INPUTRC": os.devnull}
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
            shown += os.read(terminal, 4096).decode()
    return expected in shown
