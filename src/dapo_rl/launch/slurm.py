"""`dapo launch slurm`: a run as a Slurm job. Its script starts Ray on the allocated nodes, trains, and stops Ray."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dapo_rl.base.files import atomic_write
from dapo_rl.base.format import counted, short_path
from dapo_rl.base.quote import one_line
from dapo_rl.cluster.ray_session import CPUS, NO_IDLE_WORKERS
from dapo_rl.config import ClusterSettings
from dapo_rl.errors import UserError
from dapo_rl.launch.training import CHECKPOINTS, Launch, resumes
from dapo_rl.runs.config_file import NAME

SCRIPT, LOG = "launch.sh", "slurm-%j.log"


@dataclass(frozen=True, slots=True)
class Allocation:
    """What is asked of Slurm; None leaves it to the site's default."""

    nodes: int = 1
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    save_before: int = 120
    """Seconds before the time limit at which the run saves and stops."""
    until_done: bool = False
    """Whether the job goes back to the queue at the time limit, until the run is done."""
    more: tuple[str, ...] = ()


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
    log = shlex.quote(short_path(launch.run / LOG.replace("%j", job)))
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


def slurm_script(launch: Launch, allocation: Allocation) -> str:
    run = shlex.quote(str(launch.run))
    lines = [
        "#!/bin/bash",
        f"# By `dapo launch slurm`. To submit it yourself: mkdir -p {run} && sbatch FILE",
        *(f"#SBATCH {option}" for option in _options(launch, allocation)),
        "",
        f"run={run}",
        f"python={shlex.quote(sys.executable)}",
        f'train=("$python" -P -m dapo_rl.cli {shlex.join(launch.words())})',
        f"cd -- {shlex.quote(os.getcwd())} || exit 2",
        f"until_done={1 if allocation.until_done else ''}",
        "",
    ]
    body = (Path(__file__).parent / "slurm_job.sh").read_text(encoding="utf-8")
    values = {"CONFIG": NAME, "CHECKPOINTS": CHECKPOINTS, "CPUS": CPUS, "NO_IDLE_WORKERS": "=".join(NO_IDLE_WORKERS)}
    for name, value in values.items():
        body = body.replace(f"@{name}@", str(value))
    return "\n".join(lines) + f"\n{body}"


def _options(launch: Launch, allocation: Allocation) -> Iterator[str]:
    if "\\" in str(launch.run):
        raise UserError(f"--run: {launch.run} has a backslash, which Slurm drops from the path of a log")
    output = str(launch.run).replace("%", "%%")  # Slurm replaces %j by the job's number
    signal = "USR1" if allocation.until_done else "TERM"
    values = {
        "job-name": launch.name,
        "nodes": allocation.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": allocation.gpus_per_node,
        "cpus-per-task": allocation.cpus_per_task,
        "time": allocation.time,
        "partition": allocation.partition,
        "account": allocation.account,
        "output": f"{output}/{LOG}",
        "open-mode": "append",
        "signal": f"B:{signal}@{allocation.save_before}",
    }
    yield from (f"--{key}={_quoted(str(value), key)}" for key, value in values.items() if value is not None)
    yield "--requeue"
    if allocation.more:
        yield " ".join(_quoted(word, "sbatch") for word in allocation.more)


def _quoted(word: str, option: str) -> str:
    """A word as sbatch reads it in a script: in double quotes, with backslashes before quotes and backslashes."""
    if not word.isprintable() or not word:
        raise UserError(f"--{option}: {word!r} is empty or has a control character in it")
    if re.fullmatch(r"[\w@%+=:,./-]+", word, re.ASCII):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'
