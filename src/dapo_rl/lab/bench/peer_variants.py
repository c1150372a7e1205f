"""The variants in which a peer is tried; the fastest counts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """How a TRL run differs from the plain one: the whole batch at once, with weights in the work's dtype."""

    accumulate: bool = False
    """One group per micro-batch, with gradient accumulation."""
    float32_weights: bool = False
    """Float32 weights under bfloat16 autocast, TRL's default."""
    without_autocast: bool = False
    vllm: bool = False
    micro_batch: int | None = None
    """Samples per micro-batch, where a whole mini-batch does not fit."""
    arguments: dict[str, Any] = field(default_factory=dict)

    def samples_at_once(self, samples: int, group_size: int) -> int:
        """The size of the micro-batches of an update on so many samples, which it divides."""
        most = min(samples, self.micro_batch or samples)
        return group_size if self.accumulate else next(n for n in range(most, 0, -1) if samples % n == 0)


TRL_VARIANTS: dict[str, Variant] = {
    "whole": Variant(),
    "accumulate": Variant(accumulate=True),
    "static-cache": Variant(arguments={"cache_implementation": "static"}),
    # transformers' continuous batching has no minimum length: without an end-of-sequence token nothing ends early.
    "continuous": Variant(
        arguments={"use_transformers_continuous_batching": True, "generation_kwargs": {"eos_token_id": -1}}
    ),
    "autocast": Variant(float32_weights=True),
    "pure-bfloat16": Variant(without_autocast=True),
    "liger": Variant(arguments={"use_liger_kernel": True}),
    "vllm": Variant(vllm=True),
    "vllm-autocast": Variant(vllm=True, float32_weights=True),
    "vllm-liger": Variant(vllm=True, arguments={"use_liger_kernel": True}),
    "vllm-liger-autocast": Variant(
        vllm=True, float32_weights=True, micro_batch=32, arguments={"use_liger_kernel": True}
    ),
}

VLLM_VARIANTS: dict[str, dict[str, Any]] = {
    "in-process": {"in_process": True, "wide_graphs": True},
    # For Qwen2.5, among others, vLLM does not choose its newer model runner by itself.
    "runner-v2": {"in_process": True, "wide_graphs": True, "model_runner_v2": True},
    "separate-process": {"in_process": False, "wide_graphs": True},
    # vLLM's own choice: no CUDA graph for more than 512 sequences.
    "default": {"in_process": False, "wide_graphs": False},
}
VLLM_DEFAULT_GRAPHS = 512
VLLM_GRAPH_STEP = 16
"""vLLM captures graphs for multiples of this many sequences, and uses them only up to `max_num_seqs`."""

GENERATE_VARIANTS: dict[str, dict[str, Any]] = {
    "dynamic-cache": {},
    "static-cache": {"cache_implementation": "static", "disable_compile": True},
}


VARIANTS: dict[str, dict[str, Any]] = {"trl": TRL_VARIANTS, "vllm": VLLM_VARIANTS, "generate": GENERATE_VARIANTS}
"""By peer; others have none."""


def variants_of(peer: str, *, cuda: bool, bfloat16: bool, samples: int) -> list[str]:
    """The variants that apply here, in the order in which they are tried."""
    names = all_variants(peer)
    if peer == "trl":
        names = [name for name in names if _trl_applies(TRL_VARIANTS[name], cuda, bfloat16)]
    elif peer == "vllm" and samples <= VLLM_DEFAULT_GRAPHS:
        names.remove("default")
    return names or [""]


def all_variants(peer: str) -> list[str]:
    return list(VARIANTS.get(peer, {}))


def vllm_options(variant: str, *, max_batch: int, longest: int) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`, and those of our engine around it; `max_batch` sequences run at a time."""
    how = dict(VLLM_VARIANTS[variant])
    sequences = -(-max_batch // VLLM_GRAPH_STEP) * VLLM_GRAPH_STEP
    graphs = {"max_cudagraph_capture_size": sequences} if how.pop("wide_graphs") else {}
    return {
        **how,
        "max_num_seqs": sequences,
        "max_model_len": longest,
        # vLLM is alone on the GPU, so it may use nearly all memory.
        "gpu_memory_utilization": 0.85,
        **graphs,
    }


ENGINE_OPTIONS = {"vllm": vllm_options}
"""The options of engines that have variants, as a function of the variant."""


def installed(package: str) -> bool:
    return find_spec(package) is not None


def _trl_applies(variant: Variant, cuda: bool, bfloat16: bool) -> bool:
    if (variant.float32_weights or variant.without_autocast) and not bfloat16:
        return False
    if variant.vllm and not (cuda and installed("vllm")):
        return False
    return not variant.arguments.get("use_liger_kernel") or (cuda and installed("liger_kernel"))
