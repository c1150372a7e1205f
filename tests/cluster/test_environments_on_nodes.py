"""A training run whose environments are on the nodes of a Ray cluster."""

import io
from pathlib import Path
from threading import Thread

import pyarrow.parquet as pq
import pytest
from patience import wait_until
from safetensors.torch import load_file

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cluster.ray_session import import_ray
from dapo_rl.runs.display import PlainDisplay

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_ranks")]

SMALL = [
    *("train.steps=2", "sampling.prompts_per_step=2", "sampling.group_size=4", "train.mini_batches=1"),
    *("train.epochs_per_step=1", "data.train.size=64", "data.eval=none", "eval.every=none", "log.report=false"),
    *("sampling.on_cap=fill", "sampling.cap=4", "sampling.max_staleness=0"),
]


def run(path, *settings, meanwhile=lambda pool: None):
    """Its episodes and its weights."""
    config = Config.load("guess", [*SMALL, *settings])
    with DAPOTrainer(config=config, run_dir=path, display=PlainDisplay(io.StringIO())) as trainer:
        pool = trainer._run.conversations.pool
        other = Thread(target=meanwhile, args=[pool])
        other.start()
        trainer.train()
        other.join()
    names = ["step", "draw", "sample", "token_ids", "logps", "messages", "score", "fate"]
    tables = [pq.read_table(file).select(names) for file in sorted((path / "rollouts").iterdir())]
    rows = [row for table in tables for row in table.to_pylist()]
    return type(pool).__name__, rows, load_file(path / "model" / "model.safetensors")


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


def test_a_run_goes_on_as_if_a_node_had_not_been_lost(tmp_path):
    """Its episodes are deterministic, and are replayed."""
    game = f"env.name={Path(__file__).with_name('dying_game.py')}:DyingGame"
    marker = tmp_path / "lost"
    marker.touch()
    settings = [game, f"env.options={{marker: {marker}}}", "cluster.backend=ray", "env.workers_per_node=2"]
    _, rows, weights = run(tmp_path / "whole", *settings)
    marker.unlink()

    def kill(pool):
        wait_until(marker.exists)
        for each in pool._nodes:
            import_ray().kill(each.actor)

    _, theirs, others = run(tmp_path / "lost_once", *settings, "cluster.restarts=2", meanwhile=kill)
    notes = (tmp_path / "lost_once" / "notes.jsonl").read_text()
    assert "were lost: the actor" in notes
    assert theirs == rows
    assert all((others[name] == weight).all() for name, weight in weights.items())
