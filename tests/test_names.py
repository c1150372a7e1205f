"""A name stands for one thing: no two modules define the same public class or function."""

import ast
from collections import defaultdict

from support import REPOSITORY

PACKAGE = REPOSITORY / "src" / "dapo_rl"

COMMANDS = "commands.py"
"""Its functions are named after the commands, as `dapo train` is after the loop that it runs."""
TWINS = tuple(f"objectives/numpy_twin{part}.py" for part in ("", "_credit", "_kl", "_off_policy", "_tokens"))
"""Each NumPy twin has the name of the function that it checks."""
SHARED = {"main", "build"}
"""The entry points of modules that run with `python -m`, and of built-in engines."""


def is_public_definition(node):
    definitions = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return isinstance(node, definitions) and not node.name.startswith("_")


def definitions():
    """The modules that define each public name at their top level."""
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        for node in ast.parse(path.read_text()).body:
            excepted = module == COMMANDS or (module in TWINS and isinstance(node, ast.FunctionDef))
            if is_public_definition(node) and node.name not in SHARED and not excepted:
                found[node.name].append(module)
    return found


def test_a_public_name_is_defined_once():
    found = definitions()
    assert len(found) > 300
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_the_exceptions_are_needed():
    def names(module):
        return {node.name for node in ast.parse((PACKAGE / module).read_text()).body if is_public_definition(node)}

    others = set(definitions())
    assert names(COMMANDS) & others
    assert all(names(twins) & others for twins in TWINS)
