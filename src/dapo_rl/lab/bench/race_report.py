"""Runs the contenders of `bench race` one after the other, and prints and draws who was good when."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from dapo_rl.base.files import atomic_write, beside
from dapo_rl.base.format import counted, percent
from dapo_rl.base.table import figure_table
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.lab.bench.compare import Tell, require_package, run_ours
from dapo_rl.lab.bench.contender import ContenderJob
from dapo_rl.lab.bench.peer_variants import TRL_VARIANTS
from dapo_rl.palette import BLUE, VERMILION

PEERS = ("trl",)
FUNCTIONS = {"dapo": "race:race_dapo", "trl": "race_trl:race_trl"}
LABELS = {"dapo": "dapo-rl", "trl": "TRL"}
COLORS = {"dapo": BLUE, "trl": VERMILION}


@dataclass(frozen=True, slots=True)
class RaceJob:
    """One run of a race."""

    contender: str
    """`dapo` or `trl`."""
    recipe: str
    settings: tuple[str, ...]
    seed: int
    steps: int
    every: int
    variant: str = ""
    weights: str = ""
    """Where contenders save weights, in a folder for each step that is evaluated."""

    def config(self, *more: str) -> Config:
        own = (f"seed={self.seed}", f"train.steps={self.steps}", f"eval.every={self.every}")
        quiet = (f"checkpoint.every={self.steps + 1}", "checkpoint.save_final=false", "log.rollouts=false")
        return Config.load(self.recipe, [*self.settings, *own, *quiet, *more])

    @property
    def evaluated(self) -> list[int]:
        """The steps after which the policy is evaluated."""
        return sorted({0, *range(self.every, self.steps, self.every), self.steps})


@dataclass(frozen=True, slots=True)
class Race:
    recipe: str
    settings: tuple[str, ...]
    contenders: Sequence[str]
    variant: str
    peer_settings: tuple[str, ...]
    seeds: int
    steps: int
    every: int
    goals: Sequence[float]
    peer_seeds: int | None = None
    """As many as ours, if None."""
    results: Path | None = None
    """Where the result of each run is kept, and read from by the next race of the same runs."""

    def job(self, contender: str, seed: int) -> RaceJob:
        ours = contender == "dapo"
        settings = self.settings if ours else (*self.settings, *self.peer_settings)
        variant = "" if ours else self.variant
        return RaceJob(contender, self.recipe, settings, seed, self.steps, self.every, variant)


def run_contenders(race: Race, timeout: float, tell: Tell) -> dict[str, Any]:
    for peer in race.contenders[1:]:
        if peer not in PEERS:
            raise UserError(f"--against: {peer!r} is not a peer of `bench race`; peers are: {', '.join(PEERS)}")
        require_package(peer, f"--against {peer}")
        if race.variant not in TRL_VARIANTS:
            raise UserError(
                f"--peer-variant: {peer} has no variant {race.variant!r}; there are: {', '.join(TRL_VARIANTS)}"
            )
    config = race.job("dapo", 0).config()
    if config.data.eval is None:
        raise UserError("data.eval: the race needs held-out prompts to measure accuracy on")
    runs = []
    for seed in range(race.seeds):  # in turns, so that a machine that slows down slows all of them
        for name in race.contenders:
            if name != "dapo" and race.peer_seeds is not None and seed >= race.peer_seeds:
                continue
            what = f"{LABELS[name]}, seed {seed}"
            tell(what, None)
            run = {"contender": name, "seed": seed, **_kept_run(race.job(name, seed), timeout, race.results)}
            runs.append(run)
            tell(what, run["points"][-1]["seconds"])
    return {
        "bench": "race",
        "recipe": race.recipe,
        "settings": list(race.settings),
        "peer_variant": race.variant if len(race.contenders) > 1 else None,
        "peer_settings": list(race.peer_settings),
        "model": config.model.name,
        "steps": race.steps,
        "runs": runs,
        "goals": [_goal(runs, race.contenders, goal) for goal in race.goals],
    }


def _kept_run(job: RaceJob, timeout: float, results: Path | None) -> dict[str, Any]:
    """A contender's run, or the result that an earlier race has kept of the same job."""
    if results is None:
        return _run(job, timeout)
    path = results / f"{job.contender}-{job.seed}.json"
    # With its settings: the recipe's file may have changed.
    what = json.loads(json.dumps(asdict(job) | {"config": job.config().resolved()}))
    if path.exists():
        kept = json.loads(path.read_text())
        if kept["job"] != what:
            raise UserError(f"--results: {path} is the result of another race; give each race its own directory")
        run: dict[str, Any] = kept["run"]
    else:
        run = _run(job, timeout)
        results.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps({"job": what, "run": run}, indent=1) + "\n")
    return run


