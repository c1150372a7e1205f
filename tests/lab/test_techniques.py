"""The documents have the techniques as the table has them."""

import re

import pytest
from support import REPOSITORY

from dapo_rl.config import Config, known_keys
from dapo_rl.lab.ablate.techniques import TABLES, TECHNIQUES
from dapo_rl.lab.check import conformance


def words(settings):
    def value(v):
        return v["product"][0] if isinstance(v, dict) else str(v).lower() if isinstance(v, bool) else v

    return ", ".join(f"`{key}={value(v)}`" for key, v in settings.items())


def test_the_table_of_the_ablation():
    text = (REPOSITORY / "docs" / "ablation.md").read_text()
    rows = [f"| {t.name} | {words(t.on)} | {words(t.off)} | {t.paper} |" for t in TECHNIQUES]
    start = text.index("| technique | on | off |")
    assert text[start:].split("\n\n")[0].splitlines()[2:] == rows
    assert f"Naive GRPO has {TABLES['dapo'].baseline_paper} in the paper" in text


def test_the_table_of_techniques_and_settings():
    text = (REPOSITORY / "docs" / "techniques.md").read_text()
    start = text.index("| technique | key | DAPO |")
    rows = [line.split(" | ") for line in text[start:].split("\n\n")[0].splitlines()[2:]]
    keys = {name.removeprefix("| ").lower(): set(re.findall(r"`(.*?)`", cell)) for name, cell, *_ in rows}
    assert set(keys) == {technique.name.lower() for technique in TECHNIQUES}
    for technique in TECHNIQUES:
        assert set(technique.on) <= keys[technique.name.lower()] <= set(known_keys())


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
@pytest.mark.parametrize("on", [True, False])
def test_the_check_sees_what_the_switch_does(technique, on):
    base = Config()
    config = Config.build(technique.settings(base, on))
    assert technique.is_on(config) == on
    (row,) = (row for row in conformance(config).rows if row.component.lower() == technique.name.lower())
    assert row.same == (on != (technique.name == "Overlong Filtering"))  # which the paper's best run does without
