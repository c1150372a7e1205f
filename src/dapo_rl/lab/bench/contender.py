"""Runs one contender in a separate process, so that memory peaks and allocators do not interfere.

python -m dapo_rl.lab.bench.contender RESULT < JOB
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dapo_rl.errors import UserError
from dapo_rl.lab.bench.workload import STACK_SIGNAL, Job, Workload


def run_job(job: Job) -> dict[str, Any]:
    """Runs a contender. Modules are imported here, so that each contender loads only its own."""
    if job.contender == "limit":
        return measure_limit(job.work)
    if job.contender == "trl":
        from dapo_rl.lab.bench.trl import measure_trl

        return asdict(measure_trl(job.work, job.variant))
    if job.contender == "generate":
        from dapo_rl.lab.bench.rollout import measure_generate

        return asdict(measure_generate(job.work, job.variant))
    if job.work.kind == "rollout":
        from dapo_rl.lab.bench.rollout import measure_engine

        return asdict(measure_engine(job.work, job.variant))
    if job.work.kind == "update":
        from dapo_rl.lab.bench.update import measure_update

        return asdict(measure_update(job.work))
    from dapo_rl.lab.bench.step import measure_step

    return asdict(measure_step(job.work))


def measure_limit(work: Workload) -> dict[str, Any]:
    """The machine's rates, and what `auto` resolves to on it."""
    from dapo_rl.lab.bench.machine import bandwidth, describe_machine, matmul_rate
    from dapo_rl.lab.bench.model_shapes import check_model
    from dapo_rl.models.load import compute_dtype, pick_device

    check_model(work.model)
    device = pick_device(work.device)
    dtype = compute_dtype(work.config().model, device)
    return {
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "machine": describe_machine(device),
        "bandwidth_bytes_per_s": bandwidth(device),
        "matmul_flops_per_s": matmul_rate(device, dtype),
    }


def main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    faulthandler.register(STACK_SIGNAL)
    job = Job.from_json(sys.stdin.read())
    try:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        result = run_job(job)
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
