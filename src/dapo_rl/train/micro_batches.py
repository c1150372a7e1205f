"""How the samples of an optimizer step are split: by the tokens that are computed at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from dapo_rl.types import TrainSample


def packed_batches(samples: Sequence[TrainSample], budget: int) -> list[list[int]]:
    """As few micro-batches as the budget allows, about equal, samples of one prompt together.

    A prompt that several samples of a micro-batch have is computed once, and counts once.
    """
    prompts: dict[tuple[int, ...], list[int]] = {}
    for i, sample in enumerate(samples):
        prompts.setdefault(sample.prompt_ids, []).append(i)
    order = [i for members in prompts.values() for i in members]
    fewest = len(_fill(samples, order, budget))
    # The least budget that does with as many: the fullest micro-batch is then as small as it can be.
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        if len(_fill(samples, order, middle)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return _fill(samples, order, high)


def _fill(samples: Sequence[TrainSample], order: Sequence[int], budget: int) -> list[list[int]]:
    """Samples in their order, each micro-batch as full as it gets; a sample over the budget is alone."""
    batches: list[list[int]] = []
    tokens, prompt = 0, None
    for i in order:
        sample = samples[i]
        # Nothing is computed for a response's last token: what comes after it is not asked for.
        own = len(sample.response_ids) - 1
        alone = len(sample.prompt_ids) + own
        more = own if sample.prompt_ids == prompt else alone
        if batches and tokens + more <= budget:
            batches[-1].append(i)
            tokens += more
        else:
            batches.append([i])
            tokens = alone
        prompt = sample.prompt_ids
    return batches


def padded_batches(samples: Sequence[TrainSample], budget: int) -> list[list[int]]:
    """Samples of like length together, as many as the budget holds with their padding."""
    order = sorted(range(len(samples)), key=lambda i: (len(samples[i].response_ids), len(samples[i].prompt_ids)))
    batches: list[list[int]] = []
    prompt_width = response_width = 0
    for i in order:
        prompt_width = max(prompt_width, len(samples[i].prompt_ids))
        response_width = max(response_width, len(samples[i].response_ids))
        if batches and (len(batches[-1]) + 1) * (prompt_width + response_width) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
            prompt_width, response_width = len(samples[i].prompt_ids), len(samples[i].response_ids)
    return batches
