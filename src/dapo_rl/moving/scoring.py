"""verl's scoring of a row by its column `data_source`, guessed from the names of the files."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from dapo_rl.moving.draft import Draft

LAST_NUMBER = "dapo_rl.rewards.last_number:last_number"


@dataclass(frozen=True, slots=True)
class Scoring:
    """What verl does for a data source, and what that is here."""

    pattern: str
    """Matches the path of a file."""
    data_source: str
    theirs: str
    ours: str
    settings: dict[str, Any] = field(default_factory=dict)
    learns: bool = False


SCORINGS = (
    Scoring(
        r"gsm8k",
        "openai/gsm8k",
        "1 if the number after #### is right, otherwise 0",
        "1 if the last number is right, otherwise -1",
        {"reward.verifier": LAST_NUMBER},
        learns=True,
    ),
    Scoring(
        r"dapo[-_]?math|math[-_]?dapo|aime",
        "math_dapo",
        "1 or -1 by the last Answer: line",
        "the same",
        {"reward.verifier": "math", "reward.correct": 1.0, "reward.wrong": -1.0},
    ),
    Scoring(
        r"(^|[/_-])math([/_.-]|$)|math[-_]?(lighteval|500|dataset)",
        "lighteval/MATH",
        "1 or 0 by the last \\boxed{}",
        "1 or 0 by the last Answer: line or \\boxed{}",
        {"reward.verifier": "math", "reward.boxed": True, "reward.correct": 1.0, "reward.wrong": 0.0},
    ),
)


def scoring_of(path: str) -> Scoring | None:
    """The scoring of a file, by the end of its path."""
    end = "/".join(path.lower().split("/")[-2:])
    return next((scoring for scoring in SCORINGS if re.search(scoring.pattern, end)), None)


def _paths(draft: Draft) -> list[str]:
    sources = draft.settings.get("data.train")
    return [str(path) for path in (sources if isinstance(sources, list) else [sources] if sources else [])]


def scored_otherwise(draft: Draft, data_source: str) -> bool:
    """Whether a file is known to be of another data source."""
    scorings = [scoring_of(path) for path in _paths(draft)]
    return any(scoring is not None and scoring.data_source != data_source for scoring in scorings)


def score_by_source(draft: Draft) -> None:
    """The verifier of a run without a reward function of its own. verl chooses one for each row."""
    paths = _paths(draft)
    found = {scoring.data_source: scoring for path in paths if (scoring := scoring_of(path))}
    known = all(scoring_of(path) for path in paths)
    if len(found) == 1 and known:
        (scoring,) = found.values()
        for ours, value in scoring.settings.items():
            draft.put(ours, value)
        note = f"verl: {scoring.theirs}; here: {scoring.ours}"
        here = f"reward.verifier: {scoring.settings['reward.verifier']}"
        status = "differs" if scoring.learns else "same"
        draft.add_row("(data_source)", scoring.data_source, status, here, note, scoring.learns)
        return
    names = ", ".join(found) or "not known"
    why = "verl has a scoring for each, and here there is one for all" if found else "verl scores each row by it"
    note = f"{why}: check reward.verifier (docs/verifiers.md)"
    draft.add_row("(data_source)", names, "differs", "reward.verifier: math, the default", note, True)
