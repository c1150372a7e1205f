"""`dapo launch slurm`: a run as a Slurm job."""

from __future__ import annotations

import shlex
import shutil
import subprocess

from dapo_rl.base.files import atomic_write
from dapo_rl.base.format import counted, short_path
from dapo_rl.base.quote import one_line
from dapo_rl.config import ClusterSettings
from dapo_rl.errors import UserError
from dapo_rl.launch.slurm_script import Allocation, log_path, slurm_script
from dapo_rl.launch.training import Launch, resumes

SCRIPT = "launch.sh"


def launch_slurm(launch: Launch, allocation: Allocation, dry_run: bool) -> None:
    """Writes the script into the run directory and submits it."""
    check_gpus(launch.config.cluster, allocation)
    begun = resumes(launch)
    script = slurm_script(launch, allocation)
    if dry_run:
        print(script, end="")
        return
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch here; run this on a host of the cluster, or print the script with --dry-run"
        )
    path = launch.run / SCRIPT
    try:
        launch.run.mkdir(parents=True, exist_ok=True)
        atomic_write(path, script)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; name another directory with --run") from None
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise UserError(f"sbatch refused {short_path(path)}: {one_line(done.stderr)}")
    job = done.stdout.strip().partition(";")[0]
    log = shlex.quote(short_path(log_path(launch.run, job)))
    print(
        f"job {job} {'resumes' if begun else 'trains'} {short_path(launch.run)}; follow it with `tail -F {log}`, "
        f"stop it with `scancel --batch --signal=TERM {job}` (it saves)"
    )


def check_gpus(cluster: ClusterSettings, allocation: Allocation) -> None:
    """Raises if the run needs more GPUs than are asked for; the job would wait for them forever."""
    if allocation.gpus_per_node is None:
        return
    engines, ranks = cluster.engines * cluster.engine_gpus, cluster.ranks
    needed = {"colocated": max(engines, ranks), "separate": engines + ranks, "shared": ranks}[cluster.placement]
    there = allocation.nodes * allocation.gpus_per_node
    if 0 < there < needed:
        raise UserError(
            f"--gpus-per-node: {counted(allocation.nodes, 'node')} of {counted(allocation.gpus_per_node, 'GPU')} for a "
            f"run that needs {needed}: {counted(cluster.engines, 'engine')} of {cluster.engine_gpus} and "
            f"{counted(ranks, 'rank')}, {cluster.placement}"
        )
