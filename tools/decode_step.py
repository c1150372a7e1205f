"""Times a decode step of the embedded model in float32 on a CPU: called through transformers, and directly.

OMP_NUM_THREADS=1 python tools/decode_step.py
"""

from __future__ import annotations

import time
from statistics import median

import torch

from dapo_rl.config import ModelSettings
from dapo_rl.engines.native.budget import CacheLayout
from dapo_rl.engines.native.cache import KVCache
from dapo_rl.engines.native.decode import CachedAttention, forward_of
from dapo_rl.engines.native.direct import direct_forward
from dapo_rl.engines.native.pages import Pages
from dapo_rl.engines.native.probe import probe
from dapo_rl.models.load import load_model

REACH, REPEATS = 40, 100


@torch.inference_mode()
def main() -> None:
    device = torch.device("cpu")
    model, _ = load_model(ModelSettings(device="cpu"))
    layers, vocabulary = probe(model, REACH, CachedAttention)
    direct = direct_forward(model)
    assert direct is not None
    print("rows   through transformers   directly   ratio")
    for rows in (1, 8, 32, 128):
        layout = CacheLayout(REACH, rows, rows, whole=True)
        pages = Pages(layout, REACH, device)
        cache = KVCache(layers, layout.pages, layout.page_tokens, torch.float32, device)
        ids, positions = torch.arange(rows) % vocabulary, torch.full((rows,), REACH - 1)
        attend = CachedAttention(cache, pages, torch.arange(rows), positions)
        times: dict[int, list[float]] = {0: [], 1: []}
        for _ in range(REPEATS):  # in turns, so that other work on the machine meets both
            for which, forward in enumerate((forward_of(model), direct)):
                started = time.perf_counter()
                forward(ids, positions, attend)
                times[which].append(time.perf_counter() - started)
        slow, fast = (1e3 * median(of_one) for of_one in times.values())
        print(f"{rows:4}   {slow:17.2f} ms   {fast:5.2f} ms   {slow / fast:5.2f}")


if __name__ == "__main__":
    main()
