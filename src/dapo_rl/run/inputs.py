"""The inputs of a run besides its settings, and the settings that the run directory records for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dapo_rl.base.load import spec_of
from dapo_rl.choices import NO_VERIFIER
from dapo_rl.config import Config, ModelSettings, SourceSettings
from dapo_rl.data import tasks
from dapo_rl.data.sources import IN_MEMORY, as_sources
from dapo_rl.envs.build import environment_rows, gives_rewards
from dapo_rl.envs.trl_environment import TRLEnvironment
from dapo_rl.errors import UserError
from dapo_rl.models.load import compute_dtype, pick_device
from dapo_rl.rewards.build import recorded_verifier


@dataclass(frozen=True, slots=True)
class TrainerInputs:
    """What the caller passes in addition to the settings. The settings apply where a field is None."""

    model: Any = None
    processing_class: Any = None
    reward_funcs: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None
    engine: Any = None
    """An engine, or a class or function that is called like a custom engine in the settings."""
    reward_weights: Sequence[float] | None = None
    """One for each of several reward functions; None: all are 1."""
    peft_config: Any = None
    """peft's `LoraConfig`, instead of `model.lora`."""
    tools: Sequence[Callable[..., Any]] | None = None
    """Functions that the policy can call, instead of `env.tools`."""
    environment_factory: Any = None
    """A class of TRL's environments, or a function that makes one, or several by name, instead of `env.name`."""
    notes: tuple[str, ...] = ()
    """Notes for the user on the arguments."""
    to_device: bool = False
    """Whether to move a loaded model to `model.device`, as TRL does. Otherwise it stays where it is."""

    @property
    def names_a_model(self) -> bool:
        """Whether there is a model to load, rather than a loaded one."""
        return self.model is None or isinstance(self.model, str | os.PathLike)

    def device(self, config: Config) -> torch.device:
        if self.names_a_model or self.to_device:
            return pick_device(config.model.device)
        device: torch.device = next(self.model.parameters()).device
        return device

    def has_environment(self, config: Config) -> bool:
        return config.env.given or bool(self.tools) or self.environment_factory is not None

    def judged_by_verifier(self, config: Config) -> bool:
        """Whether reward functions or a verifier judge the episodes, alone or with the environment."""
        if not self.has_environment(config) or self.reward_funcs is not None:
            return True
        named = "verifier" in config.reward.model_fields_set and config.reward.verifier != NO_VERIFIER
        return named or not gives_rewards(config, self.environment_factory)

    def sources(self, config: Config) -> dict[str, Any]:
        """The training and the held-out data, by the names of their settings."""
        held_out = config.data.eval if self.eval_dataset is None else self.eval_dataset
        train = tasks.NAME if self.makes_tasks(config) else config.data.train
        return {
            "data.train": environment_rows(config, train if self.train_dataset is None else self.train_dataset),
            "data.eval": None if held_out is None else environment_rows(config, held_out),
        }

    def makes_tasks(self, config: Config) -> bool:
        has_data = self.train_dataset is not None or "train" in config.data.model_fields_set
        return self.environment_factory is not None and not has_data

    def check_data(self, config: Config) -> None:
        """Raises UserError if a run of another model than the demo's would fall back to the demo's data, or if it is to
        be evaluated on nothing."""
        custom = self.model is not None or config.model.name != ModelSettings().name
        if custom and self.train_dataset is None and not self.makes_tasks(config):
            config.check_data("train_dataset" if self.model is not None else f"model.name={config.model.name}")
        if config.eval.every is not None and self.sources(config)["data.eval"] is None:
            raise UserError(
                "eval.every: there is nothing to evaluate on; set data.eval, give eval_dataset, or set eval.every=none"
            )


def resolve(config: Config, inputs: TrainerInputs, device: torch.device) -> Config:
    """The settings as the run directory records them: with the names of the inputs, and with the actual dtype instead
    of `model.dtype: auto`, so that a run resumed on another machine keeps it."""
    changes: dict[str, dict[str, Any]] = {"model": {}, "reward": {}, "data": {}, "env": _environment(inputs)}
    name = inputs.model if inputs.names_a_model else getattr(inputs.model, "name_or_path", None)
    if name:
        changes["model"]["name"] = os.fspath(name)
    changes["model"]["dtype"] = str(compute_dtype(config.model, device)).removeprefix("torch.")
    if inputs.reward_funcs is not None:
        changes["reward"]["verifier"] = recorded_verifier(inputs.reward_funcs, inputs.reward_weights)
    elif not inputs.judged_by_verifier(config):
        changes["reward"]["verifier"] = NO_VERIFIER
    for key, source in (("train", inputs.train_dataset), ("eval", inputs.eval_dataset)):
        if source is not None:
            named = os.fspath(source) if isinstance(source, os.PathLike) else as_sources(source, f"{key}_dataset")
            changes["data"][key] = named if isinstance(named, str | SourceSettings | tuple) else IN_MEMORY
    if inputs.makes_tasks(config):
        changes["data"]["train"] = tasks.NAME
    sections = {section: getattr(config, section).model_copy(update=values) for section, values in changes.items()}
    engine = config.engine if inputs.engine is None else spec_of(inputs.engine)
    return config.model_copy(update={**sections, "engine": engine})


def _environment(inputs: TrainerInputs) -> dict[str, Any]:
    factory, changes = inputs.environment_factory, dict[str, Any]()
    if inputs.tools:
        changes["tools"] = tuple(map(spec_of, inputs.tools))
    if isinstance(factory, Mapping):
        changes["name"] = spec_of(TRLEnvironment)
        changes["options"] = {"factory": {name: spec_of(each) for name, each in factory.items()}}
    elif factory is not None:
        changes["name"] = spec_of(factory)
    return changes
