"""`dapo launch ray` on a real Ray head with its dashboard, which the test starts on this host."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import forked
import pytest
from patience import wait_until
from slurm_cluster import free_ports
from support import DAPO, SMALL, dapo

ray = pytest.importorskip("ray", reason="ray is not installed")
pytest.importorskip("aiohttp", reason="Ray's dashboard is not installed (ray[default])")
pytestmark = pytest.mark.slow

SETTINGS = [*SMALL, "data.eval=null", "checkpoint.every=1000"]
TOKEN = "f00d" * 16


@contextlib.contextmanager
def ray_head():
    """The environment and the address of a Ray head with processes and directories of its own."""
    port, client = free_ports(2)
    environment = os.environ | {
        "PATH": f"{DAPO.parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_ADDRESS": "192.0.2.1:1",  # --address has priority
    }
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        options = {
            "port": 0,
            "dashboard-port": port,
            "ray-client-server-port": client,
            "dashboard-agent-listen-port": 0,
            "min-worker-port": 0,
            "max-worker-port": 0,
            "num-cpus": 8,
            "object-store-memory": 100 << 20,
            "temp-dir": folder,
        }
        words = [f"--{key}={value}" for key, value in options.items()]
        head = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        with Path(folder, "head.out").open("wb") as log:
            process = subprocess.Popen(
                [*head, *words], env=environment | {"RAY_ADDRESS": ""}, stdout=log, stderr=log, start_new_session=True
            )
        try:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/api/version"))
            yield environment, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def ask(url, method="GET"):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"}, method=method)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def answers(url):
    try:
        return "ray_version" in ask(url)
    except OSError:
        return False


def steps(run):
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_job_ships_its_files_goes_on_without_its_terminal_and_saves_when_stopped(tmp_path):
    here, run = tmp_path / "here", tmp_path / "it's $(touch hacked)"
    (here / "own").mkdir(parents=True)
    (here / "own" / "rewards.py").write_text(
        "def score(prompts, completions, **_):\n    return [0.5 * (len(c) % 3) for c in completions]\n"
    )
    (here / "mine.yaml").write_text("reward: {verifier: 'own/rewards.py:score'}\ndata: {train: arithmetic}\n")
    words = ["launch", "ray", "mine.yaml", *SETTINGS, "sampling.max_new_tokens=64", "--run", run]
    with ray_head() as (environment, address):
        refused = dapo(*words, "--address", address, cwd=here, env=environment | {"RAY_AUTH_MODE": "disabled"})
        assert refused.returncode == 2
        assert refused.stderr == (
            f"dapo: --address: {address}: the cluster asks for its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN "
            "to the token\n"
        )

        first = forked.Popen(
            [DAPO, *words, "train.steps=5000", "--address", address],
            cwd=here,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: len(steps(run)) > 0)
        first.send_signal(signal.SIGINT)
        out, err = first.communicate(timeout=60)
        assert first.returncode == 130
        job = out.split()[1]
        assert err.startswith(
            f"detached: job {job} goes on; follow it with `ray job logs -f --address {address} {job}`"
        )
        seen = len(steps(run))
        wait_until(lambda: len(steps(run)) > seen)
        ask(f"{address}/api/jobs/{job}/stop", "POST")
        wait_until(lambda: ask(f"{address}/api/jobs/{job}")["status"] == "STOPPED", 120)
        done = steps(run)[-1]
        assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{done}"]

        # A job finds the run and resumes it; its exit code is that of the run.
        other = dapo(*words, "seed=7", "--address", address, cwd=here, env=environment)
        assert other.returncode == 2
        assert f"\ndapo: {run}: was started with different settings: seed 0 → 7; start a new run\n" in other.stdout
    assert not any(tmp_path.rglob("hacked"))
