"""What a run says at its start about settings that are allowed, and seldom meant."""

import pytest

from dapo_rl.config import Config
from dapo_rl.config.warnings import warnings

APART = {"cluster.backend": "ray", "cluster.placement": "separate"}
STALE = {"sampling.surplus": "carry", "sampling.max_staleness": 2}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, None),
        ({"sampling.top_p": 0.9}, "sampling.top_p=0.9: sampling is truncated"),
        ({"sampling.top_k": 8, "sampling.keep_mask": True}, None),
        ({**STALE, "sampling.ahead": 2}, "sampling.ahead=2: samples can be several weight versions old"),
        ({**STALE, "sampling.ahead": 1}, None),
        ({**STALE, "sampling.ahead": 2, "algo.proximal": "recomputed"}, None),
        ({"algo.kl_unbiased": True}, "algo.kl_unbiased: with algo.kl_coef=0 there is no KL penalty"),
        ({"algo.kl_unbiased": True, "algo.kl_coef": 0.01}, None),
        (
            {"algo.loss": "clip-cov", "algo.proximal": "behaviour"},
            "algo.loss=clip-cov: tokens are selected",
        ),
        ({"algo.loss": "kl-cov", "algo.proximal": "recomputed"}, "algo.loss=kl-cov: tokens are selected"),
        ({"algo.loss": "kl-cov", "algo.proximal": "recomputed", "train.mini_batches": 2}, None),
        ({"model.lora.dropout": 0.1}, "model.lora.dropout=0.1: updates have dropout"),
        ({"model.lora.rank": 8}, None),
        ({"env.mcp": ["http://u:s3cret@h/mcp"]}, "env.mcp: a password in a URL stands in config.yaml; write ${NAME}"),
        ({"env.mcp": ["http://token@h/mcp"]}, "env.mcp: a password in a URL stands in config.yaml"),
        ({"env.mcp": ["http://u:${PASSWORD}@h/mcp", "http://${T}@h", "http://h/@x", "env KEY=value server"]}, None),
        ({**APART, "sampling.surplus": "requeue"}, "cluster.placement=separate: nothing is sampled during updates"),
        ({**APART, **STALE}, "cluster.placement=separate: engines have little to do during updates"),
        ({**APART, **STALE, "sampling.ahead": 1}, None),
        ({"cluster.backend": "ray", "cluster.placement": "colocated", "sampling.surplus": "requeue"}, None),
    ],
)
def test_they_are_told_once_each(settings, said):
    notes = list(warnings(Config.build(settings)))
    assert len(notes) == (said is not None)
    assert all(note.startswith(said) for note in notes)
