"""tools/measure.py runs a list of commands within their limits."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "measure.py"


def run(*words, cwd):
    return subprocess.run(
        [sys.executable, TOOL, "out", "--list", "list.yaml", *words], cwd=cwd, capture_output=True, text=True
    )


def test_a_command_that_takes_too_long_does_not_stop_the_others(tmp_path):
    (tmp_path / "list.yaml").write_text(
        "slow: [0.3, 'bash -c \"echo begun; (sleep 60; echo left > left) & sleep 60\"']\n"
        "wrong: [10, 'false']\nright: [10, 'echo $OUT']\n"
    )
    first = run(cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    rows = [line.split("\t") for line in (tmp_path / "out" / "results.tsv").read_text().splitlines()]
    assert [row[:2] for row in rows] == [["slow", "too long"], ["wrong", "1"], ["right", "0"]]
    assert (tmp_path / "out" / "slow.txt").read_text() == "begun\n"
    assert (tmp_path / "out" / "right.txt").read_text() == f"{tmp_path / 'out'}\n"
    assert subprocess.run(["pgrep", "-f", "sleep 60; echo left"], check=False).returncode == 1
    assert run(cwd=tmp_path).stdout == "", "nothing is measured twice"


def test_a_name_that_is_not_in_the_list_is_one_line(tmp_path):
    (tmp_path / "list.yaml").write_text("right: [10, 'true']\n")
    assert run("left", cwd=tmp_path).stderr == "list.yaml: no measurement is named left; there are right\n"
