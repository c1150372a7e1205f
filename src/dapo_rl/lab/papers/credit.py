"""Compares how a recipe assigns credit with a paper's way: relative to the group, or by a critic."""

from __future__ import annotations

import math

from dapo_rl.choices import NORMALIZATIONS, is_function
from dapo_rl.config import Config
from dapo_rl.lab.papers.record import Finding, times_the_paper
from dapo_rl.objectives import ADVANTAGES


def compare_advantage(config: Config) -> Finding:
    """DAPO's Eq. 9."""
    algo, size = config.algo, config.sampling.group_size
    if is_function(algo.advantage):
        meaning = "the function computes the advantages; algo.normalize has no effect"
        return f"advantages of {algo.advantage}", False, meaning
    if algo.advantage != "group":
        return ADVANTAGES[algo.advantage].formula, False, ADVANTAGES[algo.advantage].effect
    chosen = NORMALIZATIONS[algo.normalize]
    if algo.normalize != "group":
        meaning = "groups that are about half right have more weight than lopsided ones"
        return chosen.words, False, f"{meaning}, as in {chosen.after}" if chosen.after else meaning
    recipe = f"{chosen.words} (ddof {algo.ddof})"
    if algo.advantage_eps > 1e-3:
        meaning = f"eps {algo.advantage_eps:g} is not small compared with the std: groups with little spread count less"
        return f"{recipe}, eps {algo.advantage_eps:g}", False, meaning
    if algo.ddof == 1:
        return recipe, True, ""
    gain = (size / (size - 1)) ** 0.5 - 1
    meaning = f"the paper does not specify ddof; the authors' script uses 1, and 0 makes advantages {gain:.1%} larger"
    return recipe, True, meaning


def compare_critic(config: Config) -> Finding:
    if config.has_critic:
        return "a value for each token", True, "it starts from the policy's weights; the paper's from a reward model"
    return "none", False, "there is no credit for single tokens: all tokens of a response have the same advantage"


def compare_pretraining(config: Config) -> Finding | None:
    if not config.has_critic:
        return None
    if config.pretrain_steps > 0:
        return "before the first policy update", True, ""
    return "none", False, "the first policy updates use the values of a critic that has learned nothing"


def compare_pretrain_steps(config: Config, *, paper: int) -> Finding | None:
    steps = config.pretrain_steps
    if steps == 0:
        return None
    recipe = f"{steps} steps"
    if steps == paper:
        return recipe, True, ""
    meaning = f"{times_the_paper(steps, paper)}; it is enough once critic/vf_loss and critic/vf_explained_var settle"
    if config.critic.pretrain_steps is None:
        meaning += "; by default it is an eighth of train.steps, if that is less than 50"
    return recipe, False, meaning


def compare_decoupled(config: Config) -> Finding | None:
    """Whether the critic's targets are the returns, and the policy's λ is another one."""
    if not config.has_critic:
        return None
    critic, policy = config.critic.lambda_critic, config.critic.lambda_policy
    if critic < 1:
        meaning = "the critic learns from its own estimates, and the reward fades on the way to early tokens"
        recipe = f"lambda {critic:g} for both" if policy == critic else f"lambda {critic:g} for the critic"
        return recipe, False, meaning
    if policy == 1:
        return "lambda 1 for both", False, "advantages are the reward less the value: unbiased, but noisy"
    return "lambda 1 for the critic, another for the policy", True, ""


def compare_adaptive(config: Config) -> Finding | None:
    if not config.has_critic:
        return None
    value = config.critic.lambda_policy
    if isinstance(value, str):
        return "lambda = 1 - 1 / (alpha l)", True, ""
    if value == 1:
        return (
            "lambda = 1",
            False,
            "every token has the whole reward in its advantage: noisy for short responses as for long",
        )
    meaning = f"{value**100:.1%} of the reward is left 100 tokens before the end: the rest of an advantage comes from "
    return f"lambda = {value:g}", False, meaning + "the critic's estimates"


def compare_length_alpha(config: Config, *, paper: float) -> Finding | None:
    """α, and whether λ has a lower bound."""
    alpha, lowest = config.critic.length_alpha, config.critic.lambda_lowest
    if not config.has_critic or config.critic.lambda_policy != "adaptive":
        return None
    effects = []
    if alpha != paper:
        effects.append(f"an advantage looks ahead over about {alpha:.3g} of a response instead of {paper:g}")
    if lowest > 0:
        below = f", so responses below {1 / (alpha * (1 - lowest)):,.0f} tokens share it" if lowest < 1 else ""
        effects.append(f"lambda is at least {lowest:g}{below}")
    recipe = f"{alpha:g}" if lowest == 0 else f"{alpha:g}, lambda at least {lowest:g}"
    if effects:
        return recipe, False, "; ".join(effects)
    short = math.floor(1 / alpha)
    if config.sampling.max_new_tokens > 10 * short:
        return recipe, True, ""
    meaning = f"lambda is 0 for responses of up to {short} tokens, where the critic alone assigns credit"
    return recipe, True, f"{meaning}; critic.lambda_lowest raises it"


def compare_value_clip(config: Config) -> Finding | None:
    if not config.has_critic:
        return None
    clip = config.critic.value_clip
    if clip is None:
        return "none", True, ""
    return f"{clip:g}", False, f"a value gains nothing by moving more than {clip:g} in a step: the critic learns slower"


def compare_whitening(config: Config) -> Finding | None:
    if not config.has_critic:
        return None
    if not config.critic.whiten:
        return "none", True, ""
    return "on", False, "advantages of a step have mean 0 and variance 1, however little there is to learn from it"


def compare_critic_rate(config: Config, *, paper: float) -> Finding | None:
    if not config.has_critic:
        return None
    lr = config.critic_lr
    if math.isclose(lr, paper):
        return f"{lr:g}", True, ""
    share = lr / config.train.lr
    beside = "twice the policy's, as in the paper"
    if not math.isclose(share, 2):
        pace = "the critic follows the policy faster" if share > 2 else "the critic falls behind the policy sooner"
        beside = f"{share:.3g} times the policy's instead of twice: {pace}"
    return f"{lr:g}", False, f"{times_the_paper(lr, paper)}; {beside}"
