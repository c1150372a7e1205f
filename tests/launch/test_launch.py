"""`dapo launch`: what it would run, what it refuses, what it ships, and runs on this host."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from patience import end_processes_in, lives, wait_until
from support import DAPO, SMALL, dapo

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.launch import ship
from dapo_rl.launch.ray_nodes import wait_for_nodes
from dapo_rl.launch.ship import copy_to, files_to_ship

NASTY = """it's $(touch hacked); "%j" `id`"""


def launch(*words, cwd, **options):
    return dapo("launch", *words, cwd=cwd, **options)


def refused(*words, cwd, **options):
    result = launch(*words, cwd=cwd, **options)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("dapo: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("dapo: ").rstrip("\n")


def test_a_dry_run_prints_the_local_command(tmp_path):
    words = [f"data.system_prompt={NASTY}", "seed=3"]
    result = launch("local", "demo", *words, "--run", NASTY, "--dry-run", cwd=tmp_path)
    run = str(tmp_path / NASTY)
    expected = [sys.executable, "-P", "-m", "dapo_rl.cli", "train", "demo", *words]
    assert shlex.split(result.stdout) == [*expected, "cluster.backend=ray", "cluster.address=null", "--run", run]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_script(tmp_path):
    """bash reads the words of the script as they were given, and evaluates nothing."""
    words = [f"data.system_prompt={NASTY}", "seed=3"]
    options = {
        "nodes": "2",
        "gpus-per-node": "8",
        "time": "1:00",
        "partition": NASTY,
        "sbatch": "--mem=0 --comment 'a b'",
    }
    given = [word for key, value in options.items() for word in (f"--{key}", value)]
    result = launch("slurm", "demo", *words, "--run", NASTY, *given, "--dry-run", cwd=tmp_path)
    asked = [line.removeprefix("#SBATCH ") for line in result.stdout.splitlines() if line.startswith("#SBATCH ")]
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=1:00"} <= set(asked)
    assert {"--signal=B:TERM@120", '--mem=0 --comment "a b"'} <= set(asked)
    shown_run = f"{tmp_path}/{NASTY}".replace('"', '\\"').replace("%j", "%%j")  # Slurm replaces %j, and %% by %
    assert f'--output="{shown_run}/slurm-%j.log"' in asked
    assert """--partition="it's $(touch hacked); \\"%j\\" `id`\"""" in asked
    lines = result.stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("run="))
    header = "\n".join(lines[start : start + 4])
    shown = subprocess.run(
        ["bash", "-c", header + """\nprintf '%s\\0' "$PWD" "$run" "${train[@]}" """],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    train = [sys.executable, "-P", "-m", "dapo_rl.cli", "train", "demo", *words, "cluster.backend=ray"]
    assert shown.stdout.split("\0")[:-1] == [str(tmp_path), str(tmp_path / NASTY), *train]
    subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_job_for_ray(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (tmp_path / "mine.yaml").write_text("data: {train: a.jsonl}\nreward: {verifier: exact}\n")
    run = f"/shared/{NASTY}"
    result = launch("ray", "mine.yaml", "seed=3", "--run", run, "--dry-run", cwd=tmp_path)
    first, command = result.stdout.splitlines()
    assert first == "submit to http://127.0.0.1:8265, in a directory with mine.yaml, a.jsonl:"
    ran = command.replace("exec dapo", "printf '%s\\0' dapo")
    shown = subprocess.run(["sh", "-c", ran], cwd=tmp_path, capture_output=True, text=True, check=True)
    words = ["dapo", "train", "mine.yaml", "seed=3", "cluster.backend=ray", "cluster.address=auto", "--run", run]
    assert shown.stdout.split("\0")[:-1] == words
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("target", ["local", "ray", "slurm"])
def test_a_mistake_in_the_recipe_is_one_line(target, tmp_path):
    run = ["--run", "/shared/a"]
    assert "nosuch.yaml: no such recipe" in refused(target, "nosuch.yaml", *run, cwd=tmp_path)
    assert "train.stepz: no such setting; did you mean train.steps" in refused(
        target, "train.stepz=3", *run, cwd=tmp_path
    )
    line = "cluster.address: `dapo launch` sets it; leave it out"
    assert refused(target, "cluster.address=auto", *run, cwd=tmp_path) == line
    assert refused(target, "--seed", "3", cwd=tmp_path) == (
        "--seed: settings are written key=value, without dashes: seed=3"
    )


def test_what_is_missing_is_one_line(tmp_path):
    bare = os.environ | {"PATH": "/nonexistent"}
    assert refused("slurm", "--run", "a", cwd=tmp_path, env=bare) == (
        "there is no sbatch here; run this on a host of the cluster, or print the script with --dry-run"
    )
    assert "--run: give an absolute path" in refused("ray", "--run", "a", cwd=tmp_path)
    assert "is not the address of a Ray dashboard" in refused("ray", "--run", "/a", "--address", "auto", cwd=tmp_path)
    assert refused("slurm", "--run", "a\\b", "--dry-run", cwd=tmp_path).endswith("drops from the path of a log")
    assert refused("slurm", "--sbatch", "'", "--dry-run", cwd=tmp_path) == "--sbatch: No closing quotation"
    assert refused("slurm", "--time", "1\n#SBATCH", "--dry-run", cwd=tmp_path).startswith("--time: ")
    needs = ["cluster.engines=4", "cluster.ranks=6", "cluster.placement=separate"]
    assert refused("slurm", *needs, "--gpus-per-node", "8", "--dry-run", cwd=tmp_path) == (
        "--gpus-per-node: 1 node of 8 GPUs for a run that needs 10: 4 engines of 1 and 6 ranks, separate"
    )
    needs = ["cluster.engines=4", "cluster.ranks=2", "cluster.placement=shared"]
    assert refused("slurm", *needs, "--gpus-per-node", "1", "--dry-run", cwd=tmp_path) == (
        "--gpus-per-node: 1 node of 1 GPU for a run that needs 2: 4 engines of 1 and 2 ranks, shared"
    )


def test_an_address_where_nothing_answers_is_one_line(tmp_path):
    pytest.importorskip("aiohttp", reason="Ray's dashboard is not installed (ray[default])")
    line = refused("ray", "--run", "/a", "--address", "http://127.0.0.1:1", cwd=tmp_path)
    assert line.startswith("--address: http://127.0.0.1:1: nothing answers there; ")


def test_the_recipe_and_the_files_that_it_names_are_shipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("r/mine.yaml", "d/train.jsonl", "d/other.jsonl", "own.py", "loss.py", "m/weights", "m/x/y", "more"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(name)
    config = Config.build(
        {
            "data": {"train": "./d/train.jsonl", "eval": "/data/eval.jsonl"},
            "reward": {"verifier": ["own:score", "math"]},
            "algo": {"loss": "loss.py:loss"},
            "model": {"name": "m"},
        }
    )
    files = files_to_ship(Path("r/mine.yaml"), config, ["more"])
    expected = ["r/mine.yaml", "d/train.jsonl", "loss.py", "own.py", "m/weights", "m/x/y", "more"]
    assert [each.there for each in files] == expected
    copy_to(tmp_path / "copy", files)
    assert {path.relative_to("copy").as_posix() for path in Path("copy").rglob("*") if path.is_file()} == set(expected)
    assert Path("copy/m/x/y").read_text() == "m/x/y"
    assert [each.there for each in files_to_ship(tmp_path / "r" / "mine.yaml", Config())] == ["mine.yaml"]
    assert files_to_ship(None, Config()) == []


def test_a_file_that_cannot_be_shipped_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match=r"^data.train: ../a.jsonl is outside of the working directory"):
        files_to_ship(None, Config.build({"data": {"train": "../a.jsonl"}}))
    with pytest.raises(UserError, match=r"^reward.verifier: no.py: no such file"):
        files_to_ship(None, Config.build({"reward": {"verifier": "no.py:score"}}))
    Path("big").write_text("x" * 100)
    monkeypatch.setattr(ship, "MOST_BYTES", 99)
    with pytest.raises(UserError, match=r"^--include: the files to ship have .* put big on a file system"):
        files_to_ship(None, Config(), ["big"])


def test_waiting_for_nodes_ends_when_ray_has_ended():
    with subprocess.Popen(["true"]) as ended:
        pass
    with pytest.raises(UserError, match=r"^0 of 3 nodes joined Ray: Ray ended while it started"):
        wait_for_nodes("127.0.0.1:1", 3, [ended.pid])
    with pytest.raises(UserError, match="they took too long"):
        wait_for_nodes("127.0.0.1:1", 3, [os.getpid()], patience_s=0)


def steps(run):
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def left_alone(tmp_path):
    """A folder in which no process is left, even if the test fails."""
    yield tmp_path
    end_processes_in(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_local_run_outlives_its_terminal_saves_when_stopped_and_resumes(left_alone):
    pytest.importorskip("ray", reason="ray is not installed")
    tmp_path, run = left_alone, left_alone / "a"
    words = ["launch", "local", *SMALL, "data.eval=null", "eval.every=null", "checkpoint.every=1000", "--run", "a"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    first = forked.Popen([DAPO, *words, "train.steps=5000"], **options)
    wait_until(lambda: len(steps(run)) > 0)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 130
    process = int(out.split()[1])
    how = f"follow it with `tail -f a/launch.log`, stop it with `kill {process}` (it saves)"
    assert out.splitlines()[0] == f"process {process} trains a; {how}"
    assert err == f"detached: process {process} goes on; {how}\n"
    assert "".join(out.splitlines(keepends=True)[1:]) in (run / "launch.log").read_text()
    seen = len(steps(run))
    wait_until(lambda: len(steps(run)) > seen)
    os.kill(process, signal.SIGTERM)
    wait_until(lambda: not lives(process), 60)
    done = steps(run)[-1]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{done}"]

    assert refused(*words[1:], "seed=7", cwd=tmp_path).endswith(
        "started with different settings: seed 0 → 7; start a new run"
    )
    second = dapo(*words, f"train.steps={done + 1}", cwd=tmp_path, env=environment)
    assert second.returncode == 0, second.stdout
    assert f"resumed from {run}/checkpoints/step-{done}" in second.stdout
    assert steps(run) == list(range(1, done + 2))


def test_judges_and_reward_models_are_shipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rm").mkdir()
    for name in ("judge.yaml", "rm/config.json", "model.py"):
        (tmp_path / name).write_text("", encoding="utf-8")
    config = Config.load("demo", ["reward.verifier=[judge.yaml, 'model:rm', 'model:org/other']"])
    assert {each.there for each in files_to_ship(None, config)} == {"judge.yaml", "rm/config.json"}


def test_environments_transforms_teachers_and_critics_are_shipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("world.py", "tools.py", "columns.py", "teacher/weights", "rm/weights", "cert.pem", "key.pem")
    for name in names:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("", encoding="utf-8")
    config = Config.build(
        {
            "env": {"name": "world.py:World", "tools": ["tools:add", "python"], "tls": ["cert.pem", "key.pem"]},
            "train": {"transforms": ["columns.py:add"]},
            "teacher": {"name": "teacher"},
            "critic": {"model": "rm"},
        }
    )
    assert {each.there for each in files_to_ship(None, config)} == set(names)
    for env in ({"name": "openenv:http://host:8000"}, {"agent": "python agent.py --port 80:80"}):
        assert files_to_ship(None, Config.build({"env": env})) == []
    config = Config.build({"env": {"agent": "agent.py:play"}})
    with pytest.raises(UserError, match=r"^env.agent: agent.py: no such file"):
        files_to_ship(None, config)
