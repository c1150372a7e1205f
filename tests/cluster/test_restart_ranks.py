"""Lost ranks are started again so many times, and the run goes on where its checkpoint left it."""

import pytest

from dapo_rl.cluster.restart_ranks import Restarts
from dapo_rl.errors import RankLostError, UserError


class Counter:
    """A part of a run."""

    def __init__(self):
        self.value = 7

    def save(self, directory):
        (directory / "counter").write_text(str(self.value))

    def load(self, directory):
        self.value = int((directory / "counter").read_text())


class Ranks:
    def __init__(self):
        self.calls = []

    def restart(self):
        self.calls.append("restart")

    def wait(self):
        self.calls.append("wait")
        raise OSError("the ranks that were writing are gone")


def test_the_ranks_start_again_until_it_was_too_often():
    ranks, counter, notes = Ranks(), Counter(), []
    restarts = Restarts(ranks.restart, [counter], ranks, 2, lambda: ranks.calls.append("resume"), notes.append)
    for number in (1, 2):
        counter.value = 100
        restarts(RankLostError("rank 1 is lost"))
        assert counter.value == 7  # as at the beginning, and `resume` loads a checkpoint if there is one
        assert ranks.calls == ["wait", "restart", "resume"] * number
        assert notes[-2:] == [
            f"rank 1 is lost; starting the ranks again ({number} of 2)",
            f"the ranks were started again ({number} of 2), because rank 1 is lost",
        ]
    advice = "continue with --resume; look for the cause in Ray's logs, or raise cluster.restarts"
    with pytest.raises(UserError, match=f"^rank 1 is lost, after 2 restarts; {advice}$"):
        restarts(RankLostError("rank 1 is lost"))
    assert len(ranks.calls) == 6


def test_no_restarts_are_none():
    restarts = Restarts(Ranks().restart, [], None, 0, None, None)
    with pytest.raises(UserError, match=r"^rank 0 is lost, after 0 restarts; continue with --resume; "):
        restarts(RankLostError("rank 0 is lost"))
