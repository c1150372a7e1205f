"""A run whose teacher is behind a server learns as from a loaded one, and loses nothing when the server goes away."""

import json

import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file
from support import THOROUGH
from teacher_server import teacher_server

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.config import ModelSettings
from dapo_rl.errors import UserError
from dapo_rl.models.load import load_model
from dapo_rl.models.save import save_model
from dapo_rl.runs.directory import RunDirectory

pytestmark = pytest.mark.slow
SETTINGS = (*THOROUGH, "train.steps=3", "train.warmup_steps=0", "eval.every=3", "eval.prompts=8", "checkpoint.every=9")
FILLED = ("sampling.on_cap=fill", "sampling.cap=6")


@pytest.fixture(scope="module")
def other():
    """The embedded model with noise in its weights: another opinion of the same tokens."""
    model, tokenizer = load_model(ModelSettings(device="cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * weight.std() * torch.randn_like(weight) if weight.ndim == 2 else 0
    return model, tokenizer


def train(path, *settings, resume=False):
    with DAPOTrainer(config=Config.load(DEFAULT_RECIPE, [*SETTINGS, *settings]), run_dir=path) as trainer:
        trainer.train(resume_from_checkpoint=resume)


def result(path):
    """What a run leaves, without times."""
    weights = load_file(path / "model" / "model.safetensors")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/"))} for line in lines]
    samples = [row for file in sorted(path.glob("rollouts/*")) for row in parquet.read_table(file).to_pylist()]
    return {name: weight.tolist() for name, weight in weights.items()}, metrics, samples


def test_it_learns_as_from_a_loaded_teacher(other, tmp_path):
    settings = ("algo.advantage=distill", "sampling.dynamic=false", "train.steps=2")
    with teacher_server(*other) as server:
        train(tmp_path / "served", *settings, f"teacher.name={server.url}")
    save_model(*other, tmp_path / "teacher")
    train(tmp_path / "loaded", *settings, f"teacher.name={tmp_path / 'teacher'}")
    served, loaded = (RunDirectory(tmp_path / name).read_metrics() for name in ("served", "loaded"))
    assert served[-1]["teacher/kl"] > 0.001
    for ours, theirs in zip(served, loaded, strict=True):
        for name in ("teacher/kl", "actor/grad_norm"):
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("settings", [("sampling.surplus=carry",), ("sampling.surplus=requeue",), FILLED])
def test_a_server_that_goes_away_loses_nothing(other, tmp_path, settings):
    """The run stops with a checkpoint, and resumed it ends as the run in which nothing happened."""
    settings = (*settings, "teacher.retries=0")
    with teacher_server(*other) as server:
        settings = (*settings, f"teacher.name={server.url}")
        train(tmp_path / "whole", *settings)
        calls = []

        def second_fails(path, body):
            if path == "/v1/completions":
                calls.append(body)
            return (503, b"going away") if len(calls) == 2 else None

        server.before = second_fails
        with pytest.raises(UserError, match=r"^teacher\.name: .* answered 503 .*going away; resume when it answers$"):
            train(tmp_path / "run", *settings)
        notes = (tmp_path / "run" / "notes.jsonl").read_text()
        assert "step 2: stopped before the update; resuming continues with what was sampled" in notes
        assert not (tmp_path / "run" / "rollouts" / "step-000002.parquet").exists()
        server.before = lambda path, body: None
        server.asked.clear()
        train(tmp_path / "run", *settings, resume=True)
        again = server.completions
    assert again[0] == calls[1]  # the same samples
    for ours, theirs in zip(result(tmp_path / "run"), result(tmp_path / "whole"), strict=True):
        assert ours == theirs
