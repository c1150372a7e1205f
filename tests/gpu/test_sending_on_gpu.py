"""Weights on a GPU, sent to another process by NCCL."""

import os
import subprocess
import sys

import pytest
import torch

from dapo_rl.cluster.network import tcp_store
from dapo_rl.cluster.weights_broadcast import ChannelBrokenError, WeightChannel, WeightLayout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

PREPARE = """
import dapo_rl.cluster.weights_broadcast as sent
sent.use_interface = lambda: None  # there is no Ray here
"""
RECEIVER = (
    PREPARE
    + """
import sys, torch
channel = sent.WeightChannel(("127.0.0.1", int(sys.argv[1])), 1, 2, "cuda", 30.0)
layouts = [sent.WeightLayout("a", (1 << 20,), torch.bfloat16), sent.WeightLayout("b", (3,), torch.float32)]
for _ in range(3):
    received = channel.receive(layouts)
    print([(name, tensor.device.type, tensor.float().sum().item()) for name, tensor in received], flush=True)
"""
)


@pytest.fixture
def one_gpu_for_two(monkeypatch):
    """NCCL takes two processes on one GPU only if it believes them to be on two hosts."""
    monkeypatch.setattr("dapo_rl.cluster.weights_broadcast.use_interface", lambda: None)
    monkeypatch.setenv("NCCL_HOSTID", "sender")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    return os.environ | {"NCCL_HOSTID": "receiver"}


def test_another_process_receives_what_is_sent(one_gpu_for_two):
    store = tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    receiver = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, str(store.port)], stdout=subprocess.PIPE, text=True, env=one_gpu_for_two
    )
    channel = WeightChannel(("127.0.0.1", store.port), 0, 2, "cuda", 60.0, store)
    layouts = [WeightLayout("a", (1 << 20,), torch.bfloat16), WeightLayout("b", (3,), torch.float32)]
    for number in range(3):
        weights = [torch.full((1 << 20,), float(number), device="cuda"), torch.tensor([1.0, 2.0, number])]
        channel.send(list(zip(layouts, weights, strict=True)))
        expected = [("a", "cuda", float(number << 20)), ("b", "cuda", 3.0 + number)]
        assert receiver.stdout.readline().strip() == str(expected)
    assert receiver.wait(30) == 0
    channel._timeout_s = 3.0
    # Nobody is there any more. NCCL takes a few megabytes into its own memory, and calls them sent.
    large = WeightLayout("c", (1 << 28,), torch.bfloat16)
    with pytest.raises(ChannelBrokenError):
        channel.send([(large, torch.zeros(large.shape, dtype=torch.bfloat16, device="cuda"))])
    channel.close()
