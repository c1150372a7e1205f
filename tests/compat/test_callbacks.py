"""transformers' callbacks: what they are called with, and what they may get wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import DefaultFlowCallback

from dapo_rl.compat.trl.callbacks import TRL_NAMES, Callbacks, with_trl_names
from dapo_rl.compat.trl.training_arguments import CallbackArguments
from dapo_rl.config import Config
from dapo_rl.errors import NonFiniteError, UserError


class Records(TrainerCallback):
    """Records each hook with the step and the epoch, and what it got besides."""

    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hook(args, state, control, **more):
            assert isinstance(state, TrainerState)
            assert isinstance(control, TrainerControl)
            self.calls.append((name, state.global_step, state.epoch, more))

        return hook

    def hooks(self):
        return [name for name, *_ in self.calls]


def row(step, drawn=4, **more):
    return {"sampling/drawn": drawn, "sampling/tokens_trained": 100, "reward/mean": step / 10, **more}


def make(*callbacks, tmp_path="run", **settings):
    config = Config.build({"train.steps": 5, "eval.every": 2, "data.eval": "arithmetic"})
    args = CallbackArguments.of(config, Path(tmp_path))
    made = Callbacks(args, {"model": "the model"}, prompts=8, steps=5, eval_steps=2, save_steps=5, **settings)
    for callback in callbacks:
        made.add(callback)
    return made


def test_a_step_calls_its_hooks_in_the_order_of_transformers():
    seen = Records()
    callbacks = make(seen)
    callbacks.call("on_init_end")
    callbacks.train_begin()
    for step in (1, 2, 3):
        callbacks.step_begin()
        callbacks.step_end(step, row(step))
    callbacks.evaluated({"eval/accuracy": 0.5, "eval/pass@4": 0.75})
    callbacks.saved()
    callbacks.train_end()
    assert seen.hooks() == [
        *("on_init_end", "on_train_begin", "on_epoch_begin"),
        *("on_step_begin", "on_step_end", "on_log"),
        *("on_step_begin", "on_step_end", "on_epoch_end", "on_log"),  # 8 prompts are one epoch
        *("on_epoch_begin", "on_step_begin", "on_step_end", "on_log"),
        *("on_log", "on_evaluate", "on_save", "on_epoch_end", "on_train_end"),
    ]
    steps = {name: (step, epoch) for name, step, epoch, _ in reversed(seen.calls)}
    assert steps["on_step_begin"] == (0, 0)
    assert steps["on_step_end"] == (1, 0.5)
    assert steps["on_train_end"] == (3, 1.5)
    more = {name: more for name, _, _, more in seen.calls}
    expected = {"model", "lr_scheduler", "train_dataloader", "eval_dataloader"}
    assert more["on_save"].keys() == expected
    assert more["on_save"]["model"] == "the model"
    assert more["on_evaluate"]["metrics"] == {
        "eval/accuracy": 0.5, "eval_accuracy": 0.5, "eval/pass@4": 0.75, "eval_pass@4": 0.75,
    }  # fmt: skip
    third = next(more["logs"] for name, step, _, more in seen.calls if (name, step) == ("on_log", 3))
    assert third == row(3) | {"reward": 0.3, "epoch": 1.5, "num_tokens": 300}


def test_the_state_is_a_function_of_the_log():
    lines = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, **row(1), "actor/clipped_high_prob": None},
        {"step": 2, **row(2), "eval/accuracy": 0.75},
        {"step": 3, **row(3), "eval/accuracy": 0.5},
    ]
    live, resumed = make(Records), make()
    live.train_begin()
    live.evaluated({"eval/accuracy": 0.25})
    for line in lines[1:]:
        metrics = {name: value for name, value in line.items() if name not in ("step", "eval/accuracy")}
        live.step_begin()
        live.step_end(line["step"], metrics)
        if "eval/accuracy" in line:
            live.evaluated({"eval/accuracy": line["eval/accuracy"]})
    resumed.follow(lambda: lines)
    assert resumed.state == live.state
    state = resumed.state
    assert (state.global_step, state.max_steps, state.eval_steps, state.save_steps) == (3, 5, 2, 5)
    assert (state.epoch, state.num_input_tokens_seen) == (1.5, 300)
    assert (state.best_metric, state.best_global_step) == (0.75, 2)
    assert [entry["step"] for entry in state.log_history] == [0, 1, 2, 2, 3, 3]
    assert [e["eval_accuracy"] for e in state.log_history if "eval_accuracy" in e] == [0.25, 0.75, 0.5]
    assert all(entry.get("actor/clipped_high_prob", 0) is not None for entry in state.log_history)


def test_callbacks_keep_their_state_object_when_a_run_resumes():
    callbacks = make(Records)
    before = callbacks.state
    callbacks.follow(lambda: [{"step": 1, **row(1)}])
    assert callbacks.state is before
    assert before.global_step == 1


def test_control_is_the_callbacks_and_is_reset_with_each_step():
    class Wants(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_evaluate = control.should_save = state.global_step == 1
            return control

        def on_save(self, args, state, control, **kwargs):
            return TrainerControl(should_training_stop=True)

    callbacks = make(Wants)
    callbacks.train_begin()
    callbacks.step_begin()
    callbacks.step_end(1, row(1))
    assert (callbacks.should_evaluate, callbacks.should_save, callbacks.should_stop) == (True, True, False)
    callbacks.evaluated({"eval/accuracy": 0.5})
    assert not callbacks.should_evaluate
    callbacks.saved()
    assert (callbacks.should_save, callbacks.should_stop, callbacks.stopped_by) == (False, True, "Wants")
    callbacks.train_begin()
    assert not callbacks.should_stop


def test_early_stopping_counts_evaluations_without_progress():
    callbacks = make(EarlyStoppingCallback(2))
    callbacks.train_begin()
    stops = []
    for accuracy in (0.25, 0.5, 0.5, 0.4):
        callbacks.evaluated({"eval/accuracy": accuracy})
        stops.append(callbacks.should_stop)
    assert stops == [False, False, False, True]
    assert callbacks.state.best_metric == 0.5


def test_a_config_of_trl_as_args(tmp_path):
    trl = pytest.importorskip("trl")
    callbacks = make(EarlyStoppingCallback(1))
    callbacks.args = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(UserError, match=r"EarlyStoppingCallback.on_train_begin raised AssertionError: .* requires met"):
        callbacks.train_begin()
    callbacks.args.metric_for_best_model, callbacks.args.greater_is_better = "reward", True
    callbacks.args.eval_strategy = "steps"
    callbacks.train_begin()
    for reward in (-0.5, 0.25):
        callbacks.evaluated({"eval/accuracy": 0.5, "eval/reward": reward})
    assert (callbacks.should_stop, callbacks.state.best_metric) == (False, 0.25)
    callbacks.evaluated({"eval/accuracy": 0.75, "eval/reward": 0.0})
    assert callbacks.should_stop


def test_early_stopping_by_a_metric_that_must_be_named():
    callbacks = make(EarlyStoppingCallback)
    callbacks.args = None
    with pytest.raises(UserError, match=r"^callbacks: EarlyStoppingCallback.on_train_begin raised AttributeError: "):
        callbacks.train_begin()


def test_the_stock_flow_asks_for_what_the_settings_say():
    callbacks = make(DefaultFlowCallback)
    callbacks.train_begin()
    wants = []
    for step in range(1, 6):
        callbacks.step_begin()
        callbacks.step_end(step, row(step))
        wants.append((callbacks.should_evaluate, callbacks.should_save, callbacks.should_stop))
    assert wants == [(False,) * 3, (True, False, False), (False,) * 3, (True, False, False), (True, True, True)]


def test_a_printer_may_take_from_its_logs(capsys):
    callbacks = make(PrinterCallback)
    callbacks.log({"total_flos": 1.0, "loss": 0.5, "note": "mine"})
    assert capsys.readouterr().out == "{'note': 'mine', 'loss': '0.5', 'epoch': 0}\n"
    assert callbacks.state.log_history == [{"note": "mine", "total_flos": 1.0, "loss": 0.5, "epoch": 0, "step": 0}]


@pytest.mark.parametrize("error", [ValueError("no such\ncolumn"), SystemExit(0)])
def test_an_exception_names_the_callback_and_its_hook(error):
    class Breaks(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            raise error

    with pytest.raises(UserError) as caught:
        make(Breaks).log({"x": 1})
    kind = type(error).__name__
    assert str(caught.value).startswith(f"callbacks: Breaks.on_log raised {kind}: ")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error
    assert "raise error" in caught.value.more


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("a line"), NonFiniteError("x")])
def test_what_is_already_understood_passes(error):
    class Raises(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            raise error

    with pytest.raises(type(error)) as caught:
        make(Raises).saved()
    assert caught.value is error


def test_what_is_no_callback_is_refused_when_it_is_added():
    class Needs(TrainerCallback):
        def __init__(self, patience):
            self.patience = patience

    with pytest.raises(UserError, match=r"^callbacks: expected a transformers TrainerCallback, got len$"):
        make(len)
    with pytest.raises(UserError, match=r"^callbacks: Needs\(\) raised TypeError: .*'patience'; pass an instance$"):
        make(Needs)

    class Answers(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            return True

    with pytest.raises(UserError, match=r"^callbacks: Answers.on_save returned a bool; a hook returns its control, or"):
        make(Answers).saved()


def test_a_hook_that_is_never_called_is_mentioned():
    class Gradients(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs): ...

    assert make(PrinterCallback, Gradients).never_called() == [
        "callbacks: Gradients: never called here: on_optimizer_step"
    ]


def test_callbacks_are_taken_out_by_class_or_by_themselves():
    one, other = Records(), Records()
    callbacks = make(one, PrinterCallback, other)
    assert callbacks.pop(PrinterCallback).__class__ is PrinterCallback
    assert callbacks.pop(other) is other
    assert callbacks.pop(Records) is one
    assert callbacks.pop(Records) is None


def test_metrics_have_both_names_and_are_finite():
    assert len(set(TRL_NAMES.values())) == len(TRL_NAMES)
    metrics = {"actor/kl_loss": 0.5, "actor/lr": None, "actor/entropy": float("nan"), "acc/mean": 1.0}
    assert with_trl_names(metrics) == {"actor/kl_loss": 0.5, "kl": 0.5, "acc/mean": 1.0}
    assert with_trl_names({"reward/brief/std": 0.2}) == {"reward/brief/std": 0.2, "rewards/brief/std": 0.2}
    assert with_trl_names({"reward/batch": 0.2}) == {"reward/batch": 0.2}


@pytest.mark.slow
def test_a_run_without_callbacks_does_not_import_transformers_trainer():
    program = (
        "import sys; from dapo_rl.compat.trl.callbacks import Callbacks; c = Callbacks(); c.train_begin();"
        "c.step_begin();"
        "c.step_end(1, {}); c.evaluated({}); c.saved(); c.train_end(); print('transformers.trainer_callback' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
