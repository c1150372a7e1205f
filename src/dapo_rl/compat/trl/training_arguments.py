"""What callbacks read of transformers' `TrainingArguments`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dapo_rl.config import Config

FIXED = {
    "metric_for_best_model": "eval_accuracy",
    "greater_is_better": True,
    "load_best_model_at_end": False,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "logging_first_step": True,
    "save_strategy": "steps",
    "eval_delay": 0,
    "num_train_epochs": 0,  # not known: `max_steps` ends the run
    "gradient_accumulation_steps": 1,
    "world_size": 1,
    "process_index": 0,
    "local_process_index": 0,
    "should_save": True,
    "should_log": True,
    "disable_tqdm": False,
    "include_num_input_tokens_seen": "no",
    "report_to": (),
    "push_to_hub": False,
    "hub_model_id": None,
}


class CallbackArguments(SimpleNamespace):
    """The fields of transformers' `TrainingArguments` that callbacks read, with the values of this run.

    It is not a `TrainingArguments`, which needs accelerate and initialises devices.
    """

    @classmethod
    def of(cls, config: Config, run_dir: Path) -> CallbackArguments:
        return cls(
            **FIXED,
            output_dir=str(run_dir),
            run_name=run_dir.name,
            logging_dir=str(run_dir / "tensorboard"),
            max_steps=config.train.steps,
            seed=config.seed,
            learning_rate=config.train.lr,
            eval_strategy="steps" if config.data.eval is not None else "no",
            eval_steps=config.eval.every,
            save_steps=config.checkpoint_every,
            num_generations=config.sampling.group_size,
            max_completion_length=config.sampling.max_new_tokens,
            temperature=config.sampling.temperature,
            beta=config.algo.kl_coef,
        )

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Values as trackers accept them."""
        plain = (bool, int, float, str)
        return {name: value if isinstance(value, plain) else str(value) for name, value in vars(self).items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)
