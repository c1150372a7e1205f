"""When too many episodes fail for results to mean anything."""

from __future__ import annotations

from collections.abc import Sequence

from dapo_rl.base.format import counted
from dapo_rl.base.quote import TRACEBACK_LIMIT, shorten
from dapo_rl.errors import UserError
from dapo_rl.types import Trajectory, Verdict


def check_failures(episodes: Sequence[tuple[Trajectory, Verdict]], share: float) -> None:
    """Raises UserError if more than this share of the episodes failed. What was lost was not its own environment's
    fault."""
    failures = [verdict.detail for sample, verdict in episodes if failure_reason(sample, verdict) not in (None, "lost")]
    if len(failures) > share * len(episodes):
        line, _, traceback = failures[0].partition("\n")
        raise UserError(
            f"env: failed in {len(failures)} of {counted(len(episodes), 'episode')}, more than env.max_error_share "
            f"{share:g} allows; the first failure: {shorten(line)}",
            more=shorten(traceback, TRACEBACK_LIMIT),
        )


def failure_reason(sample: Trajectory, verdict: Verdict) -> str | None:
    """Why the environment of an episode failed, as `EpisodeFailure.reason` has it; None if it did not."""
    return verdict.detail.partition(":")[0] if sample.scalars.get("env_failed") else None
