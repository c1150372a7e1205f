"""The policy as its own judge on engines that are Ray actors."""

import io
import json

import pyarrow.parquet as pq
import pytest
from support import THOROUGH

from dapo_rl import Config, DAPOTrainer
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.runs.display import PlainDisplay

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_ranks", "warm_engines")]

ENGINES = ["cluster.backend=ray", "cluster.engines=2"]
SYNCHRONOUS = ["sampling.max_staleness=0", "train.steps=2"]


def run(path, *settings, resume=False):
    judge = path.parent / "judge.yaml"
    asks = {"endpoint": "policy", "prompt": "{prompt}{response}\n1+2=?", "parse": "([0-9])", "max_tokens": 12}
    judge.write_text(json.dumps(asks), encoding="utf-8")
    words = [*THOROUGH, "data.eval.size=8", f"reward.verifier={judge}", "reward.max_error_share=1", *settings]
    with DAPOTrainer(config=Config.load("demo", words), run_dir=path, display=PlainDisplay(io.StringIO())) as trainer:
        return trainer.train(resume=resume)


def groups(path):
    names = ["step", "draw", "sample", "prompt_id", "token_ids", "version_last", "score", "fate"]
    return [pq.read_table(file).select(names).to_pylist() for file in sorted((path / "rollouts").iterdir())]


def test_without_staleness_engines_of_a_cluster_judge_as_that_of_one_process(tmp_path):
    (tmp_path / "ray").mkdir()
    run(tmp_path / "plain", *SYNCHRONOUS)
    run(tmp_path / "ray" / "run", *SYNCHRONOUS, *ENGINES, "cluster.placement=shared", "cluster.ranks=2")
    assert groups(tmp_path / "ray" / "run") == groups(tmp_path / "plain")


def test_a_run_that_samples_during_updates_has_all_verdicts_before_each(tmp_path):
    settings = [*ENGINES, "cluster.placement=separate", "sampling.ahead=1", "eval.every=2", "checkpoint.every=1"]
    path = tmp_path / "run"
    run(path, *settings, "train.steps=2")
    summary = run(path, *settings, "train.steps=4", resume=True)
    assert summary["finished"]
    tokens = summary["tokens"]
    assert tokens["total"] == sum(count for name, count in tokens.items() if name != "total")
    seen = [(row["draw"], row["sample"]) for table in groups(path) for row in table if row["fate"] != "carried"]
    assert len(set(seen)) == len(seen), "a sample was counted twice"
    steps = [row for row in RunDirectory(path).read_metrics() if row["step"] > 0]
    assert sum(row["judge/tokens"] for row in steps) > 0
    assert any(row["sampling/in_flight"] > 0 for row in steps)
