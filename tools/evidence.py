"""Collects the experiments of docs/evidence.md from the directories of `dapo ablate`, and draws their pictures.

    python tools/evidence.py runs/evidence            # docs/evidence/NAME.json, docs/evidence-NAME.png, evidence.png
    python tools/evidence.py runs/evidence NAME …     # only these experiments, and evidence.png

Each experiment is the directory runs/evidence/NAME of the command on the page. The table of the page and evidence.png
come from the JSON files; `python tools/evidence.py --tables` prints the table.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dapo_rl.base.files import atomic_write
from dapo_rl.lab.ablate.plan import AblationPlan
from dapo_rl.lab.ablate.quantities import COMPARABLE, Quantity
from dapo_rl.lab.ablate.results import collect, repetition_by_step
from dapo_rl.lab.ablate.runs import ArmRun, all_runs
from dapo_rl.lab.ablate.statistics import SeedDifference, paired_difference
from dapo_rl.palette import BLUE, GREEN, GREY, VERMILION
from dapo_rl.runs.directory import RunDirectory

DOCS = Path(__file__).parents[1] / "docs"
STEP, TOKENS = "rollout step", "tokens generated, thousands"


@dataclass(frozen=True, slots=True)
class Panel:
    curve: str
    """A metric of the run log, `accuracy` (held out), `repetition` or `punished`."""
    title: str
    unit: str
    scale: float = 1.0
    x: str = STEP
    level: float | None = None
    """A horizontal line."""


@dataclass(frozen=True, slots=True)
class Experiment:
    name: str
    technique: str
    vary: str
    without: str
    """The first arm in words, as the legend has it."""
    compared: tuple[str, ...]
    panels: tuple[Panel, ...]
    title: str
    to_accuracy: float | None = None
    recipe: str = ""
    """Of the lab, if its name is another."""
    settings: str = ""
    """Of this experiment, beyond the recipe's."""
    seeds: range = range(8)

    def in_words(self) -> str:
        """The technique, as the table has it."""
        return f"{self.technique}{self.other_seeds}"

    @property
    def other_seeds(self) -> str:
        """The seeds of a repetition, in words."""
        return f", seeds {self.seeds[0]} to {self.seeds[-1]}" if self.seeds.start else ""

    @property
    def command(self) -> str:
        to = f" --to-accuracy {self.to_accuracy:g}" if self.to_accuracy else ""
        settings = f" {self.settings}" if self.settings else ""
        settings += f" seed={self.seeds.start}" if self.seeds.start else ""
        return (
            f"dapo ablate lab/{self.recipe or self.name}{settings} --vary {self.vary} --seeds {len(self.seeds)} "
            f"--compare {','.join(self.compared)}{to} --out runs/evidence/{self.name}"
        )


InWords = Callable[[Experiment], str]
"""How the table and the picture of all differences name an experiment."""

ACCURACY = Panel("accuracy", "Held-out accuracy", "% correct", 100)
CLIP_HIGHER = Experiment(
    "clip-higher",
    "Clip-Higher",
    "algo.clip_high=0.2,0.28",
    "without",
    ("mean_entropy", "mean_accuracy"),
    (
        Panel("actor/pg_clipfrac_high", "Tokens clipped at the upper bound", "% of tokens", 100),
        Panel("actor/entropy", "Entropy", "nats per token"),
        replace(ACCURACY, title="Right answers, the rare ones"),
    ),
    "Clip-Higher where entropy collapses on a common answer",
)
EXPERIMENTS = (
    Experiment(
        "dynamic-sampling",
        "Dynamic Sampling",
        "sampling.dynamic=false,true",
        "without",
        ("steps_to", "tokens_to"),
        (
            Panel("reward/zero_std_share", "Sampled groups whose rewards are all equal", "% of groups", 100),
            replace(ACCURACY, title="Held-out accuracy by steps", level=85),
            replace(ACCURACY, title="… and by tokens", x=TOKENS, level=85),
        ),
        "Dynamic Sampling reaches 85 % in fewer steps",
        0.85,
        seeds=range(10),
    ),
    Experiment(
        "overlong-filtering",
        "Overlong Filtering",
        "overlong.mask_truncated=false,true",
        "without",
        ("accuracy", "response_length"),
        (
            Panel("punished", "Responses cut off although all is right so far", "% of responses", 100),
            Panel("response_length/mean", "Length of responses", "tokens"),
            replace(ACCURACY, title="Held-out accuracy, where the work fits"),
        ),
        "A limit that cuts off right work teaches to guess; Overlong Filtering prevents that",
        seeds=range(10),
    ),
    Experiment(
        "soft-overlong-punishment",
        "Soft Overlong Punishment",
        "overlong.shape=off,soft",
        "without",
        ("mean_truncated", "accuracy"),
        (
            Panel("response_length/clip_ratio", "Responses cut off at 48 tokens", "% of responses", 100),
            Panel("response_length/mean", "Length of responses", "tokens"),
            ACCURACY,
        ),
        "Soft Overlong Punishment: fewer responses are cut off, at a cost in accuracy",
        seeds=range(10),
    ),
    CLIP_HIGHER,
    replace(
        CLIP_HIGHER,
        name="clip-higher-again",
        compared=("accuracy",),
        recipe="clip-higher",
        seeds=range(8, 32),
    ),
    Experiment(
        "token-level-loss",
        "Token-level Loss",
        "algo.aggregation=seq-mean-token-mean,token-mean",
        "a mean per response",
        ("mean_length", "repetition"),
        (
            Panel("response_length/mean", "Length of responses", "tokens"),
            Panel("repetition", "Repeated 4-grams", "% of a response", 100),
            ACCURACY,
        ),
        "With Token-level Loss, rambling fades sooner",
        seeds=range(10),
    ),
)


