"""The time of each part of a step, from the data sheets of GPUs and the share of them that is reached.

A step of decoding reads the weights, and the keys and values of all running samples; with many samples its matrix
products take longer than reading the weights. An update takes 6 FLOP per parameter and token, 8 if layers are
recomputed, and 2 less if the weights are frozen below LoRA's adapters; and it reads and writes activations.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.errors import UserError
from dapo_rl.memory.check import GPUS
from dapo_rl.memory.model_size import ModelSize
from dapo_rl.memory.report import GIB, Memory

GPUS_PER_NODE = 8
MEASURED_ON = "h200"
ERROR = 0.05
"""The relative error of predictions of what was measured (tools/fit_rates.py)."""
SHARPNESS = 3
"""Reading weights and computing with them overlap: the time of both is the norm of this order of the two times."""
OPTIMIZER_BYTES = 28
"""Per parameter: AdamW reads the weight, its gradient and both moments, and writes all but the gradient, in float32."""
LINK_SHARE = 0.8
"""Of the links between GPUs; not measured."""
ALL_REDUCE_S = 10e-6
"""The latency of adding up a small tensor over the GPUs of an engine; not measured."""
FORWARD_SHARE = 1 / 3
"""The share of the forward pass in an update: the backward pass computes twice as much."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    tflops: float
    """Dense bfloat16 matrix products, in TFLOP/s."""
    bandwidth: float
    """Of the memory, in GB/s."""
    link: float
    """To the other GPUs of a node, in GB/s in one direction: NVLink, or PCIe."""
    network: float
    """To other nodes, in GB/s per GPU in one direction, with the network adapters that are usual for it."""

    @property
    def memory(self) -> Memory:
        return Memory(self.name, "cuda", int(GPUS[self.name] * GIB), here=False)


SPECS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 312, 2039, 300, 25),
        Gpu("a800", 312, 2039, 200, 25),
        Gpu("l40s", 362, 864, 32, 12.5),
        Gpu("rtx4090", 165, 1008, 32, 12.5),
        Gpu("h100", 989, 3350, 450, 50),
        Gpu("h800", 989, 3350, 200, 50),
        Gpu("h200", 989, 4800, 450, 50),
        Gpu("b200", 2250, 8000, 900, 50),
    )
}
"""The SXM versions with 80 GB, where there are several. The memory is that of `dapo check --gpu`."""


def find_gpu(name: str) -> Gpu:
    known = SPECS.get(name.strip().lower())
    if known is None:
        hint = did_you_mean(nearest(name.lower(), SPECS), f"known are {', '.join(SPECS)}")
        raise UserError(f"--gpu: there is no data sheet of {name!r}{hint}")
    return known


@dataclass(frozen=True, slots=True)
class Shares:
    """The constants that tools/fit_rates.py fits to measurements."""

    matmul: float = 0.658
    """Of the data sheet's FLOP/s."""
    bandwidth: float = 0.834
    """Of the data sheet's memory bandwidth."""
    layer_s: float = 36.7e-6
    """The fixed time of a layer in a step of decoding: launches, norms, sampling."""
    passes: float = 6.39
    """How often an update reads or writes each activation."""


