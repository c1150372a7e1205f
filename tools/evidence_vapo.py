"""The part of docs/evidence.md on VAPO, from the run directories of its commands: tables, pictures, and numbers of each
seed in docs/evidence/.

    python tools/evidence_vapo.py runs/evidence     reads the runs, writes JSON and pictures, prints the table
    python tools/evidence_vapo.py --tables          prints the table of the saved JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import evidence
import numpy as np
from evidence import ACCURACY, DOCS, STEP, TOKENS, Panel
from matplotlib.figure import Figure

from dapo_rl.base.files import atomic_write
from dapo_rl.lab.ablate.differences import SeedDifference, paired_difference
from dapo_rl.lab.ablate.quantities import COMPARABLE
from dapo_rl.palette import BLUE, GREEN, GREY, VERMILION

STYLES = {2: (GREY, BLUE), 3: (GREY, GREEN, BLUE)}
"""Colours by the number of arms."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Arms of one ablation; each pair `(first, second)` of `pairs` is compared."""

    name: str
    vary: str
    labels: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    compared: tuple[str, ...]
    panels: tuple[Panel, ...]
    title: str
    to_accuracy: float = 0.85

    @property
    def command(self) -> str:
        return (
            f"dapo ablate lab/{self.name} --vary {self.vary} --seeds 8 --compare {','.join(self.compared)} "
            f"--to-accuracy {self.to_accuracy:g} --out runs/evidence/{self.name}"
        )


COMPARISONS = (
    Comparison(
        "presets",
        "preset=grpo,dapo,vapo",
        ("GRPO", "DAPO", "VAPO"),
        ((0, 2), (1, 2)),
        ("steps_to", "tokens_to", "accuracy"),
        (
            replace(ACCURACY, title="Held-out accuracy by steps", level=85),
            replace(ACCURACY, title="… and by tokens", x=TOKENS, level=85),
            Panel("actor/entropy", "Entropy of the policy", "nats per token", x=STEP),
        ),
        "GRPO, DAPO and VAPO on the same sums",
    ),
    Comparison(
        "value-pretraining",
        "critic.pretrain_steps=0,6",
        ("without", "6 steps of pre-training"),
        ((0, 1),),
        ("steps_to", "accuracy"),
        (
            Panel("critic/vf_explained_var", "Explained variance of the critic", "1 is perfect"),
            Panel("critic/vf_loss", "Value loss", "half the squared error"),
            replace(ACCURACY, level=80),
        ),
        "Value pre-training: the critic explains more, the policy learns later",
        0.8,
    ),
)
HEAD = (
    "| compared | quantity | first | second | difference | corrected 95 % interval | d | detectable |\n"
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def count() -> int:
    """The number of differences in the table, which its intervals are corrected for."""
    return sum(len(each.pairs) * len(each.compared) for each in COMPARISONS)


def gather(comparison: Comparison, directory: Path) -> dict[str, Any]:
    """The numbers of a comparison from its run directories."""
    as_experiment = evidence.Experiment(
        comparison.name,
        "",
        comparison.vary,
        "",
        comparison.compared,
        comparison.panels,
        comparison.title,
        comparison.to_accuracy,
    )
    return evidence.gather(as_experiment, directory) | {"command": comparison.command}


def read(comparison: Comparison) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "evidence" / f"{comparison.name}.json").read_text())
    return found


def difference(data: Mapping[str, Any], pair: tuple[int, int], name: str) -> SeedDifference:
    """The second arm minus the first, paired by seed."""
    first, second = ({run["seed"]: run[name] for run in data["arms"][arm]["runs"]} for arm in pair)
    found = paired_difference(second, first, count())
    assert found is not None
    return found


def table() -> list[str]:
    """The rows of the table, from the JSON files."""
    rows = []
    for comparison in COMPARISONS:
        data = read(comparison)
        for pair in comparison.pairs:
            for name in comparison.compared:
                found, quantity = difference(data, pair, name), COMPARABLE[name]
                half, detectable = found.corrected_half_width, found.detectable
                assert half is not None
                assert detectable is not None
                means = [float(np.mean([run[name] for run in data["arms"][arm]["runs"]])) for arm in pair]
                goal = f" {comparison.to_accuracy:.0%}".replace("%", " %") if name.endswith("_to") else ""
                bold = "**" if found.excludes_zero else ""
                interval = f"{bold}{quantity.signed(found.mean - half)} to {quantity.signed(found.mean + half)}{bold}"
                cells = [
                    ", then ".join(comparison.labels[arm] for arm in pair),
                    quantity.head + goal,
                    *(quantity.write(mean) for mean in means),
                    quantity.signed(found.mean),
                    interval,
                    f"{found.effect_size:+.1f}",
                    "" if found.excludes_zero else quantity.unsigned(detectable),
                ]
                rows.append(f"| {' | '.join(cells)} |")
    return rows


def draw(comparison: Comparison, data: Mapping[str, Any]) -> Figure:
    picture = Figure(figsize=(15, 4.6), dpi=100, layout="constrained")
    picture.suptitle(f"{comparison.title} ({len(data['seeds'])} seeds per arm)", fontsize=14, fontweight="bold")
    axes = picture.subplots(1, len(comparison.panels))
    for axis, panel in zip(axes, comparison.panels, strict=True):
        for i, arm in enumerate(data["arms"]):
            color, marker, label = STYLES[len(data["arms"])][i], "o^s"[i], comparison.labels[i]
            curve = arm["curves"][f"{panel.curve} by {panel.x}"]
            x, mean, low, high = (np.array(curve[key]) for key in ("x", "mean", "low", "high"))
            every = max(1, len(x) // 8)
            axis.plot(x, panel.scale * mean, color=color, marker=marker, markevery=every, label=label, linewidth=2)
            axis.fill_between(x, panel.scale * low, panel.scale * high, color=color, alpha=0.15, linewidth=0)
        if panel.level is not None:
            axis.axhline(panel.level, color=VERMILION, linewidth=1, linestyle="--")
        evidence._finish(axis, panel)
    axes[0].legend(fontsize=9, loc="best")
    picture.supxlabel("lines: means over seeds   bands: range over seeds", fontsize=9, color="#666666")
    return picture


def main(words: Sequence[str]) -> None:
    if words != ["--tables"]:
        (home,) = map(Path, words)
        for comparison in COMPARISONS:
            data = gather(comparison, home / comparison.name)
            atomic_write(DOCS / "evidence" / f"{comparison.name}.json", json.dumps(data, ensure_ascii=False) + "\n")
            draw(comparison, data).savefig(DOCS / f"evidence-{comparison.name}.png")
    print("\n".join([HEAD, *table()]))


if __name__ == "__main__":
    main(sys.argv[1:])
