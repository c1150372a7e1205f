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
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.plan import PARTS, AblationPlan, check_same_plan, grid, table_one
from dapo_rl.lab.ablate.report import ablation_json, markdown, print_ablation
from dapo_rl.lab.ablate.results import ArmResult, collect
from dapo_rl.lab.ablate.runs import ArmRun, all_runs
from dapo_rl.lab.ablate.schedule import run_all
from dapo_rl.lab.ablate.show import ablation_display
from dapo_rl.runs.directory import new_run_directory

SEEDS = 3


def run_ablation(
    recipe: Path | None,
    overrides: Sequence[str],
    *,
    seeds: int | None = None,
    vary: Sequence[str] = (),
    only: str | None = None,
    out: Path | None = None,
    jobs: int = 1,
    keep_models: bool = False,
) -> int:
    """Returns the exit code: 0 if every run is done, that of the first run that failed, or 128 + a signal."""
    if out is not None and "=" in str(out):
        raise UserError(f"--out: {out} contains =, so it would be read as a setting on the command line; rename it")
    saved = AblationPlan.load(out / "plan.json") if out is not None and (out / "plan.json").exists() else None
    if saved is not None and recipe is None and not overrides and not vary and only is None:
        first = saved.seeds[0]
        plan = saved if seeds is None else replace(saved, seeds=tuple(range(first, first + seeds)))
    else:
        number = seeds or (len(saved.seeds) if saved else SEEDS)
        plan = _plan(recipe, overrides, number, vary, only)
        if saved is not None and out is not None:
            check_same_plan(out, saved, plan)
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
    from dapo_rl.lab.ablate.picture import draw_ablation  # matplotlib takes a second to import

    atomic_write(out / "ablation.json", ablation_json(plan, results))
    atomic_write(out / "ablation.md", markdown(plan, results))
    draw_ablation(plan, results, out / "ablation.png")
    console.print()
    print_ablation(plan, results, console)
    for name in ("ablation.md", "ablation.json", "ablation.png"):
        console.print(short_path(out / name), markup=False, highlight=False, soft_wrap=True)


def _plan(
    recipe: Path | None, overrides: Sequence[str], seeds: int, vary: Sequence[str], only: str | None
) -> AblationPlan:
    if only is not None and only not in PARTS:
        raise UserError(f"--only: {only!r} is not one of {', '.join(PARTS)}")
    if vary:
        if only is not None:
            raise UserError("--only: selects a part of the paper's table, and --vary replaces that table; use one")
        return grid(recipe, overrides, seeds, vary)
    return table_one(recipe, overrides, seeds, (only,) if only else PARTS)
