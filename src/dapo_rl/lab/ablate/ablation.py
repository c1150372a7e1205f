"""`dapo ablate`: plans the runs, runs those that are missing, and writes the tables and the figure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from dapo_rl.base.files import atomic_write
from dapo_rl.base.format import counted, short_path
from dapo_rl.base.lock import acquire
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.display import ablation_display
from dapo_rl.lab.ablate.plan import AblationPlan, arms_of, check_same_plan, grid, paper_table
from dapo_rl.lab.ablate.quantities import COMPARABLE, DEFAULT_COMPARED, TO_ACCURACY
from dapo_rl.lab.ablate.report import ablation_json, markdown, print_ablation
from dapo_rl.lab.ablate.results import ArmResult, collect
from dapo_rl.lab.ablate.runs import ArmRun, all_runs, run_all
from dapo_rl.lab.ablate.techniques import DEFAULT_TABLE, TABLES
from dapo_rl.runs.directory import new_run_directory

SEEDS = 3


def run_ablation(
    recipe: Path | None,
    overrides: Sequence[str],
    *,
    seeds: int | None = None,
    vary: Sequence[str] = (),
    arms: Sequence[str] = (),
    only: str | None = None,
    table: str | None = None,
    compare: str | None = None,
    to_accuracy: float | None = None,
    out: Path | None = None,
    jobs: int = 1,
    keep_models: bool = False,
) -> int:
    """Returns the exit code: 0 if every run is done, that of the first run that failed, or 128 + a signal."""
    if out is not None and "=" in str(out):
        raise UserError(f"--out: {out} contains =, so it would be read as a setting on the command line; rename it")
    saved = AblationPlan.load(out / "plan.json") if out is not None and (out / "plan.json").exists() else None
    is_named = recipe is not None or overrides or vary or arms or only is not None or table is not None
    if saved is not None and not is_named:
        first = saved.seeds[0]
        plan = saved if seeds is None else replace(saved, seeds=tuple(range(first, first + seeds)))
    else:
        number = seeds or (len(saved.seeds) if saved else SEEDS)
        plan = _plan(recipe, overrides, number, vary, arms, only, table)
        if saved is not None and out is not None:
            check_same_plan(out, saved, plan)
            plan = replace(plan, compared=saved.compared, to_accuracy=saved.to_accuracy)
    plan = _compared(plan, compare, to_accuracy)
    if out is None:
        out = new_run_directory(f"ablate-{plan.name}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        release = acquire(out)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{out}: is not a directory; name another with --out") from None
    try:
        return _run(plan, out, jobs, keep_models)
    finally:
        release()


def _run(plan: AblationPlan, out: Path, jobs: int, keep_models: bool) -> int:
    runs = all_runs(plan, out, keep_models)
    plan.save(out / "plan.json")
    console = Console()
    left = sum(run.state != "done" for run in runs)
    size = f"{counted(len(plan.arms), 'arm')}, {counted(len(runs), 'run')}"
    again = f"; {len(runs) - left} already done" if left < len(runs) else ""
    console.print(f"{size} in {short_path(out)}{again}", markup=False, highlight=False, soft_wrap=True)
    with ablation_display(plan, runs) as display:
        stopped_by = run_all(runs, jobs, display)
    results = collect(plan, runs)
    _write(plan, results, runs, out, console)
    if stopped_by is not None:
        line = f"stopped; resume with dapo ablate --out {short_path(out)}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        return 128 + stopped_by
    codes = [run.exit_code for run in runs if run.state == "failed" and run.exit_code is not None]
    if any(run.state == "stopped" for run in runs):  # a single run was stopped from outside
        codes.append(128 + signal.SIGINT)
    return next((code if code > 0 else 1 for code in codes), 0)


def _write(
    plan: AblationPlan, results: Sequence[ArmResult], runs: Sequence[ArmRun], out: Path, console: Console
) -> None:
    if not any(run.state == "done" for run in runs):
        console.print("no run has finished yet; nothing to compare")
        return
    from dapo_rl.lab.ablate.plot import draw_ablation  # matplotlib takes a second to import

    atomic_write(out / "ablation.json", ablation_json(plan, results))
    atomic_write(out / "ablation.md", markdown(plan, results))
    draw_ablation(plan, results, out / "ablation.png")
    console.print()
    print_ablation(plan, results, console)
    for name in ("ablation.md", "ablation.json", "ablation.png"):
        console.print(short_path(out / name), markup=False, highlight=False, soft_wrap=True)


def _plan(
    recipe: Path | None,
    overrides: Sequence[str],
    seeds: int,
    vary: Sequence[str],
    arms: Sequence[str],
    only: str | None,
    table: str | None,
) -> AblationPlan:
    if vary and arms:
        raise UserError("--arm: lists the arms, and --vary makes them from values; use one")
    if vary or arms:
        own = "--vary" if vary else "--arm"
        for option, value in (("--only", only), ("--table", table)):
            if value is not None:
                raise UserError(f"{option}: selects from a paper's table, and {own} replaces that table; use one")
        return grid(recipe, overrides, seeds, vary) if vary else arms_of(recipe, overrides, seeds, arms)
    name = DEFAULT_TABLE if table is None else table
    if name not in TABLES:
        raise UserError(f"--table: {name!r} is not one of {', '.join(TABLES)}{did_you_mean(nearest(name, TABLES))}")
    parts = TABLES[name].parts
    if only is not None and only not in parts:
        raise UserError(f"--only: {only!r} is not one of {', '.join(parts)}")
    return paper_table(recipe, overrides, seeds, (only,) if only else parts, name)


def _compared(plan: AblationPlan, compare: str | None, to_accuracy: float | None) -> AblationPlan:
    """The plan with the quantities to compare: those of the options, or those that it has."""
    if to_accuracy is not None:
        if not 0 < to_accuracy < 1:
            raise UserError(f"--to-accuracy: {to_accuracy:g} is not between 0 and 1; 0.8 is 80 %")
        plan = replace(plan, to_accuracy=to_accuracy)
        if compare is None and plan.compared == DEFAULT_COMPARED:
            plan = replace(plan, compared=(*DEFAULT_COMPARED, *TO_ACCURACY))
    if compare is not None:
        names = tuple(dict.fromkeys(name.strip() for name in compare.split(",")))
        for name in names:
            if name not in COMPARABLE:
                hint = did_you_mean(nearest(name, COMPARABLE))
                raise UserError(f"--compare: {name!r} is not one of {', '.join(COMPARABLE)}{hint}")
        plan = replace(plan, compared=names)
    if plan.to_accuracy is None and (named := [name for name in plan.compared if name in TO_ACCURACY]):
        raise UserError(f"--compare: {named[0]} needs an accuracy; give it with --to-accuracy, for example 0.8")
    return plan
