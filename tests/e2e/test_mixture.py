"""A run on several sources: mixed by weights, resumed exactly, evaluated on each."""

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest
import torch

from dapo_rl import DAPOTrainer, UserError

LIST = [{"source": "arithmetic", "size": 40, "max_terms": 3, "weight": 3}, {"source": "arithmetic", "size": 30}]
SMALL = {
    "data": {
        "eval": [{"source": "arithmetic", "split": "heldout", "size": 6}, "held-out.jsonl"],
        "max_prompt_tokens": 32,
    },
    "eval": {"every": 3, "prompts": 4},
    "sampling": {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 24, "dynamic": False},
    "overlong.shape": "off",
    "train": {"lr": 1e-3, "warmup_steps": 0},
    "model.dtype": "float32",
    "checkpoint.every": 1,
    "log.report": False,
}


@pytest.mark.slow
def test_a_mixture_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+{n}=?\n", "answer": str(2 * n)} for n in range(5)]
    (tmp_path / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def train(run, steps, resume=False, train=LIST):
        config = {**SMALL, "train.steps": steps, "data.train": train}
        with DAPOTrainer(config=config, run_dir=tmp_path / run) as trainer:
            summary = trainer.train(resume=resume)
            return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}, summary

    straight, summary = train("straight", 3)
    train("stopped", 1)
    resumed, _ = train("stopped", 3, resume=True)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())

    steps = [pq.read_table(tmp_path / "straight" / "rollouts" / f"step-{n:06d}.parquet") for n in (1, 2, 3)]
    ids = {(row["draw"], row["prompt_id"]) for step in steps for row in step.to_pylist()}
    assert Counter(prompt_id.rpartition(":")[0] for _, prompt_id in ids) == {"arithmetic": 9, "arithmetic#2": 3}
    assert summary["data"]["train_prompts"] == 70
    metrics = [json.loads(line) for line in (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()]
    last = metrics[-1]
    for name in ("arithmetic", "arithmetic#2"):
        assert 0 <= metrics[1][f"data/{name}/accuracy"] <= 1
        assert metrics[1][f"data/{name}/kept_share"] == 1, "without dynamic sampling"
        assert metrics[1][f"data/{name}/tokens"] > 0
    each = [last["eval/accuracy/arithmetic"], last["eval/accuracy/held-out.jsonl"]]
    assert last["eval/accuracy"] == pytest.approx(sum(each) / 2), "four prompts of each"

    with pytest.raises(UserError, match=r"was started with different settings: data\.train "):
        train("stopped", 3, resume=True, train=[LIST[0], {**LIST[1], "weight": 2}])
