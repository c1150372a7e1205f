"""The built-in engines: what each one can do, and the module that builds it.

To add an engine, write `engines/<name>.py` with a function `build(inputs: EngineInputs) -> Engine`, and add one entry
to `ENGINES`. Settings are checked without importing an engine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The properties of an engine that the rest of the system depends on. The defaults are those of a user's class."""

    module: str | None = None
    """The module whose `build(inputs)` returns the engine."""
    package: str | None = None
    """A package that users install for it."""
    needs_cuda: bool = False
    takes_options: bool = True
    """Whether `engine_options` are passed to it."""
    tensor_parallel: bool = True
    """Whether it can use more than one GPU (`cluster.engine_gpus`)."""
    releases_memory: bool = False
    """Whether it can free its GPU memory during updates when it runs as an actor."""
    releases_memory_in_process: bool = False
    """Likewise in the trainer's own process."""
    casts_weights: bool = False
    """Whether it holds its own weights, in the compute type; otherwise it gets them in float32."""
    paged_cache: bool = False
    """Whether it has a KV cache of fixed size (`sampling.kv_memory_gib`) and captures CUDA graphs."""
    gpu_share: float | None = None
    """The share of a GPU's memory that it reserves for its weights and KV cache, if it manages both itself."""
    loads_from_disk: bool = False
    """Whether it reads the model from files, so that it needs no copy on the GPU to start from."""
    keeps_mask: bool = True
    """Whether it can return the tokens that truncation kept (`sampling.keep_mask`)."""
    is_reference: bool = False
    """Whether it runs the model's own forward pass unchanged: a remedy for a mismatch with the trainer."""


ENGINES: dict[str, EngineSpec] = {
    "native": EngineSpec(
        module="dapo_rl.engines.native.engine",
        takes_options=False,
        tensor_parallel=False,
        releases_memory=True,
        releases_memory_in_process=True,
        casts_weights=True,
        paged_cache=True,
    ),
    "hf": EngineSpec(module="dapo_rl.engines.hf", takes_options=False, tensor_parallel=False, is_reference=True),
    "vllm": EngineSpec(
        module="dapo_rl.engines.vllm",
        package="vllm",
        needs_cuda=True,
        releases_memory=True,
        casts_weights=True,
        gpu_share=0.4,
        loads_from_disk=True,
        keeps_mask=False,
    ),
}
"""By the name that the setting `engine` gives; it also accepts a user-defined class."""

CUSTOM = EngineSpec()


def engine_spec(name: str) -> EngineSpec:
    """The spec of the engine that the setting `engine` names."""
    return ENGINES.get(name, CUSTOM)
