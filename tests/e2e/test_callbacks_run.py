"""Runs with callbacks, runs that fail, and the example of docs/callbacks.md."""

import json
import re
import signal
import sys

import forked
import pytest
from safetensors.torch import load_file
from small_hub import SmallHub, use_hub
from support import REPOSITORY, SMALL
from transformers import TrainerCallback

from dapo_rl import Config, DAPOTrainer, UserError
from dapo_rl.cli import DEFAULT_RECIPE

pytestmark = pytest.mark.slow

SETTINGS = [*SMALL, "train.steps=3", "train.warmup_steps=0", "eval.every=3", "checkpoint.every=100"]


def trainer_for(path, *callbacks):
    return DAPOTrainer(config=Config.load(DEFAULT_RECIPE, SETTINGS), run_dir=path, callbacks=callbacks)


def lines_of(path, name):
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def without_times(path):
    lines = lines_of(path, "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/"))} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    with trainer_for(path) as trainer:
        trainer.train()
        history = trainer.state.log_history
    return path, history


class StopsAfterTwo(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 1
        control.should_training_stop = state.global_step == 2


def test_a_run_that_a_callback_stops_is_saved_and_resumes_bit_for_bit(undisturbed, tmp_path):
    path = tmp_path / "run"
    with trainer_for(path, StopsAfterTwo) as trainer:
        summary = trainer.train()
    assert (summary["steps"], summary["finished"]) == (2, False)
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["step-1", "step-2"]
    assert [note["text"] for note in lines_of(path, "notes.jsonl")][-1] == "step 2: stopped by StopsAfterTwo"
    assert not (path / "error.json").exists()
    with trainer_for(path) as trainer:
        assert trainer.train(resume=True)["finished"]
        history = trainer.state.log_history
    whole, whole_history = undisturbed
    assert without_times(path) == without_times(whole)
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (path, whole))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert [row["step"] for row in history] == [row["step"] for row in whole_history] == [0, 1, 2, 3, 3]
    assert [row.get("reward") for row in history] == [row.get("reward") for row in whole_history]


def test_an_evaluation_on_request_is_in_the_log_and_the_model_goes_to_a_hub(tmp_path, monkeypatch):
    class Evaluates(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, optimizer=None, processing_class=None, **kwargs):
            control.should_evaluate = state.global_step == 0
            assert model is trainer.model
            assert optimizer.param_groups[0]["params"][0].shape
            assert processing_class is trainer.tokenizer

        def on_train_end(self, args, state, control, **kwargs):
            trainer.log({"mine": 0.5})

    path = tmp_path / "run"
    with trainer_for(path, Evaluates) as trainer:
        trainer.train()
        assert trainer.state.log_history[-1]["mine"] == 0.5
        with SmallHub().serving() as hub:
            use_hub(monkeypatch, hub.address)
            trainer.push_to_hub(private=True, dataset_name="trl-lib/tldr")
    ((_, message, files),) = hub.commits
    assert (hub.created[0]["name"], message) == ("run", "End of training")
    assert files["model.safetensors"] == (path / "model" / "model.safetensors").read_bytes()
    assert files["README.md"].endswith(b"by DAPO, from tiny.\n")
    assert [line["step"] for line in without_times(path) if "eval/accuracy" in line] == [0, 1, 3]
    assert not any("mine" in line for line in without_times(path))


def test_a_failed_run_keeps_why_until_it_is_resumed(undisturbed, tmp_path):
    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = True

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                raise KeyError("no such thing")

    path = tmp_path / "run"
    with trainer_for(path, Breaks) as trainer, pytest.raises(UserError) as caught:
        trainer.train()
    assert str(caught.value) == "callbacks: Breaks.on_step_begin raised KeyError: 'no such thing'"
    assert isinstance(caught.value.__cause__, KeyError)
    error = json.loads((path / "error.json").read_text())
    assert (error["step"], error["kind"], error["message"]) == (2, "UserError", str(caught.value))
    assert 'raise KeyError("no such thing")' in error["traceback"]

    with trainer_for(path) as trainer:
        trainer.train(resume=True)
    assert not (path / "error.json").exists()
    assert without_times(path) == without_times(undisturbed[0])
    notes = [(note["step"], note["text"]) for note in lines_of(path, "notes.jsonl")]
    assert notes[0][0] == 0
    assert notes[0][1].startswith("eval 0/3  held-out accuracy ")
    assert (1, f"resumed from {path / 'checkpoints' / 'step-1'}") in notes


def test_a_bug_leaves_its_traceback_and_a_refused_resumption_leaves_nothing(tmp_path):
    path = tmp_path / "run"
    with trainer_for(path) as trainer:
        trainer._run.policy.update = lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            trainer.train()
    error = json.loads((path / "error.json").read_text())
    assert (error["step"], error["kind"]) == (1, "ZeroDivisionError")
    assert "1 / 0" in error["traceback"]
    assert [line["step"] for line in without_times(path)] == [0]
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
    config = Config.load(DEFAULT_RECIPE, [*SETTINGS, "seed=7"])
    with DAPOTrainer(config=config, run_dir=path) as other, pytest.raises(UserError, match="seed"):
        other.train(resume=True)
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()} == before
    with trainer_for(path) as trainer:
        trainer.train(resume=True)
    assert [line["step"] for line in without_times(path)] == [0, 1, 2, 3]
    assert not (path / "error.json").exists()


@pytest.fixture
def usual_ctrl_c():
    """Python's own handler, whatever the tests were started with: a run leaves any other in place."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_ctrl_c")
def test_ctrl_c_is_no_failure(tmp_path):
    class Interrupts(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    with trainer_for(tmp_path / "run", Interrupts) as trainer, pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not (tmp_path / "run" / "error.json").exists()
    (note,) = lines_of(tmp_path / "run", "notes.jsonl")
    assert note["text"].startswith("stopped; to continue from the last checkpoint")


def test_a_callback_that_fails_at_once_leaves_no_processes(tmp_path):
    class Refuses(TrainerCallback):
        def on_init_end(self, args, state, control, **kwargs):
            raise ValueError("not today")

    with pytest.raises(UserError, match=r"^callbacks: Refuses.on_init_end raised ValueError: not today$"):
        trainer_for(tmp_path / "run", Refuses)
    assert not (tmp_path / "run").exists()


def test_the_example_in_the_docs(tmp_path):
    (program,) = re.findall(
        r"^```python\n(.*?)^```", (REPOSITORY / "docs" / "callbacks.md").read_text(), re.MULTILINE | re.DOTALL
    )
    result = forked.run([sys.executable, "-c", program], cwd=tmp_path, timeout=400)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^step 3 of 3: reward [-\d.]+$", result.stdout, re.MULTILINE)
    accuracies = json.loads(result.stdout.splitlines()[-1])
    assert len(accuracies) == 4