def comparisons(experiments: Sequence[Experiment] = EXPERIMENTS) -> int:
    """The number of differences on the page, which all of its intervals are corrected for."""
    return sum(len(experiment.compared) for experiment in experiments)


def gather(experiment: Experiment, directory: Path) -> dict[str, Any]:
    """The numbers of an experiment from its run directories."""
    plan = AblationPlan.load(directory / "plan.json")
    plan = replace(
        plan, seeds=tuple(experiment.seeds), compared=experiment.compared, to_accuracy=experiment.to_accuracy
    )
    more = ("accuracy_before", "accuracy", "entropy", "clipped_high", "clipped_prob")
    names = dict.fromkeys((*experiment.compared, *more))
    arms = []
    for result in collect(plan, all_runs(plan, directory)):
        outcomes = [(each.run.seed, each.final) for each in result.runs if each.final is not None]
        arms.append(
            {
                "label": result.arm.label,
                "runs": [
                    {"seed": seed, **{name: _rounded(found[name]) for name in names}, "reached": found["reached"]}
                    for seed, found in outcomes
                ],
                "curves": {
                    f"{panel.curve} by {panel.x}": _band(panel, [each.run for each in result.runs if each.final])
                    for panel in experiment.panels
                },
            }
        )
    return {"name": experiment.name, "command": experiment.command, "seeds": list(plan.seeds), "arms": arms}


def differences(experiment: Experiment, data: Mapping[str, Any], count: int) -> dict[str, SeedDifference]:
    """Each compared quantity: the technique minus none, paired by seed, corrected for `count` comparisons."""
    without, with_it = data["arms"]
    found = {}
    for name in experiment.compared:
        by_seed = [{run["seed"]: run[name] for run in arm["runs"]} for arm in (with_it, without)]
        difference = paired_difference(by_seed[0], by_seed[1], count)
        assert difference is not None
        found[name] = difference
    return found


HEAD = (
    "| technique alone | quantity | without | with | difference | corrected 95 % interval | exact | d | detectable |\n"
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def table(experiments: Sequence[Experiment] = EXPERIMENTS, in_words: InWords = Experiment.in_words) -> list[str]:
    """The rows of a page's table, from the JSON files."""
    rows = []
    for experiment in experiments:
        data = read(experiment)
        for name, found in differences(experiment, data, comparisons(experiments)).items():
            rows.append(row(in_words(experiment), name, found, data["arms"], experiment.to_accuracy))
    return rows


def row(
    compared: str, name: str, found: SeedDifference, arms: Sequence[Mapping[str, Any]], to_accuracy: float | None
) -> str:
    """The row of a table for one quantity of two arms."""
    quantity, half = COMPARABLE[name], found.corrected_half_width
    assert half is not None
    assert found.detectable is not None
    means = [np.mean([run[name] for run in arm["runs"]]) for arm in arms]
    head = quantity.head + (f" {to_accuracy:.0%}".replace("%", " %") if name.endswith("_to") else "")
    interval = ends(quantity, (found.mean - half, found.mean + half))
    exact = "" if found.exact is None else ends(quantity, found.exact)
    detectable = "" if found.excludes_zero else quantity.unsigned(found.detectable)
    cells = [compared, head, *(quantity.write(float(mean)) for mean in means)]
    cells += [quantity.signed(found.mean), interval, exact, f"{found.effect_size:+.1f}", detectable]
    return f"| {' | '.join(cells)} |"


def ends(quantity: Quantity, interval: tuple[float, float]) -> str:
    """An interval, in bold if it excludes 0."""
    low, high = interval
    bold = "" if low <= 0 <= high else "**"
    return f"{bold}{quantity.signed(low)} to {quantity.signed(high)}{bold}"


def read(experiment: Experiment) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "evidence" / f"{experiment.name}.json").read_text())
    return found


