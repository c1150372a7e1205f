"""Draws the packages and their imports: `python tools/packages.py docs/packages.png [SOURCE]`.

A package stands above all packages that it imports; an arrow that another path implies is left out.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt


def imports(root: Path) -> dict[str, set[str]]:
    """The packages, or modules beside them, that each one imports."""
    found: dict[str, set[str]] = defaultdict(set)
    names = {path.stem if path.is_file() else path.name for path in root.iterdir()} - {"__init__", "__main__"}
    for path in root.rglob("*.py"):
        here = path.relative_to(root).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                parts = (module or "").split(".")
                if here in names and parts[0] == "dapo_rl" and len(parts) > 1 and parts[1] in names - {here}:
                    found[here].add(parts[1])
                    found[parts[1]] |= set()
    return dict(found)


def heights(graph: dict[str, set[str]]) -> dict[str, int]:
    """How many packages the longest path down from each one passes; a circle's arrow back counts as none."""
    known: dict[str, int] = {}

    def height(name: str, above: tuple[str, ...]) -> int:
        if name not in known:
            below = [height(other, (*above, name)) for other in graph[name] if other not in (*above, name)]
            known[name] = 1 + max(below, default=-1)
        return known[name]

    for name in sorted(graph):
        height(name, ())
    return known


def draw(root: Path, path: Path) -> None:
    graph = imports(root)
    height, rows = heights(graph), defaultdict(list)
    for name in sorted(graph):
        rows[height[name]].append(name)
    place = {name: (i - (len(row) - 1) / 2, y) for y, row in rows.items() for i, name in enumerate(row)}
    below: dict[str, set[str]] = {}
    for name in sorted(graph, key=height.__getitem__):
        below[name] = set().union(*({o} | below[o] for o in graph[name] if height[o] < height[name]))
    figure, axes = plt.subplots(figsize=(11, 0.62 * len(rows) + 1))
    for name, others in graph.items():
        for other in others:
            up = height[other] >= height[name]
            implied = any(other in below[between] for between in others if height[between] < height[name])
            if up or not implied:
                arrow = {"arrowstyle": "-|>", "color": "#c0392b" if up else "#8a94a3", "shrinkA": 11, "shrinkB": 11}
                axes.annotate("", xy=place[other], xytext=place[name], arrowprops=arrow)
    for name, (x, y) in place.items():
        is_package = (root / name).is_dir()
        box = {"boxstyle": "round,pad=0.35", "fc": "#e8f0fb" if is_package else "#f5f5f2", "ec": "#51657d"}
        axes.text(x, y, name, ha="center", va="center", fontsize=9, bbox=box)
    axes.set_xlim(min(x for x, _ in place.values()) - 0.6, max(x for x, _ in place.values()) + 0.6)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.axis("off")
    figure.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    draw(Path(sys.argv[2] if len(sys.argv) > 2 else "src/dapo_rl"), Path(sys.argv[1]))
