"""The table of built-in engines: settings, commands and runs follow its entries, not the engines' names."""

import ast
import json
import subprocess
import sys

import pytest
import torch
from sglang_engine import Runtime
from support import REPOSITORY, SMALL, small_model, tokenizer, weights_of

from dapo_rl import Config, DAPOTrainer, UserError
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.config import SamplingSettings
from dapo_rl.engine_specs import CUSTOM, ENGINES, EngineSpec, engine_spec
from dapo_rl.engines.build import build_engine
from dapo_rl.engines.hf import HFEngine
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.protocol import Engine, EngineInputs, Request, SamplingParams

PACKAGE = REPOSITORY / "src" / "dapo_rl"


@pytest.fixture
def sglang(monkeypatch):
    monkeypatch.setitem(ENGINES, "sglang", EngineSpec(module="sglang_engine", package="sglang"))


@pytest.mark.slow
def test_a_new_engine_is_one_file_and_one_entry_and_trains_a_step_of_the_demo(tmp_path, sglang):
    quick = [*SMALL[:5], "data.eval=null", "eval.every=null", "train.steps=1", "train.warmup_steps=0"]
    config = Config.load(
        DEFAULT_RECIPE, [*quick, "engine=sglang", "sampling.max_new_tokens=16", "sampling.dynamic=false"]
    )
    closed = Runtime.closed
    with DAPOTrainer(config=config, run_dir=tmp_path / "run") as trainer:
        trainer.train()
    (metrics,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics["sampling/tokens_trained"] > 0
    assert metrics["rollout/mismatch_kl"] < 1e-6, "its log-probabilities are those of the trainer"
    assert metrics["sampling/preempted"] == 0
    assert Config.load(tmp_path / "run" / "config.yaml").engine == "sglang"
    assert Runtime.closed == closed + 1


def test_an_engine_continues_where_another_stopped(sglang):
    engine = build_engine("sglang", EngineInputs(small_model(), tokenizer(), SamplingSettings(), torch.float32))
    request = Request("a", [5, 6, 7], 2, SamplingParams(max_new_tokens=6, ignore_eos=True), seed=3)
    engine.submit(request)
    (taken,) = engine.take_unfinished()
    assert taken.untouched
    engine.receive(4, weights_of(small_model()))
    engine.submit(taken)
    assert {done.index for done in engine.poll()} == {0, 1}
    assert engine.version == 4


def test_settings_follow_the_specs(sglang):
    assert Config.load(DEFAULT_RECIPE, ["engine=sglang", "engine_options.tp_size=2"]).engine == "sglang"
    with pytest.raises(UserError, match=r"engine=hf has no options of its own"):
        Config.load(DEFAULT_RECIPE, ["engine=hf", "engine_options.tp_size=2"])
    with pytest.raises(UserError, match=r"which uses one GPU; set engine=vllm or engine=sglang, or more cluster\.eng"):
        Config.load(DEFAULT_RECIPE, ["engine=native", "cluster.backend=ray", "cluster.engine_gpus=2"])


def test_specs():
    assert list(ENGINES) == ["native", "hf", "vllm"]
    assert engine_spec("my.module:Class") is CUSTOM
    assert [name for name, spec in ENGINES.items() if spec.releases_memory_in_process] == ["native"]
    assert all(spec.releases_memory for spec in ENGINES.values() if spec.releases_memory_in_process)


@pytest.mark.parametrize("engine", [NativeEngine, HFEngine])
def test_engines_inherit_the_optional_methods(engine):
    assert Engine in engine.__mro__
    made = engine(small_model(), tokenizer(), max_batch=4)
    made.flush()
    made.close()
    assert (made.version, made.preempted, made.figures()) == (0, 0, [])


@pytest.mark.slow
def test_no_file_compares_the_name_of_an_engine():
    """Comparisons like `engine == "native"` would miss an engine that is added."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and "engine" in ast.unparse(node).lower():
                names = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)} & set(ENGINES)
                assert not names, f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}"


def test_the_table_does_without_torch():
    code = "import sys, dapo_rl.engine_specs; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
