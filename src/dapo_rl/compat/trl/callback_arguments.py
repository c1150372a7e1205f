"""The `args` that callbacks receive, if the caller gave no `GRPOConfig`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dapo_rl.config import Config


@dataclass(frozen=True, slots=True)
class CallbackArguments:
    """The fields of transformers' `TrainingArguments` that callbacks read, with the values of this run.

    It is not a `TrainingArguments`, which needs accelerate and initialises devices.
    """

    output_dir: str
    run_name: str
    logging_dir: str
    max_steps: int
    seed: int
    learning_rate: float
    eval_strategy: str
    eval_steps: int | None
    save_steps: int
    num_generations: int
    max_completion_length: int
    temperature: float
    beta: float
    metric_for_best_model: str = "eval_accuracy"
    greater_is_better: bool = True
    load_best_model_at_end: bool = False
    logging_strategy: str = "steps"
    logging_steps: int = 1
    logging_first_step: bool = True
    save_strategy: str = "steps"
    eval_delay: int = 0
    num_train_epochs: float = 0
    """Not known: `max_steps` ends the run."""
    gradient_accumulation_steps: int = 1
    world_size: int = 1
    process_index: int = 0
    local_process_index: int = 0
    should_save: bool = True
    should_log: bool = True
    disable_tqdm: bool = False
    include_num_input_tokens_seen: str = "no"
    report_to: tuple[str, ...] = ()
    push_to_hub: bool = False
    hub_model_id: str | None = None

    @classmethod
    def of(cls, config: Config, run_dir: Path) -> CallbackArguments:
        sampling = config.sampling
        return cls(
            output_dir=str(run_dir),
            run_name=run_dir.name,
            logging_dir=str(run_dir / "tensorboard"),
            max_steps=config.train.steps,
            seed=config.seed,
            learning_rate=config.train.lr,
            eval_strategy="steps" if config.data.eval is not None else "no",
            eval_steps=config.eval.every,
            save_steps=config.checkpoint_every,
            num_generations=sampling.group_size,
            max_completion_length=sampling.max_new_tokens,
            temperature=sampling.temperature,
            beta=config.algo.kl_coef,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Values as trackers accept them."""
        plain = (bool, int, float, str)
        return {name: value if isinstance(value, plain) else str(value) for name, value in asdict(self).items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)
