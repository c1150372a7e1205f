"""Runs with truncated sampling whose kept tokens are recorded: the trainer's policy is the one that samples."""

import json
import signal
import time

import forked
import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file
from support import REPOSITORY, SMALL

from dapo_rl import Config, DAPOTrainer, UserError
from dapo_rl.rollout.trajectory_file import read_trajectories
from dapo_rl.runs.directory import RunDirectory

pytestmark = pytest.mark.slow

CUT = ("sampling.top_k=8", "sampling.top_p=0.9")
KEEPS = (*CUT, "sampling.keep_mask=true")
QUICK = (*SMALL, "data.eval=null", "eval.every=null", "train.warmup_steps=0", "train.lr=1e-3", "train.steps=2")


def trained(path, *settings, recipe="demo", **arguments):
    trainer = DAPOTrainer(config=Config.load(recipe, [*QUICK, *settings]), run_dir=path, **arguments)
    with trainer:
        trainer.train()
    notes = (path / "notes.jsonl").read_text().splitlines() if (path / "notes.jsonl").exists() else []
    return RunDirectory(path).read_metrics(), [json.loads(line)["text"] for line in notes]


def weights(path):
    return (path / "model" / "model.safetensors").read_bytes()


def logged(path, column):
    return [row for file in sorted((path / "rollouts").iterdir()) for row in pq.read_table(file)[column].to_pylist()]


def test_the_trainer_scores_what_the_engine_sampled(tmp_path):
    """Its policy before the first update is the one that sampled: without the record it is another one."""
    kept, notes = trained(tmp_path / "kept", *KEEPS, "algo.kl_coef=0.01", "algo.proximal=recomputed",
                          "sampling.max_staleness=0")  # fmt: skip
    assert not any("sampling is truncated" in note for note in notes)
    assert all(abs(row["rollout/mismatch_kl"]) < 1e-8 for row in kept)
    assert kept[0]["actor/kl_loss"] < kept[1]["actor/kl_loss"], "the reference scores the kept tokens too"
    cut, notes = trained(tmp_path / "cut", *CUT)
    assert sum("so the gradient is biased; set sampling.keep_mask=true, or truncate" in note for note in notes) == 1
    assert weights(tmp_path / "kept") != weights(tmp_path / "cut")
    # The same first tokens, with the log-probabilities of two distributions.
    (mine, ours), (other, theirs) = (
        [logged(tmp_path / name, column)[0] for column in ("token_ids", "logps")] for name in ("kept", "cut")
    )
    assert mine == other
    assert (np.array(ours) >= np.array(theirs) - 1e-5).all()
    assert cut[0]["actor/entropy"] > kept[0]["actor/entropy"]
    assert "kept_ids" not in pq.read_schema(next((tmp_path / "kept" / "rollouts").iterdir())).names


def test_a_limit_is_named_where_it_is_missing(tmp_path):
    _, notes = trained(tmp_path / "run", "sampling.top_p=0.9", "train.steps=1")
    assert sum("set sampling.keep_mask=true and sampling.top_k=256, or truncate" in note for note in notes) == 1


def test_every_engine_trains_the_same_policy(tmp_path):
    """The first step; later ones have other weights in the last bits."""
    step = ("train.steps=1", "sampling.dynamic=false", "sampling.temperature=0.7")
    engines = {"native": "native", "hf": "hf", "own": f"{REPOSITORY}/examples/own_engine.py:PlainEngine"}
    rows = {name: trained(tmp_path / name, *KEEPS, *step, f"engine={engines[name]}")[0][0] for name in engines}
    for name, row in rows.items():
        assert logged(tmp_path / name, "token_ids") == logged(tmp_path / "native", "token_ids"), name
        for metric in ("actor/entropy", "actor/grad_norm", "actor/pg_loss"):
            assert row[metric] == pytest.approx(rows["native"][metric], rel=1e-3, abs=1e-6), name
        assert abs(row["rollout/mismatch_kl"]) < 1e-8, name


def test_an_engine_that_does_not_return_them_is_refused(tmp_path):
    (tmp_path / "forgetful.py").write_text(
        "from dataclasses import replace\n"
        "from dapo_rl.engines.hf import HFEngine\n"
        "class Forgetful(HFEngine):\n"
        "    def __init__(self, model, tokenizer, settings, *, dtype, longest):\n"
        "        super().__init__(model, tokenizer, 64)\n"
        "    def poll(self, timeout_s=None):\n"
        "        completions = super().poll(timeout_s)\n"
        "        return [replace(done, sample=done.sample.replace(kept_ids=None)) for done in completions]\n"
    )
    with pytest.raises(UserError, match=r"^engine: .*Forgetful\.poll returned .* with no column kept_ids; "):
        trained(tmp_path / "run", *KEEPS, f"engine={tmp_path}/forgetful.py:Forgetful")


def test_episodes_of_several_turns_keep_the_column(tmp_path):
    """Tokens of the environment are context only; the trainer scores all the others as the engine did."""
    few = ("sampling.prompts_per_step=2", "sampling.on_cap=fill", "sampling.cap=4", "train.mini_batches=1")
    rows, _ = trained(tmp_path / "run", *KEEPS, *few, "checkpoint.every=1", recipe="guess")
    assert all(abs(row["rollout/mismatch_kl"]) < 1e-8 for row in rows)
    assert any(not all(mask) for mask in logged(tmp_path / "run", "mask"))


def test_a_teacher_is_renormalised_over_the_kept_tokens(tmp_path):
    """The policy is its own teacher: before the first update they agree, whatever is cut."""
    distill = ("algo.advantage=distill", "sampling.dynamic=false", "teacher.name=tiny", "model.name=tiny")
    kept, _ = trained(tmp_path / "kept", *KEEPS, *distill, "train.steps=1", "train.mini_batches=1")
    assert abs(kept[0]["teacher/kl"]) < 1e-6


def command(path, *words):
    settings = (
        *QUICK,
        *KEEPS,
        "sampling.ahead=2",
        "checkpoint.every=1",
        "log.rollouts=false",
        "sampling.dynamic=false",
    )
    return forked.Popen([forked.DAPO, "train", "demo", *settings, "--run", str(path), *words], cwd=REPOSITORY)


def test_a_killed_run_continues_bit_for_bit(tmp_path):
    """Its checkpoint has begun and finished samples with the tokens that were kept."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert command(whole).wait(120) == 0
    process = command(killed)
    saved = killed / "checkpoints" / "step-1"
    until = time.monotonic() + 120
    while not (saved / "trajectories.parquet").exists() and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    samples = [sample for sample in read_trajectories(saved, 10**6, 10**6) if len(sample.token_ids)]
    assert samples
    assert all(sample["kept_ids"].shape == (len(sample.token_ids), 8) for sample in samples)
    assert command(killed, "--resume").wait(120) == 0
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (killed, whole))
    assert all((ours[name] == tensor).all() for name, tensor in theirs.items())
