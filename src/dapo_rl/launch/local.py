"""`dapo launch local`: a run in processes of this host that outlive the terminal, with a log file."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

from dapo_rl.base.format import short_path
from dapo_rl.base.process import dapo_command, start_logged
from dapo_rl.cluster.ray_session import import_ray
from dapo_rl.errors import UserError
from dapo_rl.launch.training import Launch, resumes

LOG = "launch.log"
POLL_S = 0.2


def launch_local(launch: Launch, detach: bool, dry_run: bool) -> int:
    """Starts the run and copies its log to stdout until it ends; returns its exit code."""
    words = launch.words("cluster.address=null", "--run", str(launch.run), *(["--resume"] if resumes(launch) else []))
    command = dapo_command(*words)
    if dry_run:
        print(shlex.join(command))
        return 0
    import_ray()
    log = launch.run / LOG
    try:
        launch.run.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            start = output.tell()
            process = start_logged(command, output, os.environ | {"PYTHONUNBUFFERED": "1"})
    except OSError as error:
        raise UserError(f"{log}: cannot be written: {error.strerror}; name another directory with --run") from None
    where = shlex.quote(short_path(log))
    how = f"follow it with `tail -f {where}`, stop it with `kill {process.pid}` (it saves)"
    print(f"process {process.pid} trains {short_path(launch.run)}; {how}", flush=True)
    if detach:
        return 0
    try:
        return _follow(process, log, start)
    except KeyboardInterrupt:
        print(f"detached: process {process.pid} goes on; {how}", file=sys.stderr)
        return 130


def _follow(process: subprocess.Popen[bytes], log: Path, start: int) -> int:
    with log.open("rb") as file:
        file.seek(start)
        while process.poll() is None:
            if not _copy(file):
                time.sleep(POLL_S)
        _copy(file)
    code = process.returncode
    return code if code >= 0 else 128 - code


def _copy(file: BinaryIO) -> int:
    content = file.read()
    sys.stdout.buffer.write(content)
    sys.stdout.flush()
    return len(content)
