"""Mistakes in tools, environments and agents that docs/errors.md does not list: one line each, before a run begins."""

import os

import forked
import pytest
from support import DAPO

from dapo_rl.config import Config
from dapo_rl.envs.build import build_environment
from dapo_rl.envs.protocol import AgentError, EpisodeFailure, InvalidAnswerError, Observation
from dapo_rl.envs.replies import failure_of, observation_of
from dapo_rl.errors import UserError

CODE = '''
class Positional:
    def open(self, prompt): ...
    def step(self, turn): return 1.0


class Sized:
    def __init__(self, size): ...
    def step(self, turn): return 1.0


class Untyped:
    def reset(self, **row): return "Count."

    def count(self, step):
        """Counts.

        Args:
            step: How far.
        """


def undocumented(word: str) -> str:
    return word


def variadic(*words: str) -> str:
    """Looks up words."""


not_a_function = 3
broken = 1
'''


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "mine.py:Gone"}, r"^mine\.py:Gone: mine\.py has no 'Gone'"),
        ({"name": "mien.py:Sized"}, r"^mien\.py:Sized: no such file: mien\.py .*; did you mean mine\.py\?$"),
        ({"name": "no_such_module:Game"}, r"^no_such_module:Game: no module 'no_such_module'"),
        ({"name": "broken.py:Game"}, r"^broken\.py:Game: importing it failed: ZeroDivisionError"),
        ({"name": "mine.py:Positional"}, r"Positional: open must take prompt and seed, as open\(self, prompt, seed\)"),
        ({"name": "mine.py:Sized"}, r"^env\.options: Sized: missing a required argument: 'size'; it takes size$"),
        ({"name": "mine.py:Untyped"}, r"^tool count: the argument 'step' has no type hint"),
        ({"tools": ["mine.py:undocumented"]}, r"^tool undocumented: it has no description; add a docstring"),
        ({"tools": ["mine.py:variadic"]}, r"^tool variadic: the argument \*words: str cannot be given by name"),
        ({"tools": ["mine.py:not_a_function"]}, r"^mine\.py:not_a_function: expected a function, got int$"),
        ({"tools": ["calculater"]}, r"^env\.tools: 'calculater' is not a tool; .*; did you mean calculator\?$"),
        ({"agent": "mine.py:slove"}, r"^mine\.py:slove: mine\.py has no 'slove'"),
        ({"agent": "sh 'unclosed"}, r"^env\.agent: sh 'unclosed: No closing quotation; it must be file\.py:function"),
        ({"agent": " "}, r"^env\.agent: it is empty"),
        ({"agent": "mine.py:undocumented", "name": "guess"}, r"^env\.name: an episode has one environment; leave out"),
    ],
)
def test_one_line(settings, said, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    config = Config.build({"env": settings, "data": {"train": "arithmetic"}})
    with pytest.raises(UserError, match=said) as error:
        build_environment(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (float("nan"), "gave the reward nan; it has to be finite"),
        (float("inf"), "gave the reward inf; it has to be finite"),
        (None, "returned NoneType; return an Observation, a text, or a number to end with"),
        ((1.0, True), "returned tuple; return an Observation"),
        (Observation(tool_calls=True), "gave an observation whose `tool_calls` or `tool_errors` is not a number of"),
        (Observation(tool_errors=-1), "gave an observation whose `tool_calls` or `tool_errors` is not a number of"),
        (Observation(prompt_ids=(True,)), "gave `prompt_ids` that are not tokens"),
        (Observation(max_tokens=True), "gave the max_tokens True; it is a number above 0, or None"),
        (Observation(max_tokens=0), "gave the max_tokens 0; it is a number above 0, or None"),
    ],
)
def test_an_invalid_answer_is_a_failure_without_a_traceback(answer, said):
    with pytest.raises(InvalidAnswerError) as error:
        observation_of(answer)
    failure = failure_of("mine.py:Game", error.value)
    assert failure.reason == "error"
    assert failure.detail.startswith(f"mine.py:Game: {said}")
    assert "\n" not in failure.detail


def test_an_agents_own_exception_has_its_traceback_and_no_other():
    try:
        raise AgentError("env.agent: mine.py:solve: KeyError: 'x'") from KeyError("x")
    except AgentError as error:
        failure = failure_of("mine.py:solve", error)
    assert failure == EpisodeFailure("error", "env.agent: mine.py:solve: KeyError: 'x'\nKeyError: 'x'\n")


@pytest.mark.slow
def test_nothing_is_left_running(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "class Game:\n"
        "    def step(self, turn):\n"
        f"        with open({str(tmp_path / 'workers')!r}, 'a') as file: print(os.getpid(), file=file)\n"
        "        return float('nan')\n"
    )
    words = ["data.train.size=50", "data.eval=null", "eval.every=null", "sampling.prompts_per_step=2"]
    words += ["train.mini_batches=1", "sampling.group_size=2", "sampling.max_new_tokens=56", "log.report=false"]
    done = forked.run([DAPO, "train", *words, "env.name=mine.py:Game", "--run", "run"], cwd=tmp_path, timeout=120)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "gave the reward nan" in line
    workers = {int(line) for line in (tmp_path / "workers").read_text().split()}
    assert workers
    assert not [worker for worker in workers if os.path.exists(f"/proc/{worker}/environ") and _is_alive(worker)]


def _is_alive(worker):
    with open(f"/proc/{worker}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
