"""The batch arithmetic of a recipe: samples, updates and tokens per step."""

from __future__ import annotations

from dataclasses import dataclass

from dapo_rl.config import Config
from dapo_rl.rewards.judge.judge_file import is_policy_judge


@dataclass(frozen=True, slots=True)
class BatchArithmetic:
    groups_per_step: int
    samples_per_step: int
    updates_per_step: int
    samples_per_update: int
    tokens_generated_per_step: int
    """Maximum, if every group that is drawn is kept."""
    tokens_generated_per_step_at_cap: int
    tokens_trained_per_step: int
    """Maximum of a batch of `groups_per_step`; rarely, carried groups make one larger."""
    steps: int
    pretrain_steps: int
    """Of these, the steps that train the critic alone."""
    total_updates: int


def batch_arithmetic(config: Config) -> BatchArithmetic:
    sampling, train = config.sampling, config.train
    samples = sampling.prompts_per_step * sampling.group_size
    draws = config.sampling_cap if redraws(config) else sampling.prompts_per_step
    return BatchArithmetic(
        groups_per_step=sampling.prompts_per_step,
        samples_per_step=samples,
        updates_per_step=config.updates_per_step,
        samples_per_update=samples // train.mini_batches,
        tokens_generated_per_step=samples * sampling.max_new_tokens,
        tokens_generated_per_step_at_cap=draws * sampling.group_size * sampling.max_new_tokens,
        tokens_trained_per_step=samples * sampling.max_new_tokens,
        steps=train.steps,
        pretrain_steps=config.pretrain_steps,
        total_updates=(train.steps - config.pretrain_steps) * config.updates_per_step,
    )


def redraws(config: Config) -> bool:
    """Whether a step keeps sampling until its batch is full."""
    return config.sampling.dynamic and not config.sampling.dynamic_batch


def judged_by_policy(config: Config) -> str:
    """What the arithmetic leaves out if the policy is its own judge; empty if it is not."""
    own = [entry.verifier for entry in config.reward.verifiers if is_policy_judge(entry.verifier)]
    return f"{own[0]}: the policy also reads and judges each sample, which is not included" if own else ""
