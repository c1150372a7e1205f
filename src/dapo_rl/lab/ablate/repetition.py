"""How much responses repeat themselves: the share of repeated 4-grams (seq-rep-4 of Welleck et al., 2020)."""

from __future__ import annotations

from collections.abc import Sequence

from dapo_rl.base.parquet import read_columns
from dapo_rl.runs.directory import RunDirectory

N = 4


def repeated_share(tokens: Sequence[int], n: int = N) -> float:
    """1 − distinct n-grams / n-grams; 0 for a response that is shorter than two of them."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def repetition_by_step(directory: RunDirectory) -> dict[int, float]:
    """The mean over everything sampled in a step, for the steps whose rollouts are kept."""
    means: dict[int, float] = {}
    for path in sorted(directory.rollouts_path.glob("step-*.parquet")):
        table = read_columns(path, ["step", "token_ids"])
        shares = [repeated_share(tokens) for tokens in table["token_ids"].to_pylist()]
        if shares:
            means[int(table["step"][0].as_py())] = sum(shares) / len(shares)
    return means
