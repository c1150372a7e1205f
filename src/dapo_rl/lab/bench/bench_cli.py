"""`dapo bench rollout|update|step|episodes|race|sampling|bookkeeping`: the options and their checks."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from dapo_rl.completion import complete_settings
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.lab.bench.workload import Kind, ToolWork, Workload, fixed_length, longest_length

app = typer.Typer(
    help="Measure speed and memory, and compare with other libraries.\n\nEvery library gets the same workload.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

SWEEPABLE = ("prompts", "group", "tokens", "prompt_tokens")

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", show_default=False, hidden=True, autocompletion=complete_settings),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Repeats = Annotated[int, typer.Option(help="Measured rounds; the median is reported.")]
Timeout = Annotated[float, typer.Option(help="Time limit per contender, in seconds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only a JSON object.")]

TOKENS = 64

ENGINE: str = Config.model_fields["engine"].default


@app.command(
    "step", help="Measure a whole step.\n\nSampling, verification, one update, and the weight transfer to the engine."
)
@app.command(
    "update", help="Measure one optimizer step on prompts × group samples.\n\nTokens/s counts response tokens."
)
@app.command(
    "rollout",
    help="Measure sampling with log-probabilities. `--against generate` is transformers' plain generate, without them.",
)
def bench_command(
    context: typer.Context,
    settings: Settings = None,
    model: Annotated[
        str,
        typer.Option(
            help="A shape with random weights (smollm2-135m, llama-3.2-1b, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, "
            "qwen2.5-7b, qwen2.5-32b), a directory, a hub name, or tiny."
        ),
    ] = "smollm2-135m",
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 4,
    group: Annotated[int, typer.Option(help="Samples per prompt.")] = 8,
    tokens: Annotated[
        int | None, typer.Option(help=f"Tokens per sample, {TOKENS} by default; end-of-sequence is ignored.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Draw the lengths of the samples instead: fixed:N, lognormal:MEDIAN[:SIGMA] or uniform:LOW:HIGH. For "
            "rollout and update."
        ),
    ] = None,
    cap: Annotated[int | None, typer.Option(help="With --lengths, the most tokens of a sample.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    dtype: Annotated[
        str, typer.Option(help="auto, float32 or bfloat16; auto is bfloat16 if the hardware supports it.")
    ] = "auto",
    engine: Annotated[str, typer.Option(help="native, hf or vllm; not used by update.")] = ENGINE,
    device: Device = "auto",
    repeats: Repeats = 3,
    warmup: Annotated[int, typer.Option(help="Warm-up rounds.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts and samples.")] = 0,
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare with a peer on the same workload: generate, hf, native or vllm for rollout; trl for step."
        ),
    ] = None,
    peer_variant: Annotated[
        str | None, typer.Option(help="Try only this variant of the peer; by default all, and report the best.")
    ] = None,
    timeout: Timeout = 1800,
    sweep: Annotated[str | None, typer.Option(help="Vary one size, for example prompts=8,16,32.")] = None,
    as_json: AsJson = False,
) -> None:
    work = Workload(
        kind=cast(Kind, context.command.name),
        model=model,
        prompts=prompts,
        group=group,
        tokens=_most_tokens(tokens, lengths, cap),
        prompt_tokens=prompt_tokens,
        dtype=dtype,
        engine=engine,
        device=device,
        repeats=repeats,
        warmup=warmup,
        seed=seed,
        settings=tuple(settings or ()),
        lengths="" if lengths is None or fixed_length(lengths) else lengths,
    )
    _run(work, against, peer_variant, timeout, sweep, as_json)


@app.command()
def episodes(
    settings: Settings = None,
    model: Annotated[str, typer.Option(help="A shape, a directory, a hub name, or tiny, as for rollout.")] = "tiny",
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 512,
    at_a_time: Annotated[
        int | None, typer.Option(min=1, help="Episodes that are open at a time, and slots of the engine; all.")
    ] = None,
    turns: Annotated[int, typer.Option(min=2, help="Turns of an episode; a tool call is between two of them.")] = 4,
    turn_tokens: Annotated[int, typer.Option(min=1, help="Tokens per turn; end-of-sequence is ignored.")] = 64,
    observation_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a tool's result.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Tokens per prompt.")] = 64,
    latency: Annotated[
        float, typer.Option(min=0, help="Seconds that a tool takes: the median of a lognormal distribution.")
    ] = 0.5,
    longest_latency: Annotated[float, typer.Option(min=0, help="Its upper limit, in seconds.")] = 20,
    sync: Annotated[
        bool, typer.Option("--sync", help="A tool that blocks its process (env.workers), instead of an async one.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    engine: Annotated[str, typer.Option(help="native, hf or vllm.")] = ENGINE,
    device: Device = "auto",
    repeats: Repeats = 1,
    warmup: Annotated[int, typer.Option(help="Warm-up rounds, with shorter latencies.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, prompts, samples and latencies.")] = 0,
    against: Annotated[
        str | None, typer.Option(help="Compare with trl: GRPOTrainer with environment_factory, on a GPU with vLLM.")
    ] = None,
    trl_wait: Annotated[
        float,
        typer.Option(
            min=0,
            help="If TRL's tool calls, which it makes one by one, take longer, add their times instead of waiting.",
        ),
    ] = 120,
    timeout: Timeout = 1800,
    as_json: AsJson = False,
) -> None:
    """Measure episodes of several turns with slow tools.

    Compared with the same tokens in one turn, and with TRL.
    """
    work = Workload(
        kind="episodes",
        model=model,
        prompts=episodes,
        group=1,
        tokens=turns * turn_tokens,
        prompt_tokens=prompt_tokens,
        dtype=dtype,
        engine=engine,
        device=device,
        repeats=repeats,
        warmup=warmup,
        seed=seed,
        settings=tuple(settings or ()),
        tools=ToolWork(
            turns=turns,
            observation_tokens=observation_tokens,
            median_s=latency,
            longest_s=longest_latency,
            at_a_time=min(at_a_time or episodes, episodes),
            sync=sync,
            trl_wait_s=trl_wait,
        ),
    )
    _check(work)
    _check_time(timeout)
    from dapo_rl.lab.bench.episodes_report import compare_episodes, print_episodes

    with _told() as tell:
        report = compare_episodes(work, against, timeout, tell)
    _show(report, as_json, print_episodes)


@app.command()
def race(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] KEY=VALUE", show_default=False, autocompletion=complete_settings),
    ] = None,
    against: Annotated[str | None, typer.Option(help="Compare with trl.")] = None,
    peer_variant: Annotated[str, typer.Option(help="How the peer runs, as for step.")] = "whole",
    peer_setting: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A setting of the peer alone, such as a tuned train.lr."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each contender, with the seeds 0, 1, …")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Rollout steps of a run.")] = 20,
    every: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = 5,
    accuracy: Annotated[str, typer.Option(help="Accuracies to reach, in percent.")] = "50,60,70",
    timeout: Annotated[float, typer.Option(help="Time limit per run, in seconds.")] = 3600,
    peer_seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs of the peer; ratios compare the seeds that both have.  [default: as --seeds]",
            show_default=False,
        ),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Keep each run's result here; runs whose results are here are not repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the curves to this PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the seconds and tokens until the policy is good.

    Every contender trains from the same weights, on the same prompts, with the same rewards and evaluation.
    """
    _check_time(timeout)
    goals = [percent / 100 for percent in _numbers(accuracy)]
    if not goals or not all(0 < goal <= 1 for goal in goals):
        raise UserError(f"--accuracy: {accuracy!r} is not a list of percentages, as in 50,60,70")
    from dapo_rl.lab.bench.race_report import Race, draw_race, print_race, run_contenders

    words = list(settings or ())
    recipe = words.pop(0) if words and "=" not in words[0] else "demo"
    names = ["dapo"] if against is None else ["dapo", against]
    peer_settings = tuple(peer_setting or ())
    plan = Race(
        recipe, tuple(words), names, peer_variant, peer_settings, seeds, steps, every, goals, peer_seeds, results
    )
    with _told() as tell:
        report = run_contenders(plan, timeout, tell)
    if out is not None:
        draw_race(report, out)
    _show(report, as_json, print_race)


