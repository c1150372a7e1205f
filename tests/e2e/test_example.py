"""The one-file example: short, on `dapo_rl.algo` alone, with every technique in it, and it learns."""

import ast
import re
import sys

import forked
import pytest
from support import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "dapo_in_one_file.py"
TREE = ast.parse(EXAMPLE.read_text())


def test_it_has_at_most_250_lines():
    assert len(EXAMPLE.read_text().splitlines()) <= 250


def test_of_the_package_it_uses_the_mathematics_alone():
    modules = {alias.name for node in ast.walk(TREE) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in ast.walk(TREE) if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if name.startswith("dapo_rl")} == {"dapo_rl.algo"}
    others = {name.split(".")[0] for name in modules} - sys.stdlib_module_names
    assert others == {"dapo_rl", "torch", "transformers"}


def test_every_technique_is_there():
    called = {node.func.id for node in ast.walk(TREE) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert called >= {
        *("dapo_policy_loss", "group_advantages", "dynamic_sampling_filter", "soft_overlong_punishment"),
    }
    for name in (
        "Clip-Higher",
        "Dynamic Sampling",
        "Token-level loss",
        "Soft Overlong Punishment",
        "Overlong Filtering",
    ):
        assert name in EXAMPLE.read_text()


@pytest.mark.slow
def test_a_few_steps_raise_accuracy():
    result = forked.run([sys.executable, EXAMPLE, "--steps", "15"], timeout=300)
    assert result.returncode == 0, result.stderr
    before, after = (float(share) for share in re.findall(r"accuracy (?:before|after): ([\d.]+)%", result.stdout))
    assert before < 10
    assert after > before + 15
