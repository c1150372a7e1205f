"""TRL's GRPOTrainer as a contender of `bench race`.

It trains on the prompts of our stream in its order, with our verifier and length penalty as its reward function, and
the recipe's batch, learning rate, clip bounds and number of updates. It has no dynamic sampling: it trains on every
group that it samples.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dapo_rl.config import Config
from dapo_rl.data import stream_of
from dapo_rl.errors import UserError
from dapo_rl.lab.bench.machine import synchronize
from dapo_rl.lab.bench.peer_variants import Variant
from dapo_rl.lab.bench.race_report import RaceJob
from dapo_rl.lab.bench.trl import QUIET, trl_trainer, trl_variant
from dapo_rl.models.load import compute_dtype, load_model, pick_device
from dapo_rl.models.save import save_model
from dapo_rl.objectives.overlong import soft_overlong_punishment
from dapo_rl.rewards.build import build_verifier
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.run.inputs import TrainerInputs
from dapo_rl.run.prompts import prompt_sets
from dapo_rl.types import Prompt, Trajectory

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def race_trl(job: RaceJob) -> dict[str, Any]:
    started = time.perf_counter()
    how = trl_variant(job.variant)
    config = job.config()
    if TrainerInputs().has_environment(config):
        raise UserError("bench race: the recipe has an environment; the race is one of single turns")
    verifier = VerifierPool(build_verifier(config.reward), config.reward)  # it forks: before torch has threads
    from datasets import Dataset
    from transformers import TrainerCallback

    device = pick_device(config.model.device)
    dtype = compute_dtype(config.model, device)
    weights = dtype if dtype != torch.float32 and not how.float32_weights else torch.float32
    model, tokenizer = load_model(config.model)
    model.to(device, weights)
    train, _ = prompt_sets(config, TrainerInputs(), tokenizer, verifier)
    needed = job.steps * config.sampling.prompts_per_step
    prompts = list(islice(stream_of(train, config.seed), needed))
    if any(tokenizer(prompt.text).input_ids != prompt.token_ids.tolist() for prompt in prompts[:16]):
        raise UserError("bench race: TRL would read other tokens than our run, as its tokenizer adds special ones")
    rewards = Rewards(prompts, verifier, config)
    clock = _Clock(device, rewards)

    class Callback(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.resume(first_after=started)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            step, rest = divmod(state.global_step, updates_per_step(config))
            if not rest and step in job.evaluated:
                clock.pause(step)
                trained = trainer.accelerator.unwrap_model(trainer.model)
                save_model(trained, tokenizer, Path(job.weights) / str(step), dtype)
                clock.resume()

    if config.sampling.stop and not how.vllm:
        _end_at_stops(model, tokenizer, config.sampling.stop, job.variant)
    with TemporaryDirectory(prefix="dapo-race-trl-") as directory:
        rows = Dataset.from_dict({"prompt": [prompt.text for prompt in prompts], "row": list(range(len(prompts)))})
        given = arguments(job, config, how, device, dtype)
        more = {"reward_funcs": rewards, "train_dataset": rows, "callbacks": [Callback()]}
        trainer = trl_trainer(how, model, tokenizer, directory, dtype, given, **more)
        trainer.train()
    verifier.close()
    points = [{"step": 0, "seconds": 0.0, "tokens": 0}, *clock.points]
    return {"points": points, "start_seconds": clock.start_seconds}


def _end_at_stops(model: Any, tokenizer: Any, stops: Sequence[str], variant: str) -> None:
    """Lets `generate` end samples at stop strings: an end-of-sequence token follows, up to which TRL reads a sample."""
    if variant == "continuous":
        raise UserError(f"--peer-variant: {variant} has no stop strings, as in sampling.stop; use another")
    from transformers import LogitsProcessor, LogitsProcessorList, StopStringCriteria

    plain, has_stop = model.generate, StopStringCriteria(tokenizer, list(stops))

    class End(LogitsProcessor):  # type: ignore[misc]
        def __init__(self, prompt: int) -> None:
            self._prompt = prompt

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] > self._prompt:
                ended = has_stop(input_ids, scores)
                scores = scores.masked_fill(ended[:, None], -torch.inf)
                scores[ended, tokenizer.eos_token_id] = 0.0
            return scores

    def generate(input_ids: torch.Tensor, **more: Any) -> Any:
        return plain(input_ids=input_ids, logits_processor=LogitsProcessorList([End(input_ids.shape[1])]), **more)

    model.generate = generate


def updates_per_step(config: Config) -> int:
    return config.train.mini_batches * config.train.epochs_per_step


def arguments(job: RaceJob, config: Config, how: Variant, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    sampling, train, updates = config.sampling, config.train, updates_per_step(config)
    samples = sampling.prompts_per_step * sampling.group_size // train.mini_batches
    micro_batch = how.samples_at_once(samples, sampling.group_size)
    given: dict[str, Any] = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": samples // micro_batch,
        "steps_per_generation": train.mini_batches * samples // micro_batch,
        "num_iterations": train.epochs_per_step,
        "num_generations": sampling.group_size,
        "max_completion_length": sampling.max_new_tokens,
        "generation_kwargs": {"stop": list(sampling.stop)} if sampling.stop and how.vllm else {},
        "loss_type": "dapo",
        "beta": config.algo.kl_coef,
        "epsilon": config.algo.clip_low,
        "epsilon_high": config.algo.clip_high,
        "mask_truncated_completions": config.overlong.mask_truncated,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or None,
        "learning_rate": train.lr,
        "lr_scheduler_type": SCHEDULES[train.lr_schedule],
        "warmup_steps": train.warmup_steps * updates,
        "weight_decay": train.weight_decay,
        "adam_beta1": train.betas[0],
        "adam_beta2": train.betas[1],
        "max_grad_norm": train.max_grad_norm,
        "max_steps": job.steps * updates,
        "bf16": dtype == torch.bfloat16 and not how.without_autocast,
        "seed": job.seed,
        "use_cpu": device.type == "cpu",
        **QUIET,
    }
    if config.algo.kl_coef > 0:  # TRL weights the penalty by default
        given["use_bias_correction_kl"] = config.algo.kl_unbiased
    if how.vllm:
        longest = config.data.max_prompt_tokens + sampling.max_new_tokens
        given |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": longest}
    # Those of a variant make every sample as long as the next one.
    return given | {name: value for name, value in how.arguments.items() if name != "generation_kwargs"}


class Rewards:
    """Our verdicts as TRL's reward function. Counts the sampled tokens."""

    __name__ = "rewards"

    def __init__(self, prompts: Sequence[Prompt], verifier: VerifierPool, config: Config) -> None:
        self._prompts, self._verifier, self._config = prompts, verifier, config
        self.tokens = 0

    def __call__(
        self, completions: list[str], row: list[int], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        lengths = [len(ids) for ids in completion_ids]
        self.tokens += sum(lengths)
        pending = []
        for text, ids, number in zip(completions, completion_ids, row, strict=True):
            sample = Trajectory(ids, [0.0] * len(ids), text=text, finish_reason="stop", versions=0)
            pending.append(self._verifier.submit(self._prompts[number], [sample]))
        scores = [future.result()[0].score for future in pending]
        if self._config.overlong.shape == "soft":
            longest, cache = self._config.overlong_max_length, self._config.overlong_cache_length
            penalties = soft_overlong_punishment(torch.tensor(lengths), longest, cache, self._config.overlong.factor)
            scores = [score + penalty for score, penalty in zip(scores, penalties.tolist(), strict=True)]
        return scores


class _Clock:
    """Seconds of training, without those in which weights are saved for the evaluation."""

    def __init__(self, device: torch.device, rewards: Rewards) -> None:
        self._device, self._rewards = device, rewards
        self._seconds = self._since = self.start_seconds = 0.0
        self.points: list[dict[str, Any]] = []

    def resume(self, first_after: float | None = None) -> None:
        """`first_after` is when the start-up began that ends now."""
        synchronize(self._device)
        self._since = time.perf_counter()
        if first_after is not None:
            self.start_seconds = self._since - first_after

    def pause(self, step: int) -> None:
        synchronize(self._device)
        self._seconds += time.perf_counter() - self._since
        self.points.append({"step": step, "seconds": self._seconds, "tokens": self._rewards.tokens})
