"""The kill test: a run that is killed again and again and resumed each time ends as the run that never was.

    python tests/e2e/chaos.py                       the embedded default, 20 kills
    python tests/e2e/chaos.py --kills 4 train.steps=6 checkpoint.every=1
    python tests/e2e/chaos.py guess sampling.surplus=carry train.steps=24      with an environment
    python tests/e2e/chaos.py --tools train.steps=24 checkpoint.every=1        with tools, on a model that calls them
    python tests/e2e/chaos.py cluster.backend=ray cluster.ranks=2

It watches the run directory to know what the run is doing, so that kills are aimed: in the middle of writing a
checkpoint, right after one has its name, right after a line of the log, while sampling, in the update; and others come
at any time. With ranks, some kills take one of them: the run continues by itself, and is killed later. The weights, the
optimizer's state and everything else in the last checkpoint, the log, the rollouts and the model must then be those of
an undisturbed run, to the last bit; only times may differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))
import forked
import tool_model
from forked import DAPO

AIMS = ("checkpoint", "renamed", "logged", "sampling", "update", "any time")
RANK_AIMS = ("a rank", "checkpoint", "a rank", "renamed", "a rank", "logged", "a rank", "update", "a rank", "any time")


@dataclass(frozen=True)
class Kill:
    aim: str
    found: str
    """What the run directory showed when the kill came."""
    resumed_from: str = ""


class Process(Protocol):
    pid: int

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


Launcher = Callable[[list[str], Path], Process]
"""Runs `dapo` with some words, its output in a file."""


def command(popen: type[subprocess.Popen[bytes]] = subprocess.Popen, threads: str | None = "1") -> Launcher:
    """The command itself, or forked from a process that has imported everything, which makes many starts cheap."""
    environment = os.environ | ({"OMP_NUM_THREADS": threads} if threads else {})

    def launch(words: list[str], output: Path) -> Process:
        with output.open("wb") as file:
            return popen([DAPO, *words], env=environment, stdout=file, stderr=subprocess.STDOUT)

    return launch


class Run:
    """`dapo train` in a directory, watched from outside."""

    def __init__(self, path: Path, settings: list[str], launch: Launcher) -> None:
        self.path, self._settings, self._launch = path, settings, launch
        self.output = path.with_name(f"{path.name}.txt")

    def start(self) -> Process:
        """Goes on where there is a run, and begins where there is none yet."""
        begin_or_resume = ["--resume"] if (self.path / "config.yaml").exists() else self._settings
        return self._launch(["train", *begin_or_resume, "--run", str(self.path)], self.output)

    def drafts(self) -> list[str]:
        return sorted(path.name for path in (self.path / "checkpoints").glob(".step-*.part"))

    def last_checkpoint(self) -> int:
        names = (path.name.removeprefix("step-") for path in (self.path / "checkpoints").glob("step-*"))
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def log_size(self) -> int:
        log = self.path / "metrics.jsonl"
        return log.stat().st_size if log.exists() else 0

    def lines(self) -> list[dict[str, float]]:
        """The lines of steps: line 0 has only the evaluation before the first."""
        log = self.path / "metrics.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [line for line in lines if line["step"] > 0]

    def logged(self) -> int:
        """The last step in the log."""
        log = self.path / "metrics.jsonl"
        lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
        return sum(not line.startswith(b'{"step": 0,') for line in lines)

    def describe(self) -> str:
        writing = "".join(f", writing {name}" for name in self.drafts())
        return f"log at step {self.logged()}, last checkpoint {self.last_checkpoint()}{writing}"

    def restarts(self) -> int:
        """How often this process has started its ranks again."""
        return self.output.read_text(errors="replace").count("the ranks were started again")

    def resumed_from(self) -> str:
        output = self.output.read_text(errors="replace")
        for line in output.splitlines():
            if line.startswith("resumed from "):
                return f"step {line.rsplit('step-', 1)[1]}"
        return "the start" if output else "nothing"


def whole_run(run: Run) -> float:
    """Runs to the end, whatever is there already; the seconds it took."""
    started = time.monotonic()
    process = run.start()
    _must_be_zero(process.wait(), run)
    return time.monotonic() - started


def killed_run(run: Run, aim: str, dice: random.Random, reference: list[dict[str, float]]) -> Kill | None:
    """Starts or resumes the run and kills it; None when it was done before the kill."""
    process = run.start()
    if not _comes(_moment(run, aim, dice, reference), process, run):
        return None
    found, resumed_from = run.describe(), run.resumed_from()
    if aim == "a rank" and (ranks := rank_processes(process.pid)):
        os.kill(dice.choice(ranks), dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
        if not _comes(lambda: run.restarts() > 0, process, run):
            return Kill(aim, found, resumed_from)
        _comes(_moment(run, "any time", dice, reference), process, run)
    process.kill()
    process.wait()
    return Kill(aim, found, resumed_from)


def _comes(moment: Callable[[], bool], process: Process, run: Run) -> bool:
    """Whether the moment comes before the run is done."""
    while not moment():
        if (code := process.poll()) is not None:
            _must_be_zero(code, run)
            return False
        time.sleep(0.0005)
    return True


def rank_processes(driver: int) -> list[int]:
    """The processes of a run's ranks."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, new = set[int](), {driver}
    while new:
        found |= new
        new = {child for child, parent in parents.items() if parent in new} - found
    return sorted(pid for pid in found if pid in parents and _is_rank(pid))


