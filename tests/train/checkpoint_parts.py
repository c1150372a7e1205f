"""A policy that is saved and loaded as those of runs are."""

from support import tokenizer

from dapo_rl.config import AlgoSettings, TrainSettings
from dapo_rl.train.policy import HFPolicy


def policy_of(model, **options):
    return HFPolicy(
        model,
        pad_id=tokenizer().pad_token_id,
        temperature=1.0,
        algo=AlgoSettings(),
        train=TrainSettings(lr=1e-3, packed=False),
        norm_length=20,
        token_budget=10**6,
        tokenizer=tokenizer(),
        **options,
    )
