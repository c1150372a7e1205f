"""Runs on streams: they learn what runs on the same rows learn, and resume exactly."""

from itertools import count

import pytest
import support
import torch

from dapo_rl import Config, DAPOTrainer, UserError
from dapo_rl.data.arithmetic import problems
from dapo_rl.lab.verify import dry_run
from dapo_rl.run.inputs import TrainerInputs

pytestmark = pytest.mark.slow

ROWS = problems(200)
SMALL = [*support.SMALL[:4], "data.eval=null", "train.warmup_steps=0", "train.steps=4", "checkpoint.every=2"]


def endless():
    return (ROWS[n % len(ROWS)] for n in count())


def trainer_for(path, *overrides, **arguments):
    return DAPOTrainer(config=Config.load("demo", [*SMALL, "eval.every=null", *overrides]), run_dir=path, **arguments)


def same_weights(one, other):
    pairs = zip(one.model.named_parameters(), other.model.named_parameters(), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def test_a_run_on_an_endless_stream_resumes_exactly(tmp_path, capsys):
    whole = trainer_for(tmp_path / "whole", train_dataset=endless())
    summary = whole.train()
    assert "data.train: a stream without a length" in capsys.readouterr().out
    assert summary["data"]["train_prompts"] >= 16
    assert summary["data"]["bad_rows"] == summary["data"]["too_long"] == 0

    first = trainer_for(tmp_path / "parts", train_dataset=endless())
    first.stop_requested = lambda: first._run.progress.step == 2
    first.train()
    with pytest.raises(UserError, match="an iterator cannot be read again"):
        first.train(resume=True)
    second = trainer_for(tmp_path / "parts", train_dataset=endless())
    resumed = second.train(resume=True)
    assert "data.train: reading the stream again, up to row " in capsys.readouterr().out
    assert resumed["data"] == summary["data"]
    assert same_weights(whole, second)


def test_a_stream_is_found_again_in_the_middle_of_a_step(tmp_path):
    """Prompts of groups that are kept, dropped, unread and in flight."""
    whole = trainer_for(tmp_path / "whole", "train.steps=2", train_dataset=endless()).train()
    calls = [0]

    def in_the_second_step():
        calls[0] += first._run.progress.step == 1
        return calls[0] > 10

    first = trainer_for(tmp_path / "parts", "train.steps=2", train_dataset=endless())
    first.stop_requested = in_the_second_step
    assert first.train()["steps"] == 1
    assert len(first._run.sampler.so_far.sampled) > 0
    parts = trainer_for(tmp_path / "parts", "train.steps=2", train_dataset=endless()).train(resume=True)
    assert (parts["data"], parts["tokens"], parts["finished"]) == (whole["data"], whole["tokens"], True)


def test_what_cannot_be_done_with_a_stream_is_one_line(tmp_path):
    for overrides, message in (
        (["sampling.skip_solved_epochs=1"], r"^sampling\.skip_solved_epochs: a stream without a length has no epochs"),
        (["data.max_prompt_tokens=500"], r"^sampling\.max_new_tokens: 56 after a prompt of 500 tokens exceeds"),
    ):
        with pytest.raises(UserError, match=message):
            trainer_for(tmp_path, *overrides, train_dataset=endless())
    with pytest.raises(UserError, match=r"^data\.eval: a stream needs eval\.prompts"):
        trainer_for(tmp_path, train_dataset=ROWS, eval_dataset=endless())
    trainer_for(tmp_path, "eval.prompts=8", train_dataset=ROWS, eval_dataset=endless()).close()


def test_a_dry_run_takes_the_first_rows_of_a_stream():
    config = Config.load("demo", [*SMALL, "eval.every=null"])
    result = dry_run(config, rows=3, samples=2, given=TrainerInputs(train_dataset=endless()))
    assert [row.row for row in result.rows] == ["0", "1", "2"]
    assert result.data == "in memory (the beginning of a stream)"
