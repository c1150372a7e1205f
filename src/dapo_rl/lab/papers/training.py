"""Compares the updates, the optimizer, the model and the data of a recipe with a paper's, and how it is evaluated."""

from __future__ import annotations

import re

from dapo_rl.base.format import counted
from dapo_rl.config import Config, Sources, entries_of, source_name
from dapo_rl.lab.batch_arithmetic import batch_arithmetic
from dapo_rl.lab.papers.record import Finding, times_the_paper


def compare_updates(config: Config) -> Finding:
    numbers = batch_arithmetic(config)
    updates, samples = numbers.updates_per_step, numbers.samples_per_update
    recipe = f"{updates}, of {samples:,} responses"
    if updates == 1:
        meaning = "one update per step is on-policy: the ratio is 1 for groups sampled in the step, and neither clip "
        return recipe, False, meaning + "bound acts on them"
    if updates != 16:
        place, often = ("further from", "more") if updates > 16 else ("closer to", "less")
        meaning = f"the last update of a step is {place} the policy that sampled than in the paper, so clipping is "
        return recipe, False, meaning + f"{often} frequent"
    if samples != 512:
        return recipe, False, f"each update averages over {times_the_paper(samples, 512)} responses"
    return recipe, True, ""


def compare_length(config: Config, *, paper: int) -> Finding:
    """The paper's figure counts updates of the policy, not rollout steps."""
    updates = batch_arithmetic(config).total_updates
    recipe = f"{updates:,} updates"
    if abs(updates - paper) <= 0.01 * paper:
        return recipe, True, ""
    steps = config.pretrain_steps + round(paper / config.updates_per_step)
    return recipe, False, f"{times_the_paper(updates, paper)}, which train.steps={steps} would have"


def compare_rate(config: Config) -> Finding:
    lr, schedule = config.train.lr, config.train.lr_schedule
    effects = []
    if lr != 1e-6:
        pace = "faster and less stable" if lr > 1e-6 else "slower and steadier"
        effects.append(f"{times_the_paper(lr, 1e-6)}: {pace}")
    if schedule != "constant":
        effects.append(f"it decays to {config.train.min_lr_share:g} of its value by step {config.train.steps}")
    return f"{lr:g}, {schedule}", not effects, "; ".join(effects)


def compare_warmup(config: Config, *, paper: int | None) -> Finding:
    """`paper` None: there is a warm-up, whose length the paper does not state."""
    steps = config.train.warmup_steps
    recipe = f"{steps} rollout steps"
    if steps == paper or (paper is None and steps > 0):
        return recipe, True, ""
    when = (
        f"after {steps} rollout steps instead of {paper}" if steps else "at once, before AdamW's averages have settled"
    )
    return recipe, False, f"the full learning rate is reached {when}"


def compare_optimizer(config: Config) -> Finding:
    train = config.train
    name = {"adamw": "AdamW", "adamw_8bit": "8-bit AdamW"}[train.optimizer]
    recipe = f"{name}, decay {train.weight_decay:g}, betas {train.betas[0]:g} {train.betas[1]:g}, "
    recipe += f"clip {train.max_grad_norm:g}"
    if train.optimizer != "adamw":
        return recipe, False, "the moments are quantised to 8 bits: less memory, slightly less precise updates"
    if (train.weight_decay, tuple(train.betas), train.max_grad_norm) == (0.1, (0.9, 0.999), 1.0):
        return recipe, True, ""
    meaning = "the paper specifies only AdamW; the values are from DAPO's script, and affect the size of updates"
    return recipe, False, meaning


def compare_precision(config: Config) -> Finding:
    if config.model.dtype == "bfloat16":
        return "bfloat16, float32 weights", True, ""
    if config.model.dtype == "auto":
        return "on a GPU bfloat16, float32 weights", True, ""
    return "float32", False, "ratios are more precise than with bfloat16, and a step on a GPU takes longer"


def compare_model(config: Config) -> Finding:
    name = config.model.name
    if re.search(r"qwen2\.5-32b$", name.rstrip("/"), re.IGNORECASE):
        return name, True, ""
    return name, False, "the paper's scores are for the Qwen2.5-32B base model; expect different ones"


def compare_training_prompts(config: Config) -> Finding:
    name = source_name(config.data.train)
    if _every_source(config.data.train, r"dapo-math-17k"):
        return name, True, ""
    return name, False, "other problems: what is learned, and how many groups are informative, depends on them"


def compare_heldout_prompts(config: Config) -> Finding:
    if config.data.eval is None:
        return "none", False, "accuracy before and after training is not measured"
    name, limit = source_name(config.data.eval), config.eval.prompts
    if not _every_source(config.data.eval, r"aime[^a-z0-9]*(20)?24"):
        return name, False, "accuracies are not comparable with the paper's tables"
    if limit is None or limit >= 30:
        return name, True, ""
    return f"{name}, {counted(limit, 'prompt')}", False, f"{limit} of 30 problems: each is {1 / limit:.0%} of the score"


def compare_heldout_samples(config: Config) -> Finding | None:
    n = config.eval.samples
    if config.data.eval is None:
        return None
    if n == 32:
        return "avg@32", True, ""
    return f"avg@{n}", False, f"the sampling noise of a prompt's accuracy is {(32 / n) ** 0.5:.2g} times that of avg@32"


def compare_heldout_sampling(config: Config) -> Finding | None:
    temperature, top_p = config.eval.temperature, config.eval.top_p
    if config.data.eval is None:
        return None
    recipe = f"temperature {temperature:g}, top_p {top_p:g}"
    if (temperature, top_p) == (1.0, 0.7):
        return recipe, True, ""
    if temperature == 0:
        return recipe, False, "greedy decoding: no sampling noise, but not the mean over samples of the paper's tables"
    meaning = "top_p and temperature affect accuracy: compare only accuracies with the same settings"
    return recipe, False, meaning


def _every_source(sources: Sources, pattern: str) -> bool:
    return all(re.search(pattern, entry.source, re.IGNORECASE) for entry in entries_of(sources))
