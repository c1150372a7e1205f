"""Deals the samples of an optimizer step to ranks, by tokens."""

from __future__ import annotations

from collections.abc import Sequence

from dapo_rl.types import Trajectory


def deal(samples: Sequence[Trajectory], ranks: int) -> list[list[int]]:
    """The indices of each rank's samples, in order, with about equal numbers of tokens.

    Samples of one prompt stay together, because their prompt is computed once. They are split only where together they
    have more tokens than a rank's fair share.
    """
    parts = _parts(samples, ranks)
    loads = [0] * ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    # The largest first, each to the rank with the fewest tokens so far.
    for part in sorted(parts, key=lambda part: -_tokens(samples, part)):
        least = min(range(ranks), key=loads.__getitem__)
        dealt[least].extend(part)
        loads[least] += _tokens(samples, part)
    return [sorted(indices) for indices in dealt]


def _parts(samples: Sequence[Trajectory], ranks: int) -> list[list[int]]:
    """Samples of one prompt, as long as they are within a fair share."""
    prompts: dict[bytes, list[int]] = {}
    for i, sample in enumerate(samples):
        prompts.setdefault(sample.prompt_ids.tobytes(), []).append(i)
    share = sum(_tokens(samples, members) for members in prompts.values()) / ranks
    parts: list[list[int]] = []
    for members in prompts.values():
        part: list[int] = []
        for i in members:
            if part and _tokens(samples, [*part, i]) > share:
                parts.append(part)
                part = []
            part.append(i)
        parts.append(part)
    return parts


def _tokens(samples: Sequence[Trajectory], part: Sequence[int]) -> int:
    """Tokens to compute for samples that share a prompt."""
    return len(samples[part[0]].prompt_ids) + sum(len(samples[i].token_ids) for i in part)
