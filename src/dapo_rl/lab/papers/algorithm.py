"""Rows on the loss, and on credit: relative to the group, or by a critic."""

from __future__ import annotations

import math
from functools import partial

from dapo_rl.choices import AGGREGATIONS, NORMALIZATIONS, is_function
from dapo_rl.config import Config
from dapo_rl.lab.papers.compare import Finding, differs, row, same, times_the_paper
from dapo_rl.objectives import ADVANTAGES, LOSSES

technique, value = partial(row, "algorithm"), partial(row, "settings")
of_critic, critic_value = partial(technique, needs_critic=True), partial(value, needs_critic=True)
_GROUP_KEYS = "algo.advantage algo.normalize algo.ddof algo.advantage_eps"


@technique("Objective", "Eq. 8", "min(r A, clip(r) A)", "algo.loss algo.clip_ratio_c")
def objective(c: Config) -> Finding:
    if is_function(c.algo.loss):
        meaning = "the function computes the token losses; whether the clip bounds apply is up to it"
        return differs(f"losses of {c.algo.loss}", meaning)
    loss, bound = LOSSES[c.algo.loss], c.algo.clip_ratio_c
    if c.algo.loss != "dapo":
        return differs(loss.formula, loss.effect)
    if bound is None:
        return same(loss.formula)
    recipe = f"min(r A, clip(r) A), dual clip at {bound:g}"
    meaning = f"tokens with a negative advantage and a ratio above {bound:g} get no gradient"
    if bound >= 10:
        return same(recipe, f"{meaning}; DAPO's script has this bound too, at 10, where it hardly acts")
    return differs(recipe, f"{meaning}: mistakes whose probability rises fastest are not unlearned")


@technique("LM loss of correct samples", "Eq. 8", "none", "algo.positive_lm_coef")
def no_lm_loss(c: Config) -> Finding | None:
    if (weight := c.algo.positive_lm_coef) == 0:
        return None
    return differs(f"weight {weight:g}", "correct samples are imitated too, whatever their advantage, as in VAPO")


@technique("Positive-example LM loss", "Eq. 9, 10", "of correct samples", "algo.positive_lm_coef", without=54)
def lm_loss(c: Config) -> Finding:
    if c.algo.positive_lm_coef > 0:
        return same("of correct samples")
    return differs("none", "correct samples, which are rare on hard prompts, count by their advantage alone")


@value("LM loss weight", "Sec. 5.1", "0.1", "algo.positive_lm_coef")
def lm_loss_weight(c: Config) -> Finding | None:
    if (weight := c.algo.positive_lm_coef) == 0:
        return None
    words = f"imitation of correct samples counts {'more' if weight > 0.1 else 'less'} beside the policy gradient"
    return differs(f"{weight:g}", weight != 0.1 and f"{words} than with 0.1")


@technique(
    "Ratio",
    "Eq. 9",
    "to the policy that sampled the token",
    "algo.proximal algo.importance_cap algo.importance_mode",
)
def ratio(c: Config) -> Finding:
    if c.algo.old_policy == "behaviour":
        return same("to the policy that sampled the token")
    recipe, cap = "to the policy at the beginning of the step", c.algo.importance_cap
    old = c.sampling.dynamic and c.sampling.surplus == "carry"
    meaning = "the same policy, by the trainer's log-probabilities instead of the engine's, as in DAPO's script"
    if old:
        meaning += "; carried tokens, which older weights sampled, are clipped around newer ones"
    if cap is None:
        return differs(recipe, f"{meaning}, without a correction") if old else same(recipe, meaning)
    what = {"truncate": "truncated at", "mask": "0 above"}[c.algo.importance_mode]
    effect = f"token losses are multiplied by the ratio to the policy that sampled, {what} {cap:g}"
    return differs(f"{recipe}, importance weights {what} {cap:g}", meaning, effect)


@technique("Clip-Higher", "Eq. 10", "upper bound wider", "algo.clip_low algo.clip_high")
def clip_higher(c: Config) -> Finding:
    low, high = c.algo.clip_low, c.algo.clip_high
    if high > low:
        return same("upper bound wider")
    if high == low:
        meaning = "unlikely tokens can hardly gain probability, and entropy tends to collapse"
        return differs("symmetric", f"both bounds are {low:g}: {meaning}")
    meaning = "the upper bound is tighter: exploration is limited more than in GRPO, and entropy falls faster"
    return differs("lower bound wider", meaning)


