"""Runs that the policy judges itself: kills, stops, budgets, evaluations and other engines."""

import itertools
import json
import shutil
import signal
import subprocess
import time

import forked
import pyarrow.parquet as pq
import pytest
from forked import DAPO
from support import SMALL, dapo, small_model, tokenizer

from dapo_rl import Config, DAPOTrainer
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.errors import UserError
from dapo_rl.evals.protocols import make_plan
from dapo_rl.evals.run import evaluate_models
from dapo_rl.lab.verify import dry_run
from dapo_rl.memory.one_gpu import MemoryPlan
from dapo_rl.models.load import TINY
from dapo_rl.run import backend
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.train.policy import HFPolicy

pytestmark = pytest.mark.slow
SETTINGS = [*SMALL, "train.steps=3", "eval.every=1", "checkpoint.every=1", "data.train.size=30", "train.warmup_steps=0"]
EXACT = ("step", "draw", "sample", "prompt_id", "token_ids", "version_first", "version_last", "score", "fate")


def write(path, **changes):
    judge = {
        "endpoint": "policy",
        "prompt": "{prompt}{response}\n1+2=?",
        "parse": "([0-9])",
        "scale": {str(n): n for n in range(10)},
        "max_tokens": 12,
        "agree_with": "math",
    } | changes
    path.write_text(json.dumps(judge), encoding="utf-8")
    return path


def config_for(judge, *settings):
    return Config.load("demo", [*SETTINGS, f"reward.verifier={judge}", *settings])


def train(path, judge, *settings, resume=False, stop=None):
    with DAPOTrainer(config=config_for(judge, *settings), run_dir=path) as trainer:
        if stop is not None:
            trainer.stop_requested = stop
        return trainer.train(resume=resume)


def metrics_of(path):
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing", "perf", "judge/")) and v == v}
        for row in RunDirectory(path).read_metrics()
    ]


def rollouts(path):
    files = sorted((path / "rollouts").iterdir())
    return [[row[name] for name in EXACT] for file in files for row in pq.read_table(file).to_pylist()]


def weights(path):
    return (path / "model" / "model.safetensors").read_bytes()


