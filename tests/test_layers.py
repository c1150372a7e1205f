"""Imports go one way."""

import ast
from graphlib import TopologicalSorter

from support import REPOSITORY

PACKAGE = REPOSITORY / "src" / "dapo_rl"

LAYERS = [
    {"errors"},
    {"base"},
    {"workers"},
    {"choices", "engine_specs"},
    {"objectives"},
    {"recipes"},
    {"version", "types", "palette", "outcomes", "config", "demo", "completion"},
    {"codec"},
    {"data", "rewards", "envs", "models", "runs", "convert"},
    {"compat"},
    {"engines"},
    {"memory"},
    {"rollout"},
    {"evals"},
    {"train"},
    {"cluster"},
    {"algo", "run"},
    {"trainer"},
    {"lab"},
    {"board", "launch"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
SIDEWAYS = {
    ("outcomes", "palette"),
    ("completion", "config"),
    ("demo", "config"),
    ("envs", "data"),
}
"""What may be imported from a neighbour on the same layer."""
WITHOUT_TORCH = {
    *(
        "errors",
        "base",
        "workers",
        "recipes",
        "version",
        "types",
        "choices",
        "engine_specs",
        "palette",
        "outcomes",
        "codec",
        "config",
        "demo",
    ),
    *("completion", "data", "rewards", "envs", "runs", "board", "convert", "launch"),
}


def part(module):
    """The part of the package that a module, named below `dapo_rl`, belongs to."""
    return module.split(".")[0]


def part_of(path):
    return part(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


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
                there = part(name.removeprefix("dapo_rl."))
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


def test_no_imports_go_in_circles():
    """Imports in functions and under TYPE_CHECKING count too."""
    graph = {name_of(path): set(imported_modules(path)) for path in PACKAGE.rglob("*.py")}
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a circle


def name_of(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path):
    """The modules of the package that a file imports, by `import module` or `from package import module` too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("dapo_rl"))
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("dapo_rl"):
            for alias in node.names:
                place = PACKAGE.parent.joinpath(*node.module.split("."), alias.name)
                is_module = place.with_suffix(".py").exists() or place.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module
