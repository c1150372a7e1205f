"""Features of other libraries that are missing here, and the settings that ask for them.

A run that needs one of them is refused by name: without its images, tools or teacher it would learn something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dapo_rl.convert.settings.verl import ACTOR, MODEL, ROLLOUT


@dataclass(frozen=True, slots=True)
class Feature:
    name: str
    instead: str
    """The alternative here."""

    def refusal(self, evidence: str) -> str:
        return f"{self.name} ({evidence}): not supported; {self.instead}"


IMAGES = Feature("images", "dapo-rl trains text models on text")
ROBOTS = Feature("vision-language-action models", "dapo-rl trains text models on text")
TEACHER = Feature("distillation from a teacher", "dapo-rl learns from the rewards of a verifier")
TURNS = Feature("several turns, tools and agents", "a response is one turn, which a verifier scores")
SFT = Feature("supervised fine-tuning", "dapo-rl trains by reinforcement learning with verifiable rewards")
PREFERENCES = Feature("learning from preferences", "dapo-rl learns from the rewards of a verifier")
REWARD_MODELS = Feature("training a reward model", "dapo-rl trains policies with the rewards of a verifier")


@dataclass(frozen=True, slots=True)
class Sign:
    """A setting that asks for a feature."""

    key: str
    """A name, or a pattern."""
    feature: Feature
    only: tuple[Any, ...] = ()
    """The values that ask for it; without any, all but `off`."""
    off: tuple[Any, ...] = ()
    default: Any = None
    """The value that complete files of the library contain in any case."""

    def asks(self, value: Any, is_complete: bool) -> bool:
        if value is None or value is False or (is_complete and value == self.default):
            return False
        return value in self.only if self.only else value not in ("", [], {}, 0, *self.off)


SIGNS: dict[str, tuple[Sign, ...]] = {
    "verl": (
        Sign("(trainer)", ROBOTS, only=("vla",)),
        Sign("data.image_key", IMAGES, default="images"),
        Sign("data.video_key", IMAGES, default="videos"),
        Sign("data.audio_key", IMAGES, default="audios"),
        Sign(f"{ACTOR}.freeze_vision_tower", IMAGES, only=(True,)),
        Sign("distillation.enabled", TEACHER, only=(True,)),
        Sign(f"{ROLLOUT}.multi_turn.enable", TURNS, only=(True,)),
        Sign(f"{ROLLOUT}.multi_turn.*_path", TURNS),
        Sign(f"{ROLLOUT}.agent.default_agent_loop", TURNS, off=("single_turn_agent",)),
        Sign(f"{ROLLOUT}.agent.agent_loop_config_path", TURNS),
        Sign("data.tool_config_path", TURNS),
    ),
    "trl": tuple(Sign(key, TURNS) for key in ("tools", "environment_factory", "rollout_func")),
    "ms-swift": (
        Sign("rlhf_type", PREFERENCES, only=("dpo", "orpo", "simpo", "kto", "cpo")),
        Sign("rlhf_type", REWARD_MODELS, only=("rm",)),
        Sign("rlhf_type", TEACHER, only=("gkd",)),
        Sign("teacher_*", TEACHER),
        *(Sign(key, TURNS) for key in ("multi_turn_scheduler", "use_gym_env", "gym_env", "agent_template")),
        Sign("max_pixels", IMAGES),
    ),
    "areal": (
        Sign("train_dataset.type", SFT, only=("sft",)),
        Sign("train_dataset.type", REWARD_MODELS, only=("rw",)),
        Sign("train_dataset.type", PREFERENCES, only=("dpo",)),
        Sign("actor.is_critic", REWARD_MODELS, only=(True,)),
        Sign("teacher.path", TEACHER),
        *(Sign(key, TURNS) for key in ("workflow", "eval_workflow", "agent_*", "econfig.*", "tir.*", "max_turns")),
        *(Sign(key, TURNS) for key in ("max_tokens_per_trajectory", "max_llm_calls_per_run", "n_trajs")),
        *(Sign(key, TURNS) for key in ("judge_engine*", "rollout.agent.*")),
    ),
}
MODEL_KEYS = {"verl": f"{MODEL}.path", "trl": "model_name_or_path", "ms-swift": "model", "areal": "actor.path"}
_VISION = re.compile(
    r"(^|[-_.\d])(vl|vlm|vla|vision|multimodal|omni)([-_.\d]|$)|internvl|llava|smolvlm|openvla|pixtral|idefics|"
    r"paligemma|molmo|minicpm-?[vo]\b|glm-?4[.\d]*v\b|(^|[-_])ovis",
    re.IGNORECASE,
)
"""Parts of the names of models that read images."""


def reads_images(model: str) -> bool:
    """Whether a model reads images, by the last part of its name or path."""
    return _VISION.search(model.rstrip("/").split("/")[-1]) is not None


def missing_feature(library: str, keys: Mapping[str, Any], is_complete: bool) -> str | None:
    """Why a run has no counterpart here. `is_complete`: the keys are a file with every default of the library."""
    for key, value in keys.items():
        for sign in SIGNS[library]:
            if fnmatchcase(key, sign.key) and sign.asks(value, is_complete):
                return sign.feature.refusal(f"{key}={str(getattr(value, 'text', value))[:60]}")
    key = MODEL_KEYS[library]
    model = getattr(value := keys.get(key), "text", value)  # of a path whose beginning is not known, the text
    if isinstance(model, str) and reads_images(model):
        return IMAGES.refusal(f"{key}={model[:60]} is a vision-language model")
    return None
