"""Runs the contenders one after the other, each in its own process, and prints the comparison."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.text import Text

from dapo_rl.base.format import counted, percent
from dapo_rl.base.table import figure_table
from dapo_rl.engine_specs import ENGINES, engine_spec
from dapo_rl.errors import UserError
from dapo_rl.lab.bench.contender import STACK_SIGNAL, ContenderJob
from dapo_rl.lab.bench.peer_variants import all_variants, installed, variants_of
from dapo_rl.lab.bench.roofline import Limit, Size, floor_seconds
from dapo_rl.lab.bench.workload import Workload

PEERS = {"rollout": ("generate", *sorted(ENGINES)), "update": (), "step": ("trl",)}
OURS = {"rollout": "rollout:measure_engine", "update": "update:measure_update", "step": "step:measure_step"}
THEIRS = {"generate": "rollout:measure_generate", "trl": "trl:measure_trl"}
"""Of other peers, which are engines, the function is ours."""

LOG_LINES = 40
STACK_LINES = 150
"""A stack begins with the innermost call; the main thread's is the last."""
STACK_SECONDS = 2

Tell = Callable[[str, float | None], None]
"""Reports the current measurement and, once it is done, its seconds."""


class ContenderError(RuntimeError):
    """Our own contender crashed; the message is its log."""


def bench(
    works: Sequence[Workload], against: str | None, variant: str | None, timeout: float, tell: Tell
) -> list[dict[str, Any]]:
    """A report for each workload. The machine's rates are measured before and after, and the better ones are used."""
    _check_peer(works[0], against, variant)
    for work in works:
        work.config()
    tell("the machine", None)
    limit = ContenderJob("limit", "machine:measure_limit", (works[0],))
    before = run_ours(limit, timeout)
    works = [replace(work, device=before["device"], dtype=before["dtype"]) for work in works]
    reports = [_compare(work, against, variant, timeout, tell) for work in works]
    tell("the machine", None)
    after = run_ours(limit, timeout)
    rates = Limit(**{name: max(before[name], after[name]) for name in Limit.__annotations__})
    for work, report in zip(works, reports, strict=True):
        floor = floor_seconds(work, Size(**report.pop("size")), rates)
        report["limit"] = {**asdict(rates), "floor_seconds": floor, "share": floor / report["seconds"]}
        if theirs := report.get("against", {}).get("seconds"):
            report["against"]["share"] = floor / theirs
        report["machine"] = before["machine"]
    return reports


def _compare(work: Workload, against: str | None, variant: str | None, timeout: float, tell: Tell) -> dict[str, Any]:
    name = work.kind if work.kind == "update" else f"{work.kind}, engine {work.engine}"
    tell(name, None)
    ours = run_ours(ContenderJob("dapo", OURS[work.kind], (work,)), timeout)
    numbers = _numbers(work, ours)
    tell(name, numbers["seconds"])
    size = ours["facts"]["size"]
    settings = {
        name: value for name, value in asdict(work).items() if name not in ("kind", "repeats", "settings", "tools")
    }
    report: dict[str, Any] = {
        "bench": work.kind,
        **settings,
        "settings": list(work.settings),
        "lengths": _lengths(work),
        "samples": work.samples,
        "parameters": size["parameters"],
        "size": size,
        **numbers,
    }
    if against:
        report["against"] = _peer(work, against, variant, timeout, tell)
        theirs = report["against"].get("seconds")
        report["ratio"] = theirs / numbers["seconds"] if theirs else None
    return report


def _lengths(work: Workload) -> dict[str, Any]:
    """A summary of the drawn lengths; the seed reproduces each of them."""
    lengths = work.all_lengths
    return {
        "distribution": work.lengths or f"fixed:{work.tokens}",
        "cap": work.tokens,
        "median": median(lengths),
        "mean": mean(lengths),
        "longest": max(lengths),
        "tokens": sum(lengths),
    }


def _peer(work: Workload, name: str, variant: str | None, timeout: float, tell: Tell) -> dict[str, Any]:
    """The numbers of every variant, and those of the fastest as the peer's."""
    cuda, bfloat16 = work.device == "cuda", work.dtype == "bfloat16"
    names = [variant] if variant else variants_of(name, cuda=cuda, bfloat16=bfloat16, samples=work.samples)
    their_work = replace(work, engine=name) if name in ENGINES else work
    tried = []
    for each in names:
        tell(f"{name} {each}", None)
        result = run_contender(ContenderJob(name, THEIRS.get(name, OURS[work.kind]), (their_work, each)), timeout)
        failed: dict[str, Any] = {name: result[name] for name in ("error", "log") if name in result}
        numbers = failed if "error" in result else _numbers(their_work, result)
        tell(f"{name} {each}", numbers.get("seconds"))
        tried.append({"variant": each, **numbers})
    finished = [numbers for numbers in tried if "seconds" in numbers]
    best = min(finished, key=lambda numbers: numbers["seconds"]) if finished else {}
    return {"name": name, **best, "variants": tried}


def _numbers(work: Workload, result: dict[str, Any]) -> dict[str, Any]:
    seconds = median(result["seconds"])
    return {
        "seconds": seconds,
        "tokens_per_second": work.response_tokens / seconds,
        "peak_memory_bytes": result["peak_memory_bytes"],
        "memory": result["memory"],
        "repeats": list(result["seconds"]),
        "parts": result["parts"],
        **{name: value for name, value in result["facts"].items() if name != "size"},
    }


