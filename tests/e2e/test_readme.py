"""Every command and program in the README runs, in a shorter form where it takes minutes."""

import re
import shlex
import sys
from pathlib import Path

import forked
import pytest
import yaml
from support import DAPO, REPOSITORY

from dapo_rl.recipes import packaged_recipe

pytestmark = pytest.mark.slow

README = (REPOSITORY / "README.md").read_text()
SHORT = ["sampling.prompts_per_step=4", "sampling.group_size=4", "data.eval.size=8", "train.steps=1"]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]


def run(words, cwd):
    result = forked.run(words, cwd=cwd, timeout=400)
    assert result.returncode == 0, f"{shlex.join(map(str, words))}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"


def test_the_commands_of_dapo(tmp_path):
    lines = [shlex.split(line) for line in COMMANDS if line.startswith("dapo ")]
    assert len(lines) >= 5
    for _, *words in lines:
        extra = []
        if words[0] == "train":
            extra = ["train.steps=2"] if "--resume" in words else SHORT
        run([DAPO, *words, *extra], tmp_path)


@pytest.mark.skipif(
    Path(sys.prefix).resolve() != (REPOSITORY / ".venv").resolve(), reason="make uses .venv; run the tests by make test"
)
def test_the_commands_of_make(tmp_path):
    assert [line for line in COMMANDS if line.startswith("make ")] == ["make demo", "make test"]
    run(["make", "demo", f"ARGS={shlex.join([*SHORT, '--run', str(tmp_path / 'run')])}"], REPOSITORY)
    assert (tmp_path / "run" / "report.png").exists()
    run(["make", "test", "ARGS=tests/test_layers.py"], REPOSITORY)


def test_no_other_kind_of_command():
    assert all(line.startswith(("make ", "dapo ")) for line in COMMANDS)


def test_the_python_example(tmp_path):
    (program,) = blocks("python")
    run([sys.executable, "-c", program], tmp_path)
    assert (tmp_path / "sums" / "model.safetensors").exists()


def test_the_recipe_is_the_one_in_the_package():
    (shown,) = blocks("yaml")
    name, path = re.search(r"This is \[`(.*?)`\]\((.*?)\)", README).groups()
    assert REPOSITORY / path == packaged_recipe(name)
    assert yaml.safe_load(shown) == yaml.safe_load((REPOSITORY / path).read_text())