def draw(experiment: Experiment, data: Mapping[str, Any]) -> Figure:
    labels = (
        f"{experiment.without} ({data['arms'][0]['label']})",
        f"{experiment.technique} ({data['arms'][1]['label']})",
    )
    return draw_arms(experiment.title, experiment.panels, data, labels)


STYLES = {
    2: ((GREY, "o"), (BLUE, "s")),
    3: ((GREY, "o"), (GREEN, "^"), (BLUE, "s")),
    6: ((GREY, "o"), ("#e6ab72", "v"), ("#8cc4e8", "P"), (VERMILION, "D"), (BLUE, "s"), (GREEN, "^")),
}
"""Colours and markers by the number of arms."""


def draw_arms(title: str, panels: Sequence[Panel], data: Mapping[str, Any], labels: Sequence[str]) -> Figure:
    """The curves of each arm, a panel beside the other."""
    picture = Figure(figsize=(15, 4.9), dpi=100, layout="constrained")
    picture.suptitle(f"{title} ({len(data['seeds'])} seeds per arm)", fontsize=14, fontweight="bold")
    axes = picture.subplots(1, len(panels))
    for axis, panel in zip(axes, panels, strict=True):
        for arm, (color, marker), label in zip(data["arms"], STYLES[len(labels)], labels, strict=True):
            curve = arm["curves"][f"{panel.curve} by {panel.x}"]
            x, mean, low, high = (np.array(curve[key]) for key in ("x", "mean", "low", "high"))
            every = max(1, len(x) // 8)
            axis.plot(x, panel.scale * mean, color=color, marker=marker, markevery=every, label=label, linewidth=2)
            axis.fill_between(x, panel.scale * low, panel.scale * high, color=color, alpha=0.15, linewidth=0)
        if panel.level is not None:
            axis.axhline(panel.level, color=VERMILION, linewidth=1, linestyle="--")
            axis.annotate(
                "target", (1, panel.level), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=VERMILION
            )
        _finish(axis, panel)
    picture.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(labels),
        fontsize=10,
        title="lines: means over seeds   bands: range over seeds",
        title_fontsize=9,
        frameon=False,
    )
    return picture


def _finish(axis: Axes, panel: Panel) -> None:
    axis.set_title(panel.title, loc="left", fontsize=12)
    axis.set_xlabel(panel.x)
    axis.set_ylabel(panel.unit)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


KEY = "thick: 95 % interval   thin: corrected for all comparisons here   blue: the corrected interval excludes 0"


def draw_all(experiments: Sequence[Experiment], in_words: InWords, title: str) -> Figure:
    """Every difference of a page, in per cent of the value without the technique."""
    rows = []
    for experiment in experiments:
        data = read(experiment)
        for name, found in differences(experiment, data, comparisons(experiments)).items():
            base = float(np.mean([run[name] for run in data["arms"][0]["runs"]]))
            label = f"{in_words(experiment)}: {COMPARABLE[name].head.removesuffix(' %')}"
            label += f" {experiment.to_accuracy:.0%}".replace("%", " %") if name.endswith("_to") else ""
            rows.append((label, found, abs(base) / 100))
    picture = Figure(figsize=(11, 1.8 + 0.42 * len(rows)), dpi=100, layout="constrained")
    axis = picture.subplots()
    draw_intervals(axis, [(found, unit) for _, found, unit in rows])
    axis.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axis.set_xlabel("difference, in per cent of the value without the technique")
    axis.set_title(title, loc="left", fontweight="bold")
    picture.supxlabel(KEY, fontsize=9, color="#666666")
    return picture