@dataclass(frozen=True, slots=True)
class Rates:
    """A model on GPUs of one kind; each engine has `tensor_parallel` of them."""

    size: ModelSize
    gpu: Gpu
    tensor_parallel: int = 1
    shares: Shares = Shares()

    @property
    def flops(self) -> float:
        return self.shares.matmul * self.gpu.tflops * 1e12

    @property
    def bandwidth(self) -> float:
        return self.shares.bandwidth * self.gpu.bandwidth * 1e9

    @property
    def matrices(self) -> int:
        """Parameters that each token is multiplied with: all but the embedding, which is only looked up."""
        size = self.size
        layer = 2 * size.queries + 2 * size.keys + 3 * size.inner
        return size.layers * size.hidden * layer + size.head

    @property
    def kv_token(self) -> int:
        return 4 * self.size.layers * self.size.keys

    def decode_fixed(self, rows: int) -> float:
        """Seconds of a step of an engine that decodes so many samples, without reading their keys and values."""
        size, tp = self.size, self.tensor_parallel
        reading = 2 * self.matrices / tp / self.bandwidth
        computing = 2 * self.matrices * rows / tp / self.flops
        adding = 0.0
        if tp > 1:  # twice in each layer
            exchanged = 4 * rows * size.hidden * (tp - 1) / tp
            adding = 2 * size.layers * (ALL_REDUCE_S + exchanged / self._link)
        both: float = (reading**SHARPNESS + computing**SHARPNESS) ** (1 / SHARPNESS)
        return size.layers * self.shares.layer_s + both + adding

    @property
    def decode_token(self) -> float:
        """Seconds that each token of context adds to a step of decoding."""
        return self.kv_token / self.tensor_parallel / self.bandwidth

    def decode(self, rows: int, context: int) -> float:
        """Seconds of a step of decoding with so many samples of this context."""
        return self.decode_fixed(rows) + rows * context * self.decode_token

    def prefill(self, tokens: float) -> float:
        """Seconds until the keys and values of so many tokens are computed."""
        return 2 * self.matrices * tokens / self.tensor_parallel / self.flops

    def update(self, tokens: float, position: float, recompute: bool, adapters: int | None = None) -> float:
        """Seconds that one GPU computes the gradient of so many tokens; `position` is their mean position in their
        samples, and `adapters` the parameters of LoRA's adapters, if only they are trained."""
        size = self.size
        attention = 2 * size.layers * size.queries * position
        work = (8 if recompute else 6) * (self.matrices + (adapters or 0)) + (4 if recompute else 3) * 2 * attention
        if adapters is not None:
            work -= 2 * self.matrices
        activations = self.shares.passes * size.layers * size.layer_bytes(bfloat16=True)
        return tokens * (work / self.flops + activations / self.bandwidth)

    def optimizer(self, gpus: int, adapters: int | None = None) -> float:
        """Seconds of an optimizer step whose state is divided over GPUs."""
        return OPTIMIZER_BYTES * self._trained(adapters) / gpus / self.bandwidth

    def gather(self, nbytes: float, gpus: int) -> float:
        """Seconds in which each of the GPUs gets all of a tensor that is divided among them. The same for the sum of a
        tensor that all of them have, of which each gets its part."""
        if gpus == 1:
            return 0.0
        inside = nbytes * (gpus - 1) / gpus / self._link
        nodes = ceil(gpus / GPUS_PER_NODE)
        between = nbytes * (nodes - 1) / nodes / (LINK_SHARE * self.gpu.network * 1e9 * GPUS_PER_NODE)
        return max(inside, between)

    def gradients(self, micro_batches: int, gpus: int, adapters: int | None = None) -> float:
        """Seconds of FSDP's traffic: for each micro-batch, weights in bfloat16 for the forward and the backward pass,
        and the sum of the gradients in float32."""
        return micro_batches * self.gather(4 * self.size.parameters + 4 * self._trained(adapters), gpus)

    def _trained(self, adapters: int | None) -> int:
        return self.size.parameters if adapters is None else adapters

    def transfer(self, gpus: int) -> float:
        """Seconds until all engines have new weights: each node receives them once."""
        copy = (4 + 2) * self.size.parameters / self.tensor_parallel / self.bandwidth
        return max(copy if gpus == 1 else 0.0, self.gather(2 * self.size.parameters, gpus))

    @property
    def _link(self) -> float:
        return LINK_SHARE * self.gpu.link * 1e9


@dataclass(frozen=True, slots=True)
class UpdateTime:
    even: float
    """If every rank had the same number of tokens."""
    uneven: float
    """Added because ranks wait for the one with the longest sample of a mini-batch."""
    traffic: float
    """Added because gathering weights and reducing gradients takes longer than computing."""
    optimizer: float
    transfer: float
    """The transfer of new weights to the engines."""

    @property
    def updating(self) -> float:
        return self.even + self.uneven + self.traffic + self.optimizer

    @property
    def total(self) -> float:
        return self.updating + self.transfer


def update_time(
    rates: Rates,
    lengths: Sequence[int],
    prompt_tokens: int,
    *,
    gpus: int,
    token_budget: int,
    recompute: bool,
    mini_batches: int,
    epochs: int = 1,
    critic: bool = False,
    scored: int = 0,
    adapters: int | None = None,
    transfer: float = 0.0,
) -> UpdateTime:
    """The time of a step's updates, in which samples are spread over the ranks by their tokens.

    `lengths` are the step's samples in the order of training, and `token_budget` the tokens of a micro-batch. A critic
    of the same size is trained too, all of it, and scores each sample once, as do `scored` others before the first
    update. `adapters` are the trained parameters of a policy with LoRA.
    """
    size = max(1, ceil(len(lengths) / mini_batches))
    even = uneven = traffic = optimizer = 0.0
    scoring = FORWARD_SHARE * (critic + scored)
    for start in range(0, len(lengths), size):
        batch = lengths[start : start + size]
        tokens, most = sum(batch), largest_load(batch, gpus)
        position = prompt_tokens + sum(length * length for length in batch) / (2 * tokens)
        for trained, often, passes in ((adapters, epochs, epochs), (None, epochs * critic, epochs * critic + scoring)):
            shared, longest = (rates.update(load, position, recompute, trained) for load in (tokens / gpus, most))
            even += passes * shared
            uneven += passes * (longest - shared)
            traffic += often * max(0.0, rates.gradients(ceil(most / token_budget), gpus, trained) - longest)
            optimizer += often * rates.optimizer(gpus, trained)
    return UpdateTime(even, uneven, traffic, optimizer, transfer)


def largest_load(lengths: Sequence[int], ranks: int) -> int:
    """The tokens of the rank with the most, if each sample, the longest first, goes to the rank with the fewest."""
    loads = [0] * min(ranks, len(lengths))
    for length in sorted(lengths, reverse=True):
        heapq.heapreplace(loads, loads[0] + length)
    return max(loads)