def _check_peer(work: Workload, against: str | None, variant: str | None) -> None:
    if package := engine_spec(work.engine).package:
        require_package(package, f"--engine {work.engine}")
    if against is None:
        return
    if against not in PEERS[work.kind]:
        there = ", ".join(PEERS[work.kind]) or "none"
        raise UserError(f"--against: {against!r} is not a peer of `bench {work.kind}`; peers are: {there}")
    if against == work.engine:
        raise UserError(f"--against: {against} is the engine itself; name another with --engine")
    if package := "trl" if against == "trl" else engine_spec(against).package:
        require_package(package, f"--against {against}")
    if variant is not None and variant not in all_variants(against):
        there = ", ".join(all_variants(against)) or "none"
        raise UserError(f"--peer-variant: {against} has no variant {variant!r}; there are: {there}")


def require_package(package: str, option: str) -> None:
    if not installed(package):
        raise UserError(f"{option}: {package} is not installed; pip install {package}")


def run_ours(job: ContenderJob, timeout: float) -> dict[str, Any]:
    """The result of a job that must not fail."""
    result = run_contender(job, timeout)
    if result.get("mistake"):
        raise UserError(result["error"])
    if result.get("timed_out"):
        raise UserError(f"--timeout: {job.contender} {result['error']}; raise it, or reduce the work")
    if "error" in result:
        raise ContenderError(f"{job.contender}: {result['error']}\n{result.get('log', '')}")
    return result


def run_contender(job: ContenderJob, timeout: float) -> dict[str, Any]:
    """The job's result, or an `error` with the end of its log."""
    with TemporaryDirectory(prefix="dapo-bench-") as directory:
        answer, log = Path(directory) / "result.json", Path(directory) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "dapo_rl.lab.bench.contender", str(answer)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            timed_out = False
            try:
                process.communicate(pickle.dumps(job), timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
                _ask_for_stack(process)
            finally:
                _end(process)
        lines = log.read_text(errors="replace").splitlines()
        tail = "\n".join(lines[-(STACK_LINES if timed_out else LOG_LINES) :])
        if timed_out:
            return {"error": f"took longer than {timeout:g} s", "timed_out": True, "log": tail}
        if not answer.exists():
            return {"error": f"its process ended with {process.returncode} and no result", "log": tail}
        result: dict[str, Any] = json.loads(answer.read_text())
        return result | {"log": tail} if "error" in result else result


def _ask_for_stack(process: subprocess.Popen[bytes]) -> None:
    """Lets a contender that ran out of time write to its log where it is."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        process.send_signal(STACK_SIGNAL)
        process.wait(STACK_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and its children: those of vLLM would keep the GPU's memory."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def print_benchmarks(reports: Sequence[dict[str, Any]], sweep: str | None) -> None:
    console = Console()
    first = reports[0]
    console.print(Text(_headline(first), style="bold"))
    console.print(Text(_machine(first), style="dim"))
    texts = [sweep, ""] if sweep else [""]
    table = figure_table(*texts, "seconds", "tokens/s", "peak memory", "of the limit", "ratio", texts=len(texts))
    for report in reports:
        lead = [str(report[sweep])] if sweep else []
        table.add_row(*lead, _name(report), *_cells(report), percent(report["limit"]["share"], 1), "")
        peer = report.get("against", {})
        for tried in peer.get("variants", ()):
            name = " ".join(filter(None, (peer["name"], tried["variant"])))
            if "error" in tried:
                table.add_row(*lead, name, Text(tried["error"][:60], style="red"), "", "", "", "")
            else:
                share = report["limit"]["floor_seconds"] / tried["seconds"]
                ratio = f"{tried['seconds'] / report['seconds']:.2f}×"
                table.add_row(*lead, name, *_cells(tried), percent(share, 1), ratio)
    console.print(table)
    for report in reports:
        if report["parts"]:
            parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in report["parts"].items())
            console.print(Text(f"of a step: {parts}"), highlight=False)


def _headline(report: dict[str, Any]) -> str:
    millions = report["parameters"] / 1e6
    return (
        f"{report['bench']}: {report['model']} ({millions:,.0f} M), {counted(report['prompts'], 'prompt')} × "
        f"{counted(report['group'], 'sample')} × {_tokens(report)} after "
        f"{report['prompt_tokens']}, {report['dtype']} on {report['device']}"
    )


def _tokens(report: dict[str, Any]) -> str:
    lengths = report["lengths"]
    if lengths["distribution"].startswith("fixed:"):
        return counted(report["tokens"], "token")
    return (
        f"{lengths['distribution']} tokens (median {lengths['median']:,.0f}, mean {lengths['mean']:,.0f}, longest "
        f"{lengths['longest']:,}, cap {lengths['cap']:,})"
    )


def _machine(report: dict[str, Any]) -> str:
    machine, limit = report["machine"], report["limit"]
    name = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    rates = f"{limit['bandwidth_bytes_per_s'] / 1e9:,.1f} GB/s, {limit['matmul_flops_per_s'] / 1e12:,.3g} TFLOP/s"
    return f"{name}; torch {machine['torch']}; measured {rates}"


def _name(report: dict[str, Any]) -> str:
    return "dapo" if report["bench"] == "update" else f"dapo, {report['engine']}"


def _cells(numbers: dict[str, Any]) -> tuple[str, str, str]:
    memory = f"{numbers['peak_memory_bytes'] / 2**30:,.2f} GiB"
    return f"{numbers['seconds']:.3f}", f"{numbers['tokens_per_second']:,.0f}", memory
