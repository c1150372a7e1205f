"""The values that the rows of `rows.yaml` name, and their conditions."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dapo_rl.base.format import counted
from dapo_rl.choices import AGGREGATIONS, NORMALIZATIONS, VERIFIERS, is_function
from dapo_rl.config import AlgoSettings, Config, Sources, entries_of, source_name
from dapo_rl.lab.batch_arithmetic import batch_arithmetic, redraws
from dapo_rl.objectives import ADVANTAGES, LOSSES

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class RecipeFacts:
    """The values of a recipe by name: a row's own, those of `DERIVED`, and settings and properties of its Config."""

    config: Config
    of_row: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        first, *others = name.split(".")
        if first in self.of_row:
            value = self.of_row[first]
        else:
            value = DERIVED[first](self) if first in DERIVED else getattr(self.config, first)
        for attribute in others:
            value = None if value is None else getattr(value, attribute)
        return value

    def text(self, template: str) -> str:
        return template.format_map(self)

    def hold(self, condition: str) -> bool:
        """Whether a condition holds: `name`, `not name` or `name < other`, joined by `and`."""
        return all(self._holds(term) for term in condition.split(" and "))

    def _holds(self, term: str) -> bool:
        if compared := re.fullmatch(r"(\S+) (==|!=|<=|>=|<|>) (\S+)", term):
            left, sign, right = compared.groups()
            return _COMPARE[sign](self[left], self._literal(right))
        return not self[term.removeprefix("not ")] if term.startswith("not ") else bool(self[term])

    def _literal(self, word: str) -> Any:
        """A number, null, a name, or else the word itself."""
        try:
            return None if word == "null" else float(word)
        except ValueError:
            return self[word] if "." in word or word in self.of_row or word in DERIVED else word


def times_the_paper(value: float, paper: float) -> str:
    if value >= paper:
        return f"{value / paper:.3g} times the paper's"
    share = paper / value
    return f"1/{share:.0f} of the paper's" if share >= 2 else f"{value / paper:.0%} of the paper's"


def _filters(config: Config) -> str:
    kept = "scores have a spread" if config.sampling.metric == "score" else "0 < correct < G"
    return kept if config.sampling.filter is None else f"{kept}, and {config.sampling.filter}"


def _importance(algo: AlgoSettings) -> str:
    cap, floor, masks = algo.importance_cap, algo.importance_floor, algo.importance_mode == "mask"
    if floor is None:
        bounds = f"{'0 above' if masks else 'truncated at'} {cap:g}"
    else:
        bounds = f"{'0 outside' if masks else 'truncated to'} [{floor:g}, {cap:g}]"
    per_sample = " per sample" * (algo.importance_level == "sequence")
    return bounds + per_sample + ", with mean 1" * algo.importance_normalize


def _left_out(algo: AlgoSettings) -> str:
    parts = [f"what {', '.join(algo.reject)} rejects"] if algo.reject else []
    if (threshold := algo.off_policy_mask_threshold) is not None:
        parts.append(f"negative samples that diverge by {threshold:g}")
    if (most := algo.max_token_staleness) is not None:
        parts.append(f"tokens more than {counted(most, 'version')} old")
    return "; ".join(parts)


def _optimizer(config: Config) -> str:
    train, (first, second) = config.train, config.train.betas
    name = {"adamw": "AdamW", "adamw_8bit": "8-bit AdamW"}[train.optimizer]
    return f"{name}, decay {train.weight_decay:g}, betas {first:g} {second:g}, clip {train.max_grad_norm:g}"


def _divides_by_std(config: Config) -> bool:
    if config.has_critic:
        return config.critic.whiten
    if config.algo.advantage == "group":
        return NORMALIZATIONS[config.algo.normalize].by_std
    return ADVANTAGES[config.algo.advantage].by_std


def _length_alpha(config: Config) -> str:
    alpha, lowest = config.critic.length_alpha, config.critic.lambda_lowest
    return f"{alpha:g}" if lowest == 0 else f"{alpha:g}, lambda at least {lowest:g}"


def _critic_to_policy(config: Config) -> float:
    share = config.critic_lr / config.train.lr
    return 2.0 if math.isclose(share, 2) else share


def _every_source(sources: Sources, pattern: str) -> bool:
    return all(re.search(pattern, entry.source, re.IGNORECASE) for entry in entries_of(sources))


