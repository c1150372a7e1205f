"""`dapo launch ray`: a run as a job of a Ray cluster, by Ray's jobs API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dapo_rl.base.quote import one_line, printable
from dapo_rl.cluster.ray_session import import_ray
from dapo_rl.errors import UserError
from dapo_rl.launch.ship import Shipped, copy_to, files_to_ship, recipe_there
from dapo_rl.launch.training import CHECKPOINTS, Launch
from dapo_rl.recipes import packaged_name
from dapo_rl.runs.config_file import NAME

PORT = 8265
STOP_WAIT_S = 300
"""Seconds that a stopped job has to save before Ray kills it; Ray's default is 3."""
OVERRIDING = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables that Ray's client prefers to its argument."""


def launch_ray(launch: Launch, address: str, include: Sequence[str], detach: bool, dry_run: bool) -> int:
    """Submits the job and copies its log to stdout until it ends; returns the exit code of the run."""
    files = files_to_ship(launch.recipe, launch.config, include)
    command = entrypoint(launch)
    if dry_run:
        print(f"submit to {address}, in a directory with {', '.join(each.there for each in files) or 'no files'}:")
        print(command)
        return 0
    client = _connect(address)
    job = _submit(client, command, files, launch.name)
    where = f"--address {shlex.quote(address)} {job}"
    how = f"follow it with `ray job logs -f {where}`, stop it with `ray job stop {where}` (it saves)"
    print(f"job {job} trains {launch.run}; {how}", flush=True)
    if detach:
        return 0
    try:
        asyncio.run(_follow(client, job))
        return _exit_code(client, job)
    except KeyboardInterrupt:
        print(f"detached: job {job} goes on; {how}", file=sys.stderr)
        return 130
    except (RuntimeError, OSError) as error:
        raise UserError(f"--address: the connection to {address} was lost: {one_line(error)}; {how}") from error


def entrypoint(launch: Launch) -> str:
    """The command of the job for a shell on the cluster. It resumes the run if there is one."""
    run = str(launch.run)
    words = ["dapo", *_words(launch), "cluster.address=auto", "--run", run]
    config, checkpoints = shlex.quote(f"{run}/{NAME}"), shlex.quote(f"{run}/{CHECKPOINTS}")
    # exec: the signal that stops the job then reaches the run itself.
    return (
        f"if [ -e {config} ] || [ -d {checkpoints} ]; then set -- --resume; else set --; fi; "
        f'exec {shlex.join(words)} "$@"'
    )


def _words(launch: Launch) -> list[str]:
    words = launch.words()
    if launch.recipe is not None and packaged_name(launch.recipe) is None:
        there = recipe_there(launch.recipe)
        words[1] = f"./{there}" if there.startswith("-") else there
    return words


def _connect(address: str) -> Any:
    import_ray()
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise UserError(_no_client(error)) from error
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("ray.")]:
        logging.getLogger(name).setLevel(logging.ERROR)  # each has a level of its own
    if not address.startswith(("http://", "https://")):
        raise UserError(f"--address: {address} is not the address of a Ray dashboard, for example http://HEAD:{PORT}")
    for name in OVERRIDING:
        os.environ.pop(name, None)
    try:
        return JobSubmissionClient(address)
    except ConnectionError as error:
        why = "nothing answers there; is a Ray head with a dashboard running (`ray start --head`), and its port open?"
        raise UserError(f"--address: {address}: {why}") from error
    except Exception as error:  # of several libraries
        if "ray[default]" in str(error):
            raise UserError(_no_client(error)) from error
        if type(error).__name__ == "AuthenticationError":
            why = "the cluster asks for its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the token"
            raise UserError(f"--address: {address}: {why}") from error
        raise UserError(f"--address: {address}: {one_line(error)}") from error


def _no_client(error: Exception) -> str:
    return f"Ray's jobs API is not installed ({one_line(error)}); run `pip install dapo-rl[cluster]`"


def _submit(client: Any, command: str, files: Sequence[Shipped], name: str) -> str:
    with TemporaryDirectory(prefix="dapo-launch-") as folder:
        copy_to(Path(folder), files)
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), "PYTHONUNBUFFERED": "1"}
        try:
            job = client.submit_job(
                entrypoint=command,
                runtime_env={"working_dir": folder, "env_vars": variables},
                metadata={"name": f"dapo {name}"},
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"the job was refused: {one_line(error)}") from error
    return str(job)


async def _follow(client: Any, job: str) -> None:
    async for text in client.tail_job_logs(job):
        sys.stdout.write(text)
        sys.stdout.flush()


def _exit_code(client: Any, job: str) -> int:
    info = client.get_job_info(job)
    state = str(getattr(info.status, "value", info.status))
    if state == "SUCCEEDED":
        return 0
    code = info.driver_exit_code
    with contextlib.suppress(BrokenPipeError):
        print(printable(f"job {job} {state.lower()}" + (f" with exit code {code}" if code else "")), file=sys.stderr)
    if state == "STOPPED":
        return 143
    return int(code) if code and code > 0 else 1
