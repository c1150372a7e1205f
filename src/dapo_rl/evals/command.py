"""`dapo eval`: the options, and what is printed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from dapo_rl.errors import UserError

EVAL_HELP = """Evaluate models on problems: avg@k, pass@k and cons@k, each with its interval over problems.

\b
  dapo eval tiny --data arithmetic --k 8
  dapo eval tiny runs/mine --data arithmetic --k 8           two models, and a paired test of the difference
  dapo eval MODEL --data aime-2024.parquet --protocol aime2024
  dapo eval MODEL --data gsm8k-test.jsonl --protocol gsm8k
  dapo eval MODEL --data reasoning_gym:chain_sum data.eval.size=200

A model is a directory, a run directory, a hub name, or tiny. The first is what the others are compared with. A file
that has each problem several times over, as verl's AIME 2024 has, counts each once.

The directory gets evaluation.json, evaluation.png, and a Parquet file with every response of each model. The same
command goes on where it was stopped, and samples nothing that is there already.
"""


def evaluate(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL... [KEY=VALUE]...", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A .jsonl or .parquet file, a hub data set, reasoning_gym:NAME, or arithmetic.")
    ] = None,
    k: Annotated[
        int | None, typer.Option(help="Samples for each problem; by default the file's copies of each, or 1.")
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="aime2024: k 32, temperature 1, top_p 0.7, 20480 tokens; gsm8k: greedy, step by step."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; by default 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling; by default 1, which is off.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a response at most; by default 1024, or what the model's context has.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(help="Problems to use at most, from the first.")] = None,
    verifier: Annotated[
        str | None, typer.Option(help="math (gym for reasoning_gym:NAME), exact, module:name or file.py:name.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to; by default evals/NAME, where NAME follows from data and settings.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="native, hf, vllm, module:Class or file.py:Class.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides the samples, and the draws of the intervals.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON, and nothing else.")] = False,
) -> None:
    words = arguments or []
    models = [word for word in words if "=" not in word]
    if not models:
        raise UserError("eval: name a model: a directory, a run directory, a hub name, or tiny")
    from dapo_rl.evals.plan import make_plan

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

    from dapo_rl.evals.run import evaluate_models

    stopped_by = _stop_on_sigterm()
    try:
        report, directory = evaluate_models(plan, models, out)
    except KeyboardInterrupt:
        typer.echo("dapo: stopped; the same command goes on where it was", err=True)
        raise typer.Exit(128 + (stopped_by[0] if stopped_by else signal.SIGINT)) from None
    from dapo_rl.base.format import short_path
    from dapo_rl.evals.plot import draw  # matplotlib takes a second to import
    from dapo_rl.evals.table import show

    draw(report, directory / "evaluation.png")
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
        for name in ("evaluation.json", "evaluation.png"):
            print(short_path(directory / name))


def _stop_on_sigterm() -> list[int]:
    """SIGTERM ends an evaluation like Ctrl-C does: nothing is saved that is not saved already."""
    received: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handle)
    return received