def _run(job: RaceJob, timeout: float) -> dict[str, Any]:
    """A contender's seconds, tokens and accuracy after each evaluated step, and the seconds before the first."""
    with TemporaryDirectory(prefix="dapo-race-") as weights:
        job = replace(job, weights=weights)
        run = run_ours(ContenderJob(job.contender, FUNCTIONS[job.contender], (job,)), timeout)
        if job.contender != "dapo":
            accuracies = run_ours(ContenderJob("evaluate", "race:evaluate_weights", (job,)), timeout)["accuracies"]
            run["points"] = [point | {"accuracy": accuracies[str(point["step"])]} for point in run["points"]]
    return run


def _goal(runs: Sequence[dict[str, Any]], contenders: Sequence[str], goal: float) -> dict[str, Any]:
    """When each run first reached an accuracy in an evaluation; None: not within its steps."""
    reached: dict[str, Any] = {}
    for name in contenders:
        own = [run["points"] for run in runs if run["contender"] == name]
        first = [next((point for point in points if point["accuracy"] >= goal), None) for points in own]
        reached[name] = {
            key: [None if point is None else point[key] for point in first] for key in ("seconds", "tokens", "step")
        }
    ratio = None
    # The peer may have fewer runs: compared are the seeds that all have.
    seeds = min(len(reached[name]["seconds"]) for name in contenders)
    times = [reached[name]["seconds"][:seeds] for name in contenders]
    if len(times) == 2 and all(each is not None and each > 0 for own in times for each in own):
        ratio = median(times[1]) / median(times[0])
    return {"accuracy": goal, **reached, "ratio": ratio}


def print_race(report: dict[str, Any], console: Console | None = None) -> None:
    console = console or Console()
    names = list(dict.fromkeys(run["contender"] for run in report["runs"]))
    seeds = counted(max(run["seed"] for run in report["runs"]) + 1, "seed")
    console.print(
        f"race: {report['recipe']}, {report['model']}, {counted(report['steps'], 'step')}, {seeds}", style="bold"
    )
    figures = [head for name in names for head in (f"{LABELS[name]}: seconds", "tokens")]
    table = figure_table("accuracy", *figures, *(["ratio"] if len(names) > 1 else []))
    for goal in report["goals"]:
        row = [percent(goal["accuracy"])]
        for name in names:
            row.append("  ".join("—" if each is None else f"{each:,.0f}" for each in goal[name]["seconds"]))
            row.append("  ".join("—" if each is None else f"{each / 1e3:,.0f}k" for each in goal[name]["tokens"]))
        if len(names) > 1:
            row.append("" if goal["ratio"] is None else f"{goal['ratio']:.2f}×")
        table.add_row(*row)
    for name in names:
        runs = [run for run in report["runs"] if run["contender"] == name]
        own = [run["points"] for run in runs]
        ends = ", ".join(
            f"{percent(points[0]['accuracy'], 1)} → {percent(points[-1]['accuracy'], 1)}" for points in own
        )
        console.print(
            f"{LABELS[name]}: {ends} in {median(points[-1]['seconds'] for points in own):,.0f} s, after "
            f"{median(run['start_seconds'] for run in runs):,.0f} s of start-up"
        )
    console.print(table)
    console.print("seconds of training at the first evaluation that reached it, without start-up", style="dim")


def draw_race(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    from dapo_rl.runs.report_plot import light_grid, percent_tick

    picture = Figure(figsize=(9.2, 3.8), dpi=110, layout="constrained")
    labels = {"seconds": "seconds of training", "tokens": "tokens sampled"}
    for axis, (key, label) in zip(picture.subplots(1, 2, sharey=True), labels.items(), strict=True):
        named = set()
        for run in report["runs"]:
            name = run["contender"]
            axis.plot(
                [point[key] for point in run["points"]],
                [point["accuracy"] for point in run["points"]],
                color=COLORS[name],
                marker="o",
                markersize=3,
                label=None if name in named else LABELS[name],
            )
            named.add(name)
        for goal in report["goals"]:
            axis.axhline(goal["accuracy"], color="#cccccc", linewidth=0.8, zorder=0)
        axis.set_xlabel(label)
        axis.yaxis.set_major_formatter(percent_tick)
        light_grid(axis)
    picture.axes[0].set_ylabel("held-out accuracy")
    picture.axes[0].legend(frameon=False)
    picture.suptitle(f"{report['recipe']}: accuracy over time", fontsize=12, fontweight="bold", parse_math=False)
    with beside(path) as draft:
        picture.savefig(draft, format="png")
