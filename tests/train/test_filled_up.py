"""`on_cap: fill`: the groups that a batch is filled up with count in it, and teach nothing."""

import itertools

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support import Prompts, ScriptedEngine, TextVerifier, full_batch, make_sample

from dapo_rl import DAPOTrainer, algo
from dapo_rl.algo import reference
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.config import Config
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.runs.rollouts import GroupRow, write_table
from dapo_rl.train.batch import shaped_rewards
from dapo_rl.train.metrics import step_metrics

MIXED, WRONG, RIGHT = ["right", "wrong", "wrong", "wrong"], ["wrong"] * 4, ["right"] * 4
LENGTHS = [10, 85, 90, 100]
"""With a limit of 100 and a cache of 20, penalties of 0, 0.25, 0.5 and 1."""
PENALTIES = [0, -0.25, -0.5, -1]
NORMALIZE = ["group", "batch", "none", "leave-one-out"]


def config(**changes):
    base = {
        "sampling.max_new_tokens": 100,
        "sampling.group_size": 4,
        "sampling.prompts_per_step": 4,
        "sampling.cap": 4,
        "sampling.on_cap": "fill",
        "overlong.cache_length": 20,
    }
    return Config.build(base | {name.replace("__", "."): value for name, value in changes.items()})


def fill(settings, kinds, n=4):
    def script(request):
        texts = kinds[int(request.id.removeprefix("draw-")) % len(kinds)]
        return [make_sample(length, text=text) for length, text in zip(LENGTHS, texts, strict=True)]

    params = SamplingParams(max_new_tokens=100)
    cap = settings.sampling_cap
    sampler = Sampler(Prompts(), ScriptedEngine(script), TextVerifier(), params, settings.sampling, cap=cap, seed=0)
    return sampler.fill(n)


def batch_of(filled, settings):
    return full_batch(filled.kept, settings, 0, filled.filled_up)


def advantages(batch):
    return [[float(sample["advantages"][0]) for sample in group.samples] for group in batch]


@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("masked_in_baseline", [True, False])
def test_groups_that_are_filled_up_have_no_advantage(normalize, masked_in_baseline, eps):
    settings = config(
        algo__normalize=normalize, algo__advantage_eps=eps, overlong__masked_in_baseline=masked_in_baseline
    )
    filled = fill(settings, [MIXED, WRONG, RIGHT, WRONG])
    assert [group.draw for group in filled.kept] == [0, 1, 2, 3]
    assert filled.filled_up == {1, 2, 3}
    informative, *rest = advantages(batch_of(filled, settings))
    assert rest == [[0.0] * 4] * 3
    # Not even the batch's standard deviation knows of them.
    assert informative == advantages(full_batch(filled.kept[:1], settings))[0]
    assert informative[0] > 0 > informative[1]


@pytest.mark.parametrize("changes", [{"sampling__metric": "score"}, {"sampling__dynamic_batch": True}])
def test_nor_where_the_filter_looks_at_scores_or_nothing_passes_it(changes):
    settings = config(sampling__cap=8, **changes)
    filled = fill(settings, [WRONG, RIGHT])
    assert filled.filled_up == {group.draw for group in filled.kept}
    assert len(filled.kept) == 4
    assert advantages(batch_of(filled, settings)) == [[0.0] * 4] * 4


def test_a_full_batch_is_filled_up_with_nothing():
    settings = config(sampling__cap=100)
    filled = fill(settings, [MIXED, WRONG])
    assert filled.filled_up == frozenset()
    assert all(row[0] > 0 for row in advantages(batch_of(filled, settings)))


def test_without_dynamic_sampling_length_alone_still_tells_samples_apart():
    """That is GRPO with a length penalty, and what was asked for."""
    settings = config(sampling__dynamic=False, sampling__on_cap="error", sampling__cap=None)
    filled = fill(settings, [WRONG])
    assert filled.filled_up == frozenset()
    assert advantages(batch_of(filled, settings))[0][0] > 0


def test_they_count_in_the_batch_and_in_its_denominators():
    settings = config(train__mini_batches=2)
    batch = batch_of(fill(settings, [MIXED, WRONG]), settings)
    assert all(sample.loss_mask.any() for group in batch for sample in group.samples)
    assert [len(mini_batch) for mini_batch in batch.mini_batches(2)] == [8, 8]


def test_the_log_has_their_real_rewards_and_an_advantage_of_zero(tmp_path):
    settings = config()
    filled = fill(settings, [MIXED, WRONG])
    batch = batch_of(filled, settings)
    metrics = step_metrics(filled, batch, [], shaped_rewards(filled.sampled, settings))
    assert metrics["sampling/filled_up"] == 2
    assert metrics["sampling/tokens_trained"] == 4 * sum(LENGTHS)
    assert metrics["reward/batch"] == pytest.approx((2 * 1 - 14 * 1 + 4 * sum(PENALTIES)) / 16)
    rows = [GroupRow(trained, "kept") for trained in batch]
    write_table(tmp_path / "rows.parquet", 1, rows)
    table = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    of_second = [row for row in table if row["draw"] == 1]
    assert [row["length_penalty"] for row in of_second] == pytest.approx(PENALTIES)
    assert [row["reward"] for row in of_second] == pytest.approx([-1 + penalty for penalty in PENALTIES])
    assert [row["advantage"] for row in of_second] == [0.0] * 4


@pytest.mark.parametrize(
    ("normalize", "eps", "left_out"), itertools.product(NORMALIZE, [0.0, 1e-6], [(), (0,), (1, 2), (0, 1, 2)])
)
def test_torch_equals_numpy_where_whole_groups_are_left_out(normalize, eps, left_out):
    rewards = np.array([[1.0, -1, -1.5], [-1, -1.25, -2], [0.5, 0.5, 0.5]])
    mask = np.ones_like(rewards, bool)
    mask[list(left_out)] = False
    ours = algo.group_advantages(torch.tensor(rewards), normalize=normalize, eps=eps, mask=torch.tensor(mask))
    theirs = reference.group_advantages(rewards, normalize=normalize, eps=eps, mask=mask)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert (ours[list(left_out)] == 0).all()


def never_right(completions, **columns):
    return [-1.0 for _ in completions]


@pytest.mark.slow
def test_a_step_of_nothing_else_leaves_the_weights_as_they_are(tmp_path):
    """A whole run: length penalties alone, which differ, move nothing."""
    changes = ["sampling.cap=2", "sampling.prompts_per_step=2", "sampling.group_size=4", "sampling.on_cap=fill"]
    changes += ["train.steps=1", "train.mini_batches=2", "data.train.size=8", "data.eval=null", "overlong.factor=1"]
    shaped = ["overlong.shape=linear", "overlong.max_length=1", "sampling.max_new_tokens=12", "eval.every=null"]
    settings = Config.load(DEFAULT_RECIPE, [*changes, *shaped])
    trainer = DAPOTrainer(reward_funcs=never_right, config=settings, run_dir=tmp_path / "run")
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    table = pq.read_table(tmp_path / "run" / "rollouts").to_pylist()
    assert len(table) == 8
    assert len({row["reward"] for row in table}) > 1
    assert {row["advantage"] for row in table} == {0.0}
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))
