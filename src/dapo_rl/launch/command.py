"""The commands `dapo launch local`, `dapo launch ray` and `dapo launch slurm`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from dapo_rl.completion import Arguments
from dapo_rl.errors import UserError
from dapo_rl.recipes import split_arguments

RunOption = Annotated[
    Path | None, typer.Option("--run", help="The run directory, by default runs/NAME-TIME; an existing run is resumed.")
]
Detach = Annotated[bool, typer.Option("--detach", help="Return once it has started, instead of showing its log.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and start nothing.")]

app = typer.Typer(
    help="Train in the background on this host, or as a Ray or Slurm job.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def local(arguments: Arguments = None, run: RunOption = None, detach: Detach = False, dry_run: DryRun = False) -> None:
    """Train in processes of this host.

    \b
      dapo launch local recipe.yaml
      dapo launch local recipe.yaml cluster.engines=2 --run runs/a --detach

    It starts `dapo train` with a Ray cluster of its own and shows the log, which is launch.log in the run directory.
    Ctrl-C or a closed terminal do not stop the run.
    """
    from dapo_rl.launch.local import launch_local
    from dapo_rl.launch.training import plan_launch

    raise typer.Exit(launch_local(plan_launch(*split_arguments(arguments), run), detach, dry_run))


@app.command()
def ray(
    arguments: Arguments = None,
    address: Annotated[
        str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="The dashboard of the Ray cluster, http://HEAD:8265.")
    ] = "http://127.0.0.1:8265",
    run: Annotated[
        Path | None, typer.Option("--run", help="The run directory on the cluster; an existing run is resumed.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Ship this file or directory too; repeat the option for more.")
    ] = None,
    detach: Detach = False,
    dry_run: DryRun = False,
) -> None:
    """Train as a job of a running Ray cluster.

    \b
      dapo launch ray recipe.yaml --address http://HEAD:8265 --run /shared/runs/a

    The recipe and the files that it names by a relative path are shipped; absolute paths are paths of the cluster,
    whose hosts have dapo-rl installed. Ctrl-C detaches from the job and does not stop it.
    """
    from dapo_rl.launch.ray_job import launch_ray
    from dapo_rl.launch.training import plan_launch

    if run is None or not run.is_absolute():
        raise UserError("--run: give an absolute path on a file system of the cluster, for example /shared/runs/a")
    launch = plan_launch(*split_arguments(arguments), run)
    raise typer.Exit(launch_ray(launch, address, include or (), detach, dry_run))


@app.command()
def slurm(
    arguments: Arguments = None,
    run: RunOption = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    gpus_per_node: Annotated[int | None, typer.Option(min=0, help="GPUs per node.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="CPUs per node.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, for example 4:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account.")] = None,
    save_before: Annotated[
        int, typer.Option(min=1, max=65535, help="Save and stop this many seconds before the time limit.")
    ] = 120,
    until_done: Annotated[
        bool, typer.Option("--until-done", help="At the time limit, put the job back in the queue to resume.")
    ] = False,
    sbatch: Annotated[
        str, typer.Option(help='Further options of sbatch in one string, for example "--mem=0 --exclusive".')
    ] = "",
    dry_run: DryRun = False,
) -> None:
    """Train as a Slurm job.

    \b
      dapo launch slurm recipe.yaml --nodes 4 --gpus-per-node 8 --time 24:00:00
      dapo launch slurm recipe.yaml --dry-run > job.sh    a script to change

    The script starts Ray on the nodes of the allocation and `dapo train` on the first. It is launch.sh in the run
    directory, on a file system that the nodes share; the log is slurm-JOB.log.
    """
    from dapo_rl.launch.slurm import Allocation, launch_slurm
    from dapo_rl.launch.training import plan_launch

    try:
        more = tuple(shlex.split(sbatch))
    except ValueError as error:
        raise UserError(f"--sbatch: {error}") from None
    allocation = Allocation(
        nodes, gpus_per_node, cpus_per_task, time, partition, account, save_before, until_done, more
    )
    launch_slurm(plan_launch(*split_arguments(arguments), run), allocation, dry_run)
