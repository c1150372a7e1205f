"""A run with episodes of several turns, written by the run's own writer."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from board_runs import HOSTILE, make_run, metrics_of

from dapo_rl.board.detokenize import EMBEDDED
from dapo_rl.runs.directory import GroupRow, RunDirectory
from dapo_rl.types import Group, Prompt, Trajectory, Turn, Verdict


def call(name: str, arguments: Any, id_: str = "call_0") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(name: str, content: str, id_: str = "call_0") -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": id_, "content": content}


def text_of(message: dict[str, Any]) -> str:
    """A message as its tokens say it."""
    calls = [f"<tool_call>{json.dumps(each['function'])}</tool_call>" for each in message.get("tool_calls", ())]
    return "".join([message["content"] or "", *calls])


def episode(messages: list[dict[str, Any]], index: int = 0, rewards: dict[int, float] | None = None, **scalars: float):
    """A trajectory with tokens of the embedded model: a turn for each message of the policy and for what answers it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(EMBEDDED))
    ids: list[int] = []
    mask: list[bool] = []
    turns = []
    for policy, part in groupby(messages, lambda message: message["role"] == "assistant"):
        tokens = tokenizer.encode("".join(map(text_of, part)), add_special_tokens=False).ids
        end, number = len(ids) + len(tokens), len(turns)
        author = "policy" if policy else "environment"
        turns.append(Turn(len(ids), end, author, 0.5 * number + 0.25, (rewards or {}).get(number, 0.0)))
        ids += tokens
        mask += [policy] * len(tokens)
    logps = [-0.4 * (i % 7) if own else 0.0 for i, own in enumerate(mask)]
    return Trajectory(
        ids, logps, "".join(map(text_of, messages)), "stop", mask=mask, index=index,
        turns=tuple(turns), messages=tuple(messages), scalars=scalars,
    )  # fmt: skip


SUM = [
    {"role": "assistant", "content": "I ask.\n", "tool_calls": [call("calculator", {"expression": "12 * (3 + 4)"})]},
    result("calculator", "84"),
    {"role": "assistant", "content": "Answer: 84"},
]
MISTAKEN = [
    {"role": "assistant", "content": "", "tool_calls": [call("calculator", '{"expression": 12 *')]},
    result("calculator", "not valid JSON: Expecting value"),
    {
        "role": "assistant",
        "content": "Again: ",
        "tool_calls": [
            call("python", {"code": "x = 12\nfor i in range(3):\n    x += i\nprint(x)"}, "call_1"),
            call("search", {"query": "order of operations", "limit": 3}, "call_2"),
        ],
    },
    result("python", "15\n", "call_1"),
    result("search", "Parentheses first.\n" * 4, "call_2"),
    {"role": "user", "content": "One guess is left."},
    {"role": "assistant", "content": "Answer: 15"},
]
ATTACK = [
    {"role": "assistant", "content": HOSTILE, "tool_calls": [call(HOSTILE, {HOSTILE: HOSTILE}), call("b", HOSTILE)]},
    result(HOSTILE, HOSTILE),
    {"role": HOSTILE, "content": HOSTILE},
    {"role": "assistant", "content": HOSTILE},
]


def group_of_episodes(draw: int, *samples: Trajectory) -> Group:
    prompt = Prompt(f"p{draw}", "What is 12 * (3 + 4)?", [5, 6], answer="84", data_source="sums")
    right = ["84" in sample.text for sample in samples]
    verdicts = [Verdict(float(ok), ok, "correct" if ok else "wrong", "84" if ok else "15") for ok in right]
    return Group(draw, prompt, samples, tuple(verdicts))


def write_forked(run: RunDirectory, first: list[dict[str, Any]] = MISTAKEN) -> list[Trajectory]:
    """An episode of three trajectories in step 1; the update saw the last two."""
    parts = [episode(said) for said in (first, SUM[:1], SUM)]
    aside, later, last = parts
    later = later.replace(prompt_ids=aside.token_ids, train_logps=later.logps)
    last = last.replace(prompt_ids=later.token_ids, train_logps=last.logps, scalars={"forks": 2.0, "turns": 6.0})
    group = replace(group_of_episodes(1, last), forks=(aside.replace(prompt_ids=[5, 6]), later))
    run.write_rollouts(1, [GroupRow(group, "kept")], 0)
    return parts


def make_episode_run(path: Path) -> RunDirectory:
    """A step with a group of two episodes with tools and one of single turns."""
    run = make_run(path, steps=2, **{"model.name": "tiny"})
    run.metrics_path.unlink()
    for step in (1, 2):
        of_env = {"env/turns": 2.5, "env/tool_calls": 1.5, "env/tool_errors": 0.5, "env/wait_s": 1.25, "env/forks": 0.0}
        of_env |= {"env/failed": 0.125, "env/failed_timeout": 0.125}
        run.append_metrics(step, metrics_of(step) | of_env)
    samples = (
        episode(SUM, 0, {2: 1.0}, tool_calls=1, tool_errors=0, turns=2, env_wait_s=0.75, forks=0, env_reward=1.0),
        episode(
            MISTAKEN, 1, {0: -0.5, 2: 0.25}, tool_calls=3, tool_errors=1, turns=3, env_wait_s=6.5, forks=1,
            env_reward=-0.25,
        ).replace(finish_reason="turns"),
    )  # fmt: skip
    scored = tuple(
        sample.replace(advantages=1.0 - 2 * i, scalars={"reward": 1.0 - i, "length_penalty": 0.0})
        for i, sample in enumerate(samples)
    )
    single = Trajectory([5, 6, 7], -0.5, "no tool", "stop")
    rows = [
        GroupRow(group_of_episodes(1, *scored), "kept"),
        GroupRow(group_of_episodes(2, single), "all_wrong"),
        GroupRow(group_of_episodes(3, episode(ATTACK, tool_calls=2, tool_errors=1, turns=2)), "all_wrong"),
    ]
    run.write_rollouts(1, rows, 0)
    return run
