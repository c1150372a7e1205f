"""docs/verifiers.md: its recipe is read and its functions run."""

import re

import pytest
import yaml
from support import REPOSITORY

from dapo_rl.config import Config
from dapo_rl.rewards import build_verifier
from dapo_rl.rewards.trainer_state import RewardState
from dapo_rl.rewards.validation import verify
from dapo_rl.types import Prompt, RewardPart, Trajectory

PAGE = (REPOSITORY / "docs" / "verifiers.md").read_text()


def block(language):
    text, *_ = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return text


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(block("python"))


def test_the_recipe_and_its_functions(rewards):
    verifier = build_verifier(Config.build(yaml.safe_load(block("yaml"))).reward)
    samples = [Trajectory.of_text("Answer: 5"), Trajectory.of_text("6")]
    right, wrong = verify(verifier, Prompt("p", "2+3=", (1,), "5"), samples, state=RewardState(1, 2))
    assert right.parts == (RewardPart("math", 1.0), RewardPart("brevity", -0.0045, 0.2), RewardPart("judge", 1.0, 0.5))
    assert (wrong.parts[2].score, wrong.correct) == (0.0, False)
    assert right.extra == {"characters": 9}
    assert right.metrics == {"longest": (9.0, 1)}
    assert verifier.timeout_s == 5 + 30


def test_the_command_line(rewards):
    (word,) = re.findall(r"^    dapo train '(reward.verifier=\[.*\])'$", PAGE, re.MULTILINE)
    entries = Config.load(None, [word]).reward.verifiers
    assert [(entry.verifier, entry.weight) for entry in entries] == [("math", 1.0), ("rewards.py:brevity", 0.2)]


def test_links_lead_to_sections():
    sections = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.*)$", PAGE, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) <= sections