class StopAt:
    """Requests a stop from the n-th time it is asked on."""

    def __init__(self, n=None):
        self.n, self.calls = n, 0

    def __call__(self):
        self.calls += 1
        return self.n is not None and self.calls >= self.n


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a stop, the judge of it, and how often it looked for one."""
    path = tmp_path_factory.mktemp("whole")
    looks = StopAt()
    summary = train(path / "run", write(path / "judge.yaml"), stop=looks)
    return path / "run", path / "judge.yaml", looks.calls, summary


def test_a_run_learns_from_itself_and_counts_what_that_takes(whole):
    path, _, _, summary = whole
    rows = RunDirectory(path).read_metrics()
    steps = [row for row in rows if row["step"] > 0]
    assert [row["reward/judge/std"] > 0 for row in steps] == [True] * 3
    assert all(row["judge/calls"] > 0 and row["judge/tokens"] > 12 * row["judge/calls"] for row in steps)
    assert all(0 <= row["judge/agreement"] <= 1 and row["judge/seconds"] > 0 for row in steps)
    assert all(row["eval/verifier_errors"] == 0 and row["eval/reward"] > 0 for row in rows)
    tokens = summary["tokens"]
    assert tokens["total"] == sum(row["sampling/tokens_generated"] for row in steps)
    assert tokens["total"] == sum(count for name, count in tokens.items() if name != "total")
    assert weights(path) != (TINY / "model.safetensors").read_bytes()
    assert not list((path / "judge").glob("judge.jsonl")), "replies of one version are in no file"


def test_a_run_that_was_killed_resumes_to_the_last_bit(whole, tmp_path):
    expected, judge, _, _ = whole
    path = tmp_path / "run"
    words = [*SETTINGS, f"reward.verifier={judge}", "train.steps=3", "--run", str(path)]
    process = forked.Popen([DAPO, "train", "demo", *words], cwd=tmp_path, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not (path / "checkpoints" / "step-1").exists() and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (path / "model").exists(), "it was too fast to be killed"
    done = dapo("train", "--run", path, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert weights(path) == weights(expected)
    assert rollouts(path) == rollouts(expected)
    assert metrics_of(path) == metrics_of(expected)


@pytest.mark.parametrize("share", [0.15, 0.4, 0.55, 0.8])
def test_a_run_that_was_stopped_anywhere_goes_on_as_if_it_had_not_been(whole, tmp_path, share):
    expected, judge, calls, _ = whole
    summary = train(tmp_path / "run", judge, stop=StopAt(max(2, int(share * calls))))
    assert not summary["finished"]
    assert train(tmp_path / "run", judge, resume=True)["finished"]
    assert rollouts(tmp_path / "run") == rollouts(expected)
    tokens = [json.loads((path / "summary.json").read_text())["tokens"] for path in (tmp_path / "run", expected)]
    assert tokens[0] == tokens[1]


def test_a_stop_while_the_judge_is_asked(whole, tmp_path):
    """The rewards that it had not given are asked for again."""
    expected, judge, _, _ = whole
    with DAPOTrainer(config=config_for(judge), run_dir=tmp_path / "run") as trainer:
        run = trainer._run
        policy = run.verifier.policy
        answer, asked = policy.answer, []

        def while_asked(check):
            asked.append(len(policy._waiting))
            return answer(check)

        policy.answer = while_asked
        trainer.stop_requested = lambda: len(asked) >= 3
        assert not trainer.train()["finished"]
        assert run.engine.take_unfinished() == []
    assert train(tmp_path / "run", judge, resume=True)["finished"]
    assert rollouts(tmp_path / "run") == rollouts(expected)


def test_a_budget_stops_with_a_checkpoint_and_loses_nothing(whole, tmp_path):
    expected, _, _, _ = whole
    judge = write(tmp_path / "judge.yaml", budget={"calls": 30})
    with pytest.raises(
        UserError, match=r"judge\.yaml: budget\.calls: 30 calls are spent, and more are needed"
    ) as error:
        train(tmp_path / "run", judge)
    assert "\n" not in str(error.value)
    write(judge)
    assert train(tmp_path / "run", judge, resume=True)["finished"]
    assert rollouts(tmp_path / "run") == rollouts(expected)


@pytest.mark.parametrize(
    "settings",
    [
        ["engine=hf"],
        ["sampling.wait_for_verdicts=false"],
        ["sampling.surplus=drop", "sampling.max_staleness=0"],
        ["sampling.dynamic=false"],
    ],
)
def test_other_ways_to_sample(whole, tmp_path, settings):
    _, judge, _, _ = whole
    assert train(tmp_path / "run", judge, "train.steps=2", *settings)["finished"]
    assert all(row["judge/tokens"] > 0 for row in RunDirectory(tmp_path / "run").read_metrics() if row["step"] > 0)


def test_a_game_that_it_judges_too(tmp_path):
    """Episodes of several turns, with the environment's reward beside the judge's."""
    marks = {"parse": "(Answer|Wait|[0-9])", "scale": {"Answer": 1, "Wait": 0} | {str(n): n for n in range(10)}}
    judge = write(tmp_path / "judge.yaml", agree_with=None, prompt="{response}\n1+2=?", **marks)
    small = [word for word in SMALL if not word.startswith(("data.", "sampling.max_new"))]
    config = Config.load(
        "guess", [*small, "train.steps=1", "eval.every=null", "data.eval=null", f"reward.verifier={judge}"]
    )
    with DAPOTrainer(config=config, run_dir=tmp_path / "run") as trainer:
        assert trainer.train()["finished"]
    (row,) = RunDirectory(tmp_path / "run").read_metrics()
    assert row["judge/calls"] > 0


def test_verify_asks_the_policy(whole):
    _, judge, _, _ = whole
    result = dry_run(config_for(judge), rows=2, samples=2)
    assert len(result.answers) == 4
    assert all(answer.parts[0].name == "judge" and answer.parts[0].score == answer.score for answer in result.answers)


def test_each_model_of_an_evaluation_judges_itself(whole, tmp_path):
    """The first one says nothing that has a mark."""
    _, judge, _, _ = whole
    other = tmp_path / "other"
    small_model(max_position_embeddings=512).save_pretrained(other)
    tokenizer().save_pretrained(other)
    options = {"--k": 2, "--prompts": 4, "--max-new-tokens": 24}
    plan = make_plan("arithmetic", options, [f"reward.verifier={judge}", "eval.temperature=1"])
    both, _ = evaluate_models(plan, [str(other), "tiny"], tmp_path / "both")
    alone, _ = evaluate_models(plan, ["tiny"], tmp_path / "alone")
    assert both["models"][0]["verifier_errors"] > 4
    assert both["models"][1]["verifier_errors"] == 0
    assert both["models"][1]["metrics"]["score"] == alone["models"][0]["metrics"]["score"]


def without_template(path):
    """The embedded model as a base model."""
    shutil.copytree(TINY, path)
    (path / "chat_template.jinja").unlink()
    return path


def test_a_model_without_a_chat_template_is_one_line_and_may_be_asked_in_plain_text(whole, tmp_path):
    _, judge, _, _ = whole
    model = f"model.name={without_template(tmp_path / 'base')}"
    with pytest.raises(UserError, match=r"judge\.yaml: .*no chat template; data\.chat_template=never") as error:
        dry_run(config_for(judge, model), rows=1, samples=1)
    assert "\n" not in str(error.value)
    result = dry_run(config_for(judge, model, "data.chat_template=never"), rows=1, samples=1)
    assert [answer.status for answer in result.answers] != ["error"]


def test_a_reward_list_with_a_judge_of_the_policy(whole, tmp_path):
    _, judge, _, _ = whole
    verifier = f"[math, {{verifier: '{judge}', weight: 0.1}}]"
    config = Config.load("demo", [*SETTINGS, f"reward.verifier={verifier}", "train.steps=1"])
    with DAPOTrainer(config=config, run_dir=tmp_path / "run") as trainer:
        assert trainer.train()["finished"]
    row = RunDirectory(tmp_path / "run").read_metrics()[-1]
    assert row["reward/math/std"] > 0
    assert row["judge/calls"] > 0


def test_a_judge_given_as_a_reward_function(whole, tmp_path):
    _, judge, _, _ = whole
    config = Config.load("demo", [*SETTINGS, "train.steps=1"])
    with DAPOTrainer(config=config, reward_funcs=[str(judge)], run_dir=tmp_path / "run") as trainer:
        assert trainer.train()["finished"]
    assert RunDirectory(tmp_path / "run").read_metrics()[-1]["judge/tokens"] > 0


def test_an_engine_that_rests_during_updates_is_not_asked_then(whole, tmp_path, monkeypatch):
    """On a CPU there is no memory to give up, so `release_memory` only sends its samples back to the queue."""
    expected, judge, _, _ = whole
    calls = []

    def recorded(name, then):
        def record(self, *arguments):
            calls.append(name)
            return then(self, *arguments)

        monkeypatch.setattr(NativeEngine, name, record)

    recorded("release_memory", NativeEngine._back_to_the_queue)
    for name in ("poll", "receive"):
        recorded(name, getattr(NativeEngine, name))
    monkeypatch.setattr(HFPolicy, "release_memory", lambda self: None, raising=False)
    monkeypatch.setattr(backend, "memory_plan", lambda *arguments: MemoryPlan(time_share=True))
    assert train(tmp_path / "run", judge)["finished"]
    rests = [after for before, after in itertools.pairwise(calls) if before == "release_memory"]
    assert rests == ["receive"] * 3
    assert weights(tmp_path / "run") == weights(expected)
