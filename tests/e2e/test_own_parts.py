"""The worked examples of a loss, a verifier and an engine, each in one file, in real runs."""

import json
import re

import pytest
from support import REPOSITORY, SMALL, dapo, make_prompt

from dapo_rl.base.load import load_function
from dapo_rl.types import Trajectory

EXAMPLES = REPOSITORY / "examples"
QUICK = [*SMALL, "train.steps=2", "data.eval=null", "eval.every=null", "checkpoint.every=1"]


@pytest.mark.parametrize(
    "setting",
    [
        "algo.loss=examples/own_loss.py:cispo",
        "algo.advantage=examples/own_loss.py:against_the_batch",
        "reward.verifier=examples/own_verifier.py:shows_its_work",
    ],
)
@pytest.mark.slow
def test_each_example_trains(setting, tmp_path):
    done = dapo("train", *QUICK, setting, "--run", tmp_path / "run", cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


@pytest.mark.slow
def test_the_loss_of_the_page_is_trained_and_drawn_beside_dapos(tmp_path):
    """docs/losses.md, with fewer and smaller steps."""
    page = (REPOSITORY / "docs" / "losses.md").read_text()
    code, transform = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(code.splitlines()) <= 20
    (tmp_path / "soft.py").write_text(code)
    (tmp_path / "teacher.py").write_text(transform)
    (command,) = re.findall(r"^    dapo (ablate .*)$", page, re.MULTILINE)
    words = command.replace("train.steps=40", "train.steps=2").replace("--seeds 2", "--seeds 1").split()
    done = dapo(*words, *SMALL, "eval.prompts=8", "train.transforms=[teacher.py:add_teacher]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "soft" / "ablation.md").read_text()
    rows = re.findall(r"^\| algo\.loss=(\S+) \| [\d.]+ .*\| 1/1 \|$", table, re.MULTILINE)
    assert rows == ["dapo", "soft.py:soft_trust"]
    assert (tmp_path / "soft" / "ablation.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_example_engine_samples_what_ours_samples_and_resumes_bit_for_bit(tmp_path):
    engine = "engine=examples/own_engine.py:PlainEngine"
    for name, words in {"ours": [], "theirs": [engine], "stopped": [engine, "train.steps=1"]}.items():
        done = dapo("train", *QUICK, *words, "--run", tmp_path / name, cwd=REPOSITORY)
        assert done.returncode == 0, done.stderr
    resumed = dapo("train", "train.steps=2", "--run", tmp_path / "stopped", "--resume", cwd=REPOSITORY)
    assert resumed.returncode == 0, resumed.stderr
    weights = {name: (tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("theirs", "stopped")}
    assert weights["theirs"] == weights["stopped"]
    generated = [
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[1])["sampling/tokens_trained"]
        for name in ("ours", "theirs")
    ]
    assert generated[0] == generated[1]


def test_the_example_verifier_wants_the_right_answer_and_sound_steps():
    judge = load_function(f"{EXAMPLES / 'own_verifier.py'}:shows_its_work")
    responses = ["3+8=11\n11+5=16\n16", "16", "3+8=12\n12+4=16\n16", "3+8=11\n11+5=17\n17", "no idea"]
    verdicts = judge(make_prompt("p", "3+8+5=?\n", "16"), [Trajectory.of_text(text) for text in responses])
    assert [(v.score, v.correct, v.status) for v in verdicts] == [
        (1.0, True, "correct"),
        (0.5, True, "correct"),
        (0.5, True, "correct"),
        (-1.0, False, "wrong"),
        (-1.0, False, "unparseable"),
    ]


def test_the_page_on_engines_has_the_protocols_methods():
    from dapo_rl.engines.custom import ENGINE_METHODS

    page = (REPOSITORY / "docs" / "engines.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)\(", page, flags=re.M)) == ENGINE_METHODS
