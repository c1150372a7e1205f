"""The entry point of `dapo`: runs a command, and explains errors.

Exit codes: 0 done, 1 a bug, 2 the user's mistake, 3 diverged, 130 or 143 stopped by a signal and saved, 141 the
reader of the output closed the pipe.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import cache
from typing import Any

import typer
from rich.console import Console

from dapo_rl.base.os_errors import explain_os_error
from dapo_rl.base.streams import CLOSED_PIPE, complain, nobody_reads, open_streams, release_streams
from dapo_rl.commands import app
from dapo_rl.config import known_keys
from dapo_rl.config.recipe import setting_named
from dapo_rl.demo import DEFAULT_RECIPE as DEFAULT_RECIPE
from dapo_rl.errors import DivergedError, UserError

COMPLETION = "_DAPO_COMPLETE"
"""The variable by which typer's scripts ask for the candidates of a word."""


def main() -> None:
    """The entry point. Every error that a user can cause is printed as one line."""
    open_streams()
    try:
        code = _invoke(sys.argv[1:])
        sys.stdout.flush()
    except (UserError, DivergedError) as error:
        complain(str(error), getattr(error, "more", ""))
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):  # before a run has started
        complain("stopped")
        code = 128 + signal.SIGINT
    except OSError as error:
        code = _handle_os_error(error)
    except Exception as error:
        # click's own errors (a missing argument, an unknown option) have a method to show themselves.
        if not hasattr(error, "show"):
            raise
        error.show()
        code = getattr(error, "exit_code", 2)
    finally:
        release_streams()
    sys.exit(code)


@cache
def root_command() -> Any:
    """`dapo` with all its commands."""
    return typer.main.get_command(app)


def _invoke(words: list[str]) -> int:
    """Runs the command. typer and rich would exit silently on any broken pipe, not only that of stdout."""
    Console.on_broken_pipe = _raise_again  # type: ignore
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory has been removed; change to another") from None
    command = root_command()
    if COMPLETION in os.environ:
        os.environ["COLUMNS"] = "1000"  # a candidate and its help are one line
        command.main(prog_name="dapo")  # completes and exits
    try:
        with command.make_context("dapo", words) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except Exception as error:
        _explain_option(words, error)
        raise
    return 0


def _explain_option(words: list[str], error: Any) -> None:
    """Raises UserError for an unknown option that is the name of a setting: `--seed 3` or `--train.lr=1e-6`."""
    option = getattr(error, "option_name", None)
    if option is None or not any("KEY=VALUE" in (each.metavar or "") for each in error.ctx.command.params):
        return
    name = option.lstrip("-").replace("-", "_")
    key = name if name in known_keys() else setting_named(name, known_keys())
    place = next((i for i, word in enumerate(words) if word.partition("=")[0] == option), None)
    if key is None or place is None:
        return
    _, equals, value = words[place].partition("=")
    following = words[place + 1] if place + 1 < len(words) else ""
    if not equals:
        value = following if following and not following.startswith("--") and "=" not in following else "VALUE"
    raise UserError(f"{option}: settings are written key=value, without dashes: {key}={value}")


def _raise_again(_console: Console) -> None:
    raise


def _handle_os_error(error: OSError) -> int:
    """The exit code for errors that a user can fix, and for `dapo … | head`; any other error is raised again."""
    if isinstance(error, BrokenPipeError) and nobody_reads(sys.stdout):
        return CLOSED_PIPE
    line = explain_os_error(error)
    if line is None:
        raise error
    complain(line)
    return 2


if __name__ == "__main__":
    main()
