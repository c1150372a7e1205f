"""Sampling and updating take turns with GPU memory: what an update finds free, and the same run as without."""

import json

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from support import SMALL, small_model, train_sample

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.config import AlgoSettings, TrainSettings
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.train.policy import HFPolicy

pytestmark = pytest.mark.gpu

if not hasattr(NativeEngine, "release_memory"):
    pytest.skip("the native engine cannot release its memory", allow_module_level=True)

CACHE = 3 << 30
"""2,048 sequences of more than 400 tokens take at least this."""


def train(path, memory):
    settings = [
        *("model.device=cuda", "train.steps=3", "train.warmup_steps=0", "eval.every=null", "data.eval=null"),
        *(f"train.memory={memory}", "sampling.kv_memory_gib=4", "train.token_budget=4096", "train.lr=1e-6"),
        *("sampling.max_batch=2048", "sampling.max_new_tokens=400", "model.dtype=float32", "log.rollouts=false"),
    ]
    config = Config.load(DEFAULT_RECIPE, [*SMALL, *settings])
    with DAPOTrainer(config=config, run_dir=path) as trainer:
        trainer.train()
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in ("sampling/tokens_generated", "acc/mean", "actor/grad_norm")} for row in rows]


def test_turns_free_the_cache_and_change_nothing(tmp_path, monkeypatch):
    free, update = [], HFPolicy.update

    def watched(policy, *arguments):
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
        return update(policy, *arguments)

    monkeypatch.setattr(HFPolicy, "update", watched)
    kept, kept_free = train(tmp_path / "keep", "keep"), min(free)
    free.clear()
    turned, turned_free = train(tmp_path / "turns", "time_share"), min(free)
    print(f"\nfree during updates: {kept_free / 2**30:.1f} GiB with keep, {turned_free / 2**30:.1f} GiB with turns")
    assert turned_free - kept_free > CACHE
    assert len(kept) == 3
    # The weights hardly change, so the samples are the same if the engine has rebuilt its own.
    for ours, theirs in zip(turned, kept, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2)


def test_an_update_in_turns_leaves_no_gradients_and_no_cached_memory():
    allocated, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    model = small_model(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4).cuda()
    parameters = sum(p.numel() for p in model.parameters())
    policy = HFPolicy(
        model,
        pad_id=0,
        temperature=1.0,
        algo=AlgoSettings(),
        train=TrainSettings(lr=1e-4),
        norm_length=10,
        token_budget=10**4,
        dtype=torch.bfloat16,
        time_share=True,
    )
    samples = [train_sample((1, 2), (3, 4, 5 + i), (-1.0,) * 3, 1.0 - 2 * (i % 2), i // 2) for i in range(8)]
    policy.update(samples, 1e-4)
    policy.release_memory()
    assert all(p.grad is None for p in model.parameters())
    # Weights and two moments, and little else: cuBLAS has workspaces.
    assert torch.cuda.memory_allocated() - allocated < 12 * parameters + 128 * 2**20
    assert torch.cuda.memory_reserved() - kept < 12 * parameters + 256 * 2**20
