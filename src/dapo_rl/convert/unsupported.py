"""Features of other libraries that are missing here, and the settings that ask for them.

A run that needs one of them is refused by name: without its images or its loss it would learn something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from dapo_rl.config.peers import LIBRARIES

FEATURES = {
    "IMAGES": ("images", "dapo-rl trains text models on text"),
    "ROBOTS": ("vision-language-action models", "dapo-rl trains text models on text"),
    "TEACHER": (
        "distillation by another loss",
        "dapo-rl adds log π_teacher − log π of the sampled tokens to their advantages (teacher.name)",
    ),
    "ROLLOUTS": ("rollout functions", "write it as an environment or an agent (docs/environments.md)"),
    "SFT": ("supervised fine-tuning", "dapo-rl trains by reinforcement learning with verifiable rewards"),
    "PREFERENCES": ("learning from preferences", "dapo-rl learns from the rewards of a verifier"),
    "RLOO": ("TRL's RLOO trainer", "convert a GRPO run and set algo.normalize: leave-one-out, RLOO's baseline"),
    "REWARD_MODELS": ("training a reward model", "dapo-rl trains policies with the rewards of a verifier"),
}
"""Title and alternative of each missing feature, by its name in the tables of settings."""
_VISION = re.compile(
    r"(^|[-_.\d])(vl|vlm|vla|vision|multimodal|omni)([-_.\d]|$)|internvl|llava|smolvlm|openvla|pixtral|idefics|"
    r"paligemma|molmo|minicpm-?[vo]\b|glm-?4[.\d]*v\b|(^|[-_])ovis",
    re.IGNORECASE,
)
"""Parts of the names of models that read images."""


def why_unsupported(feature: str, evidence: str) -> str:
    name, instead = FEATURES[feature]
    return f"{name} ({evidence}): not supported; {instead}"


def reads_images(model: str) -> bool:
    return _VISION.search(model.rstrip("/").split("/")[-1]) is not None


def missing_feature(library: str, keys: Mapping[str, Any], is_complete: bool) -> str | None:
    """Why a run has no counterpart here. `is_complete`: the keys are a file with every default of the library."""
    for key, value in keys.items():
        for pattern, feature, sign in LIBRARIES[library].missing:
            if fnmatchcase(key, pattern) and _asks(sign, value, is_complete):
                return why_unsupported(feature, f"{key}={str(getattr(value, 'text', value))[:60]}")
    settings = LIBRARIES[library].settings.items()
    key = next(name for name, entry in settings if entry.ours == "model.name" and not entry.joint)
    model = getattr(value := keys.get(key), "text", value)  # of a path whose beginning is not known, the text
    if isinstance(model, str) and reads_images(model):
        return why_unsupported("IMAGES", f"{key}={model[:60]} is a vision-language model")
    return None


def _asks(sign: Mapping[str, Any], value: Any, is_complete: bool) -> bool:
    """Whether a value of a setting asks for a feature. `sign` is its entry in the table."""
    if value is None or value is False or (is_complete and value == sign.get("default")):
        return False
    return value in sign["only"] if "only" in sign else value not in ("", [], {}, 0)
