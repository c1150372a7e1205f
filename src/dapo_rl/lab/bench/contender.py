"""Runs one contender in a separate process, so that memory peaks and allocators do not interfere.

python -m dapo_rl.lab.bench.contender RESULT < JOB
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from dapo_rl.errors import UserError
from dapo_rl.lab.bench.workload import STACK_SIGNAL, BenchJob

MEASURES = {
    "limit": "machine:measure_limit",
    "trl": "trl:measure_trl",
    "generate": "rollout:measure_generate",
    "rollout": "rollout:measure_engine",
    "update": "update:measure_update",
    "step": "step:measure_step",
    "episodes": "episodes:measure_episodes",
    "resolve": "episodes:resolve_work",
    "trl episodes": "episodes_trl:measure_trl_episodes",
}
"""The module and function that measure a contender; for an engine, ours or a peer's, by the kind of work."""


def run_job(job: BenchJob) -> dict[str, Any]:
    """Runs a contender. Its module is imported here, so that each contender loads only its own."""
    where = MEASURES.get(f"{job.contender} {job.work.kind}") or MEASURES.get(job.contender) or MEASURES[job.work.kind]
    module, _, name = where.partition(":")
    result = getattr(import_module(f"dapo_rl.lab.bench.{module}"), name)(job.work, job.variant)
    return result if isinstance(result, dict) else asdict(result)


def main() -> None:
    answer_job(lambda text: run_job(BenchJob.from_json(text)))


def answer_job(run: Callable[[str], dict[str, Any]]) -> None:
    """Runs a job from the standard input, and writes its result to the file of the first argument."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    faulthandler.register(STACK_SIGNAL)
    job = sys.stdin.read()
    try:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        result = run(job)
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
