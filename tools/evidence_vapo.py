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
from evidence import ACCURACY, DOCS, STEP, TOKENS, Panel

from dapo_rl.base.files import atomic_write
from dapo_rl.lab.ablate.statistics import SeedDifference, paired_difference


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
                compared = ", then ".join(comparison.labels[arm] for arm in pair)
                arms = [data["arms"][arm] for arm in pair]
                rows.append(evidence.row(compared, name, difference(data, pair, name), arms, comparison.to_accuracy))
    return rows


def main(words: Sequence[str]) -> None:
    if words != ["--tables"]:
        (home,) = map(Path, words)
        for comparison in COMPARISONS:
            data = gather(comparison, home / comparison.name)
            atomic_write(DOCS / "evidence" / f"{comparison.name}.json", json.dumps(data, ensure_ascii=False) + "\n")
            picture = evidence.draw_arms(comparison.title, comparison.panels, data, comparison.labels)
            picture.savefig(DOCS / f"evidence-{comparison.name}.png")
    print("\n".join([HEAD, *table()]))


if __name__ == "__main__":
    main(sys.argv[1:])
