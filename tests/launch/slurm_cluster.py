"""A Slurm cluster of two nodes on this host, with its own configuration, ports, directories and job numbers."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from patience import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "LAUNCH_FAILED")
CONFIG = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
CredType=cred/munge
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
FirstJobId={ports[0]}
SchedulerParameters=sched_interval=1
KillWait=60
SlurmdParameters=config_overrides
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def missing_programs() -> list[str]:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


class SlurmCluster:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = os.environ | {
            "SLURM_CONF": str(home / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }

    def call(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` tells: JobState, ExitCode and others."""
        return dict(word.partition("=")[::2] for word in self.call("scontrol", "show", "job", number).split())

    def has_ended(self, number: str) -> bool:
        return self.job(number)["JobState"] in ENDED

    def ended(self, number: str) -> dict[str, str]:
        wait_until(lambda: self.has_ended(number))
        return self.job(number)

    def processes(self) -> dict[int, str]:
        """The processes with this cluster's configuration in their environment, but for its daemons."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"SLURM_CONF={self.home}".encode() in (directory / "environ").read_bytes():
                    found[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return {number: line for number, line in found.items() if not line.startswith(("slurm", "munge", ": slurm"))}


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Starts the daemons, and ends them and every process of their jobs."""
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        cluster = SlurmCluster(home)
        for name in ("state", "spool-one", "spool-two"):
            (home / name).mkdir()
        user, host = pwd.getpwuid(os.getuid()).pw_name, socket.gethostname().partition(".")[0]
        (home / "slurm.conf").write_text(CONFIG.format(home=home, user=user, host=host, ports=free_ports(3)))
        (home / "munge.key").write_bytes(os.urandom(128))
        (home / "munge.key").chmod(0o400)
        files = [f"--{name}-file={home}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        with contextlib.ExitStack() as running:
            running.callback(_end_jobs, cluster)
            running.enter_context(_daemon(cluster, "munged", "-F", "-f", f"--socket={home}/munge.socket", *files))
            wait_until((home / "munge.socket").exists)
            for words in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "one"], ["slurmd", "-D", "-N", "two"]):
                running.enter_context(_daemon(cluster, *words))
            wait_until(lambda: _idle_nodes(cluster) == 2)
            running.callback(_cancel, cluster)
            yield cluster


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        servers = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for server in servers:
            server.bind(("127.0.0.1", 0))
        return [server.getsockname()[1] for server in servers]


@contextlib.contextmanager
def _daemon(cluster: SlurmCluster, *words: str) -> Iterator[None]:
    with (cluster.home / f"{words[0]}.out").open("ab") as log:
        process = subprocess.Popen(
            words, env=cluster.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle_nodes(cluster: SlurmCluster) -> int:
    words = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
    done = subprocess.run(words, env=cluster.environment, capture_output=True, text=True, timeout=60)
    return sum(int(word) for word in done.stdout.split())


def _cancel(cluster: SlurmCluster) -> None:
    user = pwd.getpwuid(os.getuid()).pw_name
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        cluster.call("scancel", "--user", user)
        wait_until(lambda: not cluster.call("squeue", "-h"), 20)


def _end_jobs(cluster: SlurmCluster) -> None:
    for number in cluster.processes():
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)
