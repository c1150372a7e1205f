"""Batch transforms: the built-in ones in their order, and the user's own, which can add any column."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import REPOSITORY, SMALL, make_prompt, make_sample

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.errors import UserError
from dapo_rl.train.batch import make_batch
from dapo_rl.train.custom import build_advantages
from dapo_rl.train.trainer_state import Progress
from dapo_rl.train.transforms import CustomTransform, build_transforms
from dapo_rl.types import Group, Verdict

TEACHER = """
import numpy as np
import torch
from dapo_rl.models.response_logps import response_logps
from dapo_rl.models.load import load_model
from dapo_rl.config import ModelSettings

teacher, _ = load_model(ModelSettings(device="cpu"))

def add(batch):
    trained = batch.trained
    with torch.no_grad():
        rows = response_logps(teacher, trained, 1.0, 0).logps.numpy()
    return batch.with_trained(
        s.replace(teacher_logps=row[: len(s.token_ids)], routing=np.ones((len(s.token_ids), 2, 3), np.int16))
        for s, row in zip(trained, rows, strict=True)
    )
"""


def batch(step=1, **settings):
    verdicts = (Verdict(1.0, True, "correct"), Verdict(-1.0, False, "wrong"))
    config = Config.build({"sampling.group_size": 2, "sampling.prompts_per_step": 2, **settings})
    return make_batch([Group(0, make_prompt("p"), (make_sample(3), make_sample(4)), verdicts)], config, step=step)


class Scorer:
    """Says which scores it was asked for."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        def score(samples):
            self.asked.append(name)
            return [np.full(len(s.token_ids), -0.5, np.float32) for s in samples]

        return score


@pytest.mark.parametrize(
    ("settings", "step", "asked"),
    [
        ({}, 1, []),
        ({"algo.proximal": "recomputed"}, 1, []),
        ({"algo.proximal": "recomputed", "train.mini_batches": 2}, 1, ["score"]),
        ({"algo.kl_coef": 0.1}, 1, ["score_reference"]),
        (
            {"algo.kl_coef": 0.1, "algo.proximal": "recomputed", "train.mini_batches": 2},
            1,
            ["score", "score_reference"],
        ),
        ({"preset": "vapo", "critic.pretrain_steps": 3}, 3, ["values"]),
        ({"preset": "vapo", "critic.pretrain_steps": 3, "algo.kl_coef": 0.1, "algo.kl_in": "reward"}, 4,
         ["score_reference", "values"]),
    ],
)  # fmt: skip
def test_a_run_scores_what_its_settings_need_in_order(settings, step, asked):
    config = Config.build({"sampling.group_size": 2, "sampling.prompts_per_step": 2, **settings})
    scorer = Scorer()
    given = batch(step, **settings)
    values = scorer.values if config.has_critic else None
    for transform in build_transforms(config, scorer, build_advantages(config.algo), values):
        given = transform(given)
    assert scorer.asked == asked
    added = {"score": "proximal_logps", "score_reference": "ref_logps", "values": "values"}
    for sample in given.samples:
        assert {added[name] for name in asked} <= sample.columns.keys()


def custom(tmp_path, code):
    (tmp_path / "mine.py").write_text(code)
    return CustomTransform(f"{tmp_path}/mine.py:f", Config())


