"""The inputs that an actor builds its engine from, and the engine that it builds, without starting an actor."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import small_model, tokenizer

from dapo_rl.cluster import build_engines
from dapo_rl.cluster.build_engines import EngineParts, build_engine_pool
from dapo_rl.cluster.meta_model import flesh_out, skeleton_of
from dapo_rl.config import Config, ModelSettings
from dapo_rl.models.load import load_empty
from dapo_rl.models.save import save_model
from dapo_rl.models.weights import ModelWeights

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def pool_of(monkeypatch):
    """The arguments of the pool, on a host with 8 threads and 600 bytes for caches."""
    monkeypatch.setattr(build_engines, "EnginePool", lambda *arguments, **named: (*arguments, named))
    monkeypatch.setattr(build_engines, "memory_share", lambda device: 600)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)

    def build(device, *settings):
        config = Config.load(None, ["cluster.backend=ray", *settings])
        parts, _, _, named = build_engine_pool(
            config, config.engine, small_model(), None, None, device, torch.bfloat16, 64, print
        )
        return parts, named

    return build


@pytest.mark.parametrize(("engines", "threads", "kv_bytes"), [(1, 8, None), (3, 2, 200), (8, 1, 75), (20, 1, 30)])
def test_engines_on_one_host_divide_its_threads_and_memory(pool_of, engines, threads, kv_bytes):
    parts, named = pool_of(CPU, f"cluster.engines={engines}")
    assert (parts.threads, parts.kv_bytes, parts.device) == (threads, kv_bytes, "cpu")
    assert named["options"] == {}
    assert named["background"] is (engines > 1)


@pytest.mark.parametrize(
    ("placement", "share", "gpus", "background"),
    [("colocated", None, 0.4, False), ("separate", 0.85, 1, True), ("shared", 0.4, 0.44, True)],
)
def test_engines_on_gpus_have_a_share_of_one(pool_of, built, placement, share, gpus, background):
    parts, named = pool_of(GPU, f"cluster.placement={placement}")
    engine = parts(SimpleNamespace(version=0)).inputs
    assert (engine.gpu_share, engine.kv_bytes) == (share, None if share is None else 1000 * share)
    assert engine.releases_memory is (placement == "colocated")
    assert named["options"] == {"num_gpus": gpus}
    assert named["background"] is background


class Built:
    """An engine with its inputs, and the weights that it has received."""

    def __init__(self, named, inputs):
        self.version, self.received = 0, []
        self.inputs = inputs

    def receive(self, version, weights):
        self.received.append((version, weights))


@pytest.fixture
def built(monkeypatch):
    """On GPUs whose weights leave 1000 bytes."""
    monkeypatch.setattr(build_engines, "flesh_out", lambda skeleton, weights, device, dtype: (device.type, dtype))
    monkeypatch.setattr(build_engines, "build_engine", Built)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 4000))


@pytest.fixture
def parts(built):
    config = Config.load(None, ["cluster.backend=ray"])
    return EngineParts(config, "native", None, None, torch.bfloat16, 64, "cpu", 1, kv_bytes=77)


@pytest.mark.parametrize(
    ("device", "placement", "kv_bytes"),
    [("cpu", "colocated", 77), ("cpu", "shared", 77), ("cuda", "colocated", 77), ("cuda", "shared", 400)],
)
def test_a_cache_takes_its_share_of_what_the_weights_leave_on_a_gpu(parts, device, placement, kv_bytes):
    config = Config.load(None, ["cluster.backend=ray", f"cluster.placement={placement}"])
    engine = replace(parts, device=device, config=config)(SimpleNamespace(version=0))
    assert engine.inputs.kv_bytes == kv_bytes


@pytest.mark.parametrize("version", [0, 3])
def test_an_engine_that_starts_late_receives_the_version_that_it_starts_with(parts, version):
    weights = SimpleNamespace(version=version)
    engine = replace(parts, threads=2)(weights)
    assert engine.received == ([(3, weights)] if version else [])
    assert engine.inputs.copies is False
    assert torch.get_num_threads() == 2


def test_an_engine_can_save_a_model_whose_sampling_settings_contradict_each_other(tmp_path):
    """As vLLM's does, which reads the model from files."""
    model = small_model()
    for part in (model, tokenizer()):
        part.save_pretrained(tmp_path / "model")
    settings = {"eos_token_id": 2, "temperature": 0.9, "do_sample": False}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    empty, words = load_empty(ModelSettings(name=str(tmp_path / "model")))
    save_model(flesh_out(skeleton_of(empty), ModelWeights(model), CPU), words, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text())["eos_token_id"] == 2
