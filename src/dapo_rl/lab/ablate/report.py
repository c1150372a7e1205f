"""The tables of an ablation: as Markdown, as JSON, and on the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from dapo_rl.base.format import counted
from dapo_rl.base.quote import printable
from dapo_rl.base.table import figure_table
from dapo_rl.lab.ablate.plan import AblationPlan
from dapo_rl.lab.ablate.quantities import COMPARABLE, TABLE, Write, percent_of
from dapo_rl.lab.ablate.results import LAST_SHARE, ArmResult
from dapo_rl.lab.ablate.statistics import (
    CONFIDENCE,
    FEWEST,
    INTERVAL,
    POWER,
    SeedDifference,
    TInterval,
    fewest_for_exact,
)
from dapo_rl.lab.ablate.techniques import DEFAULT_TABLE, TABLES


def markdown(plan: AblationPlan, results: Sequence[ArmResult]) -> str:
    heads, rows = ablation_table(results)
    lines = [f"# Ablation: {_escape(plan.name)}", "", _what(plan), ""]
    lines += _markdown_table(heads, rows)
    lines += ["", *(f"- {_escape(note)}" for note in notes(plan, results))]
    if compared := difference_table(results)[1]:
        lines += ["", "## Differences", "", _escape(_correction(plan)), ""]
        lines += _markdown_table(difference_table(results)[0], compared)
    lines += ["", "## Every run", ""]
    lines += _markdown_table(*seed_table(results))
    lines += ["", "## Arms", ""]
    lines += _markdown_table(["arm", "settings that differ from the arm it is compared with"], _changes(plan))
    return "\n".join([*lines, "", "![learning curves and entropy](ablation.png)", ""])


def ablation_json(plan: AblationPlan, results: Sequence[ArmResult]) -> str:
    arms = []
    for result in results:
        arm = asdict(result.arm)
        paper, _ = arm.pop("paper"), arm.pop("settings")
        estimates = {name: result.estimate(name) for name in dict.fromkeys((*TABLE, *plan.compared))}
        runs = [
            {"seed": each.run.seed, "state": each.run.state, "message": each.run.message, **(each.final or {})}
            for each in result.runs
        ]
        arms.append(
            {
                **arm,
                "paper_aime24": paper,
                **{name: value and asdict(value) for name, value in estimates.items()},
                "difference": result.difference and asdict(result.difference),
                "differences": {name: asdict(value) for name, value in result.differences.items()},
                "runs": runs,
            }
        )
    head: dict[str, Any] = {
        "name": plan.name,
        "recipe": plan.recipe,
        "overrides": plan.overrides,
        "seeds": plan.seeds,
        "interval": INTERVAL,
        "last_share": LAST_SHARE,
        "table": plan.table,
        "to_accuracy": plan.to_accuracy,
        "comparisons": plan.comparisons,
    }
    return json.dumps(head | {"arms": arms}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def print_ablation(plan: AblationPlan, results: Sequence[ArmResult], console: Console) -> None:
    heads, rows = ablation_table(results)
    columns = {head: [row[i] for row in rows] for i, head in enumerate(heads)}
    # A narrow terminal shows only the most important columns; the Markdown has all of them.
    for head in [TABLE[name].head for name in reversed(TABLE) if name != "accuracy"]:
        widths = [max(len(head), *(len(cell) for cell in cells)) for head, cells in columns.items()]
        widths[0] = min(widths[0], console.width // 3)  # labels wrap, figures do not
        if sum(widths) + 3 * len(widths) <= console.width:
            break
        del columns[head]
    shown = figure_table(*columns)
    for column in shown.columns:
        column.no_wrap, column.overflow = column.header != "arm", "fold"
    for row in zip(*columns.values(), strict=True):
        shown.add_row(*(Text(printable(cell)) for cell in row))
    console.print(shown)
    for note in notes(plan, results):
        console.print(Text(printable(note), style="dim"))
    heads, rows = difference_table(results)
    if plan.comparisons > 1 or plan.compared != ("accuracy",):
        console.print()
        for arm, quantity, difference, *rest in rows:
            words = [f"{head} {cell}" for head, cell in zip(heads[3:], rest, strict=True) if cell not in ("", "-")]
            more = f"; {'; '.join(words)}" if words else ""
            console.print(Text(printable(f"{arm}, {quantity}: {difference}{more}")))
        console.print(Text(printable(_correction(plan)), style="dim"))


def difference_table(results: Sequence[ArmResult]) -> tuple[list[str], list[list[str]]]:
    heads = ["arm", "quantity", "difference", "95 %", "corrected", "exact", "d", "detectable"]
    rows = [
        [result.arm.label, COMPARABLE[name].head, *_difference_cells(name, difference)]
        for result in results
        for name, difference in result.differences.items()
    ]
    return heads, rows


def _difference_cells(name: str, difference: SeedDifference) -> list[str]:
    quantity = COMPARABLE[name]
    cells = [quantity.signed(difference.mean)]
    if difference.half_width is None and difference.n > 1:
        cells[0] += _range(difference, quantity.signed)
    for half in (difference.half_width, difference.corrected_half_width):
        ends = [] if half is None else [quantity.signed(difference.mean + end) for end in (-half, half)]
        cells.append(" to ".join(ends) or "-")
    cells.append("-" if difference.exact is None else " to ".join(map(quantity.signed, difference.exact)))
    cells.append("-" if difference.effect_size is None else f"{difference.effect_size:+.2f}")
    # Where 0 is left out, the power of the test is no longer in question.
    found = None if difference.excludes_zero else difference.detectable
    return [*cells, "" if found is None else quantity.unsigned(found)]


def _correction(plan: AblationPlan) -> str:
    text = (
        f"corrected: the {CONFIDENCE:.0%} interval with Bonferroni's correction for "
        f"{counted(plan.comparisons, 'comparison')}. exact: the same by sign flips, without assuming a normal "
        f"distribution; needs {fewest_for_exact(plan.comparisons)} or more seeds. d: Cohen's d of paired values. "
        f"detectable: where the corrected interval includes 0, the smallest true difference that these seeds find "
        f"with a probability of {POWER:.0%}."
    )
    if plan.to_accuracy is not None:
        text += (
            f" To accuracy: to {plan.to_accuracy:.0%} held out, on straight lines between evaluations; a run that does "
            "not reach it counts with all its steps and tokens."
        )
    return text


def ablation_table(results: Sequence[ArmResult]) -> tuple[list[str], list[list[str]]]:
    from_paper = any(result.arm.paper is not None for result in results)
    accuracy, *others = TABLE
    rows = []
    for result in results:
        row = [result.arm.label]
        if from_paper:
            row.append("" if result.arm.paper is None else str(result.arm.paper))
        row += [_interval(result.estimate(accuracy), percent_of), _interval(result.difference, TABLE[accuracy].signed)]
        # Only accuracy has an interval here; the JSON has all of them.
        row += ["-" if (value := result.estimate(name)) is None else TABLE[name].write(value.mean) for name in others]
        row.append(f"{len(result.by_seed(accuracy))}/{len(result.runs)}")
        rows.append(row)
    return arm_heads(from_paper), rows


def arm_heads(from_paper: bool) -> list[str]:
    accuracy, *others = (quantity.head for quantity in TABLE.values())
    return ["arm", *(["paper"] if from_paper else []), accuracy, "difference", *others, "seeds"]


def seed_table(results: Sequence[ArmResult]) -> tuple[list[str], list[list[str]]]:
    heads = ["arm", "seed", "before %", *(quantity.head for quantity in TABLE.values())]
    rows = []
    for result in results:
        if result.arm.directory != result.arm.name:
            continue
        for each in result.runs:
            numbers = {} if each.final is None else each.final
            writes = {"accuracy_before": percent_of} | {name: quantity.write for name, quantity in TABLE.items()}
            cells = ["-" if (x := numbers.get(name)) is None else write(x) for name, write in writes.items()]
            if each.final is None:
                cells[0] = each.run.state
            rows.append([result.arm.label, str(each.run.seed), *cells])
    return heads, rows


def notes(plan: AblationPlan, results: Sequence[ArmResult]) -> list[str]:
    lines = [
        f"accuracy: held out, the mean of the evaluations in the last {LAST_SHARE:.0%} of the steps; {_spread(plan)}.",
        "difference: in points, paired by seed, from "
        + (
            "the first row."
            if plan.arms[-1].part == "vary"
            else f"the row before (techniques added) or from full {TABLES[plan.table or DEFAULT_TABLE].whole} "
            "(techniques left out)."
        ),
        "reward includes the arm's length penalty; tokens per trained: tokens generated per token trained on.",
    ]
    if any(arm.paper is not None for arm in plan.arms):
        lines.append(f"paper: {TABLES[plan.table or DEFAULT_TABLE].figures}.")
    for result in results:
        if result.arm.directory != result.arm.name:
            twin = plan.arm(result.arm.directory).label
            lines.append(f"{result.arm.label}: same settings, and therefore same runs, as {twin}.")
        for each in result.runs:
            if each.run.state == "failed" and result.arm.directory == result.arm.name:
                lines.append(f"failed: {each.run.name}: {each.run.message}")
    return lines


def _what(plan: AblationPlan) -> str:
    overrides = f", with {' '.join(plan.overrides)}" if plan.overrides else ""
    seeds = ", ".join(str(seed) for seed in plan.seeds)
    return _escape(f"{plan.recipe}{overrides}; {plan.steps}; seeds {seeds}.")


def _changes(plan: AblationPlan) -> list[list[str]]:
    rows = []
    for arm in plan.arms:
        words = ", ".join(f"{key}={json.dumps(value)}" for key, value in arm.changes.items()).replace('"', "")
        other = "" if arm.compared_with else " (otherwise the recipe's)" if words else "the recipe's"
        rows.append([arm.label, words + other])
    return rows


def _spread(plan: AblationPlan) -> str:
    if len(plan.seeds) >= FEWEST:
        return f"± is the {INTERVAL}; in brackets, the range over fewer seeds"
    needs = f"an interval needs {FEWEST} or more seeds (--seeds {FEWEST})"
    return f"in brackets, the range over seeds; {needs}" if len(plan.seeds) > 1 else needs


def _interval(value: TInterval | None, write: Write) -> str:
    if value is None:
        return "-"
    if value.half_width is not None:
        return f"{write(value.mean)} ± {percent_of(value.half_width)}"
    return write(value.mean) + (_range(value, write) if value.n > 1 else "")


def _range(value: TInterval, write: Write) -> str:
    low, high = write(value.low), write(value.high)
    return " (all equal)" if low == high else f" ({low} to {high})"


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---", *("---:" if len(heads) > 2 else "---" for _ in heads[1:])], *rows]
    return [f"| {' | '.join(_escape(cell) for cell in line)} |" for line in lines]


def _escape(text: str) -> str:
    """Escapes Markdown in text from the command line."""
    escaped = "".join(f"\\{c}" if c in "\\|`*<>[" else c for c in printable(text))
    return " ".join(escaped.split())
