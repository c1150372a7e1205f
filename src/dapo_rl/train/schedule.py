"""The learning rate schedule, by rollout step."""

from __future__ import annotations

import math

from dapo_rl.config import Config, TrainSettings


def policy_rate(step: int, config: Config, before: int | None = None) -> float:
    """The policy's learning rate. Its schedule begins after value pre-training, of `before` steps if it ended early."""
    before = config.pretrain_steps if before is None else before
    return learning_rate(step - before, config.train.model_copy(update={"steps": config.train.steps - before}))


def critic_rate(step: int, config: Config) -> float:
    """The critic's learning rate: the schedule of the policy, over all steps."""
    return learning_rate(step, config.train.model_copy(update={"lr": config.critic_lr}))


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Linear warm-up over `warmup_steps` rollout steps (not 0 in the first step), then the schedule."""
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.lr_schedule == "constant":
        return settings.lr
    progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    shape = 1 - progress if settings.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.lr * (settings.min_lr_share + (1 - settings.min_lr_share) * max(0.0, shape))
