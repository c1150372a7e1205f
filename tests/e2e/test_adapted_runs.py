"""Whole runs with environments that other software serves: verifiers, OpenEnv, MCP."""

import json
import re
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import tool_model
from openenv_process import serve_openenv
from support import REPOSITORY

from dapo_rl import DAPOTrainer
from dapo_rl.config import Config
from dapo_rl.envs.endpoint import METHODS
from dapo_rl.models.load import TINY

pytestmark = pytest.mark.slow

SMALL = [
    *("train.steps=2", "train.warmup_steps=0", "sampling.prompts_per_step=2", "sampling.group_size=4"),
    *("sampling.max_new_tokens=48", "train.mini_batches=1", "train.epochs_per_step=1", "sampling.dynamic=false"),
    *("data.eval=null", "eval.every=null", "log.report=false", "env.max_turns=3", "env.workers=2"),
]
STOP = "sampling.stop=['</tool_call>']"
"""The embedded model rarely ends a turn by itself."""


def train(directory, *settings):
    """The steps' metrics and the conversations of a run, of which no episode failed."""
    DAPOTrainer(config=Config.load(None, [*SMALL, *settings]), run_dir=directory).train()
    assert json.loads((directory / "summary.json").read_text())["steps"] == 2
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"]]
    assert all(step["env/failed"] == 0 for step in steps)
    files = sorted((directory / "rollouts").glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return steps, [(row, json.loads(row["messages"])) for row in rows]


@pytest.mark.parametrize(
    ("options", "other"),
    [("{}", "/inference/v1/generate"), (f"{{model: {TINY}}}", "/v1/chat/completions")],
    ids=["messages", "tokens"],
)
def test_a_taskset_of_verifiers(tmp_path, monkeypatch, options, other):
    """Its tasks are the data, and its rewards those of the run. With `model`, verifiers renders the prompts."""
    monkeypatch.delitem(METHODS, other)
    pytest.importorskip("verifiers.v1")
    tasksets = str(REPOSITORY / "tests" / "envs" / "tasksets")
    monkeypatch.syspath_prepend(tasksets)
    monkeypatch.setenv("PYTHONPATH", tasksets)
    settings = ["env.name=verifiers:digits_taskset", "data.train=tasks", "sampling.stop=['1', '2', '3']"]
    _, rows = train(tmp_path / "run", *settings, f"env.options={options}")
    for row, messages in rows:
        (message,) = messages
        digit = re.fullmatch(r"(\d)\+0=\?", row["prompt"].strip()).group(1)
        assert row["score"] == (2.0 if message["content"].strip().endswith(digit) else 0.0)
    assert len({row["score"] for row, _ in rows}) == 2


def test_an_openenv_server(tmp_path):
    """Each episode is a session of the server."""
    served = serve_openenv("words", sessions=64)
    settings = ["data.train=tasks", "sampling.max_new_tokens=24", "env.max_turn_tokens=8", "sampling.stop=['1']"]
    steps, rows = train(tmp_path / "run", f"env.name=openenv:{next(served)}", *settings)
    served.close()
    assert all(step["env/tool_calls"] > 0 for step in steps)
    assert any(len(messages) > 1 for _, messages in rows)
    for step in steps:
        scores = [row["score"] for row, _ in rows if row["step"] == step["step"]]
        assert sum(scores) / len(scores) == pytest.approx(-0.25 * step["env/tool_calls"]), "its rewards"
    for _, messages in rows:
        turns = [message["content"] for message in messages if message["role"] == "assistant"]
        heard = [json.loads(message["content"]) for message in messages if message["role"] == "user"]
        assert [each["text"] for each in heard] == [f"heard {turn.strip()}" for turn in turns[: len(heard)]]


def test_the_environment_of_trl_s_documentation(tmp_path):
    """Its tool changes the state of its episode, and the state makes the reward."""
    pytest.importorskip("trl")
    calls = [f'<tool_call>{{"name": "increment", "arguments": {{"step": {step}}}}}</tool_call>' for step in range(1, 5)]
    tool_model.save(tmp_path / "model", calls)
    name = f"env.name={REPOSITORY / 'examples' / 'trl_environment.py'}:IncrementEnv"
    steps, rows = train(tmp_path / "run", f"model.name={tmp_path / 'model'}", name, "data.train=tasks", STOP)
    assert all(step["env/tool_calls"] > 0 for step in steps)
    for row, messages in rows:
        counters = [int(message["content"]) for message in messages if message["role"] == "tool"]
        made = [call["function"]["arguments"]["step"] for each in messages for call in each.get("tool_calls") or ()]
        assert counters == [sum(made[:number]) for number in range(1, len(counters) + 1)]
        assert row["score"] in (0, 1)


def test_an_mcp_server(tmp_path):
    """Its tools are the episode's tools, beside those of the settings."""
    pytest.importorskip("mcp.server.mcpserver")
    calls = [call.replace('"calculator"', '"calculate"') for call in tool_model.CALLS]
    tool_model.save(tmp_path / "model", calls)
    server = Path(__file__).with_name("mcp_calculator.py")
    settings = [f"env.mcp=[{sys.executable} {server}]", "data.train={source: arithmetic, size: 32}"]
    steps, rows = train(tmp_path / "run", f"model.name={tmp_path / 'model'}", *settings)
    assert all(step["env/tool_calls"] > 0 for step in steps)
    results = {message["content"] for _, messages in rows for message in messages if message["role"] == "tool"}
    assert results & {"15", "13", "42", "7", str(2**70)}
    assert results <= {"15", "13", "42", "7", str(2**70)} | {text for text in results if text.startswith("error: ")}
