"""The time of each part of a step, from data sheets and the share of them that is reached.

A step of decoding reads the weights, and the keys and values of all running samples; with many samples its matrix
products take longer than reading the weights. An update takes 6 FLOP per parameter and token, 8 if layers are
recomputed, and reads and writes activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from dapo_rl.lab.plan.gpus import GPUS_PER_NODE, Gpu
from dapo_rl.memory.model_size import ModelSize

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
        """FLOP/s that a GPU reaches in matrix products."""
        return self.shares.matmul * self.gpu.tflops * 1e12

    @property
    def bandwidth(self) -> float:
        """Bytes/s that a GPU reads from its memory."""
        return self.shares.bandwidth * self.gpu.bandwidth * 1e9

    @property
    def matrices(self) -> int:
        """Parameters that each token is multiplied with: all but the embedding, which is only looked up."""
        size = self.size
        layer = 2 * size.queries + 2 * size.keys + 3 * size.inner
        return size.layers * size.hidden * layer + size.head

    @property
    def kv_token(self) -> int:
        """Bytes of the keys and values of one token."""
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

    def update(self, tokens: float, position: float, recompute: bool) -> float:
        """Seconds that one GPU computes the gradient of so many tokens; `position` is their mean position in their
        samples."""
        size = self.size
        attention = 2 * size.layers * size.queries * position
        work = (8 if recompute else 6) * self.matrices + (4 if recompute else 3) * 2 * attention
        activations = self.shares.passes * size.layers * size.layer_bytes(bfloat16=True)
        return tokens * (work / self.flops + activations / self.bandwidth)

    def optimizer(self, gpus: int) -> float:
        """Seconds of an optimizer step whose state is divided over GPUs."""
        return OPTIMIZER_BYTES * self.size.parameters / gpus / self.bandwidth

    def gather(self, nbytes: float, gpus: int) -> float:
        """Seconds in which each of the GPUs gets all of a tensor that is divided among them. The same for the sum of a
        tensor that all of them have, of which each gets its part."""
        if gpus == 1:
            return 0.0
        inside = nbytes * (gpus - 1) / gpus / self._link
        nodes = ceil(gpus / GPUS_PER_NODE)
        between = nbytes * (nodes - 1) / nodes / (LINK_SHARE * self.gpu.network * 1e9 * GPUS_PER_NODE)
        return max(inside, between)

    def gradients(self, micro_batches: int, gpus: int) -> float:
        """Seconds of FSDP's traffic: for each micro-batch, weights in bfloat16 for the forward and the backward pass,
        and the sum of the gradients in float32."""
        return micro_batches * self.gather(8 * self.size.parameters, gpus)

    def transfer(self, gpus: int) -> float:
        """Seconds until all engines have new weights: each node receives them once."""
        copy = (4 + 2) * self.size.parameters / self.tensor_parallel / self.bandwidth
        return max(copy if gpus == 1 else 0.0, self.gather(2 * self.size.parameters, gpus))

    @property
    def _link(self) -> float:
        return LINK_SHARE * self.gpu.link * 1e9
