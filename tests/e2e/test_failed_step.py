"""A run that fails in a step keeps what it sampled: the rollouts, their tokens in the ledger, and both on the board."""

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest
from support import SMALL

from dapo_rl import Config, DAPOTrainer, UserError
from dapo_rl.board.groups import groups_of
from dapo_rl.board.ledger import ledger
from dapo_rl.board.run import BoardRun
from dapo_rl.board.samples import SampleFilter, samples_of
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.errors import DivergedError, NonFiniteError

pytestmark = pytest.mark.slow

QUICK = [*SMALL, "data.eval=null", "eval.every=null", "checkpoint.every=1", "train.steps=3"]


def trainer_for(path, *settings, **more):
    return DAPOTrainer(config=Config.load(DEFAULT_RECIPE, [*QUICK, *settings]), run_dir=path, **more)


def never_right(completions, **_):
    return [0.0] * len(completions)


def raises(completions, **_):
    raise ZeroDivisionError("division by zero")


def raise_later(method, error, calls=0):
    """The method, which raises after this many calls."""
    left = [calls]

    def call(*arguments, **named):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return method(*arguments, **named)

    return call


def cap(path):
    return trainer_for(path, "sampling.cap=4", reward_funcs=never_right)


def verifier(path):
    return trainer_for(path, reward_funcs=raises)


def own_filter(path):
    (path.parent / "own.py").write_text("def keep(group):\n    raise ValueError('mine')\n")
    return trainer_for(path, f"sampling.filter={path.parent / 'own.py'}:keep")


def engine(path):
    trainer = trainer_for(path)
    trainer._run.engine.poll = raise_later(trainer._run.engine.poll, RuntimeError("the engine broke"), 3)
    return trainer


def update(path):
    trainer = trainer_for(path)
    trainer._run.policy.update = raise_later(trainer._run.policy.update, RuntimeError("the update broke"), 1)
    return trainer


def diverged(path):
    trainer = trainer_for(path)
    trainer._run.policy.update = raise_later(trainer._run.policy.update, NonFiniteError("the loss is nan"))
    return trainer


FAILURES = {
    cap: (UserError, {"all_wrong"}),
    verifier: (UserError, {"verifier_error"}),
    own_filter: (UserError, {"unfinished"}),
    engine: (RuntimeError, {"unfinished"}),
    update: (RuntimeError, {"unfinished"}),
    diverged: (DivergedError, {"unfinished"}),
}


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
def test_the_samples_of_the_failed_step_are_kept_and_the_error_says_where(fail, tmp_path, capsys):
    path, (kind, outcomes) = tmp_path / "run", FAILURES[fail]
    with fail(path) as trainer, pytest.raises(kind) as ended:
        trainer.train()
    file = path / "rollouts" / "step-000001.parquet"
    said = capsys.readouterr().out if kind is RuntimeError else str(ended.value)
    assert f"he samples of this step are in {file}, which `dapo board {path}` shows" in said
    if kind is not RuntimeError:
        assert json.loads((path / "error.json").read_text())["message"] == said
    table = pq.read_table(file).to_pylist()
    assert outcomes <= {row["fate"] for row in table}
    assert len({(row["draw"], row["sample"]) for row in table}) == len(table) > 0

    summary = json.loads((path / "summary.json").read_text())
    assert (summary["finished"], summary["steps"]) == (False, 0)
    tokens = Counter()
    for row in table:
        tokens[row["fate"]] += len(row["token_ids"])
    counted = {outcome: count for outcome, count in summary["tokens"].items() if count}
    total = counted.pop("total")
    assert sum(counted.values()) == total
    assert {outcome: counted[outcome] for outcome in tokens} == tokens
    assert total >= sum(tokens.values()) > 0

    run = BoardRun("run", path)
    assert run.state == "failed"
    assert run.row()["tokens"] == total
    shown = ledger(run)
    assert shown["totals"]["total"] == total
    assert shown["bars"] == [{"step": 1, "tokens": dict(tokens)}]
    assert {group["fate"] for group in groups_of(file)} == set(tokens)
    assert samples_of(file, SampleFilter(), 0, 100)["matched"] == len(table)


def test_a_resumed_run_replaces_what_the_failed_step_left(tmp_path):
    path = tmp_path / "run"
    with trainer_for(path) as trainer:
        trainer._run.policy.update = raise_later(trainer._run.policy.update, RuntimeError("the update broke"), 3)
        with pytest.raises(RuntimeError, match="the update broke"):
            trainer.train()
    failed = path / "rollouts" / "step-000002.parquet"
    assert {row["fate"] for row in pq.read_table(failed).to_pylist()} >= {"unfinished"}
    with trainer_for(path) as trainer:
        assert trainer.train(resume=True)["finished"]
    with trainer_for(tmp_path / "undisturbed") as trainer:
        whole = trainer.train()
    for step in (1, 2, 3):
        name = f"rollouts/step-{step:06d}.parquet"
        assert pq.read_table(path / name).equals(pq.read_table(tmp_path / "undisturbed" / name)), name
    assert json.loads((path / "summary.json").read_text())["tokens"] == whole["tokens"]
    assert [row["step"] for row in map(json.loads, (path / "metrics.jsonl").open())] == [1, 2, 3]


def test_a_new_run_in_the_directory_of_one_that_failed_in_its_first_step_starts_empty(tmp_path):
    path = tmp_path / "run"
    with cap(path) as trainer, pytest.raises(UserError, match=r"sampling\.cap"):
        trainer.train()
    stale = path / "rollouts" / "step-000001.parquet"
    stale.rename(path / "rollouts" / "step-000009.parquet")
    with trainer_for(path, "train.steps=1") as trainer:
        assert trainer.train()["finished"]
    assert [file.name for file in (path / "rollouts").iterdir()] == ["step-000001.parquet"]


def test_a_trainer_that_failed_before_its_first_checkpoint_starts_again_as_a_new_one(tmp_path):
    """Its weights have been trained, so that it cannot make the first step again."""
    path = tmp_path / "run"
    with trainer_for(path, "checkpoint.every=100") as trainer:
        trainer._run.policy.update = raise_later(trainer._run.policy.update, RuntimeError("the update broke"), 3)
        with pytest.raises(RuntimeError, match="the update broke"):
            trainer.train()
        log = (path / "metrics.jsonl").read_bytes()
        with pytest.raises(UserError, match="no checkpoint to resume from, and this trainer has already trained"):
            trainer.train(resume=True)
    assert (path / "metrics.jsonl").read_bytes() == log
    with trainer_for(path, "checkpoint.every=100") as trainer:
        assert trainer.train(resume=True)["finished"]
    assert [row["step"] for row in map(json.loads, (path / "metrics.jsonl").open())] == [1, 2, 3]
