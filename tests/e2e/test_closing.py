"""What a trainer takes, it gives back: when it is closed, when it is dropped, and when it could not be built."""

import gc
import json
import os
import sys
import weakref
from pathlib import Path

import forked
import pytest
import torch
from open_and_close import RUNS, children
from support import REPOSITORY, SMALL, small_model, tokenizer

from dapo_rl import Config, DAPOTrainer, UserError
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.run.build import build_run
from dapo_rl.run.inputs import TrainerInputs, resolve
from dapo_rl.runs.display import make_display

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
QUICK = [*SMALL, "data.eval=null", "eval.every=null", "train.steps=1"]


def settings(*overrides):
    return Config.load(DEFAULT_RECIPE, [*QUICK, *overrides])


def trainer_for(path, *overrides, **arguments):
    return DAPOTrainer(config=settings(*overrides), run_dir=path, **arguments)


def alive(pid):
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def by_reference_counts():
    """Nothing waits for a collection of cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_ten_runs_in_one_process_leave_nothing_behind():
    program = Path(__file__).with_name("open_and_close.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])}
    result = forked.run([sys.executable, program], env=environment, timeout=600)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["run"], row["steps"]) for row in rows] == [(n, 1) for n in range(1, RUNS + 1)]
    assert all(row["processes"] for row in rows), "there was something to end"
    assert not any(row["left"] or row["model"] for row in rows)
    first, last = rows[4], rows[-1]  # libraries keep what they load in the first runs
    assert (last["threads"], last["files"]) == (first["threads"], first["files"])
    assert last["mib"] < first["mib"] + 12, "the weights, moments and cache of a single run take more"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("engine=hf", "algo.kl_coef=0.01"),
        # Short answers, right or wrong: a CPU without bfloat16 takes seconds for a few of them.
        (
            "model.lora.rank=4",
            "model.dtype=bfloat16",
            "sampling.max_new_tokens=8",
            "overlong.cache_length=4",
            "sampling.dynamic=false",
        ),
    ],
    ids=["default", "hf, with a reference", "LoRA, in bfloat16"],
)
@pytest.mark.parametrize("trains", [False, True])
def test_a_trainer_that_is_dropped_frees_everything_at_once(tmp_path, by_reference_counts, overrides, trains):
    if "model.lora.rank=4" in overrides:
        pytest.importorskip("peft")
    trainer = trainer_for(tmp_path / "run", *overrides)
    if trains:
        trainer.train()
    run = trainer._run
    refs = [weakref.ref(part) for part in (run.model, run.engine, run.sampler, run.policy, run.verifier)]
    pids = run.verifier.pids
    assert pids
    assert all(map(alive, pids))
    del run, trainer
    assert [ref() for ref in refs] == [None] * 5
    assert not any(map(alive, pids))


def test_a_closed_trainer_says_so(tmp_path):
    with trainer_for(tmp_path / "run") as trainer:
        model, pids = weakref.ref(trainer.model), trainer._run.verifier.pids
    assert model() is None
    assert not any(map(alive, pids))
    trainer.close()
    for use in (trainer.train, trainer.evaluate, lambda: trainer.save_model(tmp_path / "model"), lambda: trainer.model):
        with pytest.raises(RuntimeError, match=r"^the trainer is closed; make a new one$"):
            use()
    assert not (tmp_path / "run").exists()
    assert trainer.config.train.steps == 1


def test_the_end_of_the_block_closes_a_trainer_that_failed(tmp_path):
    trainer = trainer_for(tmp_path / "run", reward_funcs=lambda completions, **_: 1 / 0)
    pids = trainer._run.verifier.pids
    with pytest.raises(UserError, match=r"reward\.verifier: failed on"), trainer:
        trainer.train()
    assert not any(map(alive, pids))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model.name=./nowhere", "data.train=arithmetic"), "model.name"),
        (("data.train=nothing.jsonl",), "data.train"),
        (("sampling.kv_memory_gib=0.00001",), "sampling.kv_memory_gib"),
        (("sampling.filter=nowhere:f",), "nowhere:f"),
        (("train.optimizer=adamw_8bit",), "train.optimizer"),
        (("algo.loss=nowhere:f",), "nowhere:f"),
    ],
)
def test_a_trainer_that_cannot_be_built_leaves_no_process(tmp_path, overrides, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.chdir(tmp_path)
    before = children()
    with pytest.raises(UserError) as caught:
        trainer_for(tmp_path / "run", *overrides)
    assert said in str(caught.value)
    assert caught.tb is not None, "the frames of the constructor are still there, and all that they hold"
    assert children() == before


def test_settings_are_final_before_anything_is_built_from_them():
    """Names of what was given, and the type that `auto` means on the device; nothing is loaded for it."""

    def reward(completions, **_):
        return [0.0 for _ in completions]

    config = settings("model.dtype=auto", "model.device=cpu")
    model = small_model()
    inputs = TrainerInputs(
        model, tokenizer(), ["math", reward], [{"prompt": "a", "answer": "b"}], Path("held-out.jsonl")
    )
    resolved = resolve(config, inputs, CPU)
    assert resolved.model.dtype in ("float32", "bfloat16")
    assert [one.verifier for one in resolved.reward.verifier] == ["math", f"{__name__}:{reward.__qualname__}"]
    assert (resolved.data.train, resolved.data.eval) == ("in memory", "held-out.jsonl")
    assert resolve(config, TrainerInputs("some/model"), CPU).model.name == "some/model"
    assert resolve(resolved, inputs, CPU) == resolved
    assert config.model.dtype == "auto"
    assert resolve(settings("model.dtype=bfloat16"), TrainerInputs(), CPU).model.dtype == "bfloat16"


def test_a_run_is_built_from_its_final_settings():
    config = settings("model.dtype=auto", "model.device=cpu")
    run = build_run(config, TrainerInputs(), make_display())
    try:
        assert run.config == resolve(config, TrainerInputs(), CPU)
        assert run.description.endswith(f"{run.config.model.dtype} on cpu")
    finally:
        run.close()
    run.close()
