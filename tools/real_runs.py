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

from dapo_rl.palette import BLUE, GREEN, ORANGE, PURPLE, VERMILION

RUNS = {
    "seed-0": ("seed 0", BLUE),
    "seed-1": ("seed 1, beside other runs", GREEN),
    "seed-2": ("seed 2, ended after 23 steps", ORANGE),
    "two-engines": ("two engines, asynchronous", VERMILION),
    "vllm": ("seed 0 with engine=vllm, 12 steps", PURPLE),
}
SEEDS = ("seed-0", "seed-1", "seed-2")
EVALUATED = (0, 10, 20, 30)
HEAD = "| | before | after 10 steps | 20 | 30 |\n|---|---|---|---|---|"
ENGINES = {"native": "seed-0", "vllm": "vllm"}
ENGINES_HEAD = (
    "| `engine` | tokens sampled | seconds | tokens/s | after 10 steps | mismatch |\n|---|---|---|---|---|---|"
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


def engines_steps() -> int:
    """The steps that the runs of both engines have."""
    return min(len(read(name)) for name in ENGINES.values()) - 1


def engines_table() -> list[str]:
    """Sampling of the same steps by both engines, from the same weights and prompts at first."""
    lines = []
    for engine, name in ENGINES.items():
        rows = read(name)[: engines_steps() + 1]
        tokens = sum(row["sampling/tokens_generated"] for row in rows[1:])
        seconds = sum(row["timing_s/gen"] for row in rows[1:])
        mismatch = median(row["rollout/mismatch_kl"] for row in rows if row.get("rollout/mismatch_kl") is not None)
        cells = [f"`{engine}`", f"{tokens:,}", f"{seconds:.1f}", f"{tokens / seconds:,.0f}"]
        lines.append(f"| {' | '.join([*cells, f'{100 * accuracies(rows)[10]:.1f} %', f'{mismatch:.0e}'])} |")
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
