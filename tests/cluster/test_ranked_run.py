"""A run on ranks is the run of one process, also when ranks are lost or their number changes."""

import io
import json
import math
import os
import re
import signal

import pyarrow.parquet as pq
import pytest
import torch
from rank_parts import WarmRanks
from safetensors.torch import load_file
from small_disk import FULL, FillUp, needs_root, small_disk
from support import THOROUGH, small_model, tokenizer
from transformers import TrainerCallback

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cluster import build_policy
from dapo_rl.engines.build import build_engine
from dapo_rl.engines.protocol import EngineInputs
from dapo_rl.errors import UserError
from dapo_rl.models.load import load_model
from dapo_rl.run import backend
from dapo_rl.runs.display import PlainDisplay
from dapo_rl.train.disk_space import DiskNeed

pytestmark = pytest.mark.slow

ON_RANKS = ["cluster.backend=ray", "checkpoint.every=1", "checkpoint.keep=9", "sampling.max_new_tokens=24"]


def engine_here(config, named, model, weights, tokenizer, device, dtype, longest, note):
    """An engine in this process, which starts faster than one in an actor."""
    model = load_model(config.model)[0]
    return build_engine(named, EngineInputs(model, tokenizer, config.sampling, dtype, longest, copies=False))


@pytest.fixture(scope="module", autouse=True)
def quick_start(ray_instance):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_policy, "RayRanks", WarmRanks)
        patch.setattr(backend, "build_engine_pool", engine_here)
        yield


class AtStep(TrainerCallback):
    """Does something to ranks at the beginning of steps, once each."""

    def __init__(self, actions):
        self.actions = dict(actions)

    def on_step_begin(self, args, state, control, **others):
        for action in [self.actions.pop(state.global_step + 1, None)]:
            if action is not None:
                action(WarmRanks.current.pids)


def run(path, *settings, resume=False, actions=()):
    config = Config.load("demo", [*THOROUGH, "data.eval.size=8", *settings])
    callbacks = [AtStep(actions)] if actions else None
    display = PlainDisplay(io.StringIO())
    with DAPOTrainer(config=config, run_dir=path, callbacks=callbacks, display=display) as trainer:
        on_meta = next(trainer.model.parameters()).is_meta
        summary = trainer.train(resume=resume)
    assert on_meta == (config.cluster.backend == "ray")
    assert summary["finished"]
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain") / "run", *ON_RANKS[1:], "train.steps=4")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run(tmp_path_factory.mktemp("two") / "run", *ON_RANKS, "cluster.ranks=2", "train.steps=4")


def metrics(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    aside = ("timing_s/", "perf/", "rank/")
    return [{k: math.nan if v is None else v for k, v in row.items() if not k.startswith(aside)} for row in rows]


def groups(path):
    tables = [pq.read_table(file) for file in sorted((path / "rollouts").iterdir())]
    names = ["step", "draw", "sample", "prompt_id", "token_ids", "version_first", "version_last", "score", "fate"]
    return [table.select(names).to_pylist() for table in tables]


def test_the_log_tells_what_each_rank_did(two_ranks):
    rows = [json.loads(line) for line in (two_ranks / "metrics.jsonl").read_text().splitlines()]
    for row in (row for row in rows if row["step"]):
        both = sum(row[f"rank/{n}/tokens"] for n in (0, 1))
        assert both == 2 * row["sampling/tokens_trained"], "in the two passes of a step"
        assert all(0 < row[f"rank/{n}/busy"] <= 1 and row[f"rank/{n}/memory_gib"] > 0.05 for n in (0, 1))


def test_a_checkpoint_takes_the_space_that_was_foreseen(two_ranks):
    config = Config.load("demo", [*THOROUGH, *ON_RANKS])
    need = DiskNeed.of(config, load_model(config.model)[0], torch.float32)
    files = (two_ranks / "checkpoints" / "step-4").rglob("*")
    taken = sum(file.stat().st_size for file in files if file.is_file())
    assert need.checkpoint <= taken < 1.05 * need.checkpoint + 2**20


def notes(path):
    return [json.loads(line)["text"] for line in (path / "notes.jsonl").read_text().splitlines()]


def assert_same_run(mine, other):
    """The same groups in the same order, and the same numbers up to rounding."""
    assert groups(mine) == groups(other)
    rows = metrics(other)
    assert len(metrics(mine)) == len(rows) == 5
    for a, b in zip(metrics(mine), rows, strict=True):
        for name in b.keys() & a.keys():
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5, nan_ok=True), name
    weights = load_file(other / "model" / "model.safetensors")
    for name, weight in load_file(mine / "model" / "model.safetensors").items():
        torch.testing.assert_close(weight, weights[name], atol=1e-4, rtol=0)


