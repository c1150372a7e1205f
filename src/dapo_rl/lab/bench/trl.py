"""TRL's GRPOTrainer on the workload of `bench step`, with the settings that make it fast.

Written for TRL 1.16. Every variant does one update per step on the same prompts, with completions of the same length
and the DAPO loss without a KL term; gradient checkpointing is off, and nothing is logged or saved.

With vLLM in the same process, TRL starts `LLM` from the model's directory, on three tenths of the GPU's memory, and
before each step loads the trained weights into it, one tensor at a time.
"""

from __future__ import annotations

import os
import time
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dapo_rl.lab.bench.model_shapes import open_model, random_prompts
from dapo_rl.lab.bench.peer_variants import TRL_VARIANTS, Variant
from dapo_rl.lab.bench.timing import StepClock
from dapo_rl.lab.bench.workload import Measurement, Workload
from dapo_rl.models.load import pick_device
from dapo_rl.models.save import save_model

VLLM_ENVIRONMENT = {
    # TRL starts vLLM as torchrun would, with a process group, even for one GPU. Loopback addresses keep it from asking
    # a name server, which a machine without a network waits for.
    "MASTER_ADDR": "127.0.0.1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
}


QUIET: dict[str, Any] = {
    "gradient_checkpointing": False,
    "shuffle_dataset": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
    "report_to": "none",
    "logging_strategy": "no",
    "save_strategy": "no",
    "disable_tqdm": True,
}
"""Arguments of every run: nothing is recomputed, logged or saved."""


def trl_variant(name: str) -> Variant:
    """The variant. It has to be asked for before TRL is imported, which imports vLLM."""
    how = TRL_VARIANTS[name]
    if how.vllm:
        for variable, value in VLLM_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
    return how


def trl_trainer(
    how: Variant,
    model: Any,
    tokenizer: Any,
    directory: str,
    dtype: torch.dtype,
    arguments: dict[str, Any],
    **more: Any,
) -> Any:
    """TRL's trainer, which writes into a directory; `more` are its further arguments."""
    from trl import GRPOConfig, GRPOTrainer

    tokenizer.padding_side = "left"
    if how.vllm:  # which reads the model from a directory
        save_model(model, tokenizer, f"{directory}/model", dtype)
        model.name_or_path = model.config.name_or_path = f"{directory}/model"
    args = GRPOConfig(output_dir=f"{directory}/out", **arguments)
    return GRPOTrainer(model=model, args=args, processing_class=tokenizer, **more)


def measure_trl(work: Workload, variant: str) -> Measurement:
    how = trl_variant(variant)
    from datasets import Dataset
    from transformers import TrainerCallback

    device = pick_device(work.device)
    watch = _Watch(work, device)

    class Callback(TrainerCallback):  # type: ignore[misc]
        """Measures from the end of one step to the end of the next: TRL samples within the training step."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch.step_ended(0)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.step_ended(state.global_step)

    with TemporaryDirectory(prefix="dapo-bench-trl-") as directory:
        weights = torch.float32 if how.float32_weights else getattr(torch, work.dtype)
        model, tokenizer = open_model(work.model, weights, work.device, work.seed)
        prompts = random_prompts(tokenizer, work.prompts * (work.rounds + 1), work.prompt_tokens, work.seed)
        rows, dtype, arguments = (
            Dataset.from_dict({"prompt": prompts}),
            getattr(torch, work.dtype),
            trl_arguments(work, how),
        )
        more = {"reward_funcs": watch.rewards, "train_dataset": rows, "callbacks": [Callback()]}
        trl_trainer(how, model, tokenizer, directory, dtype, arguments, **more).train()
    return watch.measurement()


def trl_arguments(work: Workload, how: Variant) -> dict[str, Any]:
    config = work.config()
    micro_batch = how.samples_at_once(work.samples, work.group)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": work.samples // micro_batch,
        "num_generations": work.group,
        "max_completion_length": work.tokens,
        "generation_kwargs": {"ignore_eos": True} if how.vllm else {"min_new_tokens": work.tokens},
        "loss_type": "dapo",
        "beta": 0.0,
        "epsilon": config.algo.clip_low,
        "epsilon_high": config.algo.clip_high,
        "temperature": config.sampling.temperature,
        "learning_rate": config.train.lr,
        "weight_decay": config.train.weight_decay,
        "max_grad_norm": config.train.max_grad_norm,
        "lr_scheduler_type": "constant",
        "bf16": work.dtype == "bfloat16" and not how.without_autocast,
        "max_steps": work.rounds,
        "seed": work.seed,
        "use_cpu": pick_device(work.device).type == "cpu",
        **QUIET,
    }
    if how.vllm:
        arguments |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": work.longest}
    return arguments | how.arguments


class _Watch(StepClock):
    """Also counts the sampled tokens."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        super().__init__(work, device)
        self._created = time.perf_counter()
        self._tokens: list[int] = []

    def rewards(self, completions: list[Any], completion_ids: list[list[int]] | None = None, **_: Any) -> list[float]:
        """Rewards that make every group half right, as in our own step."""
        self._tokens.append(sum(map(len, completion_ids or [])))
        return [float(i % 2) for i in range(len(completions))]

    def measurement(self) -> Measurement:
        if len(self.ends) != self._work.rounds + 1:
            raise AssertionError(f"TRL did {len(self.ends) - 1} steps, not {self._work.rounds}")
        return Measurement(
            seconds=tuple(self.seconds[self._work.warmup :]),
            peak_memory_bytes=self.memory.peak,
            memory=self.memory.how,
            facts={"tokens_per_step": median(self._tokens), "start_seconds": self.ends[0] - self._created},
        )
