"""How an actor ended, in a few words, from what Ray says at length."""

from __future__ import annotations

import re
from typing import Any

LOSSES = ("RayActorError", "OutOfMemoryError", "NodeDiedError", "LocalRayletDiedError", "WorkerCrashedError")
"""Ray's errors that mean that an actor is lost."""
HOST_LOST = "was lost with its host"
HOST_MEMORY = re.compile(r"was ([\d.]+) ?GB used / ([\d.]+) ?GB")
KILLED = re.compile(r"Selected to kill: .*pid=(\d+), actual memory used=([\d.]+) ?GB")
MONITOR = "RAY_memory_usage_threshold"
"""The share of a host's memory at which Ray kills, in the environment in which it starts."""
LESS_FOR_RANKS = f"lower train.token_budget or cluster.ranks, leave out cluster.offload, or raise {MONITOR}"
LESS_FOR_ENGINES = f"lower cluster.engines, sampling.max_batch or sampling.kv_memory_gib, or raise {MONITOR}"


def losses(ray: Any) -> tuple[type[Exception], ...]:
    """For `except`."""
    return tuple(getattr(ray.exceptions, name) for name in LOSSES)


def for_want_of_memory(ray: Any, error: Exception) -> bool:
    """Whether Ray has killed the actor because its host was running out of memory."""
    return isinstance(error, ray.exceptions.OutOfMemoryError)


def describe_loss(ray: Any, error: Exception) -> str:
    """What to say after the name of the actor."""
    text = str(error)
    if for_want_of_memory(ray, error):
        killed, host = KILLED.findall(text), HOST_MEMORY.search(text)
        figures = [
            " and ".join(f"process {pid} had {used} GB" for pid, used in killed),
            f"{host[1]} of {host[2]} GB were in use" if host else "",
        ]
        told = ", ".join(filter(None, figures))
        return "was killed by Ray because its host ran out of memory" + (f" ({told})" if told else "")
    if "ray.kill" in text:
        return "was ended by ray.kill"
    if isinstance(error, ray.exceptions.NodeDiedError) or "node has died" in text or "node is dead" in text:
        return HOST_LOST
    return "was killed or crashed"
