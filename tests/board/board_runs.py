"""Run directories for the board's tests, written by the run's own writer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dapo_rl.config import Config
from dapo_rl.runs.directory import GroupRow, RunDirectory
from dapo_rl.types import Group, Prompt, Sample, ScoredSample, TrainedTokens, Verdict

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
        samples=tuple(Sample(ids, tuple(-0.5 * (i + 1) for i in range(len(ids))), text, "stop") for text, _ in texts),
        verdicts=tuple(
            Verdict(1.0 if right else -1.0, right, "correct" if right else "wrong", "2" if right else "3")
            for _, right in texts
        ),
    )


def kept(group: Group) -> GroupRow:
    """Trained on; the update found the second token half as likely again as when it was sampled, the third half."""
    scores = [ScoredSample(v.score - 0.25, -0.25, 1.0 if v.correct else -1.0) for v in group.verdicts]
    change = (0.0, math.log(1.5), math.log(0.5))
    tokens = [
        TrainedTokens(tuple(a + b for a, b in zip(s.logps, change, strict=True)), (0.1, 0.2, 0.3))
        for s in group.samples
    ]
    return GroupRow(group, "kept", scores, tokens)


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
        add_clipped(run.rollout(step))
    return run


def add_clipped(path: Path) -> None:
    """What the update says of the tokens of `kept`: the second clipped high where it pushes up, the third low."""
    table = pq.read_table(path)
    if "clipped" in table.column_names:
        table = table.drop_columns(["clipped"])
    values = [None if a is None else [0, 1, 0] if a > 0 else [0, 0, 2] for a in table.column("advantage").to_pylist()]
    pq.write_table(table.append_column("clipped", pa.array(values, pa.list_(pa.int8()))), path)


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
            "steps": 3,
            "evaluations": [{"step": 0, "accuracy": 0.25}],
            "tokens": tokens,
            "wall_seconds": 9.0,
        }
    )


def append_line(run: RunDirectory, **values: float | str | None) -> None:
    with run.metrics_path.open("a") as file:
        file.write(json.dumps(values) + "\n")
