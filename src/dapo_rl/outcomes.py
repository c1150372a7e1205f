"""What happens to groups and generated tokens: every outcome once, with its labels and colours, in display order.

The sampler, the ledger, the run log, the report and the board read this table; the web page gets it from the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dapo_rl.palette import BLACK, BLUE, BROWN, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW

Outcome = Literal[
    "kept",
    "all_correct",
    "all_wrong",
    "no_spread",
    "truncated",
    "filtered",
    "verifier_error",
    "environment_error",
    "surplus",
]
"""What happened to a group: it was trained on, or the one reason why not."""
Former = Literal["stale"]
"""An outcome that no group has now; logs of older versions contain it."""
Waiting = Literal["carried", "unfinished"]
"""A group that is still undecided when the run ends, and one of a step in which the run failed."""
Role = Literal["good", "dropped", "bad", "calm"]


@dataclass(frozen=True, slots=True)
class OutcomeInfo:
    label: str
    of: Literal["group", "tokens", "display"]
    """Whether it applies to a whole group, including its tokens, or to single tokens; `display`: a kept group that
    displays name apart."""
    tint: str
    """Colour on the web page, in light and dark mode."""
    role: Role = "dropped"
    """How the web page marks a group."""
    ink: str = GREY
    """Colour in report.png."""
    why: str = ""
    """A sentence that explains it, shown with a group."""
    tokens: str = ""
    """Label for its tokens, if it differs."""
    signal: bool = True
    """False: the samples of the group are all the same, so they give no gradient."""

    @property
    def label_of_tokens(self) -> str:
        return self.tokens or self.label


OUTCOMES: dict[str, OutcomeInfo] = {
    "kept": OutcomeInfo(
        "kept",
        "group",
        "#2a9d6f",
        "good",
        BLUE,
        "The rewards of its samples differ: it was trained on.",
        tokens="trained on",
    ),
    "filled": OutcomeInfo(
        "no signal",
        "display",
        "#8a9bb5",
        "calm",
        GREY,
        "Trained on without signal: all advantages are 0, as in a group that fills up a batch (sampling.on_cap=fill).",
        signal=False,
    ),
    "trained": OutcomeInfo("trained on", "tokens", "#2a9d6f", "good"),
    "all_correct": OutcomeInfo(
        "all right",
        "group",
        "#7fb5e6",
        ink=GREEN,
        why="Dropped: every sample is right, so there is nothing to prefer.",
        signal=False,
    ),
    "all_wrong": OutcomeInfo(
        "all wrong",
        "group",
        "#d97a6c",
        ink=VERMILION,
        why="Dropped: every sample is wrong, so there is nothing to prefer.",
        signal=False,
    ),
    "no_spread": OutcomeInfo(
        "no spread",
        "group",
        "#b59ad6",
        ink=YELLOW,
        why="Dropped: every sample has the same score.",
        signal=False,
    ),
    "truncated": OutcomeInfo(
        "no spread left",
        "group",
        "#7a6fb0",
        why="Dropped: of its samples, those that were cut off are masked, and the others are all the same.",
        signal=False,
    ),
    "filtered": OutcomeInfo("own filter", "group", "#9a8f7a", ink=PURPLE, why="Dropped by the filter of the recipe."),
    "verifier_error": OutcomeInfo(
        "verifier error", "group", "#b03a48", "bad", BLACK, "Dropped: the verifier failed on a sample."
    ),
    "environment_error": OutcomeInfo(
        "environment error", "group", "#8f4a9c", "bad", BROWN, "Dropped: the environment of an episode failed."
    ),
    "surplus": OutcomeInfo("surplus", "group", "#c9a24b", ink=SKY, why="Dropped: the batch was full already."),
    "stale": OutcomeInfo(
        "stale",
        "group",
        "#a8763e",
        ink=ORANGE,
        why="Dropped by an older version of dapo-rl: the weights that sampled it were too old.",
    ),
    "carried": OutcomeInfo(
        "carried over",
        "group",
        "#8d99a8",
        "calm",
        why="The run ended while the group waited for the next step: this step's batch was full.",
    ),
    "unfinished": OutcomeInfo(
        "unfinished",
        "group",
        "#7d8a99",
        "calm",
        why="The run failed in this step, before the group was trained on.",
    ),
    "cancelled": OutcomeInfo("cancelled", "tokens", "#5f6b7a"),
    "restarted": OutcomeInfo("restarted", "tokens", "#9c6ade"),
    "masked_truncated": OutcomeInfo("masked: cut off", "tokens", "#d98fb8"),
    "off_policy": OutcomeInfo("masked: off-policy", "tokens", "#c9a36a"),
    # The log of an unfinished run distinguishes no more than these.
    "dropped": OutcomeInfo("dropped", "tokens", "#d9a06c"),
    "waiting": OutcomeInfo("waiting or cancelled", "tokens", "#8d99a8", "calm"),
}

LOGGED: tuple[str, ...] = (*get_args(Outcome), *get_args(Former))
"""The outcomes that the metrics of a run can count."""


def tokens_label(outcome: str) -> str:
    """The label for tokens of an outcome. One of another version of the package is shown by its name."""
    return OUTCOMES[outcome].label_of_tokens if outcome in OUTCOMES else outcome.replace("_", " ")
