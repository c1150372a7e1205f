"""Splits the samples of an optimizer step into micro-batches, by a token budget that the GPU's memory may raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from dapo_rl.memory.one_gpu import MOST_TOKENS
from dapo_rl.types import Trajectory


def packed_batches(samples: Sequence[Trajectory], budget: int) -> list[list[int]]:
    """As few micro-batches as the budget allows, of about equal size, with samples of one prompt together.

    A prompt shared by several samples of a micro-batch is computed once and counts once.
    """
    prompts: dict[bytes, list[int]] = {}
    for i, sample in enumerate(samples):
        prompts.setdefault(sample.prompt_ids.tobytes(), []).append(i)
    # The last token of a response is not computed: its next-token logits are not needed.
    lengths = [
        (prompt, len(samples[i].prompt_ids), len(samples[i].token_ids) - 1, i)
        for prompt, members in enumerate(prompts.values())
        for i in members
    ]
    fewest = len(_fill(lengths, budget))
    # The smallest budget that needs no more micro-batches balances their sizes.
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        if len(_fill(lengths, middle)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return _fill(lengths, high)


def _fill(lengths: Sequence[tuple[int, int, int, int]], budget: int) -> list[list[int]]:
    """Fills micro-batches greedily in the given order; a sample over the budget gets its own. `lengths` have the index
    of the prompt, its tokens, the sample's own tokens, and the index of the sample."""
    batches: list[list[int]] = []
    tokens, before = 0, -1
    for prompt, prompt_tokens, own, sample in lengths:
        more = own if prompt == before else prompt_tokens + own
        if batches and tokens + more <= budget:
            batches[-1].append(sample)
            tokens += more
        else:
            batches.append([sample])
            tokens = prompt_tokens + own
        before = prompt
    return batches


def padded_batches(samples: Sequence[Trajectory], budget: int) -> list[list[int]]:
    """Groups samples of similar length, as many as the budget holds including padding."""
    order = sorted(range(len(samples)), key=lambda i: (len(samples[i].token_ids), len(samples[i].prompt_ids)))
    batches: list[list[int]] = []
    prompt_width = response_width = 0
    for i in order:
        prompt_width = max(prompt_width, len(samples[i].prompt_ids))
        response_width = max(response_width, len(samples[i].token_ids))
        if batches and (len(batches[-1]) + 1) * (prompt_width + response_width) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
            prompt_width, response_width = len(samples[i].prompt_ids), len(samples[i].token_ids)
    return batches


def tokens_that_fit(model: nn.Module, bytes_per_token: Callable[[], int]) -> int:
    """The tokens that fit into a third of the GPU memory left after gradients and moments: large micro-batches are
    faster. `bytes_per_token` measures what one takes."""
    free: int = torch.cuda.mem_get_info()[0]
    trained: int = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    try:
        return min(max(free - 12 * trained, 0) // 3 // bytes_per_token(), MOST_TOKENS)
    except torch.OutOfMemoryError:
        return 0