def test_a_custom_transform_gets_the_batch_and_the_settings(tmp_path):
    transform = custom(
        tmp_path,
        "def f(batch, config):\n"
        "    return batch.with_samples(s.replace(steps=config.train.steps) for s in batch.samples)",
    )
    assert [sample["steps"].tolist() for sample in transform(batch()).samples] == [[100] * 3, [100] * 4]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0", "train.transforms: .*mine.py:f raised ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "raised SystemExit"),
        ("return None", "returned a NoneType; it returns the batch with more columns"),
        ("return batch.with_samples(s.until(2) for s in batch.samples)", "changed the tokens of the batch"),
        ("return batch.with_samples(s.replace(x=float('nan')) for s in batch.samples)", "made x not finite"),
        (
            "return batch.with_samples(s.replace(x=x) for s, x in zip(batch.samples, (1, 0.5)))",
            "made x of several types or shapes; give all samples the same",
        ),
        (
            "return batch.with_samples(s.replace(x=[[1] * (n + 1)] * (3 + n)) for n, s in enumerate(batch.samples))",
            "made x of several types or shapes",
        ),
        (
            "import dataclasses as d; return d.replace(batch, metrics={'x': [1]})",
            "mine.py:f: the metric x is a list, not a",
        ),
    ],
)
def test_a_custom_transform_that_fails_is_one_line(tmp_path, body, said):
    transform = custom(tmp_path, f"def f(batch):\n    {body}")
    with pytest.raises(UserError, match=said) as failed:
        transform(batch())
    assert "\n" not in str(failed.value)


def test_metrics_of_a_custom_transform_can_be_saved(tmp_path):
    code = "from dataclasses import replace\nimport numpy as np\nimport torch\n\ndef f(batch):\n    "
    code += "return replace(batch, metrics={'a': np.float32(1.5), 'b': torch.tensor(2), 'c': 3, 'd': float('nan')})"
    metrics = custom(tmp_path, code)(batch()).metrics
    Progress(metrics=dict(metrics)).save(tmp_path)
    restored = Progress()
    restored.load(tmp_path)
    assert (restored.metrics["a"], restored.metrics["b"], restored.metrics["c"]) == (1.5, 2.0, 3)
    assert np.isnan(restored.metrics["d"])


@pytest.mark.slow
def test_the_log_probabilities_of_a_teacher_are_added_by_a_file(tmp_path):
    """The teacher is the model that the run starts from, so its log-probabilities are those of the first step."""
    (tmp_path / "teacher.py").write_text(TEACHER)
    settings = [*SMALL, "train.steps=2", f"train.transforms=[{tmp_path}/teacher.py:add]"]
    with DAPOTrainer(config=Config.load(DEFAULT_RECIPE, settings), run_dir=tmp_path / "run") as trainer:
        trainer.train()
    first, second = (pq.read_table(tmp_path / "run" / "rollouts" / f"step-{n:06d}.parquet").to_pylist() for n in (1, 2))
    kept = [row for row in first if row["fate"] == "kept"]
    assert kept
    for row in kept:
        assert row["teacher_logps"] == pytest.approx(row["logps"], abs=1e-4)
        assert np.shape(row["routing"]) == (len(row["token_ids"]), 2, 3)
    assert all(row["teacher_logps"] is None for row in first if row["fate"] != "kept")
    assert any(np.abs(np.subtract(r["teacher_logps"], r["logps"])).max() > 1e-4 for r in second if r["fate"] == "kept")


@given(st.lists(st.booleans(), min_size=4, max_size=16).filter(lambda kinds: len(kinds) % 4 == 0), st.integers(1, 9))
def test_half_of_each_group_stands_for_all_of_it(kinds, step):
    verdicts = tuple(Verdict(float(right), right, "correct" if right else "wrong") for right in kinds)
    samples = tuple(make_sample(3).replace(index=i) for i in range(len(kinds)))
    made = make_batch([Group(7, make_prompt("p"), samples, verdicts)], Config.build({}), step=step)
    made = made.with_samples(sample.replace(advantages=1.0) for sample in made.samples)
    half_groups = CustomTransform(f"{REPOSITORY}/examples/half_groups.py:half_groups", Config.build({}))
    after = half_groups(made)
    assert len(after.trained) == len(kinds) / 2
    assert [s.index for s in half_groups(made).trained] == [s.index for s in after.trained]  # after a resume, too
    for right in {*kinds}:
        weight = sum(sample["advantages"][0] for sample in after.trained if sample.correct == right)
        assert weight == pytest.approx(kinds.count(right) / 2)
