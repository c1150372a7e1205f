"""Builds the teacher of a run."""

from __future__ import annotations

from typing import Any

from dapo_rl.config import Config
from dapo_rl.data import PromptSet
from dapo_rl.errors import UserError
from dapo_rl.models.load import check_context, context_of
from dapo_rl.train.served_teacher import ServedTeacher
from dapo_rl.train.teacher import Teacher
from dapo_rl.train.teacher_prompts import TeacherPrompts


def build_teacher(
    config: Config, model: Any, tokenizer: Any, prompts: PromptSet, longest: int, *, has_environment: bool
) -> Teacher | None:
    """The teacher that the settings ask for, checked. `longest` is the longest sample of the run."""
    settings, own = config.teacher, None
    if not settings.given:
        return None
    if settings.prompt is not None:
        if has_environment:
            raise UserError("teacher.prompt: environments render their own prompts; leave it out")
        own = TeacherPrompts(settings.prompt, tokenizer, config.data)
        longest_prompt = own.check(prompts.prompts)
        longest = longest_prompt + config.sampling.max_new_tokens
        if settings.of_policy:
            try:
                check_context(model, longest_prompt, config.sampling.max_new_tokens)
            except UserError as error:
                raise UserError(f"teacher.prompt: {error}") from None
    if settings.loaded:
        _check_context_of_model(config, longest)
    if not settings.served:
        return Teacher(own, None)
    served = ServedTeacher(settings)
    served.check(tokenizer, longest)
    return Teacher(own, served)


def _check_context_of_model(config: Config, longest: int) -> None:
    """A teacher may have a shorter context than its pupil, beyond which its log-probabilities mean nothing."""
    assert config.teacher.name is not None
    try:
        limit = context_of(config.teacher.name)
    except UserError:  # whoever loads it says what is wrong; on a cluster, that may be others than this host
        return
    if limit is not None and longest > limit:
        raise UserError(
            f"teacher.name: {config.teacher.name} has a context of {limit} tokens, and it may have to read {longest}; "
            "name another, or lower sampling.max_new_tokens"
        )
