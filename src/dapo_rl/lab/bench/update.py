"""Measures the update alone: one optimizer step on samples of random tokens."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from dapo_rl.lab.bench.model_shapes import open_model, random_prompts
from dapo_rl.lab.bench.roofline import Size
from dapo_rl.lab.bench.timing import measure
from dapo_rl.lab.bench.workload import Measurement, Workload
from dapo_rl.models.load import pick_device
from dapo_rl.run.build_policy import build_policy, memory_plan
from dapo_rl.types import Trajectory

NOISE = 0.01
"""The standard deviation of the noise on old log-probabilities, similar to their change over one or two updates."""


def measure_update(work: Workload) -> Measurement:
    config = work.config()
    model, tokenizer = open_model(work.model, torch.float32, work.device, work.seed)
    plan = memory_plan(config, model, work.longest, engine_releases_memory=False, has_engine=False)
    policy = build_policy(model, tokenizer, config, work.longest, plan)
    samples = _samples(work, tokenizer, model)
    rng = np.random.default_rng(work.seed)
    batch = [
        sample.replace(logps=logps + rng.normal(0, NOISE, len(logps)).astype(np.float32))
        for sample, logps in zip(samples, policy.score(samples), strict=True)
    ]
    facts = {"size": asdict(Size.of(model))}
    return measure(lambda _: policy.update(batch, config.train.lr), work, pick_device(work.device), facts)


def _samples(work: Workload, tokenizer: Any, model: Any) -> list[Trajectory]:
    rng = np.random.default_rng(work.seed)
    prompts = random_prompts(tokenizer, work.prompts, work.prompt_tokens, work.seed)
    vocabulary = min(len(tokenizer), model.config.get_text_config().vocab_size)
    return [
        Trajectory(
            rng.integers(vocabulary, size=length, dtype=np.int32),
            prompt_ids=tokenizer(text).input_ids,
            advantages=1.0 if sample % 2 else -1.0,
            scalars={"group": group},
        )
        for group, (text, lengths) in enumerate(zip(prompts, work.group_lengths, strict=True))
        for sample, length in enumerate(lengths)
    ]
