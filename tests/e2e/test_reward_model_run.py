"""Reward models in runs: from settings, from TRL's arguments, and in `dapo verify` and `dapo check`."""

import pyarrow.parquet as pq
import pytest
from reward_models import classifier, save_classifier
from support import SMALL, tokenizer

from dapo_rl import Config, DAPOTrainer
from dapo_rl.config import WeightedVerifier
from dapo_rl.lab.verify import dry_run
from dapo_rl.memory.check import find_memory, memory_report
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.runs.directory import RunDirectory

pytestmark = pytest.mark.slow
SETTINGS = [*SMALL, "train.steps=2", "data.eval=null", "eval.every=null"]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("rm") / "rm"
    save_classifier(path)
    return path


def rows(path, *settings, **arguments):
    with DAPOTrainer(config=Config.load("demo", [*SETTINGS, *settings]), run_dir=path, **arguments) as trainer:
        trainer.train()
    return [
        {name: value for name, value in row.items() if not name.startswith(("timing", "perf"))}
        for row in RunDirectory(path).read_metrics()
    ]


def test_the_same_seed_gives_the_same_run(reward_model, tmp_path):
    verifier = f"reward.verifier=[math, {{verifier: 'model:{reward_model}', weight: 0.5}}]"
    first, second = (rows(tmp_path / name, verifier) for name in "ab")
    for one, other in zip(first, second, strict=True):
        assert one["reward/rm/std"] > 0
        assert {k: v for k, v in one.items() if v == v} == {k: v for k, v in other.items() if v == v}


def test_groups_that_correctness_drops_are_not_scored_and_the_run_is_the_same(reward_model, tmp_path, monkeypatch):
    verifier = f"reward.verifier=[math, {{verifier: 'model:{reward_model}', weight: 0.5}}]"
    skipping = rows(tmp_path / "a", verifier, "sampling.metric=correct")
    monkeypatch.setattr(VerifierPool, "skips_dropped", False)
    scoring = rows(tmp_path / "b", verifier, "sampling.metric=correct")
    assert [row["actor/pg_loss"] for row in skipping] == [row["actor/pg_loss"] for row in scoring]
    assert [row["reward/math/mean"] for row in skipping] == [row["reward/math/mean"] for row in scoring]
    assert [row["reward/rm/mean"] for row in skipping] != [row["reward/rm/mean"] for row in scoring]
    ours, theirs = (
        [row for f in sorted((tmp_path / name / "rollouts").iterdir()) for row in pq.read_table(f).to_pylist()]
        for name in "ab"
    )
    assert {row["fate"] for row in ours} >= {"kept", "all_wrong"}
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine["token_ids"], mine["fate"]) == (other["token_ids"], other["fate"])
        assert (mine["score"] == other["score"]) == (mine["fate"] == "kept")


def length(completions, **columns):
    return [float(len(completion)) / 100 for completion in completions]


def test_models_among_trl_s_reward_functions(reward_model, tmp_path):
    functions, words = [str(reward_model), classifier(seed=1), length], [None, tokenizer(), None]
    (row, _) = rows(tmp_path / "run", reward_funcs=functions, reward_processing_classes=words)
    means = {name: value for name, value in row.items() if name.startswith("reward/") and name.count("/") == 2}
    assert set(means) == {
        f"reward/{name}/{kind}"
        for name in ("rm", "LlamaForSequenceClassification", "length")
        for kind in ("mean", "std")
    }
    recorded = RunDirectory.open(tmp_path / "run").read_config().reward.verifier
    assert next(entry.verifier for entry in recorded) == f"model:{reward_model}"
    assert all(isinstance(entry, WeightedVerifier) for entry in recorded)


def test_verify_shows_its_scores(reward_model):
    result = dry_run(Config.load("demo", [*SETTINGS, f"reward.verifier=model:{reward_model}"]), rows=2, samples=2)
    assert len(result.answers) == 4
    assert all(answer.parts[0].name == "rm" for answer in result.answers)


def test_check_counts_its_memory(reward_model):
    config = Config.load("demo", [*SETTINGS, f"reward.verifier=model:{reward_model}", "model.device=cpu"])
    parts = {part.name: part.bytes for part in memory_report(config, find_memory(config, None)).parts}
    parameters = sum(parameter.numel() for parameter in classifier().parameters())
    assert parts["reward model"] in (2 * parameters, 4 * parameters)