def draw_intervals(axis: Axes, rows: Sequence[tuple[SeedDifference, float]]) -> None:
    """Differences below each other, each divided by its unit."""
    for row, (found, unit) in enumerate(rows):
        color = BLUE if found.excludes_zero else GREY
        assert found.half_width is not None
        assert found.corrected_half_width is not None
        for half, width in ((found.corrected_half_width, 1.5), (found.half_width, 4.0)):
            axis.plot(
                [(found.mean - half) / unit, (found.mean + half) / unit], [row, row], color=color, linewidth=width
            )
        axis.plot([found.mean / unit], [row], "o", color=color, markersize=6, markerfacecolor="white")
    axis.axvline(0, color="black", linewidth=1)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _band(panel: Panel, runs: Sequence[ArmRun]) -> dict[str, list[float]]:
    curves, tokens = [], []
    for run in runs:
        metrics = run.directory.read_metrics()
        if panel.curve == "accuracy":
            curve = {int(row["step"]): float(row["accuracy"]) for row in run.summary()["evaluations"]}
        elif panel.curve == "repetition":
            curve = repetition_by_step(run.directory)
        elif panel.curve == "punished":
            curve = punished_by_step(run.directory)
        else:
            rows = [row for row in metrics if isinstance(row.get(panel.curve), int | float)]
            curve = {int(row["step"]): float(row[panel.curve]) for row in rows}
        made = {int(row["step"]): float(row.get("sampling/tokens_generated") or 0) for row in metrics}
        curves.append(curve)
        tokens.append({step: sum(made.get(k, 0) for k in range(step + 1)) for step in curve})
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[step] for step in steps] for curve in curves])
    by_tokens = np.array([[each[step] for step in steps] for each in tokens]).mean(axis=0) / 1000
    return {
        "x": [float(step) for step in steps] if panel.x == STEP else _list(by_tokens),
        "mean": _list(values.mean(axis=0)),
        "low": _list(values.min(axis=0)),
        "high": _list(values.max(axis=0)),
    }


def punished_by_step(directory: RunDirectory) -> dict[int, float]:
    """The share of responses that are cut off although every line of their work is right: the noise in the reward."""
    shares = {}
    for path in sorted(directory.rollouts_path.glob("step-*.parquet")):
        rows = pq.read_table(path, columns=["step", "prompt", "response", "finish_reason"]).to_pylist()
        noise = [row["finish_reason"] == "length" and right_so_far(row["prompt"], row["response"]) for row in rows]
        shares[int(rows[0]["step"])] = sum(noise) / len(noise)
    return shares


def right_so_far(prompt: str, response: str) -> bool:
    """Whether the complete lines of a response, at least one, work through the sum as it is given."""
    numbers = [int(word) for word in re.findall(r"[+-]?\d", prompt)]
    totals = list(accumulate(numbers))
    lines = response.split("\n")[:-1]
    right = [f"{totals[i]}{number:+d}={totals[i + 1]}" for i, number in enumerate(numbers[1:])]
    return bool(lines) and lines == right[: len(lines)]


def _list(values: Any) -> list[float]:
    return [round(float(value), 4) for value in values]


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def selected(names: Sequence[str], experiments: Sequence[Experiment] = EXPERIMENTS) -> list[Experiment]:
    """The experiments with these names, or all if there are none."""
    known = {experiment.name: experiment for experiment in experiments}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{unknown[0]}: not one of {', '.join(known)}")
    return [known[name] for name in names or known]


def run(words: Sequence[str], experiments: Sequence[Experiment], in_words: InWords, picture: str, title: str) -> None:
    """The command line: a directory of runs and names of experiments, or `--tables`."""
    if words != ["--tables"]:
        home, names = Path(words[0]), words[1:]
        (DOCS / "evidence").mkdir(exist_ok=True)
        for experiment in selected(names, experiments):
            data = gather(experiment, home / experiment.name)
            atomic_write(DOCS / "evidence" / f"{experiment.name}.json", json.dumps(data, ensure_ascii=False) + "\n")
            draw(experiment, data).savefig(DOCS / f"evidence-{experiment.name}.png")
        draw_all(experiments, in_words, title).savefig(DOCS / picture)
    print("\n".join([HEAD, *table(experiments, in_words)]))


TITLE = "Each technique alone, in an experiment that has what it is against"

if __name__ == "__main__":
    run(sys.argv[1:], EXPERIMENTS, Experiment.in_words, "evidence.png", TITLE)
