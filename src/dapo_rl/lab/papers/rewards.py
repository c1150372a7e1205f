"""Compares the rewards of a recipe with a paper's: right and wrong, and the length penalty."""

from __future__ import annotations

from dapo_rl.choices import NORMALIZATIONS, VERIFIERS, is_function
from dapo_rl.config import Config
from dapo_rl.lab.papers.record import Finding
from dapo_rl.objectives import ADVANTAGES


def compare_soft_punishment(config: Config) -> Finding:
    shape = config.overlong.shape
    meanings = {
        "soft": "",
        "linear": f"there is no soft interval: the penalty starts beyond {config.overlong_max_length} tokens and has "
        "no upper bound",
        "off": "a response just below the limit scores the same as a short one, and truncated ones give no hint of "
        "the cause: lengths tend to grow up to the limit",
    }
    return shape, shape == "soft", meanings[shape]


def compare_filtering(config: Config) -> Finding:
    if not config.overlong.mask_truncated:
        return "off", True, ""
    brake = "nothing" if config.overlong.shape == "off" else "only the penalty on finished ones"
    meaning = "as in DAPO's ablation (30 to 36 on AIME 2024): truncated responses are excluded from the loss, so "
    meaning += f"{brake} limits lengths"
    if config.masking == "baseline":
        meaning += "; they are excluded from their group's mean and std as well"
    return "on", False, meaning


def compare_interval(config: Config) -> Finding | None:
    if config.overlong.shape != "soft":
        return None
    longest, cache, factor = config.overlong_max_length, config.overlong_cache_length, config.overlong.factor
    effects = []
    if (longest, cache) != (20480, 4096):
        effects.append(
            f"the penalty grows from {longest - cache:,} to {longest:,} tokens instead of from 16,384 to 20,480"
        )
    if factor != 1:
        effects.append(f"a response at the limit loses {factor:g} instead of 1")
    return f"L_max {longest:,}, L_cache {cache:,}, factor {factor:g}", not effects, "; ".join(effects)


def compare_reward(config: Config) -> Finding:
    reward = config.reward
    if not isinstance(reward.verifier, str):
        weighted = " + ".join(f"{entry.weight:g} × {entry.verifier}" for entry in reward.verifiers)
        return weighted, False, f"a sum of several rewards; {reward.verifiers[0].verifier} decides what is right"
    if reward.verifier not in VERIFIERS:
        meaning = "the function defines the scores; reward.correct and reward.wrong have no effect"
        return f"scores of {reward.verifier}", False, meaning
    recipe = f"right {reward.correct:+g}, wrong {reward.wrong:+g}"
    if (reward.correct, reward.wrong) == (1, -1):
        return recipe, True, ""
    margin = reward.correct - reward.wrong
    meaning = "advantages are the same for any two values once divided by the std"
    if is_function(config.algo.advantage):
        meaning = "the effect on advantages depends on algo.advantage"
    elif not _divides_by_std(config):
        meaning = f"advantages are not divided by the std, so they are {margin / 2:g} times as large"
    if config.overlong.shape == "soft":
        share = config.overlong.factor / margin
        meaning += f"; the full length penalty is {share:.0%} of the margin between right and wrong instead of 50%"
    return recipe, False, meaning


def _divides_by_std(config: Config) -> bool:
    if config.has_critic:
        return config.critic.whiten
    if config.algo.advantage == "group":
        return NORMALIZATIONS[config.algo.normalize].by_std
    return ADVANTAGES[config.algo.advantage].by_std
