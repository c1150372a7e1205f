"""Run directories for the board's tests, written by the run's own writer."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from dapo_rl.config import Config
from dapo_rl.runs.directory import GroupRow, RunDirectory
from dapo_rl.types import Group, Prompt, Trajectory, Verdict

HOSTILE = (
    "<script>window.owned = 1</script><img src=x onerror='window.owned = 2'>"
    "\u202egnihtemos\u202c\x00\x1b[31m\u200b\u2066 </span></pre><style>body{display:none}</style>"
)


def make_group(
    draw: int, texts: list[tuple[str, bool]], prompt: str = "1+1=?", ids: tuple[int, ...] = (5, 6, 7)
) -> Group:
    return Group(
        draw=draw,
        prompt=Prompt(id=f"p{draw}", text=prompt, token_ids=(3, 4), answer="2", data_source="sums"),
        samples=tuple(
            Trajectory(ids, tuple(-0.5 * (i + 1) for i in range(len(ids))), text, "stop") for text, _ in texts
        ),
        verdicts=tuple(
            Verdict(1.0 if right else -1.0, right, "correct" if right else "wrong", "2" if right else "3")
            for _, right in texts
        ),
    )


def kept(group: Group) -> GroupRow:
    """Trained on; the update found the second token half as likely again as when it was sampled, the third half: the
    second was clipped where it was pushed up, the third where it was pushed down."""
    change = np.array([0.0, math.log(1.5), math.log(0.5)], np.float32)
    samples = tuple(
        s.replace(
            prompt_ids=group.prompt.token_ids,
            advantages=1.0 if v.correct else -1.0,
            train_logps=s.logps + change,
            entropies=[0.1, 0.2, 0.3],
            clipped=[0, 1, 0] if v.correct else [0, 0, 2],
            scalars={"reward": v.score - 0.25, "length_penalty": -0.25},
        )
        for s, v in zip(group.samples, group.verdicts, strict=True)
    )
    return GroupRow(replace(group, samples=samples), "kept")


def make_run(path: Path, steps: int = 3, *, text: str = "I think 2", **overrides: object) -> RunDirectory:
    """A run of a few steps: at each a kept group and one that was all right."""
    settings = [f"{key}={value}" for key, value in {"train.steps": steps, **overrides}.items()]
    config = Config.load(None, settings)
    run = RunDirectory.create(path, config)
    for step in range(1, steps + 1):
        run.append_metrics(step, metrics_of(step))
        groups = make_group(10 * step, [(text, True), ("no idea", False)]), make_group(10 * step + 1, [("2", True)] * 2)
        rows = [kept(groups[0]), GroupRow(groups[1], "all_correct")]
        run.write_rollouts(step, rows, config.log.keep_rollouts)
    return run


VALUES, ADVANTAGES = (-0.5, 0.25, 0.75), (0.5, 0.375, -1.0)
"""What a critic expects before each of three tokens, and the advantage that it gives them."""


def credited(row: GroupRow) -> GroupRow:
    """A kept group as a critic trained it."""
    samples = tuple(sample.replace(values=VALUES, advantages=ADVANTAGES) for sample in row.group.samples)
    return replace(row, group=replace(row.group, samples=samples))


def make_critic_run(path: Path, steps: int = 8, pretrain_steps: int = 2) -> RunDirectory:
    """A run of VAPO; both groups of a step are trained on, although the second is all right."""
    settings = {"preset": "vapo", "critic.pretrain_steps": pretrain_steps}
    run = make_run(path, steps, **settings)
    run.metrics_path.unlink()
    for step in range(1, steps + 1):
        of_policy = {} if step <= pretrain_steps else {"actor/entropy": 1 / step}
        of_critic = {"critic/vf_explained_var": step / 16 - 0.25, "critic/vf_loss": 1 / step}
        others = {name: value for name, value in metrics_of(step).items() if name != "actor/entropy"}
        run.append_metrics(step, others | of_policy | of_critic | {"actor/updates": 8 * bool(of_policy)})
        groups = make_group(10 * step, [("I think 2", True), ("no", False)]), make_group(10 * step + 1, [("2", True)])
        run.write_rollouts(step, [credited(kept(group)) for group in groups], None)
    return run


def metrics_of(step: int) -> dict[str, float | None]:
    return {
        "acc/mean": step / 10,
        "reward/mean": step / 5 - 1,
        "actor/entropy": 1 / step,
        "eval/accuracy": 0.5 if step % 2 == 0 else None,
        "sampling/tokens_generated": 12,
        "sampling/tokens_trained": 6,
        "sampling/wasted_share": 0.5,
        "timing_s/step": 2.0,
    }


def finish(run: RunDirectory, tokens: dict[str, int]) -> None:
    run.write_summary(
        {
            "finished": True,
            "steps": run.read_config().train.steps,
            "evaluations": [{"step": 0, "accuracy": 0.25}],
            "tokens": tokens,
            "wall_seconds": 9.0,
        }
    )


def append_line(run: RunDirectory, **values: float | str | None) -> None:
    with run.metrics_path.open("a") as file:
        file.write(json.dumps(values) + "\n")