def assert_equal_runs(mine, other):
    """To the last bit, except times."""
    assert groups(mine) == groups(other)
    assert repr(metrics(mine)) == repr(metrics(other))
    for file in ("model/model.safetensors", "checkpoints/step-4/shards/__1_0.distcp"):
        assert (mine / file).read_bytes() == (other / file).read_bytes(), file


def test_a_run_on_two_ranks_is_that_of_one_process(plain, two_ranks):
    assert_same_run(two_ranks, plain)
    names = [sorted(path.name for path in (run / "model").iterdir()) for run in (plain, two_ranks)]
    assert names[0] == names[1]


def test_a_run_resumes_on_another_number_of_ranks(plain, tmp_path):
    path = run(tmp_path / "run", *ON_RANKS, "cluster.ranks=2", "train.steps=2")
    run(path, *ON_RANKS, "cluster.ranks=1", "train.steps=3", resume=True)
    run(path, *ON_RANKS, "cluster.ranks=4", "train.steps=4", resume=True)
    assert len(list((path / "checkpoints" / "step-4" / "shards").glob("__*.distcp"))) == 4
    assert_same_run(path, plain)


def kill(rank, number=signal.SIGKILL):
    return lambda pids: os.kill(pids[rank], number)


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        (["train.memory=time_share"], {}, "train.memory: time_share is for one process; "),
        (
            [],
            {"model": small_model(), "processing_class": tokenizer()},
            "model: a loaded model cannot be sent to ranks",
        ),
    ],
)
def test_what_cannot_be_trained_on_ranks_is_refused(tmp_path, settings, given, message):
    config = Config.load("demo", [*THOROUGH, *ON_RANKS, *settings])
    with pytest.raises(UserError, match=f"^{message}"):
        DAPOTrainer(config=config, run_dir=tmp_path, **given)


def test_ranks_need_ray():
    with pytest.raises(UserError, match=r"cluster\.ranks: 2 ranks need Ray; set cluster\.backend=ray"):
        Config.load("demo", ["cluster.ranks=2"])


def test_a_run_continues_by_itself_after_ranks_were_lost(two_ranks, tmp_path):
    """One that is killed before the first checkpoint, and one that hangs later."""
    settings = [*ON_RANKS, "cluster.ranks=2", "train.steps=4", "cluster.timeout_s=8"]
    path = run(tmp_path / "run", *settings, actions={1: kill(1), 3: kill(0, signal.SIGSTOP)}.items())
    told = [note for note in notes(path) if note.startswith("the ranks were started again")]
    assert re.fullmatch(r"[\w ]+ \(1 of 3\), because rank 1 was killed or crashed, in \w+", told[0])
    assert re.fullmatch(r"[\w ]+ \(2 of 3\), because no progress for \d+ s in \w+, on rank 0", told[1])
    assert_equal_runs(path, two_ranks)


def test_too_many_losses_end_the_run_with_one_line(tmp_path):
    settings = [*ON_RANKS, "cluster.ranks=2", "train.steps=4", "cluster.restarts=0"]
    with pytest.raises(UserError, match=r"^rank 1 was killed or crashed, in \w+, after 0 restarts; continue .*; look"):
        run(tmp_path / "run", *settings, actions={2: kill(1)}.items())
    assert json.loads((tmp_path / "run" / "error.json").read_text())["step"] == 2


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as path:
        yield path


@needs_root
def test_ranks_on_a_full_disk_train_to_the_end_and_save_the_model(disk):
    """There is no room for the shards of the second checkpoint; the ranks live on."""
    small = ["train.steps=3", "checkpoint.keep=1", "data.eval=null", "eval.every=null", "cluster.restarts=0"]
    config = Config.load("demo", [*THOROUGH, *ON_RANKS, *small])
    filling = FillUp(disk, 1, 6.5)
    with (
        DAPOTrainer(config=config, run_dir=disk / "run", callbacks=[filling]) as trainer,
        pytest.raises(UserError, match=f"step-3: the checkpoint cannot be written: {FULL}; .* the model is in "),
    ):
        trainer.train()
    assert [json.loads(line)["step"] for line in (disk / "run" / "metrics.jsonl").open()] == [1, 2, 3]
    assert load_file(disk / "run" / "model" / "model.safetensors")
    (disk / "ballast").unlink()
    with DAPOTrainer(config=config, run_dir=disk / "run") as trainer:
        assert trainer.train(resume=True)["finished"]
