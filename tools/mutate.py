"""Mutation testing: breaks one place of the code at a time and runs tests that should notice.

    python tools/mutate.py src/dapo_rl/objectives tests/objectives --count 20 --seed 1

The first path is the module or package to break, the others are given to pytest. All of it happens in a temporary copy
of the files that git knows. Each mutant is one change: a comparison, a constant, `and` or `or`, `not`, `min` or `max`,
an operator, a statement or a returned value that is gone, a default. A mutant that no test notices has survived; its
diff is printed. Exit code: 0 if all were killed, 1 if some survived, 2 if the tests fail without any change.

Where processes can fork, slow libraries are imported once, and the tests of each mutant run in a child of this process.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import compileall
import contextlib
import difflib
import gc
import importlib
import multiprocessing
import os
import py_compile
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
}
SLACK = 3.0
"""A mutant may take so many times as long as the tests without a change, and SECONDS more."""
SECONDS = 20.0
PRELOADED = (
    "numpy",
    "pandas",
    "torch",
    "transformers",
    "peft",
    "hypothesis",
    "matplotlib.figure",
    "fastapi.testclient",
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""A process must fork while it has one thread, and libraries start more when they are imported."""


@dataclass(frozen=True, slots=True)
class Mutant:
    path: Path
    line: int
    kind: str
    start: int
    """Where the change begins, in bytes."""
    end: int
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


