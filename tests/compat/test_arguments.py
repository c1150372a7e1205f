"""Wrong arguments of `DAPOTrainer` and its methods: one line each."""

import copy

import pytest
from support import small_model, tokenizer

from dapo_rl import DAPOTrainer, UserError
from dapo_rl.runs.display import PlainDisplay

ROWS = [{"prompt": "1+1=?\n", "answer": "2"}] * 4
SMALL = {
    "train.steps": 1,
    "sampling.prompts_per_step": 1,
    "sampling.group_size": 2,
    "sampling.max_new_tokens": 8,
    "sampling.dynamic": False,
    "overlong.shape": "off",
    "reward.workers": 0,
    "log.report": False,
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "model: expected a name, a directory or a loaded model of transformers, got 3 (int)"),
        ({"model": ["a"]}, "model: expected a name, a directory or a loaded model of transformers, got ['a'] (list)"),
        ({"model": dict}, "model: expected a name"),
        ({"config": [1]}, "config: expected a mapping of settings, a Config, or the path or name of a recipe, got [1]"),
        ({"config": 3}, "config: expected a mapping of settings"),
        ({"config": b"x"}, "config: expected a mapping of settings"),
        ({"processing_class": "x"}, "processing_class: expected a tokenizer"),
        ({"processing_class": []}, "processing_class: expected a tokenizer"),
        (
            {"engine": "vllm"},
            "engine: expected an engine, or a class or function that makes one (a name goes to config",
        ),
        ({"engine": 3}, "engine: expected an engine"),
        ({"run_dir": 3}, "run_dir: expected a path, got 3 (int)"),
        ({"display": "plain"}, "display: expected a display"),
        ({"reward_func": len}, "DAPOTrainer: no argument reward_func; did you mean reward_funcs?"),
        ({"tokenizer": 3}, "DAPOTrainer: no argument tokenizer; did you mean processing_class?"),
        ({"learning_rate": 1}, "no argument learning_rate; settings go to config, as in config={'train.lr': …}"),
        ({"xyzzy": 1}, "DAPOTrainer: no argument xyzzy; it has model, reward_funcs, args, train_dataset"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, message, tmp_path):
    with pytest.raises(UserError) as error:
        DAPOTrainer(**({"train_dataset": ROWS, "run_dir": tmp_path / "run"} | arguments))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def trainer(tmp_path):
    arguments = {"train_dataset": ROWS, "reward_funcs": "math", "config": SMALL, "run_dir": tmp_path / "run"}
    with DAPOTrainer(small_model(), processing_class=tokenizer(), **arguments) as made:
        yield made


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.train(resume=3), "resume: expected True, False or the path of a checkpoint, got 3 (int)"),
        (lambda t: t.train(resume_from_checkpoint=[1]), "resume_from_checkpoint: expected True, False or the path"),
        (lambda t: t.train(resum=True), "train: no argument resum; did you mean resume?"),
        (lambda t: t.save_model(output_dir="out"), "save_model: no argument output_dir; did you mean path?"),
        (lambda t: t.evaluate(eval_dataset=[]), "evaluate: no argument eval_dataset; it has none"),
        (lambda t: t.save_model(3), "path: expected a path, got 3 (int)"),
        (lambda t: t.push_to_hub(3), "repo_id: expected a string, got 3 (int)"),
        (lambda t: t.log(3), "log: expected a mapping of metrics, got 3"),
        (lambda t: t.add_callback(3), "callbacks: expected a transformers TrainerCallback, got int"),
    ],
)
def test_a_wrong_argument_of_a_method_is_one_line(trainer, call, message):
    with pytest.raises(UserError) as error:
        call(trainer)
    assert message in str(error.value)
    assert not trainer.run_dir.exists()


def test_right_arguments_are_accepted(tmp_path):
    import sys

    arguments = {"train_dataset": ROWS, "reward_funcs": "math", "config": SMALL, "display": PlainDisplay(sys.stderr)}
    with DAPOTrainer(small_model(), processing_class=tokenizer(), run_dir=str(tmp_path / "run"), **arguments) as made:
        assert made.train(resume=None)["steps"] == 1


@pytest.mark.parametrize("model", ["tiny", small_model()])
def test_a_tokenizer_that_ends_no_response(tmp_path, model):
    endless = copy.deepcopy(tokenizer())
    endless.eos_token = endless.pad_token = None
    with pytest.raises(UserError, match=r"^model\.name: the tokenizer of .* has no end-of-sequence token; set its"):
        DAPOTrainer(model, "math", None, ROWS, processing_class=endless, config=SMALL, run_dir=tmp_path / "run")


def test_an_own_model_without_data_is_refused(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("train: {steps: 1}\n")
    for arguments, where in [
        ({"model": "tiny"}, "train_dataset"),
        ({"config": {"model.name": "org/model"}}, "model.name=org/model"),
        ({"config": recipe}, str(recipe)),
    ]:
        with pytest.raises(UserError) as error:
            DAPOTrainer(run_dir=tmp_path / "run", **arguments)
        assert str(error.value).startswith(f"{where}: data.train is not set; name what to train on")


def test_a_second_run_of_a_script_names_its_argument(tmp_path):
    trl = pytest.importorskip("trl")
    how = {"output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, "max_steps": 1, "report_to": "none"}
    args = trl.GRPOConfig(**how, num_generations=2, per_device_train_batch_size=2, max_completion_length=8)
    config = {"sampling.dynamic": False, "reward.workers": 0, "log.report": False}

    def again():
        given = {"args": args, "train_dataset": ROWS, "processing_class": tokenizer(), "config": config}
        return DAPOTrainer(small_model(), "math", **given)

    with again() as trainer:
        trainer.train()
    with again() as trainer, pytest.raises(UserError) as error:
        trainer.train()
    assert str(error.value).endswith(
        "already contains a run; resume it with train(resume_from_checkpoint=True), or name another output_dir"
    )
    with again() as trainer:
        trainer.train(resume_from_checkpoint=True)
