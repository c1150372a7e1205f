"""Ray ends while a run uses it, or the run ends: one line says why, and nothing is left behind."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from patience import lives, wait_until
from support import DAPO, SMALL

from dapo_rl.cluster import ray_guard
from dapo_rl.cluster.local_ray import PREFIX, SOCKETS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot wait for any process")

BUSY = """
import json
from pathlib import Path
from dapo_rl.cluster.ray_watch import if_ray_ends, vital_processes
from dapo_rl.cluster.ray_session import import_ray, ray_cluster
from dapo_rl.config import ClusterSettings
from dapo_rl.runs.error_file import write_failure

with ray_cluster(ClusterSettings(backend="ray")), if_ray_ends(lambda error: write_failure(Path(), 7, error)):
    ray = import_ray()
    node = ray._private.worker._global_node
    print(json.dumps([node.temp_dir, vital_processes(node)]), flush=True)
    while True:
        ray.get(ray.put(bytes(1 << 20)))
"""
"""Without pause it uses the raylet, whose end would end the process at the next use."""


@pytest.fixture
def busy(tmp_path):
    """A process that uses a Ray of its own, the directory of that Ray, and its processes by their names."""
    words = [sys.executable, "-c", BUSY]
    with forked.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            temporary, vital = json.loads(process.stdout.readline())
            yield process, Path(temporary).parent, vital
        finally:
            process.kill()


def assert_soon_gone(pids):
    """Ray's agents try for a minute to report that Ray has ended, if nobody ends them."""
    wait_until(lambda: not any(map(lives, pids)), 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["its raylet", "its GCS", "its dashboard agent", "its runtime-env agent"])
def test_the_end_of_a_process_of_ray_ends_the_run_with_one_line(busy, tmp_path, name):
    process, directory, vital = busy
    os.kill(vital[name], signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 2
    why = f"Ray has ended, because {name}, process {vital[name]}, was killed or crashed; continue with --resume"
    assert re.fullmatch(rf"dapo: {why}, or look for the cause in Ray's logs, {directory}\S+\n", errors)
    failure = json.loads((tmp_path / "error.json").read_text())
    assert (failure["kind"], failure["step"]) == ("RayLostError", 7)
    assert f"dapo: {failure['message']}\n" == errors
    assert_soon_gone(vital.values())
    assert any((directory / "ray" / "session_latest" / "logs").iterdir()), "the line names them"


WATCHED = """
import subprocess, time, types
from dapo_rl.cluster.ray_watch import RayWatch

gcs = subprocess.Popen(["sleep", "600"])
started = types.SimpleNamespace(process=gcs)
RayWatch(types.SimpleNamespace(all_processes={"gcs_server": [started]}, raylet_socket_name=""), lambda: "the logs")
gcs.kill()
time.sleep(600)
"""


def test_before_there_is_a_run_nothing_can_be_resumed(tmp_path):
    done = forked.run([sys.executable, "-c", WATCHED], timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    said = r"dapo: Ray has ended, because its GCS, process \d+, was killed or crashed; "
    assert re.fullmatch(rf"{said}start again, or look for the cause in the logs\n", done.stderr)


@pytest.mark.slow
def test_nothing_of_ray_outlives_a_process_that_was_killed(busy, tmp_path):
    process, directory, vital = busy
    assert directory.parent == SOCKETS
    assert directory.name.startswith(PREFIX)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert len(vital) == 4
    process.kill()
    _, errors = process.communicate()
    assert_soon_gone(vital.values())
    wait_until(lambda: not directory.exists(), 20)
    assert errors == ""
    assert not (tmp_path / "error.json").exists()


def ignores(pid, number):
    mask = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(mask, 16) >> number - 1 & 1)


def test_a_process_is_not_mistaken_for_another_with_its_id():
    killed = []
    first, second = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    known = ray_guard.Process(first.pid)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(os, "pidfd_open")
        unsure = ray_guard.Process(second.pid)
    for process in (first, second):
        process.kill()
        process.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
        known.kill()  # the id may be someone else's now
        assert killed == []
        unsure.kill()
    assert killed == [(second.pid, signal.SIGKILL)]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_the_guard_ends_what_it_was_told_of(tmp_path, how, keep):
    """A process that the driver has forked may keep the pipe open."""
    driver, of_ray = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    directory = tmp_path / "private"
    (directory / "ray").mkdir(parents=True)
    words = [sys.executable, "-I", "-S", ray_guard.__file__, str(driver.pid), str(directory)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, text=True) as guard:
        print(of_ray.pid, file=guard.stdin, flush=True)
        if keep:
            print("keep", file=guard.stdin, flush=True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the driver
            wait_until(lambda number=number: ignores(guard.pid, number))
            guard.send_signal(number)
        assert of_ray.poll() is None
        if how == "closed":
            guard.stdin.close()
        else:
            driver.kill()
        assert guard.wait(60) == 0
    assert of_ray.wait(60) == -signal.SIGKILL
    assert directory.exists() == keep
    driver.kill()
    driver.wait()


@pytest.mark.slow
def test_a_signal_to_the_process_group_lets_the_run_save(tmp_path):
    """As `timeout` sends it, and some schedulers."""
    words = [DAPO, "train", *SMALL, "data.eval=null", "eval.every=null", "train.steps=1000", "cluster.backend=ray"]
    how = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forked.Popen([*words, "--run", "run"], start_new_session=True, **how) as process:
        for line in process.stdout:
            if line.startswith("step"):
                break
        os.killpg(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))
