"""The runs of gsm8k-qwen2.5-1.5b on docs/benchmarks.md, from their saved metrics in docs/gsm8k.

python tools/real_runs.py   draws docs/gsm8k-runs.png and docs/gsm8k-async.png, and prints the tables
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import mean, median
from typing import Any

import numpy as np
from evidence import DOCS
from matplotlib.figure import Figure

from dapo_rl.palette import BLUE, GREEN, ORANGE, PURPLE, VERMILION

RUNS = {
    "seed-0": ("seed 0", BLUE),
    "seed-1": ("seed 1, beside other runs", GREEN),
    "seed-2": ("seed 2", ORANGE),
    "vllm": ("seed 0 with engine=vllm", PURPLE),
}
TWO_ENGINES = {
    "sync": ("synchronous", BLUE),
    "async-1": ("asynchronous", VERMILION),
    "async-2": ("asynchronous, again", ORANGE),
}
"""Two engines and a rank that share a GPU; the same recipe and seed, evaluated every two steps."""
TARGET = 0.65
SEEDS = ("seed-0", "seed-1", "seed-2")
EVALUATED = (0, 10, 20, 30)
HEAD = "| | before | after 10 steps | 20 | 30 |\n|---|---|---|---|---|"
ENGINES = {"native": "seed-0", "vllm": "vllm"}
ENGINES_HEAD = (
    "| `engine` | tokens sampled | seconds | tokens/s | after 10 steps | 20 | 30 | mismatch |\n"
    "|---|---|---|---|---|---|---|---|"
)
TWO_ENGINES_HEAD = (
    "| | seconds of a step | tokens/s | staleness | after 6 steps | 10 | steps to 65 % | seconds to 65 % |\n"
    "|---|---|---|---|---|---|---|---|"
)
TOOL_HEAD = (
    "| | before | after 10 steps (tokens) | 20 | 30 | one turn, as many tokens | turns | calls per episode "
    "| of them fail |\n"
    "|---|---|---|---|---|---|---|---|---|"
)

Row = Mapping[str, Any]


def read(name: str) -> list[Row]:
    """The row before the first step, and one for each step."""
    return [json.loads(line) for line in (DOCS / "gsm8k" / f"{name}.jsonl").read_text().splitlines()]


def accuracies(rows: Sequence[Row]) -> dict[int, float]:
    return {row["step"]: row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None}


def table() -> list[str]:
    lines = []
    for name in SEEDS:
        found = accuracies(read(name))
        cells = [f"{100 * found[step]:.1f} %" if step in found else "" for step in EVALUATED]
        lines.append(f"| {name.replace('-', ' ')} | {' | '.join(cells)} |")
    return lines


def engines_table() -> list[str]:
    """Sampling of the same recipe and seed by both engines."""
    lines = []
    for engine, name in ENGINES.items():
        rows = read(name)
        found = accuracies(rows)
        tokens = sum(row["sampling/tokens_generated"] for row in rows[1:])
        seconds = sum(row["timing_s/gen"] for row in rows[1:])
        mismatch = median(row["rollout/mismatch_kl"] for row in rows if row.get("rollout/mismatch_kl") is not None)
        cells = [f"`{engine}`", f"{tokens:,}", f"{seconds:.1f}", f"{tokens / seconds:,.0f}"]
        cells += [f"{100 * found[step]:.1f} %" for step in EVALUATED[1:]]
        lines.append(f"| {' | '.join([*cells, f'{mismatch:.0e}'])} |")
    return lines


def two_engines_table() -> list[str]:
    lines = []
    for name, (label, _) in TWO_ENGINES.items():
        rows, found = read(name), accuracies(read(name))
        tokens = sum(row["sampling/tokens_generated"] for row in rows[1:])
        staleness = mean(row["sampling/staleness_mean"] for row in rows[1:])
        steps, seconds = to_target(rows)
        cells = [label, f"{seconds_of_a_step(name):.1f}", f"{tokens / elapsed(rows)[-1]:,.0f}", f"{staleness:.1f}"]
        cells += [f"{100 * found[step]:.1f} %" for step in (6, 10)]
        lines.append(f"| {' | '.join([*cells, f'{steps:.1f}', f'{seconds:.0f}'])} |")
    return lines


def tool_table() -> list[str]:
    """The runs of gsm8k-python-qwen2.5-1.5b, beside those of one turn after the tokens of their last evaluation."""
    lines = []
    for seed in SEEDS:
        rows, one_turn = read(seed.replace("seed", "tool")), read(seed)
        found, tokens = accuracies(rows), sampled(rows)
        cells = [f"{100 * found[0]:.1f} %"]
        cells += [
            f"{100 * found[step]:.1f} % ({tokens[step] / 1e6:.1f} M)" if step in found else "" for step in EVALUATED[1:]
        ]
        evaluated = accuracies(one_turn)
        same = float(
            np.interp(tokens[max(found)], [sampled(one_turn)[step] for step in evaluated], [*evaluated.values()])
        )
        first, last = rows[1], rows[-1]
        fail = [100 * row["env/tool_errors"] / row["env/tool_calls"] for row in (first, last)]
        cells += [
            f"{100 * same:.1f} %",
            f"{first['env/turns']:.2f} → {last['env/turns']:.2f}",
            f"{first['env/tool_calls']:.2f} → {last['env/tool_calls']:.2f}",
            f"{fail[0]:.0f} → {fail[1]:.0f} %",
        ]
        lines.append(f"| {seed.replace('-', ' ')} | {' | '.join(cells)} |")
    return lines


def sampled(rows: Sequence[Row]) -> list[int]:
    """Tokens up to each row."""
    return list(accumulate(row.get("sampling/tokens_generated") or 0 for row in rows))


def elapsed(rows: Sequence[Row]) -> list[float]:
    """Seconds of all steps up to each row, without evaluations."""
    return list(accumulate(row.get("timing_s/step", 0.0) for row in rows))


def to_target(rows: Sequence[Row]) -> tuple[float, float]:
    """Steps and seconds until the held-out accuracy is TARGET, on straight lines between evaluations."""
    found = accuracies(rows)
    after = next(step for step, accuracy in found.items() if accuracy >= TARGET)
    before = max(step for step in found if step < after)
    share = (TARGET - found[before]) / (found[after] - found[before])
    times = elapsed(rows)
    return before + share * (after - before), times[before] + share * (times[after] - times[before])


def seconds_of_a_step(name: str) -> float:
    return median(row["timing_s/step"] for row in read(name)[1:])


def draw() -> Figure:
    picture = Figure(figsize=(13, 5), dpi=100, layout="constrained")
    picture.suptitle("Qwen2.5-Coder-1.5B-Instruct on GSM8K, one H200", fontsize=14, fontweight="bold")
    accuracy, time = picture.subplots(1, 2)
    for name, (label, colour) in RUNS.items():
        rows = read(name)
        steps, found = rows[1:], accuracies(rows)
        accuracy.plot(
            [row["step"] for row in steps], [100 * row["acc/mean"] for row in steps], color=colour, alpha=0.35, lw=1.2
        )
        accuracy.plot(list(found), [100 * value for value in found.values()], "o", color=colour, label=label)
        time.plot([row["step"] for row in steps], [row["timing_s/step"] for row in steps], color=colour, label=label)
    accuracy.set_ylabel("accuracy %")
    accuracy.set_title("dots: 400 test problems, greedy; lines: all sampled groups", fontsize=10)
    time.set_ylabel("seconds of a step")
    time.set_ylim(0)
    for axis in (accuracy, time):
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    return picture


def draw_two_engines() -> Figure:
    picture = Figure(figsize=(13, 4.5), dpi=100, layout="constrained")
    picture.suptitle(
        "Two engines and a rank on one H200: accuracy on 400 test problems", fontsize=14, fontweight="bold"
    )
    by_step, by_time = picture.subplots(1, 2, sharey=True)
    for name, (label, colour) in TWO_ENGINES.items():
        rows, found = read(name), accuracies(read(name))
        percent, times = [100 * value for value in found.values()], elapsed(rows)
        by_step.plot(list(found), percent, "o-", color=colour, label=label)
        by_time.plot([times[step] for step in found], percent, "o-", color=colour, label=label)
    by_step.set_ylabel("accuracy %")
    by_step.set_xlabel("step")
    by_time.set_xlabel("seconds of steps, without evaluations")
    for axis in (by_step, by_time):
        axis.axhline(100 * TARGET, color="gray", lw=1, ls="--")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower right")
    return picture


def main() -> None:
    draw().savefig(DOCS / "gsm8k-runs.png")
    draw_two_engines().savefig(DOCS / "gsm8k-async.png")
    print(
        "\n".join([HEAD, *table(), "", ENGINES_HEAD, *engines_table(), "", TWO_ENGINES_HEAD, *two_engines_table(), ""])
    )
    print("\n".join([TOOL_HEAD, *tool_table(), ""]))
    for name in (*RUNS, *TWO_ENGINES):
        print(f"{name}: {seconds_of_a_step(name):.1f} s a step")


if __name__ == "__main__":
    main()
