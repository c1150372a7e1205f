"""docs/launch.md: its commands are valid, and its messages are those of the commands."""

import re
import shlex

import pytest
from support import REPOSITORY, dapo

PAGE = (REPOSITORY / "docs" / "launch.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [block.partition(">")[0].strip() for block in BLOCKS if block.startswith("dapo ")]
SOURCE = "".join(path.read_text() for path in (REPOSITORY / "src" / "dapo_rl" / "launch").glob("*.py"))


def test_each_target_has_a_command():
    assert [command.split()[2] for command in COMMANDS] == ["local", "ray", "slurm", "slurm"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_are_valid(command, tmp_path):
    result = dapo(*shlex.split(command)[1:], "--dry-run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "train demo cluster.backend=ray" in result.stdout


def test_every_option_of_slurm_is_named():
    for option in ("nodes", "gpus-per-node", "cpus-per-task", "time", "partition", "account", "sbatch", "save-before"):
        assert f"`--{option}" in PAGE
    assert "`--until-done`" in PAGE


def test_the_messages_are_those_of_the_commands():
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## Error messages")[2], re.MULTILINE)
    assert len(rows) == 6
    for row in rows[:4]:
        assert row in SOURCE
