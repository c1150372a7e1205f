"""A training run whose environments are on the nodes of a Ray cluster."""

import io

import pyarrow.parquet as pq
import pytest
from rank_parts import WarmRanks
from safetensors.torch import load_file

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cluster import build_policy
from dapo_rl.runs.display import PlainDisplay

pytestmark = pytest.mark.slow

SMALL = [
    *("train.steps=2", "sampling.prompts_per_step=2", "sampling.group_size=4", "train.mini_batches=1"),
    *("train.epochs_per_step=1", "data.train.size=64", "data.eval=none", "eval.every=none", "log.report=false"),
    *("sampling.on_cap=fill", "sampling.cap=4", "sampling.max_staleness=0"),
]


@pytest.fixture(autouse=True)
def warm_ranks(ray_instance, monkeypatch):
    monkeypatch.setattr(build_policy, "RayRanks", WarmRanks)


def run(path, *settings):
    """Its episodes and its weights."""
    config = Config.load("guess", [*SMALL, *settings])
    with DAPOTrainer(config=config, run_dir=path, display=PlainDisplay(io.StringIO())) as trainer:
        pool = type(trainer._run.conversations.pool).__name__
        trainer.train()
    names = ["step", "draw", "sample", "token_ids", "logps", "messages", "score", "fate"]
    tables = [pq.read_table(file).select(names) for file in sorted((path / "rollouts").iterdir())]
    rows = [row for table in tables for row in table.to_pylist()]
    return pool, rows, load_file(path / "model" / "model.safetensors")


def test_environments_on_the_nodes_give_the_run_of_one_process(tmp_path):
    pool, rows, weights = run(tmp_path / "plain")
    assert pool == "EnvironmentPool"
    there, theirs, others = run(tmp_path / "ray", "cluster.backend=ray", "env.workers_per_node=2")
    assert there == "DistributedEnvironments"
    assert theirs == rows
    assert any(row["score"] > 0 for row in rows)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert (others[name] == weight).all(), name
