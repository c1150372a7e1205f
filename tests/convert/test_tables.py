"""The tables of other libraries' settings: their form, which nothing else checks."""

import pytest

from dapo_rl.config import known_keys
from dapo_rl.config.peers import settings_table
from dapo_rl.config.peers.values import CONVERSIONS
from dapo_rl.convert.unsupported import FEATURES

TABLES = ("areal", "grpo", "ms_swift", "transformers", "trl", "verl")
FORMS = (
    {"to", "by", "note"},
    {"to", "values", "otherwise", "learns", "note"},
    {"joint", "alone", "note", "loss"},
    {"mapping"},
)


def entries(table):
    """Every entry with a counterpart, and every reason with its settings."""
    counterparts, reasons = [], []
    for section in table["settings"].values():
        for keys, entry in section.items():
            if keys in ("unsupported", "ignored"):
                reasons += entry.items()
            else:
                counterparts.append(entry if isinstance(entry, dict) else {"to": entry})
    return counterparts, reasons


@pytest.mark.parametrize("name", TABLES)
def test_entries_have_a_known_form(name):
    table = settings_table(name)
    assert set(table) <= {"defaults", "missing", "settings"}
    counterparts, reasons = entries(table)
    for entry in counterparts:
        assert any(set(entry) <= form for form in FORMS), entry
        assert entry.get("by", "as_is") in CONVERSIONS
        assert entry.get("alone", "as_is") in CONVERSIONS
        ours = entry.get("to") or entry.get("joint") or entry["mapping"]
        assert ours in known_keys() or ours.startswith(("data.train.", "data.eval.", "model.lora.")), ours
    for reason, settings in reasons:
        assert isinstance(reason, str)
        offs = settings.values() if isinstance(settings, dict) else ()
        assert all(isinstance(off, list) for off in offs), settings
    for feature, signs in table.get("missing", {}).items():
        assert feature in FEATURES
        assert all(set(sign) <= {"only", "default"} for sign in signs.values())


def test_every_reason_is_used_and_defined():
    named = {"KL_IN_LOSS", "MODES", "GEOMETRIC", "ADV_NORM", "ONE_PROCESS"}  # in the code
    for name in TABLES:
        counterparts, reasons = entries(settings_table(name))
        named |= {reason for reason, _ in reasons}
        named |= {entry[key] for entry in counterparts for key in ("note", "otherwise") if key in entry}
    defined = set(settings_table("reasons"))
    assert defined - named == set()
    assert {name for name in named if name.isupper()} - defined == set()