class _Finder(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, path: Path, source: bytes) -> None:
        self._path, self._source = path, source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.found: list[Mutant] = []

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _replace(self, node: ast.expr | ast.stmt, kind: str, text: str) -> None:
        self.found.append(Mutant(self._path, node.lineno, kind, *self._span(node), text))

    def _between(self, left: ast.expr, right: ast.expr, kind: str, old: str, new: str) -> None:
        """Replaces an operator between two operands. Parentheses and comments may stand there too."""
        start, end = self._span(left)[1], self._span(right)[0]
        if (place := self._source[start:end].find(old.encode())) >= 0:
            start += place
            self.found.append(Mutant(self._path, left.lineno, kind, start, start + len(old), new))

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self._between(left, right, "comparison", *COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self._between(node.values[0], node.values[1], "and/or", *words)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right))
        if type(node.op) in OPERATORS and not texts:
            self._between(node.left, node.right, "operator", *OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            start, end = self._span(node.operand)
            kind = "dropped not" if isinstance(node.op, ast.Not) else "sign"
            self._replace(node, kind, f"({self._source[start:end].decode()})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, "switch", str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, "off by one", str(node.value + 1))
        elif isinstance(node.value, float):
            self._replace(node, "ten times", repr(node.value * 10 or 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            self._replace(node.func, "min/max", "max" if node.func.id == "min" else "min")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._replace(node, "removed call", "pass")
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "removed assignment", "pass")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._replace(node, "returned value", "return None")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """Annotations are not run."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if part is not None:
                self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Decorators such as `@dataclass(frozen=True, slots=True)` change nothing that a run could notice."""
        for part in node.body:
            self.visit(part)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Messages are not what is tested here."""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def find_mutants(path: Path) -> list[Mutant]:
    """Every mutant of a file. A few are not valid Python."""
    source = path.read_bytes()
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.found


def _compiles(mutant: Mutant) -> bool:
    try:
        compile(mutant.applied(mutant.path.read_bytes()), "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def choose(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """A sample of valid mutants that has the kinds about equally often: constants are the most frequent by far."""
    rng = random.Random(seed)
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_kind.setdefault(mutant.kind, []).append(mutant)
    chosen: list[Mutant] = []
    while by_kind and len(chosen) < count:
        kind = rng.choice(sorted(by_kind))
        mutant = by_kind[kind].pop(rng.randrange(len(by_kind[kind])))
        if _compiles(mutant):
            chosen.append(mutant)
        if not by_kind[kind]:
            del by_kind[kind]
    return chosen


def copy_tree(root: Path, to: Path) -> None:
    """Copies what git tracks or would track; without git, everything."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        shutil.copytree(root, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        return
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, to / name)


def preload(names: Sequence[str]) -> None:
    """Imports libraries, as far as they are installed, for the children that `run_tests` forks."""
    os.environ.update(ONE_THREAD)
    for name in ("pytest", *names):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # a collection in a child then copies no page of these


def run_tests(root: Path, tests: Sequence[str], timeout: float | None, fork: bool = False) -> int | None:
    """pytest's exit code; None after the time limit. What the tests have started and left is killed."""
    paths = [str(root / "src"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    words = ["-x", "-q", "-p", "no:cacheprovider", *tests]
    if fork:
        assert threading.active_count() == 1, "a process that forks has one thread"
        child = multiprocessing.get_context("fork").Process(target=_run_pytest, args=(root, env, paths, words))
        child.start()
        pid, wait = child.pid, child.join
    else:
        quiet = subprocess.DEVNULL
        words = [sys.executable, "-m", "pytest", *words]
        started = subprocess.Popen(
            words, cwd=root, env=os.environ | env, stdout=quiet, stderr=quiet, start_new_session=True
        )
        pid, wait = started.pid, started.wait
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            wait(timeout)
        return child.exitcode if fork else started.returncode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        wait()


def _run_pytest(root: Path, env: dict[str, str], paths: Sequence[str], words: list[str]) -> NoReturn:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.chdir(root)
    os.environ.update(env)
    sys.path[:0] = paths
    try:
        code = sys.modules["pytest"].main(words)
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not, and the tests may rely on it
    sys.exit(int(code))


def survivors(
    root: Path, mutants: Sequence[Mutant], tests: Sequence[str], timeout: float, fork: bool = False
) -> Iterator[Mutant]:
    """Runs the tests with each mutant of a copy, prints what became of it, and yields those that survive."""
    for number, mutant in enumerate(mutants, 1):
        source = mutant.path.read_bytes()
        mutant.path.write_bytes(mutant.applied(source))
        try:
            code = run_tests(root, tests, timeout, fork)
        finally:
            mutant.path.write_bytes(source)
        outcome = {0: "SURVIVED", None: "killed, by the time limit"}.get(code, "killed")
        place = f"{mutant.path.relative_to(root)}:{mutant.line}"
        print(f"[{number}/{len(mutants)}] {place}: {mutant.kind}: {outcome}", flush=True)
        if code == 0:
            yield mutant


def diff_of(mutant: Mutant, root: Path) -> str:
    source = mutant.path.read_bytes()
    before, after = (text.decode().splitlines() for text in (source, mutant.applied(source)))
    name = str(mutant.path.relative_to(root))
    return "\n".join(difflib.unified_diff(before, after, name, name, n=2, lineterm=""))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the module or package to break")
    parser.add_argument("tests", nargs="+", help="arguments of pytest: paths, -k and so on after --")
    parser.add_argument("--count", type=int, default=10, help="number of mutants (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="which mutants (default 0)")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the project (default: the working directory)")
    parser.add_argument("--preload", nargs="*", default=PRELOADED, help="libraries that are imported once")
    given = parser.parse_args(words)
    with contextlib.ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="mutate-")).resolve()
        stack.callback(shutil.rmtree, root)  # TemporaryDirectory would remove it at the exit of a child, too
        copy_tree(given.root, root)
        # Checked by content, because a mutant may have the size and the second of what it replaces.
        compileall.compile_dir(root, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        target = root / given.target
        files = sorted(target.rglob("*.py")) if target.is_dir() else [target] if target.is_file() else []
        mutants = choose([mutant for path in files for mutant in find_mutants(path)], given.count, given.seed)
        if not mutants:
            print(f"mutate: {given.target}: nothing to break there", file=sys.stderr)
            return 2
        fork = "fork" in multiprocessing.get_all_start_methods()
        if fork:
            preload(given.preload)
        began = time.monotonic()
        if code := run_tests(root, given.tests, None, fork):
            print(f"mutate: the tests fail without any change: pytest exits with {code}", file=sys.stderr)
            return 2
        timeout = SLACK * (time.monotonic() - began) + SECONDS
        alive = list(survivors(root, mutants, given.tests, timeout, fork))
        for mutant in alive:
            print(f"\n{diff_of(mutant, root)}")
        print(f"\n{len(mutants) - len(alive)} of {len(mutants)} killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
