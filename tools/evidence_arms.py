"""The comparisons of several arms on docs/evidence.md, from the run directories of its commands: tables, pictures, and
numbers of each seed in docs/evidence/.

    python tools/evidence_arms.py runs/evidence            # reads the runs, writes JSON and pictures, prints the tables
    python tools/evidence_arms.py runs/evidence NAME …     # only the runs of these comparisons
    python tools/evidence_arms.py --tables                 # prints the tables of the saved JSON
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
    """The option that makes the arms: `--vary` with values, or an `--arm` for each."""
    labels: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    compared: tuple[str, ...]
    panels: tuple[Panel, ...]
    title: str
    to_accuracy: float = 0.85
    recipe: str = ""
    """Of the lab, if its name is another."""
    seeds: range = range(10)

    @property
    def command(self) -> str:
        return (
            f"dapo ablate lab/{self.recipe or self.name} {self.vary} --seeds {len(self.seeds)} "
            f"--compare {','.join(self.compared)} --to-accuracy {self.to_accuracy:g} --out runs/evidence/{self.name}"
        )


VAPO = (
    Comparison(
        "presets",
        "--vary preset=grpo,dapo,vapo",
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
        "--vary critic.pretrain_steps=0,6",
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
DYNAMIC = (
    Comparison(
        "dynamic-sampling-batch",
        "--arm sampling.dynamic=false --arm 'sampling.dynamic=false sampling.prompts_per_step=32' "
        "--arm sampling.dynamic=true",
        ("16 prompts", "32 prompts", "16 prompts, Dynamic Sampling"),
        ((0, 1), (1, 2)),
        ("steps_to", "tokens_to"),
        (
            Panel("reward/zero_std_share", "Sampled groups whose rewards are all equal", "% of groups", 100),
            replace(ACCURACY, title="Held-out accuracy by steps", level=85),
            replace(ACCURACY, title="… and by tokens", x=TOKENS, level=85),
        ),
        "Dynamic Sampling and a larger batch",
        recipe="dynamic-sampling",
    ),
)
STALE = (
    Comparison(
        "off-policy",
        "--arm sampling.ahead=0 --arm sampling.ahead=1 "
        "--arm 'sampling.ahead=1 algo.proximal=recomputed algo.importance_cap=2' --arm sampling.ahead=4 "
        "--arm 'sampling.ahead=4 algo.proximal=recomputed algo.importance_cap=2' "
        "--arm 'sampling.ahead=4 algo.off_policy_mask_threshold=0.05'",
        ("fresh", "1 version old", "1 old, weighted", "4 versions old", "4 old, weighted", "4 old, masked"),
        ((0, 1), (1, 2), (0, 3), (3, 4), (3, 5)),
        ("steps_to", "accuracy"),
        (
            replace(ACCURACY, level=80),
            Panel("actor/entropy", "Entropy of the policy", "nats per token"),
            Panel("actor/pg_clipfrac", "Clipped tokens", "% of tokens", 100),
        ),
        "Samples of old weights, and two corrections",
        0.8,
    ),
)
INFORMATIVE = (
    Comparison(
        "informative-prompts",
        "--vary sampling.selection=uniform,informative",
        ("uniform", "informative"),
        ((0, 1),),
        ("steps_to", "tokens_to"),
        (
            Panel("reward/zero_std_share", "Sampled groups whose rewards are all equal", "% of groups", 100),
            replace(ACCURACY, title="Held-out accuracy by steps", level=80),
            replace(ACCURACY, title="… and by tokens", x=TOKENS, level=80),
        ),
        "Prompts that are likely to be informative, where prompts repeat and differ",
        0.8,
    ),
)
GROUPS = (DYNAMIC, STALE, INFORMATIVE, VAPO)
"""A table each, whose intervals are corrected for all of its comparisons."""
HEAD = (
    "| compared | quantity | first | second | difference | corrected 95 % interval | exact | d | detectable |\n"
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def count(group: Sequence[Comparison]) -> int:
    """The number of differences in a table, which its intervals are corrected for."""
    return sum(len(each.pairs) * len(each.compared) for each in group)


def gather(comparison: Comparison, directory: Path) -> dict[str, Any]:
    """The numbers of a comparison from its run directories."""
    as_experiment = evidence.Experiment(
        comparison.name,
        "",
        "",
        "",
        comparison.compared,
        comparison.panels,
        comparison.title,
        comparison.to_accuracy,
        seeds=comparison.seeds,
    )
    return evidence.gather(as_experiment, directory) | {"command": comparison.command}


def read(comparison: Comparison) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "evidence" / f"{comparison.name}.json").read_text())
    return found


def difference(data: Mapping[str, Any], pair: tuple[int, int], name: str, comparisons: int) -> SeedDifference:
    """The second arm minus the first, paired by seed."""
    first, second = ({run["seed"]: run[name] for run in data["arms"][arm]["runs"]} for arm in pair)
    found = paired_difference(second, first, comparisons)
    assert found is not None
    return found


def table(group: Sequence[Comparison]) -> list[str]:
    """The rows of a table, from the JSON files."""
    rows = []
    for comparison in group:
        data = read(comparison)
        for pair in comparison.pairs:
            for name in comparison.compared:
                compared = ", then ".join(comparison.labels[arm] for arm in pair)
                arms = [data["arms"][arm] for arm in pair]
                found = difference(data, pair, name, count(group))
                rows.append(evidence.row(compared, name, found, arms, comparison.to_accuracy))
    return rows


def main(words: Sequence[str]) -> None:
    if words != ["--tables"]:
        home, names = Path(words[0]), words[1:]
        for comparison in (each for group in GROUPS for each in group if not names or each.name in names):
            data = gather(comparison, home / comparison.name)
            atomic_write(DOCS / "evidence" / f"{comparison.name}.json", json.dumps(data, ensure_ascii=False) + "\n")
            picture = evidence.draw_arms(comparison.title, comparison.panels, data, comparison.labels)
            picture.savefig(DOCS / f"evidence-{comparison.name}.png")
    for group in GROUPS:
        print("\n".join([HEAD, *table(group), ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
