"""The examples of tools, environments and agents train, and so does the code of docs/environments.md."""

import asyncio
import json
import re
import sys
from types import SimpleNamespace

import forked
import pytest
from support import REPOSITORY, SMALL, dapo, make_prompt

from dapo_rl.base.load import load_function
from dapo_rl.config import EnvSettings
from dapo_rl.envs import AssistantTurn, Observation
from dapo_rl.envs.pool import EnvironmentPool
from dapo_rl.envs.tools import Tool

EXAMPLES = REPOSITORY / "examples"
PAGE = (REPOSITORY / "docs" / "environments.md").read_text()
QUICK = [*SMALL, "train.steps=1", "data.eval=null", "eval.every=null"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tools.py", "trl_environment.py"])
def test_each_script_trains(name, tmp_path):
    if name == "trl_environment.py":
        pytest.importorskip("trl")
    done = forked.run([sys.executable, str(EXAMPLES / name)], cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["guess", "env.name=examples/environment.py:Chain"], ["env.agent=examples/agent.py:solve"]]
)
def test_each_setting_trains(words, tmp_path):
    agent = ["sampling.max_new_tokens=72"] if "guess" not in words else []
    done = dapo("train", *words, *QUICK, *agent, "--run", tmp_path / "run", cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1


@pytest.mark.slow
def test_the_chain_in_a_process():
    chain = load_function(f"{EXAMPLES / 'environment.py'}:Chain")
    with EnvironmentPool(chain, EnvSettings(timeout_s=60)) as pool:
        key = pool.new_key()
        opening = pool.open(key, make_prompt("p", ""), 0).result()
        seen = opening.messages[-1]["content"]
        answers = []
        for number in (1, 2, 3):
            before, sign, change = re.fullmatch(r"(\d+)([+-])(\d+)=\?", seen).groups()
            result = int(before) + int(sign + change)
            answers.append(pool.step(key, AssistantTurn(f"Answer: {result}", number=number)).result())
            seen = answers[-1].text
        assert [(answer.reward, answer.done) for answer in answers] == [(1 / 3, False), (1 / 3, False), (1 / 3, True)]
        wrong = pool.new_key()
        pool.open(wrong, make_prompt("p", ""), 0).result()
        assert pool.step(wrong, AssistantTurn("Answer: 99")).result() == Observation(reward=0.0, done=True)
        assert pool.result(wrong).result() == Observation(), "its attribute `result` is not the method"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_code_of_the_page():
    tools, environment, agent = ({"__name__": "page"} for _ in range(3))
    for code, names in zip(blocks("python"), (tools, environment, agent), strict=True):
        exec(compile(code, "page.py", "exec"), names)
    assert Tool.of(tools["price"]).schema["function"]["parameters"]["required"] == ["item"]
    said = [[{"role": "assistant", "content": "They cost 7."}], [{"role": "assistant", "content": "No idea"}]]
    assert tools["correct"](said, ["7", "7"]) == [1.0, 0.0]
    game = environment["HigherLower"]()
    game.open(None, 0)
    assert [game.step(AssistantTurn(text)) for text in ("-1", "100", "x")] == ["higher", "lower", -1.0]
    assert game.step(AssistantTurn(str(game.secret))) == 1.0
    assert asyncio.run(agent["solve"]({"prompt": "3+4=?", "answer": "7"}, Client())) == 1.0


@pytest.mark.slow
def test_the_first_tool_of_the_page_trains(tmp_path):
    (tmp_path / "mine.py").write_text(blocks("python")[0])
    done = forked.run([sys.executable, "mine.py"], cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["steps"] == 2
    assert "env.tool_format=hermes: the embedded model's chat template does not show tools" in done.stdout + done.stderr


class Client:
    """Answers like OpenAI's."""

    def __init__(self):
        self.chat = SimpleNamespace(completions=self)

    async def create(self, model, messages):
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(role="assistant", content="7"))])


def test_the_settings_of_the_page_exist():
    named = set(re.findall(r"`env\.(\w+)", PAGE))
    assert named <= set(EnvSettings.model_fields)
    assert {"name", "tools", "mcp", "agent", "max_turns", "max_error_share", "workers"} <= named
