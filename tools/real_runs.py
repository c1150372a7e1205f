"""The runs of gsm8k-qwen2.5-1.5b on docs/benchmarks.md, from their saved metrics in docs/gsm8k.

python tools/real_runs.py   draws docs/gsm8k-runs.png and prints the tables
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from evidence import DOCS
from matplotlib.figure import Figure

from dapo_rl.palette import BLUE, GREEN, ORANGE, VERMILION

RUNS = {
    "seed-0": ("seed 0", BLUE),
    "seed-1": ("seed 1, beside other runs", GREEN),
    "seed-2": ("seed 2, ended after 23 steps", ORANGE),
    "two-engines": ("two engines, asynchronous", VERMILION),
}
SEEDS = ("seed-0", "seed-1", "seed-2")
EVALUATED = (0, 10, 20, 30)
HEAD = "| | before | after 10 steps | 20 | 30 |\n|---|---|---|---|---|"
ENGINES_HEAD = (
    "| step | tokens sampled, `native` | seconds | `vllm` | seconds | ratio of tokens/s |\n|---|---|---|---|---|---|"
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
    """Sampling of the first steps by both engines, from the same weights and prompts at first."""
    lines = []
    native, vllm = read("seed-0"), read("vllm")
    for mine, other in zip(native[1:], vllm[1:], strict=False):
        cells, rates = [str(mine["step"])], []
        for row in (mine, other):
            tokens, seconds = row["sampling/tokens_generated"], row["timing_s/gen"]
            cells += [f"{tokens:,}", f"{seconds:.1f}"]
            rates.append(tokens / seconds)
        lines.append(f"| {' | '.join([*cells, f'{rates[0] / rates[1]:.1f}'])} |")
    return lines


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


def main() -> None:
    draw().savefig(DOCS / "gsm8k-runs.png")
    print("\n".join([HEAD, *table(), "", ENGINES_HEAD, *engines_table(), ""]))
    for name in RUNS:
        print(f"{name}: {seconds_of_a_step(name):.1f} s a step")


if __name__ == "__main__":
    main()
