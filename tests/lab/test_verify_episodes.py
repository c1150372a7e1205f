"""Dry runs and evaluations with an environment: episodes that are played, shown and measured."""

import io
import json

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from support import dapo, make_prompt

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.evals.progress import EvalProgress
from dapo_rl.evals.protocols import make_plan
from dapo_rl.evals.run import evaluate_models
from dapo_rl.lab.verify import DryAnswer, DryRow, DryRun, check_trainable, dry_run, dry_run_json
from dapo_rl.lab.verify_episodes import DryMessage, conversation_of
from dapo_rl.lab.verify_show import print_dry_run
from dapo_rl.types import Group, Trajectory, Turn, Verdict

GUESS = {
    "model.dtype": "float32",
    "data.train": "tasks",
    "env.name": "guess",
    "env.max_turns": 2,
    "env.max_turn_tokens": 8,
    "env.max_observation_tokens": 48,
    "sampling.max_new_tokens": 24,
    "data.max_prompt_tokens": 16,
    "overlong.cache_length": 4,
}


def silent():
    return EvalProgress(Console(file=io.StringIO()))


def printed(result, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_dry_run(result, console)
    return console.file.getvalue()


def call(name, **arguments):
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def episode():
    """A turn with a tool call, its result, and a last turn; the first one was put aside."""
    fork = Trajectory(
        (5, 6), -0.5, "", "stop", index=0, prompt_ids=(1, 2, 3),
        turns=(Turn(0, 2, "policy", 0.5, 0.25),),
        messages=({"role": "assistant", "content": "Let me see.", "tool_calls": [call("search", query="a\"b", n=2)]},),
    )  # fmt: skip
    sample = Trajectory(
        (7, 8, 9), -0.5, "42", "stop", mask=[True, False, True], prompt_ids=(1, 2, 3, 4),
        turns=(Turn(0, 1, "policy", 1.0), Turn(1, 2, "environment"), Turn(2, 3, "policy", 2.0, 1.0)),
        messages=(
            {"role": "assistant", "content": "", "tool_calls": [call("add")]},
            {"role": "tool", "name": "add", "content": "42"},
            {"role": "assistant", "content": "[bold]42"},
        ),
    )  # fmt: skip
    return Group(0, make_prompt("p"), (sample,), (Verdict(1.25, True, "correct"),), (fork,))


def test_a_conversation_has_turns_calls_results_and_rewards():
    assert conversation_of(episode(), 0) == (
        DryMessage("assistant", "Let me see.", ('search(query="a\\"b", n=2)',), "", 1, 2, 0.5, 0.25),
        DryMessage("assistant", "", ("add()",), "", 2, 1, 1.0, 0.0),
        DryMessage("tool", "42", (), "add"),
        DryMessage("assistant", "[bold]42", (), "", 3, 1, 2.0, 1.0),
    )


def test_two_conversations_are_shown():
    answer = DryAnswer(
        "42", "correct", None, 1.25, 0.0, 1.25, "stop", 4, "", turns=3, messages=conversation_of(episode(), 0)
    )
    rows = tuple(DryRow(str(i), "prompt", 3, None, "kept", (answer,)) for i in range(3))
    text = printed(DryRun("tiny", "tasks", 3, 1, 1.0, (), rows, (), containment="the python tool contains: time"))
    assert text.count("turn 3, 1 tokens, 2.0s, reward 1") == 2
    assert text.count('→ search(query="a\\"b", n=2)') == 2
    assert "tool add\n  42\n" in text
    assert "[bold]42" in text, "what a model writes is no markup"
    assert text.count("turns") == 3
    assert "the python tool contains: time" in text


@pytest.mark.slow
def test_a_dry_run_plays_episodes():
    result = dry_run(Config.build(GUESS), 2, 2, progress=silent())
    assert len(result.answers) == 4
    assert all(each.messages and each.messages[0].turn == 1 for each in result.answers)
    assert all(1 <= each.turns <= 2 for each in result.answers)
    assert all(each.tokens <= 16 for each in result.answers), "the environment's tokens do not count"
    assert "+=?" in result.rows[0].prompt, "the prompt is the environment's"
    json.loads(dry_run_json(result))
    said = [advice.what for advice in result.findings]
    assert not any("ground truth" in what or "chat" in what for what in said)


@pytest.mark.slow
def test_an_environment_that_fails_would_stop_the_run(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Broken:\n    def open(self, prompt, seed):\n        raise RuntimeError('no more')\n"
        "    def step(self, turn):\n        return 1.0\n\n    def result(self):\n        return 1.0\n"
    )
    result = dry_run(Config.build(GUESS | {"env.name": f"{tmp_path}/mine.py:Broken"}), 2, 2, progress=silent())
    assert "the environment failed in 4 of 4 episodes, more than env.max_error_share" in result.findings[0].what
    with pytest.raises(UserError, match="dapo train would stop: the environment failed"):
        check_trainable(result)
    printed(result)


@pytest.mark.slow
def test_the_python_tool_says_what_it_contains():
    settings = {name: value for name, value in GUESS.items() if name != "env.name"}
    result = dry_run(
        Config.build(settings | {"data.train": "arithmetic", "env.tools": "python", "env.tool_format": "hermes"}),
        1,
        2,
        progress=silent(),
    )
    assert result.containment.startswith("the python tool (")
    assert any("no tool was called" in advice.what for advice in result.findings)


def test_environments_in_the_plan_of_an_evaluation():
    plan = make_plan(None, words=["env.name=guess", "env.max_turns=3"])
    assert plan.config.data.eval.model_dump() == {"source": "tasks", "split": "heldout", "size": 256}
    assert plan.settings("float32")["env.max_turns"] == 3
    assert not any(key.startswith("env.") for key in make_plan("arithmetic").settings("float32"))
    with pytest.raises(UserError, match=r"env\.turn_discount: has no effect on an evaluation"):
        make_plan(None, words=["env.name=guess", "env.turn_discount=0.9"])
    with pytest.raises(UserError, match="--data"):
        make_plan(None, words=["env.tools=calculator"])


@pytest.mark.slow
def test_an_evaluation_plays_episodes(tmp_path):
    words = ["env.name=guess", "env.max_turns=2", "env.max_turn_tokens=8"]
    plan = make_plan(None, {"--k": 2, "--prompts": 3, "--max-new-tokens": 24}, words)
    report, out = evaluate_models(plan, ["tiny"], tmp_path / "out", silent())
    (path,) = out.glob("*/responses.parquet")
    rows = pq.read_table(path).to_pylist()
    assert len(rows) == 6
    for row in rows:
        messages = json.loads(row["messages"])
        assert row["turns"] == sum(message["role"] == "assistant" for message in messages) in (1, 2)
        assert row["tokens"] <= 16 < len(row["token_ids"]) + 17
    cut = sum(row["finish_reason"] in ("length", "turns") for row in rows) / len(rows)
    assert report["models"][0]["metrics"]["truncated"]["value"] == pytest.approx(cut)
    again, _ = evaluate_models(plan, ["tiny"], tmp_path / "again", silent())
    assert again["models"][0]["metrics"] == report["models"][0]["metrics"], "the same seed plays the same episodes"


@pytest.mark.slow
def test_an_evaluation_with_failing_episodes(tmp_path):
    """Few are left out and said; with many there is no result, and nothing is written that a repetition would keep."""
    code = (
        "import random\n\n\nclass Sometimes:\n    def __init__(self, share):\n        self.share = share\n\n"
        "    def open(self, prompt, seed):\n        if random.Random(seed).random() < self.share:\n"
        "            raise RuntimeError('no more')\n        return 'Hello'\n\n"
        "    def step(self, turn):\n        return 1.0\n\n    def result(self):\n        return 1.0\n"
    )
    (tmp_path / "mine.py").write_text(code)
    options = {"--k": 1, "--prompts": 12, "--max-new-tokens": 8}

    def evaluate(share, *words):
        name = [f"env.name={tmp_path / 'mine.py'}:Sometimes", f"env.options={{share: {share}}}"]
        plan = make_plan(None, options, [*name, *words])
        shown = io.StringIO()
        report, _ = evaluate_models(plan, ["tiny"], tmp_path / f"{share}", EvalProgress(Console(file=shown, width=200)))
        return report["models"][0], shown.getvalue()

    message = (
        r"^env: failed in 12 of 12 episodes, more than env\.max_error_share 0\.5 allows; the first failure: error: "
    )
    with pytest.raises(UserError, match=message):
        evaluate(1)
    assert not list((tmp_path / "1").glob("*/responses*"))
    model, shown = evaluate(0.6, "env.max_error_share=0.9")
    failed = model["verifier_errors"]
    assert 1 < failed < 12
    assert f"failed on {failed} samples, left out; the first: error: " in shown
    assert model["metrics"]["avg@1"] == {"value": 1.0, "low": 1.0, "high": 1.0, "problems": 12 - failed}


@pytest.mark.slow
def test_an_ablation_of_a_game(tmp_path):
    small = ["train.steps=1", "sampling.prompts_per_step=1", "sampling.group_size=2", "data.eval.size=2"]
    more = ["sampling.dynamic=false", "log.report=false", "eval.every=1", "train.mini_batches=1"]
    words = ["ablate", "guess", *small, *more, "--seeds", "1", "--vary", "env.max_turns=1,2", "--out", "out"]
    done = dapo(*words, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert "env.max_turns" in json.dumps(report)
    logs = list((tmp_path / "out").glob("*/seed-*/metrics.jsonl"))
    assert len(logs) == 2
    for log in logs:
        steps = [json.loads(line) for line in log.read_text().splitlines()]
        assert any("env/turns" in step for step in steps)
