"""`dapo plan`: makes a plan and prints or draws it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.lab.plan.gpus import find_gpu
from dapo_rl.lab.plan.planning import Question, plan_json, plan_run
from dapo_rl.lab.plan.show import print_plan


def run_plan(config: Config, gpu: str, options: Mapping[str, Any], picture: Path | None, as_json: bool) -> None:
    """`options` are the other fields of a Question."""
    question = Question(config, find_gpu(gpu), **options)
    with Console(stderr=True).status("simulating"):
        plan = plan_run(question)
    if as_json:
        print(json.dumps(plan_json(plan), indent=2))
    else:
        print_plan(plan)
    if not plan.results:
        raise UserError(f"plan: the run does not fit on {question.gpus} × {gpu}")
    if picture is not None:
        from dapo_rl.lab.plan.picture import draw_plan

        draw_plan(plan, picture)
