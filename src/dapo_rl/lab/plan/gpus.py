"""GPUs and their data sheets: the rates that a plan starts from."""

from __future__ import annotations

from dataclasses import dataclass

from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.errors import UserError
from dapo_rl.memory.check import GPUS
from dapo_rl.memory.report import GIB, Memory

GPUS_PER_NODE = 8


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
