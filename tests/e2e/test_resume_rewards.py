"""A run with several rewards, which log and depend on the step, resumes bit for bit, its log included."""

import json
import shutil

import chaos
import pyarrow.parquet as pq
import pytest
import support

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cli import DEFAULT_RECIPE

pytestmark = pytest.mark.slow

REWARDS = """
import random

def brevity(completions, trainer_state, log_extra, log_metric, **columns):
    log_extra("characters", [len(completion) for completion in completions])
    log_extra("start", [completion[:3] for completion in completions])
    log_metric("state/step", trainer_state.global_step)
    log_metric("state/epoch", trainer_state.epoch)
    weight = 1 + trainer_state.global_step / trainer_state.max_steps
    return [weight / (1 + len(completion)) for completion in completions]

async def lucky(completions, **columns):
    return [random.random() if len(completion) % 3 else None for completion in completions]
"""
STEPS = 5


def trainer_for(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    (path.parent / "rewards.py").write_text(REWARDS)
    verifier = "[math, {verifier: rewards.py:brevity, weight: 0.5}, {verifier: rewards.py:lucky, weight: 0.25}]"
    words = [*support.THOROUGH, f"train.steps={STEPS}", "checkpoint.every=1", "checkpoint.keep=9"]
    words += [f"reward.verifier={verifier}", "data.eval=null", "eval.every=null"]
    return DAPOTrainer(config=Config.load(DEFAULT_RECIPE, words), run_dir=path)


def test_carried_groups_keep_what_their_rewards_logged(tmp_path, monkeypatch):
    for name in ("whole", "again"):
        (tmp_path / name).mkdir()
    whole, again = tmp_path / "whole" / "run", tmp_path / "again" / "run"
    with trainer_for(whole, monkeypatch) as trainer:
        trainer.train()

    saved = {n: json.loads((whole / f"checkpoints/step-{n}/sampler.json").read_text()) for n in range(1, STEPS)}
    carried = [n for n, state in saved.items() if state["carried"]]
    assert carried, "no step has carried a group over: choose other settings"
    verdicts = saved[carried[0]]["carried"][0]["verdicts"]
    assert {"characters", "start"} == set(verdicts[0]["extra"])
    assert [name for name, *_ in verdicts[0]["parts"]][:2] == ["math", "brevity"]

    shutil.copytree(whole, again)
    for n in range(carried[0] + 1, STEPS + 1):
        shutil.rmtree(again / f"checkpoints/step-{n}")
    with trainer_for(again, monkeypatch) as trainer:
        trainer.train(resume=True)
    assert chaos.differences(whole, again) == []

    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["metric/state/step"] for row in rows] == list(range(STEPS))
    assert all(row["metric/state/epoch"] >= 0 for row in rows)
    assert {"reward/math/mean", "reward/brevity/std", "reward/lucky/mean"} <= set(rows[0])
    table = pq.read_table(whole / "rollouts/step-000002.parquet").to_pylist()
    assert all(row["extra/characters"] == len(row["response"]) for row in table)
    assert all(row["reward/math"] == (1.0 if row["correct"] else -1.0) for row in table)
    for row in table:
        parts = row["reward/math"] + 0.5 * row["reward/brevity"] + 0.25 * (row["reward/lucky"] or 0.0)
        assert row["score"] == pytest.approx(parts)
