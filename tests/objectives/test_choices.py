"""The names that settings choose among are in one table, and everything that has a copy of it reads it."""

import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
import torch
from losses_tables import family_tables
from support import REPOSITORY

from dapo_rl import algo, choices
from dapo_rl.algo import reference
from dapo_rl.config import AlgoSettings

DOCUMENT = (REPOSITORY / "docs" / "losses.md").read_text()


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (choices.Aggregation, choices.AGGREGATIONS),
        (choices.Normalize, choices.NORMALIZATIONS),
        (choices.KLKind, choices.KL_KINDS),
        (choices.Proximal, choices.PROXIMALS),
        (choices.ImportanceMode, choices.IMPORTANCE_MODES),
        (choices.ImportanceLevel, choices.IMPORTANCE_LEVELS),
        (choices.Rejection, choices.REJECTIONS),
    ],
)
def test_the_table_has_every_name_in_order(kind, table):
    assert tuple(table) == get_args(kind)


@pytest.mark.filterwarnings("ignore:micro-batch-token-mean")
def test_every_name_is_implemented_in_torch_and_numpy():
    values, mask = torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    for name in choices.AGGREGATIONS:
        assert algo.aggregate(values, mask, name).item() == pytest.approx(reference.aggregate(values, mask, name))
    for name in choices.NORMALIZATIONS:
        ours, theirs = (library.group_advantages(values, normalize=name) for library in (algo, reference))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for name in choices.KL_KINDS:
        np.testing.assert_allclose(
            algo.kl_penalty(values, -values, name), reference.kl_penalty(values, -values, name), rtol=1e-5
        )


def test_the_document_has_the_tables():
    def default(name, value):
        return f"`{name}` (default)" if name == value else f"`{name}`"

    settings = AlgoSettings()
    rows = [
        f"| {default(name, settings.aggregation)} | {choice.weight} | {choice.denominator} |"
        for name, choice in choices.AGGREGATIONS.items()
    ]
    rows += [
        f"| {default(name, settings.normalize)} | {choice.words} | {choice.after or '–'} |"
        for name, choice in choices.NORMALIZATIONS.items()
    ]
    rows += [
        f"| {default(name, settings.kl_kind)} | {choice.value} | {choice.gradient} |"
        for name, choice in choices.KL_KINDS.items()
    ]
    rows += [f"| {default(name, settings.proximal)} | {words} |" for name, words in choices.PROXIMALS.items()]
    rows += [
        f"| {default(name, settings.importance_level)} | {words} |" for name, words in choices.IMPORTANCE_LEVELS.items()
    ]
    rows += [
        f"| {default(name, settings.importance_mode)} | {words} |" for name, words in choices.IMPORTANCE_MODES.items()
    ]
    rows += [
        f"| `{name}` | {'[low, high]' if choice.two_sided else 'a number'} | {choice.words} |"
        for name, choice in choices.REJECTIONS.items()
    ]
    metrics = ("rollout", "actor")
    shown = [
        line
        for line in DOCUMENT.splitlines()
        if line.startswith("| `") and not line[3:].startswith(("algo.", *metrics))
    ]
    assert [line for line in shown if line not in family_tables()] == rows


def test_settings_and_their_names_import_no_torch():
    code = "import sys, dapo_rl.config, dapo_rl.choices; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
