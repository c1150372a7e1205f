"""Memory at a fixed address: released and restored, under a captured graph, and when there is not enough."""

import gc

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from dapo_rl.models import reserved_memory
from dapo_rl.models.reserved_memory import ReservedMemory, can_reserve, peak_bytes, reset_peak

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
MIB, GIB = 1 << 20, 1 << 30


def free():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def about(nbytes):
    """The driver loads kernels and takes page tables meanwhile."""
    return pytest.approx(nbytes, abs=160 * MIB)


def test_the_device_has_virtual_memory():
    assert can_reserve(DEVICE)
    assert not can_reserve(torch.device("cpu"))


def test_release_gives_the_bytes_back_and_restore_takes_them_at_the_same_address():
    memory = ReservedMemory(3 * GIB + 1, DEVICE)
    assert memory.nbytes == 3 * GIB + 2 * MIB  # the granularity of today's devices
    tensor = memory.tensor(torch.float32, (1024, 1024))
    address, before = tensor.data_ptr(), free()
    assert address == memory.address
    tensor.fill_(1)
    memory.release()
    assert not memory.is_mapped
    assert free() - before == about(memory.nbytes)
    memory.release()  # again changes nothing
    memory.restore()
    assert free() == about(before)
    assert tensor.data_ptr() == address
    tensor.fill_(2)
    assert tensor.sum().item() == 2 * 1024 * 1024
    memory.close()
    assert free() - before == about(memory.nbytes)
    with pytest.raises(RuntimeError, match="closed"):
        memory.restore()


def test_tensors_are_views_of_the_memory():
    memory = ReservedMemory(4 * MIB, DEVICE)
    whole = memory.tensor(torch.uint8, (memory.nbytes,))
    whole.zero_()
    part = memory.tensor(torch.bfloat16, (3, 5), offset=256)
    assert (part.dtype, part.shape, part.device) == (torch.bfloat16, (3, 5), torch.device("cuda", 0))
    part.copy_(torch.arange(15.0).view(3, 5))
    assert whole[256:286].view(torch.bfloat16).tolist() == list(range(15))
    assert whole[:256].sum().item() == whole[286:].sum().item() == 0
    assert memory.tensor(torch.float32, (0, 4)).shape == (0, 4)
    for dtype, shape, offset in ((torch.uint8, (memory.nbytes,), 1), (torch.float32, (1,), 2), (torch.uint8, (1,), -1)):
        with pytest.raises(ValueError, match="bytes at"):
            memory.tensor(dtype, shape, offset)
    memory.release()
    with pytest.raises(RuntimeError, match="mapped"):
        memory.tensor(torch.uint8, (1,))


def test_a_tensor_keeps_the_memory_and_the_last_reference_frees_it():
    before = free()
    tensor = ReservedMemory(GIB, DEVICE).tensor(torch.float32, (1024,))
    gc.collect()
    assert before - free() == about(GIB)
    tensor.fill_(3)
    assert tensor.sum().item() == 3 * 1024
    del tensor
    gc.collect()
    assert free() == about(before)


def test_a_graph_replays_after_a_release():
    memory = ReservedMemory(2 * MIB, DEVICE)
    x = memory.tensor(torch.float32, (256, 256))
    y = torch.zeros(256, 256, device=DEVICE)
    x.fill_(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # cuBLAS allocates its workspace outside of the capture
        torch.mm(x, x, out=y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(x, x, out=y)
        x.add_(1)
    for value in (1.0, 2.0):
        memory.release()
        memory.restore()
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert y.unique().tolist() == [256 * value**2]
        assert x.unique().tolist() == [value + 1]


def test_chunks_are_one_range(monkeypatch):
    monkeypatch.setattr(reserved_memory, "CHUNK_BYTES", 4 * MIB)
    memory = ReservedMemory(18 * MIB, DEVICE)
    tensor = memory.tensor(torch.int32, (18 * MIB // 4,))
    for _ in range(2):
        torch.arange(len(tensor), out=tensor)
        assert torch.equal(tensor, torch.arange(len(tensor), dtype=torch.int32, device=DEVICE))
        memory.release()
        memory.restore()


def test_not_enough_memory_is_a_clear_error_and_takes_nothing():
    before = free()
    with pytest.raises(torch.OutOfMemoryError, match=r"out of GPU memory: \d+\.\d\d GiB are needed, and .* are free"):
        ReservedMemory(torch.cuda.mem_get_info()[1] + GIB, DEVICE)
    gc.collect()
    assert free() == about(before)
    torch.ones(4, device=DEVICE).sum().item()  # the context is still usable


def test_memory_that_torch_keeps_is_freed_first():
    cached = torch.empty(torch.cuda.mem_get_info()[0] * 3 // 4, dtype=torch.uint8, device=DEVICE)
    del cached
    size = torch.cuda.mem_get_info()[1] // 2
    memory = ReservedMemory(size, DEVICE)
    memory.close()


def test_the_peak_counts_both_but_not_at_different_times():
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    memory = ReservedMemory(64 * MIB, DEVICE)
    reset_peak(DEVICE)
    small = torch.empty(16 * MIB, dtype=torch.uint8, device=DEVICE)
    del small
    assert peak_bytes(DEVICE) == base + 80 * MIB
    memory.release()
    large = torch.empty(100 * MIB, dtype=torch.uint8, device=DEVICE)
    del large
    memory.restore()
    assert peak_bytes(DEVICE) == base + 100 * MIB
    memory.close()
