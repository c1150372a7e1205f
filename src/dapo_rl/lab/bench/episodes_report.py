"""Compares episodes with tools with the same tokens in one turn, and with TRL, and prints the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.text import Text

from dapo_rl.base.format import counted, percent
from dapo_rl.base.table import figure_table
from dapo_rl.errors import UserError
from dapo_rl.lab.bench.compare import Tell, run_contender, run_ours
from dapo_rl.lab.bench.contender import ContenderJob
from dapo_rl.lab.bench.peer_variants import installed
from dapo_rl.lab.bench.workload import Workload

PEER = "trl"
BACKENDS = {"cpu": "generate", "cuda": "vllm"}
"""How TRL generates."""


def compare_episodes(work: Workload, against: str | None, timeout: float, tell: Tell) -> dict[str, Any]:
    """Our numbers, in several turns and in one, and those of TRL. Where TRL cannot run, the report says why."""
    if against not in (None, PEER):
        raise UserError(f"--against: {against!r} is not a peer of `bench episodes`; peers are: {PEER}")
    work.config()
    facts = run_ours(ContenderJob("resolve", "machine:resolve_work", (work,)), timeout)
    work = replace(work, device=facts["device"], dtype=facts["dtype"])
    tell("episodes", None)
    ours = run_ours(ContenderJob("dapo", "episodes:measure_episodes", (work,)), timeout)
    seconds, one_turn = median(ours["seconds"]), median(ours["facts"]["one_turn_seconds"])
    tell("episodes", seconds)
    assert work.tools is not None
    latencies = [each for row in work.tools.latencies(work.seed, work.prompts) for each in row]
    report: dict[str, Any] = {
        "bench": "episodes",
        **{name: getattr(work, name) for name in ("model", "prompt_tokens", "dtype", "engine", "device", "seed")},
        "settings": list(work.settings),
        "episodes": work.prompts,
        "turn_tokens": work.tokens // work.tools.turns,
        "tools": asdict(work.tools),
        "latencies_s": {
            "median": median(latencies),
            "mean": mean(latencies),
            "longest": max(latencies),
            "total": sum(latencies),
        },
        "parameters": ours["facts"]["size"]["parameters"],
        "seconds": seconds,
        "tokens_per_second": work.response_tokens / seconds,
        "engine_share": ours["facts"]["engine_seconds"] / seconds,
        "prefix_hits": ours["facts"]["prefix_hits"],
        "repeats": list(ours["seconds"]),
        "peak_memory_bytes": ours["peak_memory_bytes"],
        "one_turn": {
            "seconds": one_turn,
            "tokens_per_second": work.response_tokens / one_turn,
            "repeats": ours["facts"]["one_turn_seconds"],
        },
        "share_of_one_turn": one_turn / seconds,
        "steady": _steady(ours["facts"]["steady"], work.response_tokens / one_turn),
        "machine": facts["machine"],
    }
    if against:
        report["against"] = _trl(work, timeout, tell)
        for name in ("one_by_one", "at_once"):
            if theirs := report["against"].get(name):
                theirs["ratio"] = report["tokens_per_second"] / theirs["tokens_per_second"]
    return report


def _steady(rounds: Sequence[dict[str, float]], one_turn: float) -> dict[str, Any] | None:
    """The rounds without their beginnings and ends. `one_turn`: tokens per second in one turn."""
    if not rounds:
        return None
    tokens_per_second = median(each["tokens"] / each["seconds"] for each in rounds)
    return {
        "seconds": median(each["seconds"] for each in rounds),
        "tokens": median(each["tokens"] for each in rounds),
        "tokens_per_second": tokens_per_second,
        "share_of_one_turn": tokens_per_second / one_turn,
        "repeats": list(rounds),
    }


def _trl(work: Workload, timeout: float, tell: Tell) -> dict[str, Any]:
    backend = BACKENDS[work.device]
    peer = {"name": PEER, "backend": backend}
    missing = [package for package in ("trl", *(("vllm",) if backend == "vllm" else ())) if not installed(package)]
    if missing:
        return {**peer, "skipped": f"{' and '.join(missing)} not installed"}
    tell(f"TRL with {backend}", None)
    result = run_contender(ContenderJob(PEER, "episodes_trl:measure_trl_episodes", (work, backend)), timeout)
    if "error" in result:
        return {**peer, "skipped": result["error"], "log": result.get("log", "")}
    facts = result["facts"]
    tokens, (seconds,) = facts["episodes"] * work.tokens, result["seconds"]
    tell(f"TRL with {backend}", seconds)
    rows = {"one_by_one": seconds, "at_once": facts["at_once_seconds"]}
    numbers = {name: {"seconds": each, "tokens_per_second": tokens / each} for name, each in rows.items()}
    return {**peer, "episodes": facts["episodes"], "waited": facts["waited"], **numbers}


def print_episodes(report: dict[str, Any]) -> None:
    console = Console()
    tools, latencies, machine = report["tools"], report["latencies_s"], report["machine"]
    console.print(
        Text(
            f"episodes: {report['model']} ({report['parameters'] / 1e6:,.0f} M), "
            f"{counted(report['episodes'], 'episode')} of {counted(tools['turns'], 'turn')} of "
            f"{counted(report['turn_tokens'], 'token')}, {tools['at_a_time']} at a time, {report['dtype']} on "
            f"{report['device']}",
            style="bold",
        )
    )
    name = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    console.print(
        Text(
            f"{name}; torch {machine['torch']}; tools take {latencies['median']:.2f} s (median), "
            f"{latencies['mean']:.2f} s (mean), {latencies['longest']:.1f} s (longest), {latencies['total']:,.0f} s "
            "(all)",
            style="dim",
        )
    )
    table = figure_table("", "seconds", "tokens/s", "of one turn", "ratio")
    engine = f"dapo, {report['engine']}"
    table.add_row(f"{engine}, in one turn", *_cells(report["one_turn"]), "", "")
    kind = "synchronous" if tools["sync"] else "asynchronous"
    table.add_row(f"{engine}, {kind} tools", *_cells(report), percent(report["share_of_one_turn"], 1), "")
    if steady := report["steady"]:
        table.add_row("  in the steady state", *_cells(steady), percent(steady["share_of_one_turn"], 1), "")
    peer = report.get("against", {})
    for key in ("one_by_one", "at_once"):
        if key in peer:
            label = f"TRL, {peer['backend']}, tools {key.replace('_', ' ')}"
            table.add_row(label, *_cells(peer[key]), "", f"{peer[key]['ratio']:.1f}×")
    console.print(table)
    worked, kept = percent(report["engine_share"]), f"{report['prefix_hits']:,} tokens of earlier turns"
    console.print(Text(f"the engine worked {worked} of the time; it kept {kept}"), highlight=False)
    if not report["steady"]:
        console.print(Text("no steady state: most episodes began at once; use --episodes 4 × --at-a-time or more"))
    if "skipped" in peer:
        console.print(Text(f"TRL with {peer['backend']} was skipped: {peer['skipped']}"), highlight=False)
    elif peer:
        added = "" if peer["waited"] else ", computed as its time without tools and the sum of their latencies"
        console.print(
            Text(
                f"TRL: {counted(peer['episodes'], 'episode')} in a batch; it makes tool calls one by one{added}. "
                "“at once” would be a TRL that makes all calls of a turn together"
            ),
            highlight=False,
        )


def _cells(numbers: dict[str, Any]) -> tuple[str, str]:
    return f"{numbers['seconds']:.2f}", f"{numbers['tokens_per_second']:,.0f}"
