"""Imports go one way."""

import ast

from support import REPOSITORY

PACKAGE = REPOSITORY / "src" / "dapo_rl"

LAYERS = [
    {"errors"},
    {"base"},
    {"choices"},
    {"objectives"},
    {"foreign", "recipes"},
    {"version", "types", "palette", "outcomes", "recipe", "config", "demo", "completion"},
    {"codec"},
    {"data", "rewards", "envs", "models", "runs", "moving"},
    {"engines"},
    {"rollout"},
    {"evals"},
    {"train"},
    {"cluster"},
    {"algo", "build"},
    {"trainer"},
    {"lab"},
    {"board", "launch"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
SIDEWAYS = {
    ("outcomes", "palette"),
    ("config", "recipe"),
    ("completion", "config"),
    ("demo", "config"),
    ("demo", "recipe"),
}
"""What may be imported from a neighbour on the same layer."""
WITHOUT_TORCH = {
    *(
        "errors",
        "base",
        "foreign",
        "recipes",
        "version",
        "types",
        "choices",
        "palette",
        "outcomes",
        "codec",
        "recipe",
        "config",
        "demo",
    ),
    *("completion", "data", "rewards", "envs", "runs", "board", "moving", "launch"),
}


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module
            if node.module == "dapo_rl":
                yield from (f"dapo_rl.{alias.name}" for alias in node.names)


def modules():
    return [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def test_every_part_has_a_layer():
    assert {part_of(path) for path in modules()} == set(RANK)


def test_imports_go_down():
    for path in modules():
        here = part_of(path)
        for name in imports_of(path):
            if name.startswith("dapo_rl."):
                there = name.split(".")[1]
                allowed = here == there or RANK[there] < RANK[here] or (here, there) in SIDEWAYS
                assert allowed, f"{path.relative_to(PACKAGE)} imports {name}, which goes up"


def test_settings_data_rewards_and_run_directories_do_without_torch():
    for path in modules():
        if part_of(path) in WITHOUT_TORCH:
            heavy = {name.split(".")[0] for name in imports_of(path)} & {"torch", "transformers"}
            assert not heavy, f"{path.relative_to(PACKAGE)} imports {heavy}"


def test_the_loop_knows_no_concrete_engine():
    for path in (PACKAGE / "train").glob("*.py"):
        engines = {f"dapo_rl.engines.{name}" for name in ("build", "hf", "native.engine", "vllm")}
        assert not engines & set(imports_of(path)), path
