"""Lost ranks are started again so many times, and the run goes on where its checkpoint left it."""

import io
from dataclasses import replace

import pytest
from safetensors.torch import load_file
from support import THOROUGH

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cluster.distributed_policy import DistributedPolicy
from dapo_rl.cluster.restart_ranks import Restarts
from dapo_rl.errors import RankLostError, UserError
from dapo_rl.runs.display import PlainDisplay
from dapo_rl.train.policy import HFPolicy


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


class Started:
    """Ranks of which some cannot be started."""

    world_size = 1

    def __init__(self, problems):
        if problem := problems.pop(0):
            raise RankLostError(problem)

    def call(self, method):
        return [(None, None)]

    def close(self, *, kill=False):
        pass


def test_a_host_that_ray_takes_for_alive_costs_no_second_restart():
    on_it = "rank 0 was lost with its host, in start"
    problems = ["", on_it, "", "2 of 2 ranks did not start", on_it, on_it]
    policy = DistributedPolicy(lambda: Started(problems))
    policy.restart()
    with pytest.raises(RankLostError, match=r"^2 of 2 ranks did not start$"):
        policy.restart()
    with pytest.raises(RankLostError, match=f"^{on_it}$"):
        policy.restart()
    assert not problems


def trained(path):
    settings = [*THOROUGH, "train.steps=2", "checkpoint.every=1", "data.eval=null", "eval.every=null"]
    display = PlainDisplay(io.StringIO())
    with DAPOTrainer(config=Config.load("demo", settings), run_dir=path, display=display) as trainer:
        trainer._built = replace(trainer._built, restart=lambda: None)  # as if the policy were on ranks
        assert trainer.train()["finished"]
    return load_file(path / "model" / "model.safetensors")


def test_a_rank_lost_in_the_export_does_not_leave_an_earlier_model(tmp_path, monkeypatch):
    """The last step is made again if its checkpoint could not be written."""
    whole = trained(tmp_path / "whole")
    export, save, saves, losses = HFPolicy.export, HFPolicy.save, [], [RankLostError("rank 1 is lost")]

    def fails_once(policy, directory):
        saves.append(directory)
        if len(saves) == 2:
            raise OSError(28, "No space left on device")
        return save(policy, directory)

    def loses_once(policy, path):
        if losses:
            raise losses.pop()
        export(policy, path)

    monkeypatch.setattr(HFPolicy, "save", fails_once)
    monkeypatch.setattr(HFPolicy, "export", loses_once)
    saved = trained(tmp_path / "lost")
    assert not losses
    assert len(saves) == 3
    assert all(saved[name].equal(weight) for name, weight in whole.items())
