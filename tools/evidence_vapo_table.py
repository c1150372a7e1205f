"""VAPO's table on docs/evidence.md, from the run directories of its command.

python tools/evidence_vapo_table.py runs/evidence   reads the runs, writes JSON and a picture, prints the table
python tools/evidence_vapo_table.py --tables        prints the table of the saved JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import evidence
import numpy as np
from evidence import DOCS
from matplotlib.figure import Figure

from dapo_rl.base.files import atomic_write
from dapo_rl.lab.ablate.plan import AblationPlan
from dapo_rl.lab.ablate.quantities import COMPARABLE
from dapo_rl.lab.ablate.results import collect
from dapo_rl.lab.ablate.runs import all_runs
from dapo_rl.lab.ablate.statistics import SeedDifference, paired_difference

NAME = "vapo-table"
COMPARED = ("steps_to", "accuracy")
COMMAND = (
    "dapo ablate lab/presets critic.length_alpha=1 critic.lambda_lowest=0 --table vapo --seeds 10 "
    f"--compare {','.join(COMPARED)} --to-accuracy 0.85 --out runs/evidence/{NAME}"
)
HEAD = (
    "| arm | steps to 85 % | difference | corrected 95 % interval | exact | accuracy % | difference "
    "| corrected 95 % interval | exact |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def gather(directory: Path) -> dict[str, Any]:
    """The numbers of each arm and seed."""
    plan = AblationPlan.load(directory / "plan.json")
    arms = []
    for result in collect(plan, all_runs(plan, directory)):
        outcomes = [(each.run.seed, each.final) for each in result.runs if each.final is not None]
        numbers = [
            {
                "seed": seed,
                **{name: round(float(found[name]), 6) for name in COMPARED},
                "reached": found["reached"],
            }
            for seed, found in outcomes
        ]
        arms.append({"label": result.arm.label, "paper": result.arm.paper, "runs": numbers})
    return {"name": NAME, "command": COMMAND, "seeds": list(plan.seeds), "arms": arms}


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "evidence" / f"{NAME}.json").read_text())
    return found


def count(data: Mapping[str, Any]) -> int:
    """The number of differences, which the intervals are corrected for."""
    return len(COMPARED) * (len(data["arms"]) - 1)


def difference(data: Mapping[str, Any], arm: Mapping[str, Any], name: str) -> SeedDifference:
    """The arm minus the whole of VAPO, paired by seed."""
    whole, without = ({run["seed"]: run[name] for run in each["runs"]} for each in (data["arms"][0], arm))
    found = paired_difference(without, whole, count(data))
    assert found is not None
    return found


def table(data: Mapping[str, Any]) -> list[str]:
    rows = []
    for place, arm in enumerate(data["arms"]):
        cells = [arm["label"]]
        for name in COMPARED:
            quantity = COMPARABLE[name]
            cells.append(quantity.write(float(np.mean([run[name] for run in arm["runs"]]))))
            if place == 0:
                cells += ["", "", ""]
                continue
            found = difference(data, arm, name)
            half = found.corrected_half_width
            assert half is not None
            interval = evidence.ends(quantity, (found.mean - half, found.mean + half))
            exact = "" if found.exact is None else evidence.ends(quantity, found.exact)
            cells += [quantity.signed(found.mean), interval, exact]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def draw(data: Mapping[str, Any]) -> Figure:
    """The differences of all arms, a panel for each quantity."""
    arms = data["arms"][1:]
    picture = Figure(figsize=(13, 2.2 + 0.42 * len(arms)), dpi=100, layout="constrained")
    picture.suptitle(
        f"VAPO without one of its techniques, or any ({len(data['seeds'])} seeds per arm)",
        fontsize=14,
        fontweight="bold",
    )
    axes = picture.subplots(1, len(COMPARED), sharey=True)
    for axis, name, unit in zip(axes, COMPARED, ("steps to 85 %", "points of final accuracy"), strict=True):
        scale = 100.0 if name == "accuracy" else 1.0
        evidence.draw_intervals(axis, [(difference(data, arm, name), 1 / scale) for arm in arms])
        axis.set_xlabel(f"difference in {unit}")
    axes[0].set_yticks(range(len(arms)), [arm["label"] for arm in arms])
    picture.supxlabel(evidence.KEY, fontsize=9, color="#666666")
    return picture


def main(words: Sequence[str]) -> None:
    if words != ["--tables"]:
        (home,) = map(Path, words)
        data = gather(home / NAME)
        atomic_write(DOCS / "evidence" / f"{NAME}.json", json.dumps(data, ensure_ascii=False) + "\n")
        draw(data).savefig(DOCS / f"evidence-{NAME}.png")
    print("\n".join([HEAD, *table(read())]))


if __name__ == "__main__":
    main(sys.argv[1:])