def _is_rank(pid: int) -> bool:
    try:
        return b"RankActor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _must_be_zero(code: int, run: Run) -> None:
    if code != 0:
        raise SystemExit(f"chaos: the run ended with {code}:\n{run.output.read_text()}")


def _moment(run: Run, aim: str, dice: random.Random, reference: list[dict[str, float]]) -> Callable[[], bool]:
    """A question whose answer becomes yes at the moment to kill."""
    checkpoint, lowest = run.last_checkpoint(), [run.log_size()]
    began, delay, share = time.monotonic(), dice.uniform(0.0, 0.03), dice.random()
    due: list[float] = []

    def after(event: bool, seconds: Callable[[], float]) -> bool:
        if event and not due:
            due.append(time.monotonic() + seconds())
        return bool(due) and time.monotonic() >= due[0]

    def new_line() -> bool:
        """A resumed run first shortens the log: what comes after that is new."""
        size = run.log_size()
        lowest[0] = min(lowest[0], size)
        return size > lowest[0]

    def next_step(part: str) -> float:
        """Seconds from the beginning of the next step to somewhere in a part of it, as the undisturbed run had it."""
        row = reference[min(run.logged(), len(reference) - 1)]
        before = row["timing_s/gen"] + row["timing_s/verify"] if part == "update" else 0.0
        return before + share * row[f"timing_s/{part}"]

    mean_step = sum(row["timing_s/step"] for row in reference) / len(reference)
    return {
        "checkpoint": lambda: after(bool(run.drafts()), lambda: delay),
        "renamed": lambda: run.last_checkpoint() > checkpoint,
        "logged": new_line,
        "sampling": lambda: after(new_line() and not run.drafts(), lambda: next_step("gen")),
        "update": lambda: after(new_line() and not run.drafts(), lambda: next_step("update")),
        "any time": lambda: time.monotonic() - began >= share * (10.0 + 5 * mean_step),
        "a rank": lambda: after(new_line(), lambda: 2 * share * mean_step),
    }[aim]


def differences(one: Path, other: Path) -> list[str]:
    """What two run directories do not have in common, times aside."""
    found = []
    for name in ("metrics.jsonl", "summary.json"):
        if _without_times(one / name) != _without_times(other / name):
            found.append(name)
    tables = [sorted(path.name for path in (run / "rollouts").iterdir()) for run in (one, other)]
    if tables[0] != tables[1]:
        found.append(f"rollouts: {tables[0]} and {tables[1]}")
    for name in set(tables[0]) & set(tables[1]):
        if _rows(one / "rollouts" / name) != _rows(other / "rollouts" / name):
            found.append(f"rollouts/{name}")
    for folder in ("checkpoints", "model"):
        files = [
            {path.relative_to(run) for path in (run / folder).rglob("*") if path.is_file()} for run in (one, other)
        ]
        found += [str(path) for path in files[0] ^ files[1]]
        for path in files[0] & files[1]:
            if path.name == "manifest.json":  # the checksum of a file with times in it
                continue
            readers = {
                "progress.json": _without_times,
                "log.json": _without_times,
                ".metadata": _without_identity,
                "trajectories.parquet": _rows,
            }
            read = readers.get(path.name, Path.read_bytes)
            if read(one / path) != read(other / path):
                found.append(str(path))
    leftovers = [path for path in other.rglob(".*") if path.name.startswith(".") and path.name != ".metadata"]
    return sorted([*found, *(f"left over: {path.relative_to(other)}" for path in leftovers)])


