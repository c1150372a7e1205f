"""Whole runs with environments, on the embedded model."""

import hashlib
import json

import pyarrow.parquet as pq
import pytest

from dapo_rl import DAPOTrainer
from dapo_rl.config import Config

pytestmark = pytest.mark.slow

SMALL = [
    *("train.steps=2", "sampling.prompts_per_step=2", "sampling.group_size=4", "train.mini_batches=1"),
    *("train.epochs_per_step=1", "data.train.size=64", "data.eval=none", "eval.every=none", "checkpoint.every=1"),
    *("log.report=false", "sampling.on_cap=fill", "sampling.cap=4"),
]


def train(recipe, directory, *overrides):
    trainer = DAPOTrainer(config=Config.load(recipe, [*SMALL, *overrides]), run_dir=directory)
    trainer.train()
    return directory


def weights(directory):
    (file,) = (directory / "model").glob("*.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def rows(directory):
    files = sorted((directory / "rollouts").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize("recipe", ["guess", "calculator"])
def test_a_seed_gives_the_same_run(recipe, tmp_path):
    first, second = (train(recipe, tmp_path / name) for name in ("first", "second"))
    assert weights(first) == weights(second)
    found = rows(first)
    assert any(row["policy_turns"] > 1 for row in found)
    for row in found:
        messages = json.loads(row["messages"])
        assert sum(message["role"] == "assistant" for message in messages) == row["policy_turns"]
        assert len(row["token_ids"]) == len(row["mask"])
        written = sum(turn["end"] - turn["start"] for turn in row["turns"] if turn["author"] == "policy")
        assert written == sum(row["mask"])


def test_a_run_of_several_turns_on_another_engine_samples_the_same(tmp_path):
    """The tokens of an episode depend on its prompt, its seed and the weights, not on the engine's batches."""
    runs = [
        train("guess", tmp_path / engine, "train.steps=1", f"engine={engine}", "sampling.temperature=0.01")
        for engine in ("native", "hf")
    ]
    texts = [sorted((row["draw"], row["sample"], row["messages"]) for row in rows(run)) for run in runs]
    both = {key[:2] for key in texts[0]} & {key[:2] for key in texts[1]}
    first, second = ([row for row in each if row[:2] in both] for each in texts)
    assert first == second
