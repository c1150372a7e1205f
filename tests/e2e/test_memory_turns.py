"""Sampling and updating take turns with the memory: the order of a step, and the same run as without."""

from itertools import groupby

import pytest
from safetensors.torch import load_file
from support import THOROUGH

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.memory.one_gpu import MemoryPlan
from dapo_rl.run import backend
from dapo_rl.train.policy import HFPolicy

pytestmark = pytest.mark.slow


def train(path):
    settings = ["train.steps=2", "train.warmup_steps=0", "sampling.surplus=carry", "data.eval=null", "eval.every=null"]
    with DAPOTrainer(config=Config.load(DEFAULT_RECIPE, [*THOROUGH, *settings]), run_dir=path) as trainer:
        trainer.train()
    notes = path / "notes.jsonl"  # missing if there are none
    return load_file(path / "model" / "model.safetensors"), notes.read_text() if notes.exists() else ""


def test_the_engine_rests_during_updates(tmp_path, monkeypatch):
    """On a CPU there is no memory to give up, so `release_memory` only sends its samples back to the queue."""
    calls = []

    def record(owner, name, then):
        def recorded(self, *arguments):
            result = then(self, *arguments)
            has_gradients = "" if owner is NativeEngine or next(self.model.parameters()).grad is None else "+"
            calls.append(f"{owner.__name__}.{name}{has_gradients}")
            return result

        monkeypatch.setattr(owner, name, recorded, raising=False)

    plain, notes = train(tmp_path / "plain")
    assert "memory: " not in notes
    plan = MemoryPlan(time_share=True, note="memory: in turns")
    monkeypatch.setattr(backend, "memory_plan", lambda *arguments: plan)
    record(NativeEngine, "release_memory", NativeEngine._back_to_the_queue)
    for owner, name in (
        (NativeEngine, "poll"),
        (NativeEngine, "receive"),
        (HFPolicy, "update"),
        (HFPolicy, "release_memory"),
    ):
        record(owner, name, getattr(owner, name))
    turned, notes = train(tmp_path / "turned")
    assert "memory: in turns" in notes
    step = [
        "NativeEngine.poll",
        "NativeEngine.release_memory",
        "HFPolicy.update+",
        "HFPolicy.release_memory",
        "NativeEngine.receive",
    ]
    assert [name for name, _ in groupby(calls)] == 2 * step
    assert all((turned[name] == weight).all() for name, weight in plain.items())
