"""How noisy the gradient of a step is, and how well it agrees with that of another arm.

    python tools/gradient_noise.py runs/evidence/overlong-gradient               # writes docs/evidence/NAME.json
    python tools/gradient_noise.py --table docs/evidence/overlong-gradient.json  # the table of the saved JSON

Reads an ablation with one update per run that kept its checkpoints (`train.steps=1 train.mini_batches=1
train.epochs_per_step=1 checkpoint.every=1 --keep-models`, and a `train.max_grad_norm` that clips nothing). Adam's first
moment after one update is (1 − β₁) times the gradient. The last arm is the one that the others are compared with.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dapo_rl.base.files import atomic_write
from dapo_rl.lab.ablate.plan import AblationPlan

Array = npt.NDArray[np.float64]
DOCS = Path(__file__).parents[1] / "docs" / "evidence"


def gradient(run: Path) -> npt.NDArray[np.float32]:
    """The gradient of a run's only update."""
    state = torch.load(run / "checkpoints" / "step-1" / "optimizer.pt", weights_only=True)
    state = state.get("optimizer", state)
    moments = state["state"]
    beta = {index: group["betas"][0] for group in state["param_groups"] for index in group["params"]}
    return np.concatenate([(moments[i]["exp_avg"] / (1 - beta[i])).flatten().numpy() for i in sorted(moments)])


def products(directory: Path) -> dict[str, Any]:
    """The inner products of the gradients of all runs, which are all that the figures need."""
    plan = AblationPlan.load(directory / "plan.json")
    rows = [gradient(directory / arm.directory / f"seed-{seed}") for arm in plan.arms for seed in plan.seeds]
    gradients = np.stack(rows)
    return {
        "name": directory.name,
        "arms": [arm.label for arm in plan.arms],
        "seeds": list(plan.seeds),
        "products": [[float(f"{x:.6g}") for x in row] for row in gradients @ gradients.T],
    }


def figures(gram: Array, arms: int) -> list[dict[str, float]]:
    """For each arm: the ratio of signal to noise of a step, ‖E g‖² / tr Cov g, and the cosine of its expected gradient
    and that of the last arm. Products of different seeds are unbiased; those of one seed share its prompts."""
    seeds = len(gram) // arms
    blocks = gram.reshape(arms, seeds, arms, seeds).transpose(0, 2, 1, 3)
    between = (blocks.sum((2, 3)) - np.trace(blocks, axis1=2, axis2=3)) / (seeds * (seeds - 1))
    rows = []
    for arm in range(arms):
        signal = between[arm, arm]
        noise = np.trace(blocks[arm, arm]) / seeds - signal
        cosine = between[arm, -1] / math.sqrt(max(signal * between[-1, -1], 1e-300))
        rows.append({"snr": signal / noise, "cosine": cosine})
    return rows


def with_errors(data: Mapping[str, Any]) -> list[dict[str, tuple[float, float]]]:
    """The figures with their standard errors, by the jackknife over seeds."""
    gram, arms, seeds = np.array(data["products"]), len(data["arms"]), len(data["seeds"])
    whole = figures(gram, arms)
    keep = [np.flatnonzero(np.arange(len(gram)) % seeds != left_out) for left_out in range(seeds)]
    parts = [figures(gram[np.ix_(kept, kept)], arms) for kept in keep]
    found = []
    for arm, row in enumerate(whole):
        values = {name: np.array([part[arm][name] for part in parts]) for name in row}
        errors = {name: math.sqrt((seeds - 1) * float(np.var(v))) for name, v in values.items()}
        found.append({name: (row[name], errors[name]) for name in row})
    return found


HEAD = "| arm | signal to noise of a step | cosine with the last arm |\n| --- | ---: | ---: |"


def table(data: Mapping[str, Any]) -> list[str]:
    rows = []
    for label, row in zip(data["arms"], with_errors(data), strict=True):
        (snr, snr_error), (cosine, cosine_error) = row["snr"], row["cosine"]
        agreement = "" if label == data["arms"][-1] else f"{cosine:.2f} ± {cosine_error:.2f}"
        rows.append(f"| {label} | {snr:.2f} ± {snr_error:.2f} | {agreement} |")
    return rows


def main(words: Sequence[str]) -> None:
    if words[0] == "--table":
        data = json.loads(Path(words[1]).read_text())
    else:
        data = products(Path(words[0]))
        atomic_write(DOCS / f"{data['name']}.json", json.dumps(data) + "\n")
    print("\n".join([HEAD, *table(data)]))


if __name__ == "__main__":
    main(sys.argv[1:])
