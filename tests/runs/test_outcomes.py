"""The outcomes of groups and tokens are in one table; whatever names one has it from there."""

import re
from types import SimpleNamespace
from typing import get_args

import pytest
from support import REPOSITORY, make_prompt

from dapo_rl.outcomes import LOGGED, OUTCOMES, Former, Outcome, Waiting, tokens_label
from dapo_rl.rollout.batch_builder import FailedBatch, SampledBatch
from dapo_rl.runs.metric_text import dropped
from dapo_rl.train.ledger import Ledger
from dapo_rl.train.off_policy import LEFT_OUT
from dapo_rl.types import Batch, Group, Trajectory

STATIC = REPOSITORY / "src" / "dapo_rl" / "board" / "static"
DISPLAYED = {"kept", "filled", "dropped", "waiting"}
"""Not in the ledger: groups that were trained on, and the page's words for a run that goes on."""
GROUPS = [*get_args(Outcome), *get_args(Former), *get_args(Waiting)]


def test_the_table_has_every_outcome_of_a_group_in_order():
    assert [key for key, outcome in OUTCOMES.items() if outcome.of == "group"] == GROUPS
    assert all(OUTCOMES[key].why for key in GROUPS)


def test_colours_tell_the_outcomes_of_groups_apart():
    for colours in ([OUTCOMES[key].ink for key in LOGGED], [OUTCOMES[key].tint for key in GROUPS]):
        assert len(set(colours)) == len(colours)
        assert all(re.fullmatch("#[0-9a-fA-F]{6}", colour) for colour in colours)


def test_groups_without_a_signal_are_those_that_may_fill_up_a_batch():
    dropped_without = [key for key, outcome in OUTCOMES.items() if outcome.of == "group" and not outcome.signal]
    assert dropped_without == ["all_correct", "all_wrong", "no_spread", "truncated"]


def test_every_reason_for_a_drop_is_told():
    """Also that of an older version."""
    metrics = {f"sampling/{outcome}": 1 for outcome in (*get_args(Outcome), "stale")}
    assert dropped(metrics) == [
        *(f"1 {OUTCOMES[outcome].label}" for outcome in get_args(Outcome) if outcome != "kept"),
        "1 stale",
    ]


def test_tokens_of_an_unknown_outcome_are_named_as_they_are():
    assert [tokens_label(outcome) for outcome in ("kept", "trained", "stale", "lost_at_sea")] == [
        *("trained on", "trained on", "stale", "lost at sea"),
    ]


def test_the_document_of_the_ledger_has_every_column():
    table = (REPOSITORY / "docs" / "sampling.md").read_text().split("## The ledger")[1]
    named = {key for row in re.findall(r"^\| (`.*?`) \|", table, re.M) for key in re.findall(r"`(\w+)`", row)}
    assert named == set(OUTCOMES) - DISPLAYED


def test_the_ledger_has_no_other_columns():
    ledger, one = Ledger(), SimpleNamespace(tokens=1)
    dropped_groups = [(one, outcome) for outcome in get_args(Outcome) if outcome != "kept"]
    fill = SimpleNamespace(tokens_generated=11, tokens_cancelled=1, tokens_restarted=1, dropped=dropped_groups)
    samples = (
        *(Trajectory([1], loss_mask=in_loss) for in_loss in (True, False)),
        Trajectory([1], loss_mask=False, scalars={LEFT_OUT: 1}),
    )
    ledger.add(fill, Batch((Group(0, make_prompt("p"), samples, ()),)))
    ledger = ledger.with_failed(FailedBatch(SampledBatch((), (), ()), ()))
    assert set(ledger.columns()) == set(OUTCOMES) - DISPLAYED - set(get_args(Former)) | {"total"}


@pytest.mark.parametrize("path", sorted(STATIC.glob("*.js")), ids=lambda path: path.name)
def test_the_page_has_no_copy(path):
    words = {outcome.label for outcome in OUTCOMES.values() if " " in outcome.label} | {
        key for key in OUTCOMES if "_" in key
    }
    words |= {
        outcome.tint for outcome in OUTCOMES.values() if outcome.of == "group" and outcome.tint not in ("#2a9d6f",)
    }
    ours = path.read_text().replace('h("th", { class: "number" }, "trained on")', "")
    assert not [word for word in words if f'"{word}"' in ours or f"{word}:" in ours]
