"""VAPO's paper. It repeats DAPO's run with a critic; what it does not state is as in DAPO."""

from __future__ import annotations

from functools import partial

from dapo_rl.lab.papers import credit, losses, sampling, training
from dapo_rl.lab.papers.dapo import DAPO
from dapo_rl.lab.papers.record import Component, Paper
from dapo_rl.lab.papers.unused import UNUSED

_technique, _value = (partial(Component, kind) for kind in ("algorithm", "settings"))
_SETUP, _INHERITED, _UNSAID = "Sec. 5.1", "as in DAPO", "not stated"

VAPO = Paper(
    "VAPO",
    "2504.05118",
    60.4,
    (
        _technique(
            "Critic",
            "Sec. 4.1",
            "a value for each token",
            credit.compare_critic,
            "algo.advantage algo.normalize algo.ddof algo.advantage_eps",
        ),
        _technique(
            "Value pre-training",
            "Sec. 4.1",
            "before the first policy update",
            credit.compare_pretraining,
            "critic.pretrain_steps",
            without=11,
        ),
        _technique(
            "Decoupled GAE",
            "Sec. 4.1",
            "lambda 1 for the critic, another for the policy",
            credit.compare_decoupled,
            "critic.lambda_critic critic.lambda_policy",
            without=33,
        ),
        _technique(
            "Length-adaptive GAE",
            "Eq. 5",
            "lambda = 1 - 1 / (alpha l)",
            credit.compare_adaptive,
            "critic.lambda_policy",
            without=45,
        ),
        DAPO.row("Objective", "Eq. 8"),
        DAPO.row("Ratio", "Eq. 8"),
        DAPO.row("Clip-Higher", "Eq. 8", without=46),
        DAPO.row("Token-level loss", "Eq. 7", find=losses.compare_token_mean, without=53),
        _technique(
            "Positive-example LM loss",
            "Eq. 9, 10",
            "of correct samples",
            losses.compare_imitation,
            "algo.positive_lm_coef",
            without=54,
        ),
        _technique(
            "Group-Sampling",
            "Sec. 4.3",
            "several samples per prompt",
            sampling.compare_groups,
            "sampling.group_size",
            without=55,
        ),
        _technique(
            "Dynamic Sampling",
            _SETUP,
            "none",
            sampling.compare_no_filter,
            "sampling.dynamic sampling.filter sampling.metric sampling.dynamic_batch sampling.cap sampling.on_cap",
        ),
        DAPO.row("KL term", "Eq. 10"),
        _value(
            "Pre-training steps",
            _SETUP,
            "50 steps",
            partial(credit.compare_pretrain_steps, paper=50),
            "critic.pretrain_steps",
        ),
        _value(
            "Length alpha",
            _SETUP,
            "0.05",
            partial(credit.compare_length_alpha, paper=0.05),
            "critic.length_alpha critic.lambda_lowest",
        ),
        _value("Value clip", _UNSAID, "none", credit.compare_value_clip, "critic.value_clip"),
        _value("Whitening", _UNSAID, "none", credit.compare_whitening, "critic.whiten"),
        DAPO.row("Clip bounds", _SETUP),
        _value(
            "LM loss weight",
            _SETUP,
            "0.1",
            partial(losses.compare_imitation_weight, paper=0.1),
            "algo.positive_lm_coef",
        ),
        DAPO.row("Soft Overlong Punishment", _INHERITED, kind="settings"),
        DAPO.row("Punishment interval", _INHERITED),
        DAPO.row("Overlong Filtering", _INHERITED, paper="off"),
        DAPO.row("Rule-based reward", _INHERITED),
        DAPO.row("Prompts per step", _SETUP),
        DAPO.row("Group size", _SETUP, find=partial(sampling.compare_contrast, paper=16)),
        DAPO.row("Updates per step", _SETUP),
        DAPO.row(
            "Length of the run", "Fig. 1", paper="5,000 updates", find=partial(training.compare_length, paper=5_000)
        ),
        DAPO.row("Learning rate", _SETUP),
        _value("Critic's learning rate", _SETUP, "2e-06", partial(credit.compare_critic_rate, paper=2e-6), "critic.lr"),
        DAPO.row("Warm-up", _SETUP, paper="length not stated", find=partial(training.compare_warmup, paper=None)),
        DAPO.row("Optimizer", _INHERITED),
        DAPO.row("Precision", _INHERITED),
        DAPO.row("Prompt tokens", _INHERITED),
        DAPO.row("New tokens", _INHERITED),
        DAPO.row("Temperature", _INHERITED),
        DAPO.row("Truncated sampling", _INHERITED),
        DAPO.row("Surplus groups", _INHERITED),
        DAPO.row("Model", _SETUP),
        DAPO.row("Training prompts", _INHERITED),
        DAPO.row("Held-out prompts", _SETUP),
        DAPO.row("Held-out samples", _SETUP),
        DAPO.row("Held-out sampling", _SETUP),
        *UNUSED,
    ),
)
