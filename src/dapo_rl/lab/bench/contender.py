"""Runs a function in a separate process, so that memory peaks and allocators do not interfere.

python -m dapo_rl.lab.bench.contender RESULT < JOB
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dapo_rl.errors import UserError

STACK_SIGNAL = signal.SIGUSR1
"""On this signal, the process of a contender writes its stack to its log."""


@dataclass(frozen=True, slots=True)
class ContenderJob:
    contender: str
    """`dapo`, `limit`, or a peer: `trl`, `generate`, an engine."""
    function: str
    """`module:name` in this package. Only its process imports it."""
    arguments: tuple[Any, ...]

    def run(self) -> dict[str, Any]:
        module, _, name = self.function.partition(":")
        result = getattr(import_module(f"dapo_rl.lab.bench.{module}"), name)(*self.arguments)
        return result if isinstance(result, dict) else asdict(result)


def main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    faulthandler.register(STACK_SIGNAL)
    job = pickle.load(sys.stdin.buffer)
    try:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        result = job.run()
    except UserError as error:
        result = {"error": str(error), "mistake": True}
    except Exception as error:
        traceback.print_exc()
        result = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
    Path(sys.argv[1]).write_text(json.dumps(result))
    # Libraries leave threads and engines behind that would keep the process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
