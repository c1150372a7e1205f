"""`max_staleness: 0` is the synchronous run."""

import pytest
import support
import torch

from dapo_rl import Config, DAPOTrainer
from dapo_rl.runs.directory import RunDirectory

pytestmark = pytest.mark.slow

SMALL = [*support.SMALL, "data.eval=null", "eval.every=null", "train.warmup_steps=0", "train.steps=3"]


def trained(path, *overrides):
    trainer = DAPOTrainer(config=Config.load("demo", [*SMALL, *overrides]), run_dir=path)
    return trainer, trainer.train()


def same_weights(one, other):
    pairs = zip(one.model.named_parameters(), other.model.named_parameters(), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def test_it_has_the_weights_of_the_run_that_carries_nothing(tmp_path):
    """Without the filter, `surplus: drop` has no surplus: both sample exactly the batch of each step."""
    dropping, _ = trained(tmp_path / "drop", "sampling.dynamic=false", "sampling.surplus=drop")
    ours, _ = trained(tmp_path / "ours", "sampling.dynamic=false", "sampling.max_staleness=0")
    assert same_weights(ours, dropping)


def test_with_the_filter_every_group_is_of_the_current_weights_and_a_stopped_run_samples_the_same(tmp_path):
    _, summary = trained(tmp_path / "whole", "sampling.max_staleness=0")
    rows = RunDirectory(tmp_path / "whole").read_metrics()
    assert len(rows) == 3
    assert {row[f"sampling/{name}"] for row in rows for name in ("staleness", "carried", "in_flight")} == {0}
    assert summary["tokens"]["carried"] == summary["tokens"].get("surplus", 0) == summary["tokens"]["cancelled"] == 0

    calls = [0]

    def in_the_second_step():
        calls[0] += first._run.progress.step == 1
        return calls[0] > 2

    config = Config.load("demo", [*SMALL, "sampling.max_staleness=0"])
    first = DAPOTrainer(config=config, run_dir=tmp_path / "parts")
    first.stop_requested = in_the_second_step
    assert first.train()["steps"] == 1
    assert first._run.sampler.so_far is not None
    resumed = DAPOTrainer(config=config, run_dir=tmp_path / "parts").train(resume=True)
    assert (resumed["tokens"], resumed["data"]) == (summary["tokens"], summary["data"])
