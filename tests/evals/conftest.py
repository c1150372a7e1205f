"""Runs judge with math-verify, which takes a second to load: once here, and not in the processes of each run."""

import pytest

from dapo_rl.rewards.symbolic import load_symbolic


@pytest.fixture(scope="session", autouse=True)
def _symbolic():
    load_symbolic()