@value("Clip bounds", "Eq. 10", "low 0.2, high 0.28", "algo.clip_low algo.clip_high")
def clip_bounds(c: Config) -> Finding | None:
    if c.algo.per_sequence:
        return None  # bounds of a sequence's ratio, for which no paper here has a value
    low, high = c.algo.clip_low, c.algo.clip_high
    room = f"unlikely tokens have {'more' if high > 0.28 else 'less'} room to gain probability in a step"
    return differs(
        f"low {low:g}, high {high:g}",
        high != 0.28 and f"{room} than with 0.28",
        low > 0.2 and "bad tokens can lose more probability in a step than with 0.2, which reduces diversity",
        low < 0.2 and "bad tokens lose less probability in a step than with 0.2",
    )


@technique("Token-level loss", "Eq. 12", "token-mean", "algo.aggregation algo.norm_length")
def token_level(c: Config) -> Finding:
    """DAPO's equation can be read in two ways."""
    chosen = AGGREGATIONS[c.algo.aggregation]
    return c.algo.aggregation, chosen.token_level, chosen.effect.format(norm_length=c.norm_length)


def token_mean(c: Config) -> Finding:
    """VAPO's mean is over all tokens of the batch."""
    name = c.algo.aggregation
    if name == "token-mean":
        return same(name)
    if name == "token-mean-per-group":
        return differs(name, "the tokens of a group with long responses count less than those of other groups")
    return differs(name, AGGREGATIONS[name].effect.format(norm_length=c.norm_length))


@technique("KL term", "Sec. 2.3", "none", "algo.kl_coef algo.kl_kind algo.kl_in")
def kl_term(c: Config) -> Finding:
    if c.algo.kl_coef == 0:
        return same("none")
    recipe = f"{c.algo.kl_kind}{' in the reward' * c.kl_in_reward}, weight {c.algo.kl_coef:g}"
    meaning = "the policy is pulled towards the initial model, which hinders long reasoning; the reference costs "
    return differs(recipe, meaning + "memory and a forward pass")


@technique("Advantage", "Eq. 9", "group mean and std", _GROUP_KEYS)
def advantage(c: Config) -> Finding:
    name, eps, size = c.algo.advantage, c.algo.advantage_eps, c.sampling.group_size
    if is_function(name):
        return differs(f"advantages of {name}", "the function computes the advantages; algo.normalize has no effect")
    if name != "group":
        return differs(ADVANTAGES[name].formula, ADVANTAGES[name].effect)
    chosen = NORMALIZATIONS[c.algo.normalize]
    if c.algo.normalize != "group":
        meaning = "groups that are about half right have more weight than lopsided ones"
        return differs(chosen.words, f"{meaning}, as in {chosen.after}" if chosen.after else meaning)
    recipe = f"{chosen.words} (ddof {c.algo.ddof})"
    if eps > 1e-3:
        meaning = f"eps {eps:g} is not small compared with the std: groups with little spread count less"
        return differs(f"{recipe}, eps {eps:g}", meaning)
    if c.algo.ddof == 1:
        return same(recipe)
    meaning = "the paper does not specify ddof; the authors' script uses 1, and 0 makes advantages "
    return same(recipe, f"{meaning}{(size / (size - 1)) ** 0.5 - 1:.1%} larger")


@technique("Critic", "Sec. 4.1", "a value for each token", _GROUP_KEYS)
def critic(c: Config) -> Finding:
    if c.has_critic:
        return same("a value for each token", "it starts from the policy's weights; the paper's from a reward model")
    meaning = "there is no credit for single tokens: all tokens of a response have the same advantage"
    return differs("none", meaning)


@of_critic("Value pre-training", "Sec. 4.1", "before the first policy update", "critic.pretrain_steps", without=11)
def pretraining(c: Config) -> Finding:
    if c.pretrain_steps > 0:
        return same("before the first policy update")
    return differs("none", "the first policy updates use the values of a critic that has learned nothing")


