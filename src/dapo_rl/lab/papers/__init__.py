"""The papers that `dapo check` compares a recipe with: a table of rows, and the code that compares."""

from __future__ import annotations

from dapo_rl.base.quote import shown
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.lab.papers.compare import Paper
from dapo_rl.lab.papers.rows import DAPO, VAPO

PAPERS: dict[str, Paper] = {"dapo": DAPO, "vapo": VAPO}


def find_paper(config: Config, name: str | None = None) -> Paper:
    """The paper of that name; without one, VAPO's for a recipe with a critic, and DAPO's for any other."""
    if name is None:
        return VAPO if config.has_critic else DAPO
    try:
        return PAPERS[name.lower()]
    except KeyError:
        hint = did_you_mean(nearest(name.lower(), PAPERS))
        raise UserError(f"--paper: {shown(name)} is not one of {', '.join(PAPERS)}{hint}") from None
