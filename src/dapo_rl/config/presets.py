"""What each preset changes."""

from __future__ import annotations

from typing import Any, Literal

Preset = Literal["dapo", "grpo", "dr_grpo", "vapo", "ppo"]

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "dapo": {},  # the defaults below
    "grpo": {
        "algo": {"clip_high": 0.2, "aggregation": "seq-mean-token-mean", "kl_coef": 0.001, "kl_kind": "k3"},
        "sampling": {"dynamic": False},
        "overlong": {"shape": "off"},
    },
    "dr_grpo": {
        "algo": {"clip_high": 0.2, "aggregation": "seq-mean-token-sum-norm", "normalize": "none"},
        "sampling": {"dynamic": False},
        "overlong": {"shape": "off"},
    },
    "vapo": {
        "algo": {"advantage": "gae", "positive_lm_coef": 0.1},
        "sampling": {"dynamic": False},
    },
    "ppo": {
        "algo": {"advantage": "gae", "clip_high": 0.2},
        "critic": {
            "pretrain_steps": 0,
            "lambda_policy": 0.95,
            "lambda_critic": 0.95,
            "value_clip": 0.2,
            "whiten": True,
        },
        "sampling": {"dynamic": False},
        "overlong": {"shape": "off"},
    },
}
"""What each preset changes. A recipe or an override that sets the same key overrides the preset."""
