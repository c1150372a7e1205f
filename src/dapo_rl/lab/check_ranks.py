"""Estimates the memory of a run on ranks, on each of their GPUs. The plan is the one that the ranks make
(`cluster/rank_memory.py`), for which a model's layers are counted from its size."""

from __future__ import annotations

import sys

from dapo_rl.base.format import counted
from dapo_rl.base.memory import host_memory
from dapo_rl.cluster.rank_memory import RankMemory
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.lab.memory_report import Memory, MemoryPart, MemoryReport
from dapo_rl.models.size import ModelSize
from dapo_rl.train.memory import NOTE
from dapo_rl.train.run_sizes import RUNTIME


def ranks_report(config: Config, size: ModelSize, machine: Memory, bfloat16: bool) -> MemoryReport:
    """What each GPU of the ranks needs during updates, and whether it has it."""
    memory = rank_memory(config, size, bfloat16)
    host = host_memory() // config.cluster.ranks if machine.here else sys.maxsize
    sizes = memory.sizes(machine.bytes)
    where = f"on {counted(config.cluster.ranks, 'rank')} ({machine.name})"
    least = memory.updating(sizes, memory.longest, recompute=memory.choices[-1])
    try:
        plan = memory.plan(machine.bytes, host)
    except UserError as error:
        line = f"does not fit {where}: {str(error).removeprefix('cluster.ranks: ')}"
        return MemoryReport(machine, (), least, line, False)
    tokens, optimizer = plan.token_budget or memory.tokens, config.train.optimizer
    shards = "float32" if config.cluster.ranks == 1 else f"float32, a shard of {config.cluster.ranks}"
    parts = (
        MemoryPart("weights", sizes.weights, shards),
        MemoryPart("gradients", sizes.gradients, shards),
        MemoryPart("optimizer", sizes.moments, optimizer),
        MemoryPart("reference model", sizes.reference, "float32, for algo.kl_coef"),
        MemoryPart("critic", sizes.critic, f"weights, gradients and {optimizer}"),
        MemoryPart("update", sizes.working(tokens, plan.recompute), f"{tokens:,} tokens, gathered layers, logits"),
        MemoryPart("engines", memory.engines(sizes), f"during updates, {config.cluster.placement}"),
        MemoryPart("runtime", RUNTIME, "CUDA and its libraries"),
    )
    verdict = f"fits {where}: {plan.note.removeprefix(NOTE) if plan.note else ''}"
    return MemoryReport(machine, tuple(part for part in parts if part.bytes), least, verdict, True)


def rank_memory(config: Config, size: ModelSize, bfloat16: bool) -> RankMemory:
    """The plan's base for a model of this size. All layers count as equal."""
    hidden = size.hidden
    layer = 2 * hidden * (size.queries + size.keys) + 3 * hidden * size.inner
    untied = size.parameters - size.layers * layer > 1.5 * size.head
    root = size.head * (2 if untied else 1)
    return RankMemory(config, size, (size.parameters - root) // size.layers, root, bfloat16, config.longest_sample)
