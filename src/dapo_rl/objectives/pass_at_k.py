"""pass@k from n ≥ k samples."""

from __future__ import annotations

from math import comb


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct: `1 − C(n − c, k) / C(n, k)`."""
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {correct} correct among {n} samples is not defined")
    return 1.0 - comb(n - correct, k) / comb(n, k)
