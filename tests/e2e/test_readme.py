"""The commands and programs of the README and the first pages of docs/ run, shortened where they take minutes."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import forked
import pytest
from brief import look_briefly_at_the_machine
from support import DAPO, REPOSITORY

from dapo_rl.models.download import PRETRAINED

pytestmark = pytest.mark.slow

PAGES = {
    name: (REPOSITORY / name).read_text()
    for name in ("README.md", "docs/tutorial.md", "docs/benchmarks.md", "docs/python.md", "docs/install.md")
}
SHORT = ["sampling.prompts_per_step=4", "sampling.group_size=4", "data.eval.size=8", "train.steps=1"]
SHORTER = [*SHORT, "sampling.max_new_tokens=24", "train.epochs_per_step=1"]


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[name], re.MULTILINE | re.DOTALL)


COMMANDS = [line for name in PAGES for block in blocks(name, "bash") for line in block.splitlines() if line.strip()]


def run(words, cwd, **options):
    result = forked.run(words, cwd=cwd, timeout=400, **options)
    assert result.returncode == 0, f"{shlex.join(map(str, words))}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"


CAPITALS = REPOSITORY / "examples" / "capitals"


def test_the_commands_of_dapo(tmp_path):
    shutil.copytree(CAPITALS, tmp_path, dirs_exist_ok=True)
    lines = dict.fromkeys(line for line in COMMANDS if line.startswith("dapo ") and " model get " not in line)
    assert len(lines) >= 9
    assert "dapo train" in lines
    for _, *words in map(shlex.split, lines):
        extra = []
        if "capitals.yaml" in words:
            # The tests download no model. The embedded one knows no capitals.
            extra = ["model.name=tiny", "data.chat_template=never", "sampling.on_cap=fill", "sampling.cap=8"]
        if words[0] == "train":
            short = SHORTER if "capitals.yaml" not in words else [word for word in SHORT if "eval" not in word]
            extra += ["log.report=false", *(["train.steps=2"] if "--resume" in words else short)]
        run([DAPO, *words, *extra], tmp_path, preexec_fn=look_briefly_at_the_machine if words[0] == "bench" else None)


def test_the_model_that_the_tutorial_names_can_be_downloaded():
    (line,) = [line for line in COMMANDS if " model get " in line]
    assert line.split()[-1] in PRETRAINED


@pytest.mark.skipif(
    Path(sys.prefix).resolve() != (REPOSITORY / ".venv").resolve(), reason="make uses .venv; run the tests by make test"
)
def test_the_commands_of_make(tmp_path):
    assert [line for line in COMMANDS if line.startswith("make ")] == ["make setup", "make demo", "make test"]
    run(["make", "setup"], REPOSITORY)
    run(["make", "demo", f"ARGS={shlex.join([*SHORT, '--run', str(tmp_path / 'run')])}"], REPOSITORY)
    assert (tmp_path / "run" / "report.png").exists()
    run(["make", "test", "ARGS=tests/base/test_suggest.py"], REPOSITORY)


def test_no_other_kind_of_command():
    """`pip install .` is how the package under test was installed."""
    assert all(line.startswith(("make ", "dapo ")) or line == "pip install ." for line in COMMANDS)


def test_the_readme_has_two_commands():
    assert "".join(blocks("README.md", "bash")) == "pip install .\ndapo train\n"


def test_the_python_examples(tmp_path):
    program, functions = blocks("docs/python.md", "python")
    run([sys.executable, "-c", program], tmp_path)
    assert (tmp_path / "sums" / "model.safetensors").exists()
    run([sys.executable, "-c", functions], tmp_path)


def test_the_files_of_the_tutorial_are_those_in_examples():
    (reward,) = blocks("docs/tutorial.md", "python")
    assert reward == (CAPITALS / "rewards.py").read_text()
    (recipe,) = blocks("docs/tutorial.md", "yaml")
    assert recipe == (CAPITALS / "capitals.yaml").read_text()
    (rows,) = blocks("docs/tutorial.md", "json")
    assert (CAPITALS / "capitals.jsonl").read_text().startswith(rows)
