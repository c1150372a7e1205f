"""Evaluations with real models: what they write, that they go on, and that training's own says the same."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import forked
import pyarrow.parquet as pq
import pytest
from judge_server import judge_server, write_judge
from support import DAPO, REPOSITORY, SHARED_DATA, small_model, tokenizer

from dapo_rl import DAPOTrainer
from dapo_rl.cli import main
from dapo_rl.errors import UserError
from dapo_rl.evals.progress import EvalProgress
from dapo_rl.evals.protocols import make_plan
from dapo_rl.evals.run import evaluate_models

pytestmark = pytest.mark.slow

SHORT = {"--k": 4, "--prompts": 6, "--max-new-tokens": 40}


class Quiet(EvalProgress):
    """Counts what is sampled, and ends it as a crash would."""

    def __init__(self, crash_after=10**9):
        super().__init__()
        self.notes, self.sampled, self._crash_after = [], 0, crash_after

    def note(self, text):
        self.notes.append(text)

    def advance(self, tokens):
        self.sampled += 1
        if self.sampled > self._crash_after:
            raise RuntimeError("crash")


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """A few thousand random weights with a long context."""
    path = tmp_path_factory.mktemp("models") / "random"
    small_model(max_position_embeddings=4096).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def dapo(monkeypatch, capsys, *words):
    """The command in this process: its exit code and what it prints."""
    monkeypatch.setattr(sys, "argv", ["dapo", *map(str, words)])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main()
    signal.signal(signal.SIGTERM, before)
    return ended.value.code, *capsys.readouterr()


def test_two_models_by_the_command(monkeypatch, capsys, tmp_path, random_model):
    monkeypatch.chdir(tmp_path)
    words = ["eval", "tiny", random_model, "--data", "arithmetic", "--k", 4, "--prompts", 6, "--max-new-tokens", 40]
    code, printed, _ = dapo(monkeypatch, capsys, *words)
    assert code == 0
    assert "6 problems, 4 samples each" in printed
    assert "compared with tiny" in printed
    assert "mean score" not in printed, "the rewards are not graded"
    (out,) = (tmp_path / "evals").iterdir()
    assert out.name.startswith("arithmetic-")
    report = json.loads((out / "evaluation.json").read_text())
    assert (out / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    tiny, random = report["models"]
    assert list(tiny["metrics"]) == [
        *("avg@4", "pass@1", "pass@2", "pass@4", "cons@4", "score", "response_length", "truncated"),
    ]
    assert random["metrics"]["avg@4"]["value"] == 0.0
    change = next(row for row in report["comparisons"] if row["metric"] == "avg@4")
    assert change["value"] == pytest.approx(-tiny["metrics"]["avg@4"]["value"])
    assert change["problems"] == 6

    rows = pq.read_table(out / tiny["responses"]).to_pylist()
    assert [(row["problem"], row["sample"]) for row in rows] == [(p, s) for p in range(6) for s in range(4)]
    assert tiny["metrics"]["avg@4"]["value"] == pytest.approx(sum(row["correct"] for row in rows) / 24)
    assert tiny["metrics"]["truncated"]["value"] == pytest.approx(
        sum(row["finish_reason"] == "length" for row in rows) / 24
    )
    assert tiny["tokens"] == sum(len(row["token_ids"]) for row in rows)
    assert all(row["correct"] == (row["answer"] == row["truth"]) for row in rows)

    # Once more: nothing is sampled, and the report is the same.
    code, printed, told = dapo(monkeypatch, capsys, *words, "--json")
    assert code == 0
    assert json.loads(printed) == report
    assert told.count("already evaluated") == 2


def test_graded_rewards_have_a_mean_score(monkeypatch, capsys, tmp_path):
    """All are wrong by the threshold, so the accuracy says nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def score(completions, **_): return [len(text) / 1000 for text in completions]\n")
    words = ["eval", "tiny", "--data", "arithmetic", "--k", 2, "--prompts", 4, "--verifier", "own.py:score"]
    code, printed, _ = dapo(monkeypatch, capsys, *words, "--max-new-tokens", 40)
    assert code == 0
    (out,) = (tmp_path / "evals").iterdir()
    (model,) = json.loads((out / "evaluation.json").read_text())["models"]
    rows = pq.read_table(out / model["responses"]).to_pylist()
    expected = sum(len(row["response"]) for row in rows) / 1000 / len(rows)
    assert model["graded"]
    assert model["metrics"]["score"]["value"] == pytest.approx(expected)
    assert model["metrics"]["avg@2"]["value"] == 0.0
    (line,) = (line for line in printed.splitlines() if "mean score" in line)
    assert f"{expected:.3f}" in line


