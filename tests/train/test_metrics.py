"""The numbers of a step that follow from its updates."""

import math
from dataclasses import replace

import pytest
from support import make_prompt, make_sample

from dapo_rl.config import Config
from dapo_rl.rollout.batch_builder import SampledBatch
from dapo_rl.train.batch import make_batch, shaped_rewards
from dapo_rl.train.metrics import step_metrics
from dapo_rl.types import Batch, Group, RewardPart, Verdict


@pytest.mark.parametrize(("first", "shown"), [(0.25, 0.25), (math.nan, None)])
def test_the_mismatch_of_engine_and_trainer_is_the_first_updates(first, shown):
    """Later updates compare with weights that have moved; a first one of carried groups alone tells nothing."""
    right, wrong = Verdict(1.0, True, "correct"), Verdict(-1.0, False, "wrong")
    group = Group(0, make_prompt("p"), (make_sample(), make_sample()), (right, wrong))
    config = Config.build({"sampling.group_size": 2, "sampling.prompts_per_step": 1})
    fill = SampledBatch((group,), (), (group,), tokens_finished=6)
    updates = [{"actor/mismatch_kl": first}, {"actor/mismatch_kl": 0.5}]
    metrics = step_metrics(fill, make_batch(fill.kept, config), updates, shaped_rewards(fill.sampled, config))
    if shown is None:
        assert math.isnan(metrics["rollout/mismatch_kl"])
    else:
        assert metrics["rollout/mismatch_kl"] == shown
    assert "actor/mismatch_kl" not in metrics


def test_the_spread_of_rewards_is_over_samples_and_over_groups():
    right, wrong = Verdict(1.0, True, "correct"), Verdict(-1.0, False, "wrong")
    samples = (make_sample(), make_sample())
    groups = [
        Group(draw, make_prompt(f"p{draw}"), samples, verdicts)
        for draw, verdicts in enumerate([(right, wrong), (right, right), (wrong, wrong), (right, wrong)])
    ]
    config = Config.build({"sampling.group_size": 2, "sampling.prompts_per_step": 1})
    fill = SampledBatch((groups[0],), (), tuple(groups), tokens_finished=24)
    metrics = step_metrics(fill, make_batch(fill.kept, config), [], shaped_rewards(fill.sampled, config))
    assert metrics["reward/std"] == pytest.approx((8 / 7) ** 0.5)  # four of 1, four of -1
    assert metrics["reward/zero_std_share"] == 0.5
    empty = step_metrics(SampledBatch((), (), (), tokens_finished=0), Batch(()), [], {})
    assert math.isnan(empty["reward/std"])
    assert math.isnan(empty["reward/zero_std_share"])


def test_the_lengths_are_those_of_every_sampled_response():
    right, wrong = Verdict(1.0, True, "correct"), Verdict(-1.0, False, "wrong")
    kept = Group(0, make_prompt("p"), (make_sample(2, "stop"), make_sample(4, "stop")), (right, wrong))
    dropped = Group(1, make_prompt("q"), (make_sample(7, "length"), make_sample(3, "stop")), (wrong, wrong))
    config = Config.build({"sampling.group_size": 2, "sampling.prompts_per_step": 1})
    fill = SampledBatch((kept,), ((dropped, "filtered"),), (kept, dropped), tokens_finished=16)
    metrics = step_metrics(fill, make_batch(fill.kept, config), [], shaped_rewards(fill.sampled, config))
    assert metrics["response_length/mean"] == 4.0
    assert metrics["response_length/max"] == 7
    assert metrics["response_length/clip_ratio"] == 0.25
    assert metrics["acc/mean"] == 0.25


def test_each_source_of_a_list_has_its_accuracy_kept_share_and_tokens():
    right, wrong = Verdict(1.0, True, "correct"), Verdict(-1.0, False, "wrong")
    failed = Verdict(0.0, False, "timeout")

    def group(draw, origin, *verdicts):
        return Group(draw, replace(make_prompt(f"p{draw}"), origin=origin), (make_sample(2), make_sample(3)), verdicts)

    kept, filled, dropped = group(0, "a", right, wrong), group(1, "a", right, right), group(2, "a", wrong, wrong)
    broken, surplus = group(3, "b", right, failed), group(4, "b", wrong, right)
    carried = group(5, "b", wrong, right)  # judged in an earlier step
    later = group(6, "c", wrong, right)  # judged now, and carried to the next
    config = Config.build({"sampling.group_size": 2, "sampling.prompts_per_step": 1})
    fill = SampledBatch(
        (kept, filled, carried),
        ((dropped, "all_wrong"), (broken, "verifier_error"), (surplus, "surplus")),
        (kept, filled, dropped, broken, surplus, later),
        filled_up=frozenset({1}),
    )
    rewards = shaped_rewards([*fill.sampled, carried], config)
    metrics = step_metrics(fill, make_batch(fill.kept, config, rewards=rewards), [], rewards)
    shown = {name.removeprefix("data/"): value for name, value in metrics.items() if name.startswith("data/")}
    assert math.isnan(shown.pop("c/kept_share"))
    assert shown == {
        **{"a/accuracy": 3 / 6, "a/kept_share": 1 / 3, "a/tokens": 15},
        **{"b/accuracy": 2 / 3, "b/kept_share": 2 / 3, "b/tokens": 10},
        **{"c/accuracy": 1 / 2, "c/tokens": 5},
    }
    plain = SampledBatch((replace(kept, prompt=make_prompt("p")),), (), (replace(kept, prompt=make_prompt("p")),))
    assert not any(name.startswith("data/") for name in step_metrics(plain, Batch(()), [], rewards))


def test_each_reward_function_has_its_curve_and_what_it_logs_is_averaged():
    def verdict(math_score, length, metrics=None):
        parts = (RewardPart("math", math_score), *([RewardPart("length", length, 0.5)] if length is not None else []))
        score = sum(part.weight * part.score for part in parts)
        right = math_score > 0
        return Verdict(score, right, "correct" if right else "wrong", parts=parts, metrics=metrics or {})

    first = (verdict(1.0, 3.0, {"m": (4.0, 2), "a": (1.0, 1)}), verdict(-1.0, 5.0))
    second = (verdict(1.0, None, {"m": (2.0, 1)}), Verdict(-1.0, False, "error", metrics={"m": (6.0, 1)}))
    samples = (make_sample(), make_sample())
    groups = [Group(n, make_prompt("p"), samples, verdicts) for n, verdicts in enumerate((first, second))]
    config = Config.build({"sampling.group_size": 2, "sampling.prompts_per_step": 1})
    fill = SampledBatch((groups[0],), ((groups[1], "verifier_error"),), tuple(groups), tokens_finished=6)
    metrics = step_metrics(fill, make_batch(fill.kept, config), [], shaped_rewards(fill.sampled, config))
    ours = {name: value for name, value in metrics.items() if name.count("/") == 2 or name.startswith("metric/")}
    assert ours == {
        "reward/length/mean": 4.0,
        "reward/length/std": pytest.approx(2**0.5),
        "reward/math/mean": pytest.approx(1 / 3),
        "reward/math/std": pytest.approx(((2 * (2 / 3) ** 2 + (4 / 3) ** 2) / 2) ** 0.5),
        "metric/a": 1.0,
        "metric/m": 3.0,
    }