@app.command()
def sampling(
    prompts: Annotated[int, typer.Option(min=1, help="Groups to train on per step.")] = 16,
    group: Annotated[int, typer.Option(min=2, help="Samples per prompt.")] = 8,
    slots: Annotated[int, typer.Option(min=1, help="Concurrent sequences of the simulated engine.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 20,
    acceptance: Annotated[str, typer.Option(help="Shares of groups that pass the filter.")] = "0.1,0.2,0.3,0.5,0.7,0.9",
    seed: Annotated[int, typer.Option(help="Seed of the lengths and of which groups pass.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Simulate the cost of dynamic sampling.

    Streaming and in rounds: tokens and engine steps per trained group.
    """
    rates = _numbers(acceptance)
    if not rates or not all(0.01 <= rate <= 1 for rate in rates):
        raise UserError(f"--acceptance: {acceptance!r} is not a list of shares from 0.01 to 1, as in 0.1,0.5")
    from dapo_rl.lab.bench.sampling_simulation import STRATEGIES, print_simulation, simulate

    how = {"prompts": prompts, "group": group, "slots": slots, "steps": steps, "seed": seed}
    with Console(stderr=True).status("simulating"):
        rows = [simulate(rate, name, **how) for rate in rates for name in STRATEGIES]
    _show({"bench": "sampling", "rows": rows}, as_json, print_simulation)


@app.command()
def bookkeeping(
    prompts: Annotated[int, typer.Option(min=1, help="Groups per step.")] = 512,
    group: Annotated[int, typer.Option(min=2, help="Samples per group.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per sample.")] = 5000,
    seed: Annotated[int, typer.Option(help="Seed of the tokens.")] = 0,
    engines: Annotated[int, typer.Option(min=0, help="Engines on Ray; 0: one, in this process.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure a step without its model.

    Sampler, batch, metrics, rollout log and checkpoint state.
    """
    from dapo_rl.lab.bench.bookkeeping import measure_bookkeeping, print_bookkeeping

    with Console(stderr=True).status("") as status:
        result = measure_bookkeeping(prompts, group, tokens, seed, status.update, engines)
    _show(result, as_json, print_bookkeeping)


def _run(
    work: Workload, against: str | None, variant: str | None, timeout: float, sweep: str | None, as_json: bool
) -> None:
    _check_time(timeout)
    if variant is not None and against is None:
        raise UserError("--peer-variant: there is no peer; name one with --against")
    from dapo_rl.lab.bench.compare import bench, print_benchmarks

    name, works = _sweep(work, sweep)
    for each in works:
        _check(each)
    with _told() as tell:
        reports = bench(works, against, variant, timeout, tell)
    result = {"sweep": name, "results": reports} if name else reports[0]
    _show(result, as_json, lambda _: print_benchmarks(reports, name))


def _show(report: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report)


@contextmanager
def _told() -> Iterator[Callable[[str, float | None], None]]:
    """Shows what is measured. Exits on SIGTERM, so that no contender's process outlives this one."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(stderr=True)
    with console.status("") as status:

        def tell(what: str, seconds: float | None) -> None:
            if seconds is None:
                status.update(f"measuring {what}")
            else:  # an interrupted comparison has printed its results so far
                console.print(f"{what}: {seconds:.3f} s", highlight=False, markup=False)

        yield tell


def _numbers(words: str) -> list[float]:
    """Numbers between commas; none if one of them is not a number."""
    try:
        return [float(word) for word in words.split(",")]
    except ValueError:
        return []


def _check_time(timeout: float) -> None:
    if timeout <= 0:
        raise UserError(f"--timeout: {timeout:g} is not above 0")


def _most_tokens(tokens: int | None, lengths: str | None, cap: int | None) -> int:
    if lengths is None:
        if cap is not None:
            raise UserError("--cap: there is no --lengths; without it, every sample has --tokens tokens")
        return TOKENS if tokens is None else tokens
    if tokens is not None:
        raise UserError("--tokens: --lengths sets the lengths; use one of the two")
    if cap is not None and cap < 1:
        raise UserError(f"--cap: {cap} is below 1")
    longest = longest_length(lengths)
    if longest is None and cap is None:
        raise UserError("--cap: lognormal lengths have no upper bound; give one, as in --cap 8192")
    return min(number for number in (longest, cap) if number is not None)


def _sweep(work: Workload, sweep: str | None) -> tuple[str | None, list[Workload]]:
    if sweep is None:
        return None, [work]
    name, _, values = sweep.replace("-", "_").partition("=")
    numbers = values.split(",")
    if name not in SWEEPABLE or not all(number.strip().isdecimal() for number in numbers):
        raise UserError(f"--sweep: {sweep!r} is not NAME=N,N,… with NAME one of {', '.join(SWEEPABLE)}")
    if name == "tokens" and work.lengths:
        raise UserError("--sweep: --lengths sets the tokens; sweep prompts, group or prompt_tokens")
    sizes: list[dict[str, Any]] = [{name: int(number)} for number in numbers]
    return name, [replace(work, **size) for size in sizes]


def _check(work: Workload) -> None:
    if work.kind == "step" and work.lengths:
        raise UserError("--lengths: `bench step` has samples of one length; use --tokens, or bench rollout or update")
    least = {"prompts": 1, "group": 1 if work.kind in ("rollout", "episodes") else 2, "tokens": 1, "prompt_tokens": 2}
    least |= {"repeats": 1, "warmup": 0, "seed": 0}
    for name, bound in least.items():
        if (number := getattr(work, name)) < bound:
            raise UserError(f"--{name.replace('_', '-')}: {number} is below {bound}")
    for name, choices in (("dtype", ("auto", "float32", "bfloat16")), ("device", ("auto", "cpu", "cuda"))):
        if (choice := getattr(work, name)) not in choices:
            raise UserError(f"--{name}: {choice!r} is not one of {', '.join(choices)}")