def test_an_evaluation_of_training_says_the_same(tmp_path):
    """The same seed, problems and sampling: the same responses, so the same accuracy."""
    data = {"source": "arithmetic", "split": "heldout", "size": 8}
    trainer = DAPOTrainer(
        config={
            "model.dtype": "float32",
            "data.eval": data,
            "sampling.max_new_tokens": 40,
            "eval.samples": 4,
            "eval.top_p": 0.9,
            "seed": 3,
        },
        run_dir=tmp_path / "run",
    )
    during = trainer.evaluate()
    options = {"--k": 4, "--max-new-tokens": 40, "--top-p": 0.9, "--dtype": "float32", "--seed": 3}
    plan = make_plan("arithmetic", options, ["data.eval.size=8"])
    metrics = evaluate_models(plan, ["tiny"], tmp_path / "out", Quiet())[0]["models"][0]["metrics"]
    assert 0 < during["eval/accuracy"] < 1
    assert metrics["avg@4"]["value"] == pytest.approx(during["eval/accuracy"])
    assert metrics["pass@4"]["value"] == pytest.approx(during["eval/pass@4"])
    assert metrics["response_length"]["value"] == pytest.approx(during["eval/response_length"])
    assert metrics["truncated"]["value"] == pytest.approx(during["eval/truncated"])


def test_training_evaluates_before_the_first_step_every_so_often_and_after_the_last(tmp_path):
    trainer = DAPOTrainer(
        config={
            "data.train": {"source": "arithmetic", "size": 64},
            "data.eval": {"source": "arithmetic", "split": "heldout", "size": 2},
            "sampling": {"prompts_per_step": 1, "group_size": 4, "max_new_tokens": 40, "dynamic": False},
            "train.steps": 5,
            "eval.every": 2,
        },
        run_dir=tmp_path / "run",
    )
    summary = trainer.train()
    assert [found["step"] for found in summary["evaluations"]] == [0, 2, 4, 5]


