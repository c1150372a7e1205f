"""`dapo launch slurm` on a real Slurm cluster of two nodes, which the test starts on this host."""

import json
import os
import re
import stat
from pathlib import Path

import pytest
from patience import wait_until
from slurm_cluster import missing_programs, slurm_cluster
from support import SMALL, dapo

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_programs()), reason=f"Slurm is not installed: no {', '.join(missing_programs())}"),
]
SETTINGS = [*SMALL, "data.eval=null", "eval.every=null", "checkpoint.every=1000"]


@pytest.fixture(scope="module")
def slurm():
    with slurm_cluster() as cluster:
        yield cluster


def steps(run):
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def launch(slurm, cwd, *words):
    environment = slurm.environment | {"OMP_NUM_THREADS": "1"}
    result = dapo("launch", "slurm", *SETTINGS, *words, cwd=cwd, env=environment)
    assert result.returncode == 0, result.stderr
    return re.match(r"job (\d+) (trains|resumes) ", result.stdout).groups()


def test_a_stopped_job_saves_and_the_next_one_resumes_it(slurm, tmp_path):
    """Names and settings are data: a shell would run this one, and Slurm would replace its %j."""
    run = tmp_path / "runs" / """it's $(touch hacked) "%j" """.strip()
    ends = "sampling.stop=['$(touch hacked)']"
    number, verb = launch(slurm, tmp_path, ends, "train.steps=5000", "--until-done", "--run", run)
    assert verb == "trains"
    wait_until(lambda: steps(run) or slurm.has_ended(number))
    assert steps(run), (slurm.job(number), (run / f"slurm-{number}.log").read_text())
    slurm.call("scancel", "--batch", "--signal=USR1", number)  # as Slurm does before the time limit
    wait_until(lambda: slurm.job(number)["JobState"] == "PENDING", 60)
    assert slurm.job(number)["Restarts"] == "1"
    done = steps(run)[-1]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{done}"]
    slurm.call("scancel", number)

    number, verb = launch(slurm, tmp_path, ends, f"train.steps={done + 2}", "--nodes", "2", "--run", run)
    assert verb == "resumes"
    job = slurm.ended(number)
    log = (run / f"slurm-{number}.log").read_text()
    assert (job["JobState"], job["ExitCode"], job["NodeList"]) == ("COMPLETED", "0:0", "one,two"), log
    assert (run / f"ray-{number}.log").read_text().count("Ray runtime started.") == 2
    assert f"resumed from {run}/checkpoints/step-{done}" in log
    assert steps(run) == list(range(1, done + 3))
    assert json.loads((run / "summary.json").read_text())["finished"]

    assert not any(tmp_path.rglob("hacked"))
    wait_until(lambda: not slurm.processes(), 20)


def test_a_cancelled_job_leaves_nothing_behind(slurm, tmp_path):
    """Nothing can be started for a job that is being cancelled, and its processes all get the signal at once."""
    run = tmp_path / "run"
    number, _ = launch(slurm, tmp_path, "train.steps=5000", "--nodes", "2", "--run", run)
    wait_until(lambda: steps(run) or slurm.has_ended(number))
    lines = slurm.processes().values()
    directories = {Path(path) for line in lines for path in re.findall(r"--temp-dir=(\S+)/ray", line)}
    assert len(directories) == 2, (run / f"slurm-{number}.log").read_text()
    assert {stat.S_IMODE(path.stat().st_mode) for path in directories} == {0o700}
    slurm.call("scancel", number)
    wait_until(lambda: not any(path.exists() for path in directories), 60)
    wait_until(lambda: not slurm.processes(), 60)
    assert slurm.ended(number)["JobState"] == "CANCELLED"


def test_what_slurm_refuses_is_one_line(slurm, tmp_path):
    result = dapo("launch", "slurm", "--partition", "nosuch", "--run", "a", cwd=tmp_path, env=slurm.environment)
    assert result.returncode == 2
    assert re.fullmatch(r"dapo: sbatch refused a/launch.sh: .*invalid partition.*\n", result.stderr)
    assert os.listdir(tmp_path / "a") == ["launch.sh"]
