"""Whole runs with environments, on the embedded model."""

import hashlib
import json
import re

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


REWRITER = """
from dapo_rl.envs import Observation, Opening


class Rewriter:
    deterministic = True

    def open(self, prompt, seed):
        return Opening(({"role": "user", "content": "1+1="},))

    def step(self, turn):
        said = {"role": "user", "content": f"{turn.number}+2="}
        if turn.number == 3:
            return Observation(reward=float(len(turn.text) % 2), done=True)
        return Observation(conversation=Opening((said,)))
"""


def test_the_rollout_log_has_every_token_of_episodes_that_fork(tmp_path):
    (tmp_path / "rewriter.py").write_text(REWRITER)
    settings = [f"env.name={tmp_path / 'rewriter.py'}:Rewriter", "sampling.max_new_tokens=60"]
    run = train("guess", tmp_path / "run", *settings)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    generated, trained = (
        sum(line[f"sampling/tokens_{what}"] for line in lines if line["step"]) for what in ("generated", "trained")
    )
    found = rows(run)
    whole = [(row, part) for row in found for part in (*row["forked"], row)]
    assert sum(sum(part["mask"]) for row, part in whole) == generated
    kept = [part for row, part in whole if row["fate"] == "kept"]
    assert sum(sum(part["mask"]) for part in kept) == trained
    assert all(len(part["train_logps"]) == len(part["token_ids"]) == len(part["logps"]) for part in kept)
    assert 2 in {row["forks"] for row in found}
    for row in found:
        parts = [*row["forked"], row]
        assert len(parts) == row["forks"] + 1 == row["policy_turns"]
        assert {len(part["turns"]) for part in parts} == {1}
        assert [json.loads(part["messages"])[0]["content"] for part in parts] == [part["response"] for part in parts]
        assert len({tuple(part["prompt_ids"]) for part in parts}) == len(parts)


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


ADAPTED = {
    "gymnasium:FrozenLake-v1": (["env.options={make: {is_slippery: false}}"], r"\d+|not a valid action: .*"),
    "textarena:PegJump-v0": ([], r"(?s).*move.*"),
}
"""Settings, and what the environment says after a turn."""


@pytest.mark.parametrize("name", ADAPTED)
def test_environments_of_other_libraries(name, tmp_path):
    pytest.importorskip(name.partition(":")[0])
    options, said = ADAPTED[name]
    limits = ["data.max_prompt_tokens=400", "env.max_observation_tokens=400", "sampling.stop=[0, 1, 2, '-']"]
    run = train("guess", tmp_path / "run", f"env.name={name}", *limits, *options)
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["env/failed"] == 0 and line["env/tool_calls"] > 0 for line in lines if line["step"])
    found = rows(run)
    messages = [message for row in found for message in json.loads(row["messages"])]
    answers = [message["content"] for message in messages if message["role"] == "user"]
    assert answers
    assert all(re.fullmatch(said, answer) for answer in answers), answers
    assert any(row["policy_turns"] > 1 for row in found)