@value("Pre-training steps", "Sec. 5.1", "50 steps", "critic.pretrain_steps")
def pretrain_steps(c: Config) -> Finding | None:
    if (steps := c.pretrain_steps) in (0, 50):
        return same("50 steps") if steps else None
    meaning = f"{times_the_paper(steps, 50)}; it is enough once critic/vf_loss and critic/vf_explained_var settle"
    default = "by default it is an eighth of train.steps, if that is less than 50"
    return differs(f"{steps} steps", meaning, c.critic.pretrain_steps is None and default)


@of_critic(
    "Decoupled GAE",
    "Sec. 4.1",
    "lambda 1 for the critic, another for the policy",
    "critic.lambda_critic critic.lambda_policy",
    without=33,
)
def decoupled_gae(c: Config) -> Finding:
    its_own, of_policy = c.critic.lambda_critic, c.critic.lambda_policy
    if its_own < 1:
        recipe = f"lambda {its_own:g} for {'both' if of_policy == its_own else 'the critic'}"
        meaning = "the critic learns from its own estimates, and the reward fades on the way to early tokens"
        return differs(recipe, meaning)
    if of_policy == 1:
        return differs("lambda 1 for both", "advantages are the reward less the value: unbiased, but noisy")
    return same("lambda 1 for the critic, another for the policy")


@of_critic("Length-adaptive GAE", "Eq. 5", "lambda = 1 - 1 / (alpha l)", "critic.lambda_policy", without=45)
def adaptive_gae(c: Config) -> Finding:
    chosen = c.critic.lambda_policy
    if isinstance(chosen, str):
        return same("lambda = 1 - 1 / (alpha l)")
    if chosen == 1:
        meaning = "every token has the whole reward in its advantage: noisy for short responses as for long"
        return differs("lambda = 1", meaning)
    left = f"{chosen**100:.1%} of the reward is left 100 tokens before the end"
    return differs(f"lambda = {chosen:g}", f"{left}: the rest of an advantage comes from the critic's estimates")


@value("Length alpha", "Sec. 5.1", "0.05", "critic.length_alpha critic.lambda_lowest")
def length_alpha(c: Config) -> Finding | None:
    if not c.has_critic or c.critic.lambda_policy != "adaptive":
        return None
    alpha, lowest = c.critic.length_alpha, c.critic.lambda_lowest
    below = f", so responses below {1 / (alpha * (1 - lowest)):,.0f} tokens share it" if lowest < 1 else ""
    finding = differs(
        f"{alpha:g}" if lowest == 0 else f"{alpha:g}, lambda at least {lowest:g}",
        alpha != 0.05 and f"an advantage looks ahead over about {alpha:.3g} of a response instead of 0.05",
        lowest > 0 and f"lambda is at least {lowest:g}{below}",
    )
    short = math.floor(1 / alpha)
    if not finding[1] or c.sampling.max_new_tokens > 10 * short:
        return finding
    meaning = f"lambda is 0 for responses of up to {short} tokens, where the critic alone assigns credit"
    return same(f"{alpha:g}", f"{meaning}; critic.lambda_lowest raises it")


@critic_value("Value clip", "not stated", "none", "critic.value_clip")
def value_clip(c: Config) -> Finding:
    if (clip := c.critic.value_clip) is None:
        return same("none")
    return differs(
        f"{clip:g}", f"a value gains nothing by moving more than {clip:g} in a step: the critic learns slower"
    )


@critic_value("Whitening", "not stated", "none", "critic.whiten")
def whitening(c: Config) -> Finding:
    meaning = "advantages of a step have mean 0 and variance 1, however little there is to learn from it"
    return differs("on", meaning) if c.critic.whiten else same("none")


@critic_value("Critic's learning rate", "Sec. 5.1", "2e-06", "critic.lr")
def critic_rate(c: Config) -> Finding:
    if math.isclose(lr := c.critic_lr, 2e-6):
        return same(f"{lr:g}")
    share, beside = lr / c.train.lr, "twice the policy's, as in the paper"
    if not math.isclose(share, 2):
        pace = "the critic follows the policy faster" if share > 2 else "the critic falls behind the policy sooner"
        beside = f"{share:.3g} times the policy's instead of twice: {pace}"
    return differs(f"{lr:g}", times_the_paper(lr, 2e-6), beside)