DERIVED: dict[str, Callable[[RecipeFacts], Any]] = {
    "always": lambda facts: True,
    "times": lambda facts: times_the_paper(facts["value"], facts["number"]),
    "off_by": lambda facts: abs(facts["value"] - facts["number"]) / facts["number"],
    "steps_of_paper": lambda facts: facts["pretrain_steps"] + round(facts["number"] / facts["updates_per_step"]),
    "batch": lambda facts: batch_arithmetic(facts.config),
    "redraws": lambda facts: redraws(facts.config),
    "custom_loss": lambda facts: is_function(facts["algo.loss"]),
    "loss": lambda facts: LOSSES[facts["algo.loss"]],
    "aggregation": lambda facts: AGGREGATIONS[facts["algo.aggregation"]],
    "aggregation_effect": lambda facts: facts["aggregation.effect"].format(norm_length=facts["norm_length"]),
    "importance": lambda facts: _importance(facts.config.algo),
    "left_out": lambda facts: _left_out(facts.config.algo),
    "carries": lambda facts: facts["sampling.dynamic"] and facts["sampling.surplus"] == "carry",
    "kl": lambda facts: (
        "unbiased " * facts["algo.kl_unbiased"] + facts["algo.kl_kind"] + " in the reward" * facts["kl_in_reward"]
    ),
    "custom_advantage": lambda facts: is_function(facts["algo.advantage"]),
    "advantage": lambda facts: ADVANTAGES[facts["algo.advantage"]],
    "normalization": lambda facts: NORMALIZATIONS[facts["algo.normalize"]],
    "ddof_gain": lambda facts: (facts["sampling.group_size"] / (facts["sampling.group_size"] - 1)) ** 0.5 - 1,
    "divides_by_std": lambda facts: _divides_by_std(facts.config),
    "filters": lambda facts: _filters(facts.config),
    "truncations": lambda facts: ", ".join(
        f"{name} {value:g}" for name, value in facts["sampling.truncations"].items()
    ),
    "groups_without_signal": lambda facts: 2 * 0.5 ** facts["sampling.group_size"],
    "staleness": lambda facts: counted(facts["sampling.max_staleness"], "version"),
    "penalty_start": lambda facts: facts["overlong_max_length"] - facts["overlong_cache_length"],
    "other_interval": lambda facts: (facts["overlong_max_length"], facts["overlong_cache_length"]) != (20480, 4096),
    "several_verifiers": lambda facts: not isinstance(facts["reward.verifier"], str),
    "custom_verifier": lambda facts: facts["reward.verifier"] not in VERIFIERS,
    "weighted_verifiers": lambda facts: " + ".join(
        f"{entry.weight:g} × {entry.verifier}" for entry in facts["reward.verifiers"]
    ),
    "first_verifier": lambda facts: facts["reward.verifiers"][0].verifier,
    "half_margin": lambda facts: (facts["reward.correct"] - facts["reward.wrong"]) / 2,
    "penalty_share": lambda facts: facts["overlong.factor"] / (facts["reward.correct"] - facts["reward.wrong"]),
    "optimizer": lambda facts: _optimizer(facts.config),
    "papers_model": lambda facts: re.search(r"qwen2\.5-32b$", facts["model.name"].rstrip("/"), re.IGNORECASE),
    "papers_prompts": lambda facts: _every_source(facts["data.train"], r"dapo-math-17k"),
    "papers_benchmark": lambda facts: _every_source(facts["data.eval"], r"aime[^a-z0-9]*(20)?24"),
    "training_source": lambda facts: source_name(facts["data.train"]),
    "heldout_source": lambda facts: source_name(facts["data.eval"]),
    "heldout_problems": lambda facts: math.inf if facts["eval.prompts"] is None else facts["eval.prompts"],
    "heldout_prompts": lambda facts: counted(facts["eval.prompts"], "prompt"),
    "heldout_weight": lambda facts: 1 / facts["eval.prompts"],
    "noise": lambda facts: (32 / facts["eval.samples"]) ** 0.5,
    "reward_left": lambda facts: facts["critic.lambda_policy"] ** 100,
    "length_alpha": lambda facts: _length_alpha(facts.config),
    "short": lambda facts: math.floor(1 / facts["critic.length_alpha"]),
    "short_ten_times": lambda facts: 10 * facts["short"],
    "lowest_tokens": lambda facts: 1 / (facts["critic.length_alpha"] * (1 - facts["critic.lambda_lowest"])),
    "critic_to_policy": lambda facts: _critic_to_policy(facts.config),
}
"""Values that are neither a setting nor a property of Config. Each is computed only where a row names it."""
