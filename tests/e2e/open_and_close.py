"""Ten runs in one process, one after the other; prints what each left behind, a line of JSON per run."""

import gc
import json
import os
import sys
import tempfile
import weakref
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from support import SMALL

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cli import DEFAULT_RECIPE

RUNS = 10


def children():
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main():
    config = Config.load(DEFAULT_RECIPE, [*SMALL, "train.steps=1", "data.eval=null", "eval.every=null"])
    gc.disable()  # nothing may wait for a collection
    for number in range(RUNS):
        with tempfile.TemporaryDirectory() as directory, redirect_stdout(StringIO()):
            with DAPOTrainer(config=config, run_dir=Path(directory) / "run") as trainer:
                steps = trainer.train()["steps"]
                model, processes = weakref.ref(trainer.model), children()
            del trainer
        row = {
            "run": number + 1,
            "steps": steps,
            "processes": len(processes),
            "left": len(children()),
            "model": model() is not None,
            "threads": len(list(Path("/proc/self/task").iterdir())),
            "files": len(os.listdir("/proc/self/fd")),
            "mib": resident_bytes() / 2**20,
        }
        print(json.dumps(row), file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
