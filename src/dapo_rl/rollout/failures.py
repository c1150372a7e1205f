"""When too many episodes or verdicts fail for results to mean anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from dapo_rl.base.format import counted
from dapo_rl.base.quote import TRACEBACK_LIMIT, shorten
from dapo_rl.errors import UserError
from dapo_rl.types import Group, Trajectory, Verdict


def check_verifier(groups: Sequence[Group], share: float) -> None:
    """Raises UserError if the verifier failed on more than this share of the groups."""
    failed = [[v for s, v in group.judged if v.failed and failure_reason(s, v) is None] for group in groups]
    first = [verdicts[0].detail for verdicts in failed if verdicts]
    if len(first) > share * len(groups):
        what = f"reward.verifier: failed on {len(first)} of {counted(len(groups), 'group')}"
        _refuse(f"{what}, more than reward.max_error_share {share:g} allows", first[0])


def check_environment(episodes: Sequence[tuple[Trajectory, Verdict]], share: float) -> None:
    """Raises UserError if more than this share of the episodes failed. Lost episodes do not count: their environment is
    not at fault."""
    failures = [verdict.detail for sample, verdict in episodes if failure_reason(sample, verdict) not in (None, "lost")]
    if len(failures) > share * len(episodes):
        what = f"env: failed in {len(failures)} of {counted(len(episodes), 'episode')}"
        _refuse(f"{what}, more than env.max_error_share {share:g} allows", failures[0])


def _refuse(what: str, detail: str) -> NoReturn:
    line, _, traceback = detail.partition("\n")
    raise UserError(
        f"{what}; the first failure: {shorten(line) or 'no detail'}", more=shorten(traceback, TRACEBACK_LIMIT)
    )


def failure_reason(sample: Trajectory, verdict: Verdict) -> str | None:
    """Why the environment of an episode failed, as `EpisodeFailure.reason` has it; None if it did not."""
    return verdict.detail.partition(":")[0] if sample.scalars.get("env_failed") else None
