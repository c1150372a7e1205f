"""Warnings about valid settings that are rarely meant."""

from __future__ import annotations

from collections.abc import Iterator

from dapo_rl.base.urls import has_open_password
from dapo_rl.config.settings import RunSettings
from dapo_rl.objectives import LOSSES


def warnings(config: RunSettings) -> Iterator[str]:
    """Shown at the start of a run."""
    sampling = config.sampling
    if sampling.truncations and not sampling.keep_mask:
        given = ", ".join(f"sampling.{name}={value:g}" for name, value in sampling.truncations.items())
        limit = "" if sampling.top_k else " and sampling.top_k=256"
        yield (
            f"{given}: sampling is truncated, "
            "but the log-probabilities in the loss are those of the full softmax, so the gradient is biased; set "
            f"sampling.keep_mask=true{limit}, or truncate in evaluation only"
        )
    if min(sampling.ahead, sampling.max_staleness) > 1 and config.algo.old_policy == "behaviour":
        yield (
            f"sampling.ahead={sampling.ahead:g}: samples can be several weight versions old when they are trained "
            "on, and use up the clip range; set algo.proximal=recomputed algo.importance_cap=2"
        )
    if config.algo.kl_unbiased and config.algo.kl_coef == 0:
        yield "algo.kl_unbiased: with algo.kl_coef=0 there is no KL penalty; set algo.kl_coef=0.001, or leave it out"
    loss = LOSSES.get(config.algo.loss)
    if loss is not None and loss.by_covariance and not config.scores_first:
        yield (
            f"algo.loss={config.algo.loss}: tokens are selected by the engine's log-probabilities, and the ratio of a "
            "step's first update is about 1; set algo.proximal=recomputed train.mini_batches=4"
        )
    if any(has_open_password(server) for server in config.env.mcp):
        yield (
            "env.mcp: a password in a URL stands in config.yaml; write ${NAME} in its place, and set the environment "
            "variable NAME to it"
        )
    lora, cluster = config.model.lora, config.cluster
    if lora is not None and lora.dropout:
        yield f"model.lora.dropout={lora.dropout:g}: updates have dropout and sampling has none, so ratios are noisy"
    if cluster.backend is None or cluster.placement == "colocated":
        return
    if not config.during_updates:
        yield (
            f"cluster.placement={cluster.placement}: nothing is sampled during updates, which needs "
            "sampling.surplus=carry, sampling.max_staleness=1 and no sampling.dynamic_batch"
        )
    elif not sampling.ahead:
        yield (
            f"cluster.placement={cluster.placement}: engines have little to do during updates; sampling.ahead=1 draws "
            "a batch ahead"
        )
