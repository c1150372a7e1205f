"""Ranks that the tests of a module share: to start them takes longer than most tests."""

import pytest
import torch
from rank_parts import Rank, RanksOfTests

from dapo_rl.cluster.processes import RankProcesses


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Ranks and this process share two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def policy_on():
    """Policies by their number of ranks."""
    started = {}

    def on(world_size, **how):
        if world_size not in started:
            started[world_size] = RanksOfTests(RankProcesses(Rank, world_size))
        return started[world_size].build(**how)

    yield on
    for policy in started.values():
        policy.close()
