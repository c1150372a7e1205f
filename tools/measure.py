"""Runs the measurements of a list one after the other, and keeps what each printed.

    python tools/measure.py OUT                      # all of tools/measurements.yaml that OUT does not have yet
    python tools/measure.py OUT step-7b wide-135m --list mine.yaml

OUT/NAME.txt has what a command printed, and OUT/results.tsv a line for each: its name, exit status and seconds. After
its limit, a command is ended with all its processes, and the next one begins. A name that has a line in results.tsv is
not run again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

import yaml

LIST = Path(__file__).with_name("measurements.yaml")
GRACE_S = 5.0
"""Seconds between the request to end and the kill."""


def measure(words: Sequence[str], limit_s: float, output: Path) -> tuple[int | None, float]:
    """Runs a command; its exit status, or None if it took too long, and its seconds."""
    started = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    return status, time.monotonic() - started


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and whatever it left behind in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        if number == signal.SIGTERM:
            time.sleep(0.1)
    process.wait()


def run_list(commands: Mapping[str, tuple[float, str]], out: Path, wanted: Sequence[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.tsv"
    done = {line.split("\t")[0] for line in results.read_text().splitlines()} if results.exists() else set()
    values = {**os.environ, "OUT": str(out)}
    for name in wanted or commands:
        if name in done:
            continue
        limit_s, command = commands[name]
        words = [Template(word).substitute(values) for word in shlex.split(command)]
        print(f"{name}: {shlex.join(words)}", flush=True)
        status, seconds = measure(words, limit_s, out / f"{name}.txt")
        ended = "too long" if status is None else status
        print(f"{name}: {ended}, {seconds:.0f} s", flush=True)
        with results.open("a") as file:
            file.write(f"{name}\t{ended}\t{seconds:.1f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", type=Path, default=LIST)
    arguments = parser.parse_intermixed_args()
    commands = {
        name: (float(limit), command) for name, (limit, command) in yaml.safe_load(arguments.list.read_text()).items()
    }
    if unknown := [name for name in arguments.names if name not in commands]:
        sys.exit(f"{arguments.list}: no measurement is named {unknown[0]}; there are {', '.join(commands)}")
    try:
        run_list(commands, arguments.out.resolve(), arguments.names)
    except KeyError as error:
        sys.exit(f"{arguments.list}: set the environment variable {error.args[0]}")


if __name__ == "__main__":
    main()
