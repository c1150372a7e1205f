"""A lower bound on the time of a workload: the bytes that must be read and the operations that must be done.

All samples are decoded at once, so there are as many steps as the longest sample has tokens. A step reads every weight
once, and the keys and values so far of the samples that have not ended. A prompt that G samples share is computed once,
and its keys are read once. Kernel launches, sampling and everything else are free, so the bound cannot be reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from dapo_rl.lab.bench.workload import Workload
from dapo_rl.memory.model_size import ModelSize


@dataclass(frozen=True, slots=True)
class Size:
    body: int
    """Parameters that every token is multiplied with."""
    head: int
    """Parameters of the output layer, needed only for tokens whose successor is predicted."""
    attention_width: int
    """Query heads × head size × layers."""
    kv_width: int
    """Elements of keys and values per token, over all layers."""
    parameters: int

    @classmethod
    def of(cls, model: Any) -> Size:
        size = ModelSize.of(model)
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        body = size.parameters - size.head * (1 if tied else 2)
        return cls(body, size.head, size.queries * size.layers, 2 * size.keys * size.layers, size.parameters)


@dataclass(frozen=True, slots=True)
class Limit:
    bandwidth_bytes_per_s: float
    matmul_flops_per_s: float

    def seconds(self, read_bytes: float, flops: float) -> float:
        return max(read_bytes / self.bandwidth_bytes_per_s, flops / self.matmul_flops_per_s)


def floor_seconds(work: Workload, size: Size, limit: Limit) -> float:
    rollout, update = rollout_floor(work, size, limit), update_floor(work, size, limit)
    return {"rollout": rollout, "update": update, "step": rollout + update}[work.kind]


def rollout_floor(work: Workload, size: Size, limit: Limit) -> float:
    width = 2 if work.dtype == "bfloat16" else 4
    weights = (size.body + size.head) * width
    prompt = work.prompts * work.prompt_tokens
    prefill = 2 * size.body * prompt + 2 * size.head * work.prompts + _attention(size, prompt, work.prompt_tokens / 2)
    total = limit.seconds(weights, prefill)
    samples, groups = _running(work.all_lengths), _running([max(row) for row in work.group_lengths])
    # The prefill yields the first token; each further step yields one for every sample that has not ended.
    for position in range(1, len(samples)):
        cached = groups[position] * work.prompt_tokens + samples[position] * position
        flops = 2.0 * (size.body + size.head) * samples[position]
        flops += _attention(size, samples[position], work.prompt_tokens + position)
        total += limit.seconds(weights + cached * size.kv_width * width, flops)
    return total


def update_floor(work: Workload, size: Size, limit: Limit) -> float:
    """One forward pass, and a backward pass of twice its cost; the output layer for response tokens only."""
    prompt = work.prompts * work.prompt_tokens
    flops = 2.0 * size.body * (prompt + work.response_tokens) + 2 * size.head * work.response_tokens
    flops += _attention(size, prompt, work.prompt_tokens / 2)
    flops += sum(_attention(size, length, work.prompt_tokens + length / 2) for length in work.all_lengths)
    return 3 * flops / limit.matmul_flops_per_s


def _running(lengths: Sequence[int]) -> list[int]:
    """How many are longer than 0, 1, 2, … up to the longest, which is not."""
    ends = Counter(lengths)
    ended = accumulate(ends[length] for length in range(max(lengths)))
    return [len(lengths) - count for count in ended]


def _attention(size: Size, queries: int, keys: float) -> float:
    """Queries times keys, and weights times values."""
    return 4 * size.attention_width * queries * keys
