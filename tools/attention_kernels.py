"""Times the attention of a decode step over pages: our kernel, FlashAttention 3 (from vLLM's wheel), FlashInfer and
FlexAttention, each on the same keys and values. Ours also writes the new key and value; the others are given them.

    python tools/attention_kernels.py   # a GPU; pip install vllm flashinfer-python

Calls are captured in a CUDA graph, as in decoding: several with caches of their own, so that none is in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_rl.engines.native.kernels.attention import decode_attention, splits_for

WIDTH, PAGE = 128, 64
BANDWIDTH = 4.2e12
CASES = [
    ("1.5 B", 12, 2, 16, 6600), ("1.5 B", 12, 2, 32, 4700), ("1.5 B", 12, 2, 64, 3200), ("1.5 B", 12, 2, 128, 2100),
    ("1.5 B", 12, 2, 268, 1100), ("1.5 B", 12, 2, 512, 400),
    ("7 B", 28, 4, 16, 6600), ("7 B", 28, 4, 129, 2100), ("7 B", 28, 4, 268, 1100),
]  # fmt: skip
"""Shape of Qwen2.5, query and key-value heads, rows, tokens per row: as samples of different lengths end."""

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Work:
    q_BHD: Tensor
    k_BKD: Tensor
    v_BKD: Tensor
    keys: Sequence[Tensor]
    """For each layer `[N, K, P, D]`."""
    values: Sequence[Tensor]
    table_BM: Tensor
    positions_B: Tensor

    @property
    def bytes(self) -> int:
        heads = self.k_BKD.shape[1]
        return int((self.positions_B + 1).sum()) * heads * WIDTH * 2 * 2


def work(heads: int, kv_heads: int, rows: int, tokens: int) -> Work:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    pages = -(-(tokens + 1) // PAGE)
    layers = min(8, max(2, int(2e9 / (rows * tokens * kv_heads * WIDTH * 4))))
    new = some(rows, heads, WIDTH), some(rows, kv_heads, WIDTH), some(rows, kv_heads, WIDTH)
    keys, values = ([some(rows * pages, kv_heads, PAGE, WIDTH) for _ in range(layers)] for _ in range(2))
    table = torch.randperm(rows * pages, generator=generator, device="cuda").int().view(rows, pages)
    return Work(*new, keys, values, table, torch.full((rows,), tokens, device="cuda"))


def ours(of: Work) -> list[Call]:
    rows, kv_heads = of.k_BKD.shape[:2]
    slots = torch.arange(rows, device="cuda")
    splits = splits_for(rows, kv_heads, torch.cuda.get_device_properties(0).multi_processor_count)
    return [
        lambda k=k, v=v: decode_attention(
            of.q_BHD, of.k_BKD, of.v_BKD, k, v, of.table_BM, slots, of.positions_B, WIDTH**-0.5, splits
        )
        for k, v in zip(of.keys, of.values, strict=True)
    ]


def flash_attention(of: Work) -> list[Call]:
    """As vLLM calls it: one plan for all layers of a step."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    (rows, heads, _), kv_heads = of.q_BHD.shape, of.k_BKD.shape[1]
    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
    lengths, longest = (of.positions_B + 1).int(), int(of.positions_B.max()) + 1
    plan = get_scheduler_metadata(
        rows, 1, longest, heads, kv_heads, WIDTH, lengths, cu_seqlens_q=starts, page_size=PAGE, causal=True
    )
    layers = [[x.transpose(1, 2).contiguous() for x in pair] for pair in zip(of.keys, of.values, strict=True)]
    return [
        lambda k=k, v=v: flash_attn_varlen_func(
            of.q_BHD, k, v, 1, starts, longest, seqused_k=lengths, causal=True, block_table=of.table_BM,
            scheduler_metadata=plan, fa_version=3,
        )
        for k, v in layers
    ]  # fmt: skip


def flashinfer(of: Work) -> list[Call]:
    """With tensor cores: its other kernel has no 6 or 7 query heads to a key-value head."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    (rows, heads, _), kv_heads, pages = of.q_BHD.shape, of.k_BKD.shape[1], of.table_BM.shape[1]
    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * pages
    used, last = of.table_BM.flatten(), (of.positions_B % PAGE + 1).int()
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "HND", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=starts.clone(), paged_kv_indices_buffer=used.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )  # fmt: skip
    wrapper.plan(
        starts, used, last, heads, kv_heads, WIDTH, PAGE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16
    )
    return [lambda k=k, v=v: wrapper.run(of.q_BHD, (k, v)) for k, v in zip(of.keys, of.values, strict=True)]


def flex_attention(of: Work) -> list[Call]:
    from torch.nn.attention import flex_attention as flex

    rows, pages = of.table_BM.shape
    place = torch.full((rows, rows * pages), -1, device="cuda", dtype=torch.int32)
    place.scatter_(1, of.table_BM.long(), torch.arange(pages, device="cuda", dtype=torch.int32).expand(rows, -1))

    def visible(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        page = place[b, key // PAGE]
        return (page >= 0) & (page * PAGE + key % PAGE <= of.positions_B[b])

    blocks = torch.zeros(rows, 1, 1, rows * pages, device="cuda", dtype=torch.int32)
    blocks[:, 0, 0, :pages] = of.table_BM
    count = torch.full((rows, 1, 1), pages, device="cuda", dtype=torch.int32)
    mask = flex.BlockMask.from_kv_blocks(
        count, blocks, None, None, BLOCK_SIZE=(128, PAGE), mask_mod=visible, seq_lengths=(1, rows * pages * PAGE)
    )
    compiled = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)
    layers = [
        [x.transpose(0, 1).reshape(1, x.shape[1], -1, WIDTH).expand(rows, -1, -1, -1) for x in pair]
        for pair in zip(of.keys, of.values, strict=True)
    ]
    return [
        lambda k=k, v=v: compiled(of.q_BHD[:, :, None], k, v, block_mask=mask, enable_gqa=True)[:, :, 0]
        for k, v in layers
    ]


def microseconds(calls: Sequence[Call], repeats: int = 10) -> tuple[float, Tensor]:
    """The best time of a call, and the result of the first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            results = [call() for call in calls]
        first = results[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / repeats / len(calls))
    del kept
    return min(times), first


CONTENDERS = {"FlashAttention 3": flash_attention, "FlashInfer": flashinfer, "FlexAttention": flex_attention}


@torch.inference_mode()
def main() -> None:
    print(f"| shape | rows | tokens per row | floor | ours | {' | '.join(CONTENDERS)} |")
    print(f"|---|---|---|---|---|{'---|' * len(CONTENDERS)}")
    seen = set()
    for shape, heads, kv_heads, rows, tokens in CASES:
        of = work(heads, kv_heads, rows, tokens)
        best, expected = microseconds(ours(of))
        cells = [f"{1e6 * of.bytes / BANDWIDTH:.0f}", f"{best:.1f}"]
        for name, contender in CONTENDERS.items():
            if contender is flex_attention and shape in seen:  # it takes seconds to compile, and is far behind
                cells.append("")
                continue
            try:
                took, got = microseconds(contender(of))
            except ImportError as error:
                cells.append(f"no {error.name}")
                continue
            difference = (got.float() - expected.float()).norm() / expected.float().norm()
            assert difference < 0.01, (name, difference)
            cells.append(f"{took:.1f}")
        seen.add(shape)
        print(f"| {shape} | {rows} | {tokens:,} | {' | '.join(cells)} |", flush=True)
        del of
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
