"""Judges in runs: kills, stops, budgets and evaluations, with a real endpoint."""

import re
import signal
import threading
import time

import forked
import pytest
from forked import DAPO
from judge_server import judge_server, write_judge
from support import SMALL, dapo

from dapo_rl import Config, DAPOTrainer
from dapo_rl.errors import UserError
from dapo_rl.lab.verify import dry_run
from dapo_rl.runs.directory import RunDirectory

pytestmark = pytest.mark.slow
SETTINGS = [*SMALL, "train.steps=3", "data.eval=null", "eval.every=null", "checkpoint.every=1", "data.train.size=30"]


def by_length(prompt):
    return f"grade {len(prompt) % 7}"


def config_for(path, *settings):
    return Config.load("demo", [*SETTINGS, f"reward.verifier={path}", *settings])


def metrics_of(path):
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing", "perf", "judge/")) and v == v}
        for row in RunDirectory(path).read_metrics()
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a stop: its metrics, its directory and what was asked."""
    path = tmp_path_factory.mktemp("whole")
    with judge_server(by_length) as server:
        judge = write_judge(path / "judge.yaml", server.url, concurrency=1, scale={"min": 0, "max": 7})
        with DAPOTrainer(config=config_for(judge), run_dir=path / "run") as trainer:
            trainer.train()
    return metrics_of(path / "run"), path / "run", server


def test_a_run_learns_from_a_judge_and_logs_it(whole):
    rows, path, server = whole
    assert rows[0]["reward/judge/std"] > 0
    logged = RunDirectory(path).read_metrics()
    assert sum(row["judge/calls"] for row in logged) == len(server.asked) > 30
    assert all(row["judge/errors"] == 0 and row["judge/seconds"] > 0 for row in logged)
    assert not server.twice


def test_a_killed_run_makes_no_call_twice(whole, tmp_path):
    """The kill comes while the judge thinks about one response; all before it are in the cache."""
    expected, _, _ = whole
    hangs, resumed = threading.Event(), threading.Event()
    count = iter(range(10**6))

    def reply(prompt):
        if next(count) == 40:
            hangs.set()
            resumed.wait(60)
        return by_length(prompt)

    with judge_server(reply) as server:
        judge = write_judge(
            tmp_path / "judge.yaml", server.url, concurrency=1, scale={"min": 0, "max": 7}, timeout_s=120
        )
        words = ["demo", *SETTINGS, f"reward.verifier={judge}", "--run", str(tmp_path / "run")]
        process = forked.Popen([DAPO, "train", *words], cwd=tmp_path)
        assert hangs.wait(120)
        process.send_signal(signal.SIGKILL)
        process.wait()
        resumed.set()
        asked = list(server.asked)
        done = dapo("train", "--run", tmp_path / "run", "--resume", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert set(server.twice) <= {asked[40]}
    assert metrics_of(tmp_path / "run") == expected


@pytest.mark.parametrize("calls", [10, 45])
def test_a_budget_stops_with_a_checkpoint_and_loses_nothing(whole, tmp_path, calls):
    expected, _, _ = whole
    with judge_server(by_length) as server:
        changes = {"concurrency": 1, "scale": {"min": 0, "max": 7}}
        judge = write_judge(tmp_path / "judge.yaml", server.url, budget={"calls": calls}, **changes)
        with (
            DAPOTrainer(config=config_for(judge), run_dir=tmp_path / "run") as trainer,
            pytest.raises(UserError, match=rf"judge\.yaml: budget\.calls: {calls} calls are spent") as error,
        ):
            trainer.train()
        assert "\n" not in str(error.value)
        assert len(server.asked) == calls
        write_judge(judge, server.url, **changes)
        with DAPOTrainer(config=config_for(judge), run_dir=tmp_path / "run") as trainer:
            assert trainer.train(resume=True)["finished"]
        assert not server.twice
    assert metrics_of(tmp_path / "run") == expected


def test_the_command_line_says_it_in_one_line(tmp_path):
    with judge_server(by_length) as server:
        judge = write_judge(tmp_path / "judge.yaml", server.url, budget={"calls": 5})
        done = dapo("train", "demo", *SETTINGS, f"reward.verifier={judge}", "--run", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(r"judge\.yaml: budget\.calls: 5 calls are spent, and more are needed; raise it", done.stderr)
    assert "Traceback" not in done.stderr
    assert RunDirectory(tmp_path / "run").read_config().reward.verifier == str(judge)


def test_a_judge_that_is_down_stops_by_the_share_of_errors(tmp_path):
    with judge_server(by_length) as server:
        judge = write_judge(tmp_path / "judge.yaml", server.url)
    with (
        DAPOTrainer(config=config_for(judge), run_dir=tmp_path / "run") as trainer,
        pytest.raises(UserError, match=r"^reward\.verifier: failed on (\d+) of \1 groups.*cannot be reached") as error,
    ):
        trainer.train()
    assert "\n" not in str(error.value)


def test_a_budget_that_ends_in_an_evaluation(tmp_path):
    with judge_server(by_length) as server:
        judge = write_judge(tmp_path / "judge.yaml", server.url, budget={"calls": 2}, concurrency=1)
        settings = ("data.eval=arithmetic", "data.eval.size=8", "eval.every=1", "train.steps=1")
        config = Config.load("demo", [*SMALL, f"reward.verifier={judge}", *settings])
        with (
            DAPOTrainer(config=config, run_dir=tmp_path / "run") as trainer,
            pytest.raises(UserError, match=r"budget\.calls: 2 calls are spent"),
        ):
            trainer.train()


def test_verify_asks_the_judge(tmp_path):
    with judge_server(by_length) as server:
        judge = write_judge(tmp_path / "judge.yaml", server.url, budget={"calls": 4})
        result = dry_run(config_for(judge), rows=2, samples=1)
        assert len(result.answers) == 2
        assert all(answer.parts[0].name == "judge" for answer in result.answers)
        with pytest.raises(UserError, match=r"budget\.calls: 4 calls are spent"):
            dry_run(config_for(judge), rows=8, samples=4)


def test_slow_judges_do_not_stop_sampling(tmp_path):
    def reply(prompt):
        time.sleep(0.05)
        return by_length(prompt)

    with judge_server(reply) as server:
        judge = write_judge(tmp_path / "judge.yaml", server.url, concurrency=16)
        config = config_for(judge, "sampling.wait_for_verdicts=false", "train.steps=2")
        with DAPOTrainer(config=config, run_dir=tmp_path / "run") as trainer:
            assert trainer.train()["finished"]
