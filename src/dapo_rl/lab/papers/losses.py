"""Compares the loss of a recipe with a paper's: objective, ratio, clip bounds, average, KL, imitation."""

from __future__ import annotations

from dapo_rl.choices import AGGREGATIONS, is_function
from dapo_rl.config import Config
from dapo_rl.lab.papers.record import Finding
from dapo_rl.objectives import LOSSES


def compare_objective(config: Config) -> Finding:
    if is_function(config.algo.loss):
        meaning = "the function computes the token losses; whether the clip bounds apply is up to it"
        return f"losses of {config.algo.loss}", False, meaning
    loss, c = LOSSES[config.algo.loss], config.algo.clip_ratio_c
    if config.algo.loss != "dapo":
        return loss.formula, False, loss.effect
    if c is None:
        return loss.formula, True, ""
    meaning = f"tokens with a negative advantage and a ratio above {c:g} get no gradient"
    if c >= 10:
        meaning += "; DAPO's script has this bound too, at 10, where it hardly acts"
    else:
        meaning += ": mistakes whose probability rises fastest are not unlearned"
    return f"min(r A, clip(r) A), dual clip at {c:g}", c >= 10, meaning


def compare_ratio(config: Config) -> Finding:
    algo = config.algo
    if algo.old_policy == "behaviour":
        return "to the policy that sampled the token", True, ""
    recipe = "to the policy at the beginning of the step"
    old = config.sampling.dynamic and config.sampling.surplus == "carry"
    meaning = "the same policy, by the trainer's log-probabilities instead of the engine's, as in DAPO's script"
    if old:
        meaning += "; carried tokens, which older weights sampled, are clipped around newer ones"
    if algo.importance_cap is None:
        return recipe, not old, f"{meaning}, without a correction" if old else meaning
    what = {"truncate": "truncated at", "mask": "0 above"}[algo.importance_mode]
    meaning += f"; token losses are multiplied by the ratio to the policy that sampled, {what} {algo.importance_cap:g}"
    return f"{recipe}, importance weights {what} {algo.importance_cap:g}", False, meaning


def compare_clip_higher(config: Config) -> Finding:
    low, high = config.algo.clip_low, config.algo.clip_high
    if high > low:
        return "upper bound wider", True, ""
    if high == low:
        meaning = f"both bounds are {low:g}: unlikely tokens can hardly gain probability, and entropy tends to collapse"
        return "symmetric", False, meaning
    meaning = "the upper bound is tighter: exploration is limited more than in GRPO, and entropy falls faster"
    return "lower bound wider", False, meaning


def compare_clip_bounds(config: Config) -> Finding | None:
    low, high = config.algo.clip_low, config.algo.clip_high
    if config.algo.per_sequence:
        return None  # bounds of a sequence's ratio, for which no paper here has a value
    effects = []
    if high != 0.28:
        room = "more" if high > 0.28 else "less"
        effects.append(f"unlikely tokens have {room} room to gain probability in a step than with 0.28")
    if low > 0.2:
        effects.append("bad tokens can lose more probability in a step than with 0.2, which reduces diversity")
    elif low < 0.2:
        effects.append("bad tokens lose less probability in a step than with 0.2")
    return f"low {low:g}, high {high:g}", not effects, "; ".join(effects)


def compare_token_level(config: Config) -> Finding:
    """DAPO's Eq. 12, which can be read in two ways."""
    aggregation = config.algo.aggregation
    chosen = AGGREGATIONS[aggregation]
    return aggregation, chosen.token_level, chosen.effect.format(norm_length=config.norm_length)


def compare_token_mean(config: Config) -> Finding:
    """VAPO's Eq. 7, over all tokens of the batch."""
    aggregation = config.algo.aggregation
    if aggregation == "token-mean":
        return aggregation, True, ""
    if aggregation == "token-mean-per-group":
        return aggregation, False, "the tokens of a group with long responses count less than those of other groups"
    return aggregation, False, AGGREGATIONS[aggregation].effect.format(norm_length=config.norm_length)


def compare_kl(config: Config) -> Finding:
    algo = config.algo
    if algo.kl_coef == 0:
        return "none", True, ""
    meaning = "the policy is pulled towards the initial model, which hinders long reasoning; the reference costs "
    where = " in the reward" if config.kl_in_reward else ""
    return f"{algo.kl_kind}{where}, weight {algo.kl_coef:g}", False, meaning + "memory and a forward pass"


def compare_no_imitation(config: Config) -> Finding | None:
    """For a paper without an LM loss: a row only if the recipe has one."""
    weight = config.algo.positive_lm_coef
    if weight == 0:
        return None
    return f"weight {weight:g}", False, "correct samples are imitated too, whatever their advantage, as in VAPO"


def compare_imitation(config: Config) -> Finding:
    if config.algo.positive_lm_coef > 0:
        return "of correct samples", True, ""
    return "none", False, "correct samples, which are rare on hard prompts, count by their advantage alone"


def compare_imitation_weight(config: Config, *, paper: float) -> Finding | None:
    weight = config.algo.positive_lm_coef
    if weight == 0:
        return None
    recipe = f"{weight:g}"
    if weight == paper:
        return recipe, True, ""
    effect = "more" if weight > paper else "less"
    return recipe, False, f"imitation of correct samples counts {effect} beside the policy gradient than with {paper:g}"