def files(out):
    return {path.relative_to(out): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def test_a_killed_evaluation_goes_on_and_ends_the_same(tmp_path):
    words = ["eval", "tiny", "--data", "arithmetic", "--k", "16", "--prompts", "32", "--max-new-tokens", "40"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    out = tmp_path / "killed"
    slow = [DAPO, *words, "--out", out, "sampling.max_batch=16"]
    process = forked.Popen(slow, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not list(out.glob("*/parts/*.parquet")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    parts = {path: path.read_bytes() for path in out.glob("*/parts/*.parquet")}
    assert 1 <= len(parts) < 4

    again = forked.run([DAPO, *words, "--out", out], env=environment, timeout=200)
    assert again.returncode == 0, again.stderr
    assert f"resuming: {8 * len(parts)} of 32 problems done" in again.stderr
    whole = tmp_path / "whole"
    assert forked.run([DAPO, *words, "--out", whole], env=environment, timeout=200).returncode == 0
    assert files(out) == files(whole)
    assert not list(out.glob("*/parts"))


def test_only_what_is_missing_is_sampled_again(tmp_path):
    plan = make_plan("arithmetic", SHORT | {"--k": 64})  # two problems a part
    with pytest.raises(RuntimeError, match="crash"):
        evaluate_models(plan, ["tiny"], tmp_path, Quiet(crash_after=5))
    parts = sorted(tmp_path.glob("*/parts/*.parquet"))
    assert parts
    parts[0].write_bytes(b"cut off")
    again = Quiet()
    evaluate_models(plan, ["tiny"], tmp_path, again)
    assert again.sampled == 6 - 2 * (len(parts) - 1)


def test_another_evaluation_in_the_same_place_is_refused(tmp_path, random_model):
    def run(**changes):
        evaluate_models(make_plan("arithmetic", SHORT | changes), [random_model], tmp_path / "out", Quiet())

    run()
    with pytest.raises(UserError, match=r"was started with different settings: seed 0 → 1; name another --out"):
        run(**{"--seed": 1})
    small_model(seed=1, max_position_embeddings=4096).save_pretrained(random_model)
    with pytest.raises(UserError, match="different settings: the model's weights"):
        run()
    small_model(max_position_embeddings=4096).save_pretrained(random_model)
    run()


def test_marks_of_another_judge_are_not_read_again(tmp_path, monkeypatch):
    """What does not change a mark may change, such as a budget that is spent."""
    monkeypatch.chdir(tmp_path)
    words = {"--k": 1, "--prompts": 2, "--max-new-tokens": 8, "--verifier": "judge.yaml"}

    def run(server, mark, out=None, **changes):
        write_judge(tmp_path / "judge.yaml", server.url, prompt=f"{{response}}: grade {mark}", **changes)
        report, found = evaluate_models(make_plan("arithmetic", words), ["tiny"], out, Quiet())
        return report["models"][0]["metrics"]["avg@1"]["value"], found

    with judge_server(lambda prompt: prompt.rpartition(": ")[2]) as server:
        accuracy, first = run(server, 0.25)
        assert accuracy == 0
        accuracy, second = run(server, 0.75)
        assert accuracy == 1
        assert first != second
        asked = len(server.asked)
        assert run(server, 0.75, budget={"calls": 1000}, retries=3) == (1, second)
        assert len(server.asked) == asked
        with pytest.raises(UserError, match="was started with different settings: the judge's file; name another"):
            run(server, 0.5, first)


def test_verdicts_of_edited_code_are_not_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = {"--k": 1, "--prompts": 2, "--max-new-tokens": 8, "--verifier": "own.py:score"}

    def run(score, out=None):
        (tmp_path / "own.py").write_text(f"def score(completions, **_):\n    return [{score}] * len(completions)\n")
        report, found = evaluate_models(make_plan("arithmetic", words), ["tiny"], out, Quiet())
        return report["models"][0]["metrics"]["score"]["value"], found

    score, first = run(0.25)
    assert (score, run(0.25)) == (0.25, (0.25, first))
    assert run(0.75)[0] == 0.75
    with pytest.raises(UserError, match="was started with different settings: your code; name another"):
        run(0.5, first)


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the shared data is not here")
def test_the_32_copies_of_aime_are_not_multiplied(tmp_path, random_model):
    data = str(SHARED_DATA / "aime-2024.parquet")
    seen = Quiet()
    report, out = evaluate_models(make_plan(data, {"--max-new-tokens": 2}), [random_model], tmp_path, seen)
    (model,) = report["models"]
    assert (report["k"], model["problems"], model["samples"]) == (32, 30, 960)
    assert any("each problem 32 times: used once, with 32 samples" in note for note in seen.notes)
    rows = pq.read_table(out / model["responses"], columns=["prompt", "truth", "data_source"]).to_pylist()
    assert len({row["prompt"] for row in rows}) == 30
    assert {row["data_source"] for row in rows} == {"math_dapo"}


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the shared data is not here")
def test_gsm8k(tmp_path, random_model):
    plan = make_plan(str(SHARED_DATA / "gsm8k-test.jsonl"), {"--max-new-tokens": 4, "--prompts": 3}, protocol="gsm8k")
    report, out = evaluate_models(plan, [random_model], tmp_path, Quiet())
    rows = pq.read_table(out / report["models"][0]["responses"]).to_pylist()
    assert [row["truth"] for row in rows] == ["18", "3", "70000"]
    assert rows[0]["prompt"].startswith("<bos>Solve the problem step by step.")


def test_a_jsonl_and_a_task_of_reasoning_gym(tmp_path, random_model):
    pytest.importorskip("reasoning_gym")
    (tmp_path / "own.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n{"prompt": "2+2=?", "answer": "4"}\n')
    words = {str(tmp_path / "own.jsonl"): [], "reasoning_gym:chain_sum": ["data.eval.size=2"]}
    for number, (data, settings) in enumerate(words.items()):
        plan = make_plan(data, {"--max-new-tokens": 3}, settings)
        report, _ = evaluate_models(plan, [random_model], tmp_path / str(number), Quiet())
        assert (report["k"], report["models"][0]["problems"]) == (1, 2)


def test_a_verifier_that_fails_leaves_its_samples_out(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if ground_truth.startswith('-'):\n"
        "        raise ValueError('no negative numbers')\n"
        "    return {'score': 1.0, 'acc': True, 'pred': ground_truth}\n"
    )
    plan = make_plan("arithmetic", SHORT | {"--prompts": 20, "--verifier": f"{tmp_path / 'rewards.py'}:compute_score"})
    seen = Quiet()
    report, out = evaluate_models(plan, ["tiny"], tmp_path / "out", seen)
    rows = pq.read_table(out / report["models"][0]["responses"], columns=["truth"]).to_pylist()
    negative = sum(row["truth"].startswith("-") for row in rows)
    assert 0 < negative < 80
    assert report["models"][0]["verifier_errors"] == negative
    assert report["models"][0]["metrics"]["cons@4"] == {
        **{"value": 1.0, "low": 1.0, "high": 1.0},
        "problems": 20 - negative // 4,
    }
    assert any("no negative numbers" in note for note in seen.notes)


def test_a_run_directory_stands_for_its_model(tmp_path, random_model):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(random_model)
    report, _ = evaluate_models(make_plan("arithmetic", SHORT), [str(tmp_path / "run")], tmp_path / "out", Quiet())
    assert report["models"][0]["problems"] == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "arithmetic"], "eval: name a model"),
        (["tiny"], "--data: name a"),
        (["tiny", "tiny", "--data", "arithmetic"], "tiny: named twice"),
        (["tiny", "--data", "nothing.jsonl"], "nothing.jsonl"),
        (["tiny", "--data", "arithmatic"], "did you mean arithmetic"),
        (["./nowhere", "--data", "arithmetic"], "no directory ./nowhere"),
        (["tiny", "--data", "arithmetic", "--verifier", "mth"], "did you mean math?"),
        (["tiny", "--data", "arithmetic", "--max-new-tokens", "600"], "the model's context of 512"),
        (["tiny", "--data", "arithmetic", "--out", "a-file"], "a-file is a file; name a directory"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(monkeypatch, capsys, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    code, printed, told = dapo(monkeypatch, capsys, "eval", *words)
    assert code == 2
    assert printed == ""
    line = told.strip().splitlines()[-1]
    assert line.startswith("dapo: ")
    assert message in line
    assert "Traceback" not in told
    assert not list(tmp_path.glob("evals/*"))


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the shared data is not here")
def test_the_commands_of_the_documentation(monkeypatch, capsys, tmp_path, random_model):
    """As they stand there, with few problems and tokens."""
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    for name in ("gsm8k-test.jsonl", "aime-2024.parquet"):
        (tmp_path / name).symlink_to(SHARED_DATA / name)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "model").symlink_to(random_model)
    block = (REPOSITORY / "docs" / "evaluation.md").read_text().split("```bash\n")[1].split("```")[0]
    lines = [shlex.split(line) for line in block.splitlines()]
    assert len(lines) == 5
    for program, *words in lines:
        assert program == "dapo"
        words = [random_model if word == "MODEL" else word for word in words]
        code, _, told = dapo(monkeypatch, capsys, *words, "--prompts", 2, "--max-new-tokens", 2)
        assert code == 0, told
