"""`dapo eval`: its options and output."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from dapo_rl.base.imports import quick_imports
from dapo_rl.completion import complete_models
from dapo_rl.errors import UserError

EVAL_HELP = """Evaluate models on problems: avg@k, pass@k and cons@k.

The report has confidence intervals over problems, and with several models a paired test of each difference.

\b
  dapo eval tiny --data arithmetic --k 8
  dapo eval tiny runs/mine --data arithmetic --k 8
  dapo eval MODEL --data aime-2024.parquet --protocol aime2024
  dapo eval MODEL --data gsm8k-test.jsonl --protocol gsm8k
  dapo eval MODEL --data reasoning_gym:chain_sum data.eval.size=200
  dapo eval MODEL --data train.parquet --k 8 --scores scored.parquet
  dapo eval tiny runs/mine env.name=guess env.max_turns=4 --k 4

A model is a directory, a run directory, a hub name, or tiny. The others are compared with the first. Problems that a
file repeats, as verl's AIME 2024 does, count once. With env.name, env.tools or env.agent, episodes of several turns are
played; without --data, the environment of env.name makes its tasks.

The output directory contains evaluation.json, evaluation.png, and a Parquet file with every response of each model.
Repeat the same command to resume an evaluation that was stopped; finished problems are not sampled again.
"""


def eval_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL]... [KEY=VALUE", show_default=False, hidden=True, autocompletion=complete_models),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A .jsonl or .parquet file, a hub data set, reasoning_gym:NAME, or arithmetic.")
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", "--samples", help="Samples per problem; by default the copies of it in the file, or 1."),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="aime2024: k 32, temperature 1, top_p 0.7, 20480 tokens; gsm8k: greedy, step by step."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy; by default 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling; by default 1, which is off.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum response length; by default 1024, or what fits in the model's context.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", "--rows", help="Use only the first so many problems.")
    ] = None,
    verifier: Annotated[
        str | None, typer.Option(help="math (gym for reasoning_gym:NAME), exact, module:name or file.py:name.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output directory; by default evals/NAME, named after the data and settings.")
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option(help="Write the rows with the model's pass_rate to this .jsonl or .parquet file, to train on."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="native, hf, vllm, module:Class or file.py:Class.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the samples and of the bootstrap.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the report, as JSON.")] = False,
) -> None:
    words = arguments or []
    models = [word for word in words if "=" not in word]
    if not models:
        raise UserError("eval: name a model: a directory, a run directory, a hub name, or tiny")
    from dapo_rl.evals.protocols import make_plan

    options: dict[str, Any] = {
        "--k": k,
        "--temperature": temperature,
        "--top-p": top_p,
        "--max-new-tokens": max_new_tokens,
        "--prompts": prompts,
        "--verifier": verifier,
        "--engine": engine,
        "--dtype": dtype,
        "--seed": seed,
    }
    plan = make_plan(data, options, [word for word in words if "=" in word], protocol)

    with quick_imports():
        from dapo_rl.evals.run import evaluate_models

    signal.signal(signal.SIGTERM, _stop)
    try:
        report, directory = evaluate_models(plan, models, out, scores=scores)
    except KeyboardInterrupt as stop:
        typer.echo("dapo: stopped; repeat the command to resume", err=True)
        raise typer.Exit(128 + (stop.args[0] if stop.args else signal.SIGINT)) from None
    from dapo_rl.base.format import short_path
    from dapo_rl.evals.plot import draw_evaluation  # matplotlib takes a second to import
    from dapo_rl.evals.table import print_evaluation

    draw_evaluation(report, directory / "evaluation.png")
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_evaluation(report)
        for name in ("evaluation.json", "evaluation.png"):
            print(short_path(directory / name))


def _stop(number: int, _frame: Any) -> None:
    """Stops an evaluation like Ctrl-C. There is nothing to save: responses are saved as they arrive."""
    raise KeyboardInterrupt(number)
