"""Weights on a GPU, lent to another process by CUDA IPC."""

import subprocess
import sys

import pytest
import torch

from dapo_rl.cluster.weights_ipc import lend, memory_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

BORROWER = """
import sys
from dapo_rl.cluster.weights_ipc import borrow, memory_of
for line in sys.stdin:
    sums = [(name, tensor.device.type, tensor.float().sum().item()) for name, tensor in borrow(bytes.fromhex(line))]
    print(memory_of("cuda"), sums, flush=True)
"""


def test_another_process_reads_what_is_lent():
    borrower = subprocess.Popen(
        [sys.executable, "-c", BORROWER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for number in range(3):
        weight = torch.full((1 << 20,), float(number), dtype=torch.bfloat16, device="cuda")
        weight[0] = 7.0
        [handle] = lend([("a", weight)], 1)
        borrower.stdin.write(handle.hex() + "\n")
        borrower.stdin.flush()
        expected = [("a", "cuda", float(number * ((1 << 20) - 1) + 7))]
        assert borrower.stdout.readline().strip() == f"{memory_of('cuda')} {expected}"
    borrower.stdin.close()
    assert borrower.wait(30) == 0
