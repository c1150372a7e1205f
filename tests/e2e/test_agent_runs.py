"""Whole runs with agents: the embedded model answers their calls."""

import json
import re
import sys

import pyarrow.parquet as pq
import pytest

from dapo_rl import DAPOTrainer
from dapo_rl.config import Config

pytestmark = pytest.mark.slow

SMALL = [
    *("train.steps=1", "train.warmup_steps=0", "sampling.prompts_per_step=2", "sampling.group_size=4"),
    *("sampling.max_new_tokens=24", "train.mini_batches=1", "train.epochs_per_step=1", "sampling.dynamic=false"),
    *("data.train={source: arithmetic, size: 32}", "data.eval=null", "eval.every=null", "log.report=false"),
]


def train(directory, *settings):
    """The rows of a run of one step, of which no episode failed."""
    DAPOTrainer(config=Config.load(None, [*SMALL, *settings]), run_dir=directory).train()
    (step,) = [line for line in map(json.loads, (directory / "metrics.jsonl").open()) if line["step"]]
    assert step["env/failed"] == 0
    rows = [row for file in (directory / "rollouts").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert len(rows) == 8
    return rows


LONG = """
import contextlib
import openai

async def solve(task, client):
    (model,) = (await client.models.list()).data
    url = str(client.base_url).removesuffix("/v1/") + "/inference/v1/generate"
    codes = []
    for length in (600, model.max_model_len):
        try:
            await client.post(url, body={"token_ids": [5] * length, "sampling_params": {}}, cast_to=object)
        except openai.BadRequestError as error:
            codes.append(error.code)
    with contextlib.suppress(openai.APIStatusError):  # a reply that is cut off ends the episode
        await client.chat.completions.create(model="policy", messages=task["messages"])
    return float(model.max_model_len == 512 and codes == ["context_length_exceeded"] * 2)
"""


def test_the_model_s_context_limits_an_agent(tmp_path):
    """The settings allow longer episodes than the embedded model, which takes 512 tokens."""
    (tmp_path / "agent.py").write_text(LONG)
    rows = train(tmp_path / "run", f"env.agent={tmp_path / 'agent.py'}:solve", "data.max_prompt_tokens=1024")
    assert {row["score"] for row in rows} == {1.0}


SHELL = r"""
r=$(curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    -H "Content-Type: application/json" -d "{\"messages\": [{\"role\": \"user\", \"content\": \"3+4=?\"}]}")
case $(echo "$r" | sed 's/.*"content":"\([^"]*\)".*/\1/') in *[0-4]) echo 1 ;; *) echo 0 ;; esac
"""

SDK = """
import json, sys
from openai import OpenAI
task = json.load(sys.stdin)
reply = OpenAI().chat.completions.create(model="gpt-4o-mini", messages=task["messages"], temperature=0)
print(float(reply.choices[0].message.content[-1:] in "01234"))
"""


@pytest.mark.parametrize(("program", "script"), [("sh", SHELL), (sys.executable, SDK)], ids=["curl", "sdk"])
def test_a_command_line_as_agent(tmp_path, program, script):
    """What it prints is the reward of what the policy wrote."""
    (tmp_path / "agent").write_text(script)
    rows = train(tmp_path / "run", f"env.agent={program} {tmp_path / 'agent'}")
    for row in rows:
        (message,) = json.loads(row["messages"])
        assert row["score"] == bool(re.search(r"[0-4]$", message["content"]))
    assert len({row["score"] for row in rows}) == 2
