"""The tables of techniques that `dapo ablate --table` runs, each from a paper.

A table is one entry of `TABLES`: its techniques in the paper's order, and the figures that the paper gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from dapo_rl.choices import AGGREGATIONS
from dapo_rl.config import Config
from dapo_rl.config.recipe import flat


@dataclass(frozen=True, slots=True)
class SameAs:
    """The value of another setting."""

    key: str


@dataclass(frozen=True, slots=True)
class ProductOf:
    """The product of other settings."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Technique:
    name: str
    on: Mapping[str, Any]
    """Settings that switch the technique on in a recipe without it; a recipe that has it keeps its values."""
    off: Mapping[str, Any]
    is_on: Callable[[Config], bool]
    meaning: str
    """Its effect, in one line."""
    paper: int | None = None
    """The paper's figure with this technique and all previous ones."""
    paper_without: int | None = None
    """The paper's figure with every technique but this one."""

    def settings(self, base: Config, on: bool) -> dict[str, Any]:
        """The settings to change in a recipe to switch the technique on or off."""
        if on:
            return {} if self.is_on(base) else dict(self.on)
        own = flat(base.resolved())

        def resolved(value: Any) -> Any:
            if isinstance(value, ProductOf):
                return prod(own[key] for key in value.keys)
            return own[value.key] if isinstance(value, SameAs) else value

        return {key: resolved(value) for key, value in self.off.items()}


Part = Literal["ladder", "leave-one-out", "vary"]
PARTS: tuple[Part, ...] = ("ladder", "leave-one-out")
"""The parts of a table: techniques added one by one, and each left out of the whole."""


@dataclass(frozen=True, slots=True)
class PaperTable:
    whole: str
    """The name of all techniques together."""
    baseline: str
    """The name of the arm without any of them."""
    techniques: tuple[Technique, ...]
    figures: str
    """The meaning and source of the paper's figures."""
    baseline_paper: int | None = None
    whole_paper: int | None = None
    parts: tuple[Part, ...] = PARTS
    """Without a ladder, the baseline is the last row of the other part."""
    preset: str | None = None
    """The preset of every arm; None: the recipe's. An override comes first."""


BASELINE, BASELINE_PAPER = "Naive GRPO", 30
"""None of the techniques. Every arm has the recipe's KL term, since Table 1 has no row for it."""

_CLIP_HIGHER = Technique(
    "Clip-Higher",
    on={"algo.clip_high": 0.28},
    off={"algo.clip_high": SameAs("algo.clip_low")},
    is_on=lambda config: config.algo.clip_high > config.algo.clip_low,
    meaning="unlikely tokens can gain more probability before the ratio is clipped",
)
_TOKEN_LEVEL_LOSS = Technique(
    "Token-level Loss",
    on={"algo.aggregation": "token-mean"},
    off={"algo.aggregation": "seq-mean-token-mean"},
    is_on=lambda config: AGGREGATIONS[config.algo.aggregation].token_level,
    meaning="every token has the same weight, in long responses too",
)

TECHNIQUES = (
    Technique(
        "Overlong Filtering",
        on={"overlong.mask_truncated": True},
        off={"overlong.mask_truncated": False},
        is_on=lambda config: config.overlong.mask_truncated,
        paper=36,
        meaning="truncated responses are excluded from the loss",
    ),
    replace(_CLIP_HIGHER, paper=38),
    Technique(
        "Soft Overlong Punishment",
        on={"overlong.shape": "soft"},
        off={"overlong.shape": "off"},
        is_on=lambda config: config.overlong.shape == "soft",
        paper=41,
        meaning="a penalty that grows over the last tokens before the length limit",
    ),
    replace(_TOKEN_LEVEL_LOSS, paper=42),
    Technique(
        "Dynamic Sampling",
        on={"sampling.dynamic": True},
        off={"sampling.dynamic": False, "sampling.dynamic_batch": False},
        is_on=lambda config: config.sampling.dynamic,
        paper=50,
        meaning="groups that are all right or all wrong are dropped and replaced by new ones",
    ),
)

VAPO_TECHNIQUES = (
    Technique(
        "Value Pre-training",
        on={"critic.pretrain_steps": None},
        off={"critic.pretrain_steps": 0},
        is_on=lambda config: config.pretrain_steps > 0,
        paper_without=11,
        meaning="the critic learns the returns of the starting policy before the policy is trained",
    ),
    Technique(
        "Decoupled GAE",
        on={"critic.lambda_critic": 1.0},
        off={"critic.lambda_critic": 0.95},
        is_on=lambda config: config.critic.lambda_critic == 1,
        paper_without=33,
        meaning="the critic's targets are returns, without a bias of its own values",
    ),
    Technique(
        "Length-adaptive GAE",
        on={"critic.lambda_policy": "adaptive"},
        off={"critic.lambda_policy": 0.95},
        is_on=lambda config: config.critic.lambda_policy == "adaptive",
        paper_without=45,
        meaning="the reward reaches back over a share of the response, however long it is",
    ),
    replace(_CLIP_HIGHER, paper_without=46),
    replace(_TOKEN_LEVEL_LOSS, paper_without=53),
    Technique(
        "Positive Example LM Loss",
        on={"algo.positive_lm_coef": 0.1},
        off={"algo.positive_lm_coef": 0.0},
        is_on=lambda config: config.algo.positive_lm_coef > 0,
        paper_without=54,
        meaning="correct samples are imitated in addition",
    ),
    Technique(
        "Group Sampling",
        on={},
        off={
            "sampling.group_size": 1,
            "sampling.prompts_per_step": ProductOf(("sampling.prompts_per_step", "sampling.group_size")),
        },
        is_on=lambda config: config.sampling.group_size > 1,
        paper_without=55,
        meaning="fewer prompts with several samples each, instead of one sample of each prompt",
    ),
)

TABLES = {
    "dapo": PaperTable(
        whole="DAPO",
        baseline=BASELINE,
        techniques=TECHNIQUES,
        figures="AIME 2024 avg@32 of Qwen2.5-32B (arXiv 2503.14476, Table 1), another task and scale",
        baseline_paper=BASELINE_PAPER,
        whole_paper=TECHNIQUES[-1].paper,
    ),
    "vapo": PaperTable(
        whole="VAPO",
        baseline="Vanilla PPO",
        techniques=VAPO_TECHNIQUES,
        figures="AIME 2024 of Qwen2.5-32B (arXiv 2504.05118, Table 1), another task and scale",
        baseline_paper=5,
        whole_paper=60,
        parts=("leave-one-out",),
        preset="vapo",
    ),
}
DEFAULT_TABLE = "dapo"
