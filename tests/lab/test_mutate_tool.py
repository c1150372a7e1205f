"""tools/mutate.py breaks a package in a copy, one place at a time, and tells which changes no test notices."""

import re
import subprocess
import sys

import pytest
from support import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools"))
import mutate

CODE = '''"""A docstring with 1 < 2."""

LIMIT: int = 3


def clipped(x: float, low: int = 0, *, strict: bool = False) -> float:
    """At least `low`."""
    if x < low and not strict:
        note(f"{x + 1}")
        return max(x, low)
    x += 0.5
    return -x - LIMIT


def note(text):
    print("noted " + text)


@dataclass(frozen=True, slots=True)
class Pair:
    left: int = 7
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to load than these tests to run
    (tmp_path / "made_up").mkdir()
    (tmp_path / "made_up" / "__init__.py").touch()
    (tmp_path / "made_up" / "sums.py").write_text(
        "def total(a, b):\n    return a + b\n\n\ndef idle(a):\n    return a * 2\n"
    )
    (tmp_path / "test_sums.py").write_text(
        "from made_up.sums import total\n\n\ndef test_total():\n    assert total(2, 3) == 5\n"
    )
    return tmp_path


def run(project, *words):
    tool = REPOSITORY / "tools" / "mutate.py"
    words = [sys.executable, tool, "made_up", "test_sums.py", "--root", str(project), *words, "--preload"]
    return subprocess.run(words, cwd=project, capture_output=True, text=True)


def test_every_kind_of_mutant(tmp_path):
    path = tmp_path / "code.py"
    path.write_text(CODE)
    changed = {}
    for mutant in mutate.find_mutants(path):
        lines = zip(CODE.splitlines(), mutant.applied(CODE.encode()).decode().splitlines(), strict=True)
        (line,) = [after.strip() for before, after in lines if before != after]
        changed.setdefault(mutant.kind, []).append(line)
    assert changed == {
        "off by one": [
            "LIMIT: int = 4",
            "def clipped(x: float, low: int = 1, *, strict: bool = False) -> float:",
            "left: int = 8",
        ],
        "switch": ["def clipped(x: float, low: int = 0, *, strict: bool = True) -> float:"],
        "and/or": ["if x < low or not strict:"],
        "comparison": ["if x <= low and not strict:"],
        "dropped not": ["if x < low and (strict):"],
        "removed call": ["pass", "pass"],
        "returned value": ["return None", "return None"],
        "min/max": ["return min(x, low)"],
        "removed assignment": ["pass"],
        "ten times": ["x += 5.0"],
        "operator": ["return -x + LIMIT"],
        "sign": ["return (x) - LIMIT"],
    }


def test_a_sample_is_the_seeds_and_has_every_kind(tmp_path):
    path = tmp_path / "code.py"
    path.write_text(CODE + "TABLE = [" + "1, " * 200 + "]\n")
    mutants = mutate.find_mutants(path)
    chosen = mutate.choose(mutants, 12, 3)
    assert chosen == mutate.choose(mutants, 12, 3) != mutate.choose(mutants, 12, 4)
    assert len({(m.start, m.text) for m in chosen}) == 12
    assert len({m.kind for m in chosen}) > 4  # though nearly all are constants
    assert len(mutate.choose(mutants, 10_000, 0)) == len(mutants)


def test_the_survivors_are_those_that_no_test_runs(project):
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    done = run(project, "--count", "99")
    assert done.returncode == 1, done.stderr
    outcomes = re.findall(r"^\[\d/\d\] made_up/sums\.py:(\d): ([^:]+): (.*)$", done.stdout, re.MULTILINE)
    assert sorted(outcomes) == [
        ("2", "operator", "killed"),
        ("2", "returned value", "killed"),
        ("6", "off by one", "SURVIVED"),
        ("6", "operator", "SURVIVED"),
        ("6", "returned value", "SURVIVED"),
    ]
    assert "-    return a * 2\n+    return a / 2" in done.stdout
    assert done.stdout.endswith("2 of 5 killed\n")
    assert {path: path.read_bytes() for path in project.rglob("*") if path.is_file()} == before


def test_without_survivors_the_exit_code_is_0(project):
    (project / "made_up" / "sums.py").write_text("def total(a, b):\n    return a + b\n")
    done = run(project)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "2 of 2 killed")


ENDLESS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import mutate
mutate.preload([])
root, fork = Path.cwd(), sys.argv[2] == "True"
mutants = [m for m in mutate.find_mutants(root / "made_up" / "sums.py") if m.kind == "removed assignment"]
assert mutate.run_tests(root, ["test_sums.py"], None, fork) == 0
assert list(mutate.survivors(root, mutants, ["test_sums.py"], 5, fork)) == []
"""


@pytest.mark.slow
@pytest.mark.parametrize("fork", [False, True])
def test_an_endless_mutant_is_killed(project, fork):
    loop = "def total(a, b):\n    while b > 0:\n        a, b = a + 1, b\n        b -= 1\n    return a\n"
    (project / "made_up" / "sums.py").write_text(loop)
    words = [sys.executable, "-c", ENDLESS, REPOSITORY / "tools", str(fork)]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[1/1] made_up/sums.py:4: removed assignment: killed, by the time limit\n"


def test_what_cannot_be_measured_is_an_error(project):
    (project / "test_sums.py").write_text("def test_wrong():\n    assert False\n")
    done = run(project)
    assert (done.returncode, done.stderr) == (2, "mutate: the tests fail without any change: pytest exits with 1\n")
    (project / "made_up" / "sums.py").write_text("")
    assert run(project).stderr == "mutate: made_up: nothing to break there\n"
