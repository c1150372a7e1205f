"""`dapo convert`: its options and output."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dapo_rl.base.files import atomic_write
from dapo_rl.base.quote import cut, printable
from dapo_rl.config.peers.values import written
from dapo_rl.convert.draft import STATUSES, ConvertedSetting
from dapo_rl.convert.read_run import read_run, read_words
from dapo_rl.convert.write_recipe import Converted, convert_run, recipe_text
from dapo_rl.errors import UserError

CONVERT_HELP = """Convert a run of verl, TRL, ms-swift or AReaL to a recipe.

\b
  dapo convert run_dapo.sh > recipe.yaml
  dapo convert config.yaml --out recipe.yaml
  dapo convert -- swift rlhf --rlhf_type grpo --beta 0 ...

Reads a shell script, YAML, JSON (args.json, GRPOConfig) or a command line.
Nothing is run: a value known only at run time is reported as not known.

The recipe goes to stdout, a table to stderr. It lists every setting as same,
default here, differs, no counterpart, or unknown to dapo convert.
"""
_STYLES = {"same": "green", "default here": "green", "no counterpart": "dim", "differs": "yellow"}


def convert_command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="FILE | -- COMMAND", show_default=False, hidden=True)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the recipe to this file.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 2 if learning would change.")] = False,
    prompts: Annotated[
        int | None,
        typer.Option("--prompts", "--rows", min=1, help="Number of training prompts, to turn epochs into steps."),
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Number of training processes, for batch sizes.")] = None,
    command: Annotated[
        int | None, typer.Option(min=1, help="Which training command of a script, if it has several.")
    ] = None,
) -> None:
    words = arguments or []
    if not words:
        raise UserError("convert: name a file, or give a command line after --")
    is_file = len(words) == 1 and not any(character in words[0] for character in " \t\n")
    run = read_run(Path(words[0]), command) if is_file else read_words(words)
    converted = convert_run(run, prompts, processes)
    # In a file or a pipe, keys stay whole.
    wide = None if sys.stderr.isatty() or "COLUMNS" in os.environ else 160
    print_conversion(converted, Console(stderr=True, width=wide))
    if strict and converted.changes:
        keys = ", ".join(row.key for row in converted.changes)
        raise UserError(f"--strict: learning would change: {keys}")
    text = recipe_text(converted)
    if out is None:
        print(text, end="")
    else:
        atomic_write(out, text)


def print_conversion(converted: Converted, console: Console) -> None:
    """The table, in 80 columns or more."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column(f"{converted.library}", overflow="fold", ratio=5)
    table.add_column("value", max_width=16, overflow="fold")
    table.add_column("here", overflow="fold", ratio=7)
    for status in STATUSES:
        rows = [row for row in converted.rows if row.status == status]
        if rows:
            table.add_row(Text(f"{status} ({len(rows)})", style=f"bold {_STYLES.get(status, 'red')}"), "", "")
        for row in rows:
            table.add_row(*_cells(row))
        table.add_section()
    console.print(table)
    changes = [row.key for row in converted.changes]
    verdict = f"learning would change ({len(changes)}): {', '.join(changes)}" if changes else "learning is the same"
    console.print(Text(f"{len(converted.rows)} settings; {printable(verdict)}", style="bold"))


def _cells(row: ConvertedSetting) -> tuple[Text, Text, Text]:
    key = printable(cut(row.key, 120))
    name = key if row.is_set or key.startswith("(") else f"{key} (its default)"
    here = printable("; ".join(part for part in (row.here, row.note) if part))
    mark = ("! ", "bold red") if row.learns else ("", "")
    return Text(name), Text(printable(cut(written(row.value), 60))), Text.assemble(mark, here)
