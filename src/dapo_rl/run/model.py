"""Loads the model of a run and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dapo_rl.config import Config
from dapo_rl.data import PromptSet
from dapo_rl.errors import UserError
from dapo_rl.models.load import (
    check_context,
    check_tokenizer,
    check_vocabulary,
    load_tokenizer,
    make_savable,
    refuse_media_model,
)
from dapo_rl.models.lora import base_of, lora_settings, peft_config_of
from dapo_rl.rollout.build_conversations import longest_episode
from dapo_rl.run.inputs import TrainerInputs


def model_and_tokenizer(
    config: Config, inputs: TrainerInputs, device: torch.device, load: Callable[..., tuple[Any, Any]]
) -> tuple[Any, Any]:
    """The model that `load` gives for the settings, or the caller's, on the device."""
    if inputs.names_a_model:
        model, loaded = load(config.model)
        tokenizer = inputs.processing_class or loaded
        check_tokenizer(tokenizer, config.model.name)
        return model, tokenizer
    model, tokenizer = base_of(inputs.model), inputs.processing_class
    refuse_media_model(model)
    if next(model.parameters()).device.type != device.type:
        model.to(device)
    model.eval()  # with dropout the policy that samples would differ from the policy that is trained
    if tokenizer is None:
        if not getattr(model, "name_or_path", None):
            raise UserError("a loaded model needs its tokenizer: pass processing_class=tokenizer")
        tokenizer = load_tokenizer(model.name_or_path)
    check_tokenizer(tokenizer, config.model.name)
    make_savable(model)
    return model, tokenizer


def with_lora(config: Config, inputs: TrainerInputs, model: Any) -> Config:
    """Sets `model.lora` as `peft_config` says, or as the adapters that the model already has. Unless `config` says
    otherwise, they are saved in peft's format, which TRL's users expect."""
    adapters, settings = peft_config_of(model), config.model.lora
    if adapters is not None and inputs.peft_config is not None:
        raise UserError("peft_config: the model already has LoRA adapters, which are trained; leave it out")
    chosen = inputs.peft_config if adapters is None else adapters
    if chosen is None:
        if settings is None and not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError(
                "model: all of its weights are frozen, so that nothing would be trained; call "
                "model.requires_grad_(True), or train adapters (model.lora, peft_config)"
            )
        return config
    if settings is not None and settings.model_fields_set != {"save"}:
        raise UserError("model.lora: the adapters are given as peft's; of these settings, only model.lora.save applies")
    save = "adapter" if settings is None else settings.save
    lora = lora_settings(chosen, model).model_copy(update={"save": save})
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    config.check_conflicts()
    return config


def longest_sample(config: Config, model: Any, *prompt_sets: PromptSet | None, has_environment: bool = False) -> int:
    """The tokens of the longest possible sample; raises if the model does not support it, or a prompt's tokens. With an
    environment, the model's context limits episodes."""
    prompts = [prompt for prompt_set in prompt_sets if prompt_set for prompt in prompt_set.prompts]
    check_vocabulary(model, max(int(prompt.token_ids.max()) for prompt in prompts))
    longest_prompt = max(len(prompt.token_ids) for prompt in prompts)
    if any(prompt_set.is_stream for prompt_set in prompt_sets if prompt_set):  # most of its prompts are not read yet
        longest_prompt = config.data.max_prompt_tokens
    if has_environment:  # which can say more than the prompt
        return longest_episode(config, model)
    check_context(model, longest_prompt, config.sampling.max_new_tokens)
    return longest_prompt + config.sampling.max_new_tokens