def _rows(path: Path) -> list[str]:
    """Rows of rollouts or saved trajectories without times, as text, since NaN is not equal to itself."""
    rows = pq.read_table(path).to_pylist()
    for row in rows:
        for name in ("env_wait_s", "scalars/env_wait_s"):
            row.pop(name, None)
        for turn in row.get("turns") or ():
            del turn["seconds"]
    return [repr(row) for row in rows]


def _without_identity(path: Path) -> object:
    """The index of shards has a random name, and the path of the run."""
    index = pickle.loads(path.read_bytes())
    return index.state_dict_metadata, index.storage_data


def _without_times(path: Path) -> object:
    text = path.read_text()
    return _strip([json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text))


def _strip(value: object) -> object:
    """Times, speeds and paths differ from run to run, and the log's bytes with them."""
    if isinstance(value, dict):
        if value.keys() == {"lines", "bytes"}:
            return value["lines"]
        aside = ("timing_s/", "perf/", "engine/", "rank/", "env/wait_s", "wall_seconds", "paths")
        return {key: _strip(inner) for key, inner in value.items() if not key.startswith(aside)}
    # As text, since NaN is not equal to itself.
    return [_strip(inner) for inner in value] if isinstance(value, list) else repr(value)


def chaos(
    directory: Path,
    kills: int,
    settings: list[str],
    seed: int = 0,
    launch: Launcher | None = None,
    say: Callable[[str], None] = print,
) -> tuple[list[Kill], list[str]]:
    """Both runs; the kills that came, and what differs in the end."""
    launch = launch or command()
    undisturbed, killed = (Run(directory / name, settings, launch) for name in ("undisturbed", "killed"))
    say(f"undisturbed: {whole_run(undisturbed):.0f} s, {len(undisturbed.lines())} steps")
    dice, done, finished = random.Random(seed), [], False
    aims = RANK_AIMS if "cluster.backend=ray" in settings else AIMS
    while len(done) < kills and not finished:
        aim = aims[len(done) % len(aims)]
        kill = killed_run(killed, aim, dice, undisturbed.lines())
        finished = kill is None
        if kill is not None:
            done.append(kill)
            say(f"kill {len(done):>2}: aim {aim:<10}  started from {kill.resumed_from:<9}  {kill.found}")
    seconds = whole_run(killed)
    say(f"resumed from {killed.resumed_from()}, to the end: {seconds:.0f} s")
    return done, differences(undisturbed.path, killed.path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", default="1", help="OMP_NUM_THREADS of both runs; 0 leaves it alone")
    parser.add_argument("--fork", action="store_true", help="fork the runs from one process: faster starts")
    parser.add_argument("--tools", action="store_true", help="a recipe with tools, which the settings change")
    parser.add_argument("--keep", type=Path, help="where to leave both runs; by default they are removed")
    parser.add_argument("settings", nargs="*", help="key=value for `dapo train`")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = words.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        popen = forked.Popen if words.fork else subprocess.Popen
        launch = command(popen, None if words.threads == "0" else words.threads)
        settings = [*tool_model.recipe(directory / "tool-model"), *words.settings] if words.tools else words.settings
        kills, found = chaos(directory, words.kills, settings, words.seed, launch)
    if found:
        raise SystemExit(f"chaos: {len(kills)} kills, and these differ: {', '.join(found)}")
    print(f"chaos: {len(kills)} kills, and the run is the undisturbed one to the last bit")
    if len(kills) < words.kills:
        raise SystemExit(f"chaos: the run was done after {len(kills)} of {words.kills} kills; give it more steps")


if __name__ == "__main__":
    main()
