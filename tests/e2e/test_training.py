"""Whole runs of the embedded model: it learns, leaves everything behind that it promises, and resumes exactly."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from support import SMALL, THOROUGH, small_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from dapo_rl import Config, DAPOTrainer, DivergedError, UserError
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.models.load import TINY

pytestmark = pytest.mark.slow


def trainer_for(path, *overrides, steps=3, **arguments):
    config = Config.load(DEFAULT_RECIPE, [*THOROUGH, f"train.steps={steps}", "train.warmup_steps=0", *overrides])
    return DAPOTrainer(config=config, run_dir=path, **arguments)


def without_times(run):
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/"))} for line in lines]


def test_the_embedded_model_learns_within_a_dozen_steps(tmp_path):
    """At the default's own batch: from below 60 % held-out accuracy, by more than 15 points."""
    config = Config.load(DEFAULT_RECIPE, ["train.steps=12", "eval.every=null", "data.eval.size=256"])
    summary = DAPOTrainer(config=config, run_dir=tmp_path / "run").train()
    assert 0.2 <= summary["accuracy_before"] <= 0.6
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.15


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    settings = ["eval.every=2", "checkpoint.every=1", "overlong.mask_truncated=true", "log.report=true"]
    settings += ["sampling.max_new_tokens=56"]  # nothing is in flight at the end
    trainer = trainer_for(path, *settings, steps=4)
    return path, trainer, trainer.train()


def test_the_run_directory_has_everything(finished):
    path, _, summary = finished
    names = {p.name for p in path.iterdir()}
    assert names == {
        "config.yaml", "metrics.jsonl", "notes.jsonl", "rollouts", "checkpoints", "model", "summary.json", "report.png"
    }  # fmt: skip
    written = json.loads((path / "summary.json").read_text())
    assert written.keys() == summary.keys()
    assert {k: written[k] for k in ("steps", "seed", "tokens")} == {k: summary[k] for k in ("steps", "seed", "tokens")}
    assert (path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert Config.load(path / "config.yaml").resolved() == finished[1].config.resolved()
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["step-3", "step-4"]
    assert len(list((path / "rollouts").iterdir())) == 4
    assert summary["steps"] == 4
    assert [e["step"] for e in summary["evaluations"]] == [0, 2, 4]
    assert summary["accuracy_before"] == summary["evaluations"][0]["accuracy"]
    assert summary["accuracy_after"] == summary["evaluations"][-1]["accuracy"]


def test_the_curves_that_the_paper_watches_are_metrics(finished):
    path, _, summary = finished
    before, *lines = without_times(path)
    assert before.keys() == {
        "step", "eval/accuracy", "eval/reward", "eval/pass@1", "eval/response_length", "eval/truncated",
        "eval/verifier_errors",
    }  # fmt: skip
    assert (before["step"], before["eval/accuracy"]) == (0, summary["accuracy_before"])
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for name in (
        "response_length/mean", "reward/mean", "acc/mean", "actor/entropy", "actor/prob",
        "actor/clipped_high_prob", "sampling/all_correct_share", "actor/pg_clipfrac_high", "actor/pg_clipfrac_low",
        "actor/grad_norm", "rollout/mismatch_kl",
    ):  # fmt: skip
        assert all(name in line for line in lines), name
    assert 0 < lines[0]["actor/entropy"] < 5.6
    assert 0 < lines[0]["actor/prob"] < 1
    assert lines[0]["rollout/mismatch_kl"] < 1e-6


def test_every_generated_token_is_accounted_for(finished):
    path, _, summary = finished
    tokens = summary["tokens"]
    assert tokens["total"] > 0
    assert sum(count for outcome, count in tokens.items() if outcome != "total") == tokens["total"]
    lines = without_times(path)[1:]
    assert tokens["total"] == sum(line["sampling/tokens_generated"] for line in lines)
    assert tokens["trained"] == sum(line["sampling/tokens_trained"] for line in lines)


def test_rollouts_hold_every_group_with_its_outcome(finished):
    path, _, _ = finished
    for line in without_times(path)[1:]:
        table = pq.read_table(path / "rollouts" / f"step-{line['step']:06d}.parquet").to_pylist()
        kept = [row for row in table if row["fate"] == "kept"]
        assert len(kept) == line["sampling/kept"] * 4
        assert all(row["advantage"] is not None and len(row["logps"]) == len(row["token_ids"]) for row in kept)
        for row in kept:  # those that were cut off are masked here, and no update sees them
            assert (row["train_logps"] is None) == (row["finish_reason"] == "length")
            if row["train_logps"]:
                assert len(row["train_logps"]) == len(row["entropies"]) == len(row["token_ids"])
        for group in {row["draw"] for row in kept}:
            correct = [row["correct"] for row in kept if row["draw"] == group]
            assert 0 < sum(correct) < 4, "dynamic sampling keeps only groups that are partly right"


def test_the_model_loads_with_transformers(finished):
    path, trainer, _ = finished
    model = AutoModelForCausalLM.from_pretrained(path / "model")
    tokenizer = AutoTokenizer.from_pretrained(path / "model")
    ids = tokenizer("1+2=?\n", return_tensors="pt").input_ids
    torch.testing.assert_close(model(ids).logits, trainer.model(ids).logits)
    before = AutoModelForCausalLM.from_pretrained(TINY)
    assert any(not torch.equal(a, b.float()) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_evaluate_and_save_model(finished, tmp_path):
    _, trainer, summary = finished
    assert trainer.evaluate()["eval/accuracy"] == summary["accuracy_after"]
    trainer.save_model(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors")


def test_a_run_in_two_parts_is_the_run_in_one(tmp_path):
    overrides = ("eval.every=2", "train.lr_schedule=linear")
    whole = trainer_for(tmp_path / "whole", *overrides, steps=4)
    whole_summary = whole.train()

    first = trainer_for(tmp_path / "parts", *overrides, steps=4)
    first.stop_requested = lambda: first._run.progress.step == 2
    stopped = first.train()
    assert (stopped["steps"], stopped["finished"]) == (2, False)
    second = trainer_for(tmp_path / "parts", *overrides, steps=4)
    second_summary = second.train(resume=True)

    assert without_times(tmp_path / "parts") == without_times(tmp_path / "whole")
    for (name, a), (_, b) in zip(whole.model.named_parameters(), second.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert second_summary["evaluations"] == whole_summary["evaluations"]
    assert second_summary["tokens"] == whole_summary["tokens"]
    assert sorted(second_summary["paths"]) == ["model", "summary"]
    assert not (tmp_path / "parts" / "report.png").exists()


def test_a_run_killed_after_a_checkpoint_forgets_what_came_later(tmp_path):
    """The log is ahead of the last checkpoint: the resumed run writes those steps again, the same."""
    path = tmp_path / "run"
    trainer_for(path, "checkpoint.every=2", steps=4).train()
    expected = without_times(path)
    for late in ("checkpoints/step-4", "model"):
        for file in sorted((path / late).rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        (path / late).rmdir()
    (path / "checkpoints" / ".step-4.part").mkdir()
    summary = trainer_for(path, "checkpoint.every=2", steps=4).train(resume=True)
    assert summary["steps"] == 4
    assert without_times(path) == expected


def test_divergence_stops_the_run_and_leaves_the_last_checkpoint(tmp_path):
    path = tmp_path / "run"
    trainer = trainer_for(path, "checkpoint.every=1", steps=4)
    update, calls = trainer._run.policy.update, []

    def poisoned(mini_batch, lr):
        calls.append(lr)
        if len(calls) == 9:  # the first of step 3: two passes over two mini-batches make a step
            with torch.no_grad():
                next(trainer.model.parameters()).fill_(torch.nan)
        return update(mini_batch, lr)

    trainer._run.policy.update = poisoned
    with pytest.raises(DivergedError, match=r"diverged at step 3: .* the last good checkpoint is .*step-2") as caught:
        trainer.train()
    assert caught.value.step == 3
    assert [line["step"] for line in without_times(path)] == [0, 1, 2]
    stored = load_file(path / "checkpoints" / "step-2" / "model" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in stored.values())
    assert trainer_for(path, "checkpoint.every=1", steps=4).train(resume=True)["steps"] == 4


def test_grpo_runs_with_its_reference_and_trains_on_everything(tmp_path):
    summary = trainer_for(tmp_path / "run", "preset=grpo", steps=2).train()
    assert summary["metrics"]["sampling/drawn"] == 4
    assert summary["metrics"]["actor/kl_loss"] > 0
    assert summary["tokens"]["trained"] == summary["tokens"]["total"]


@pytest.mark.parametrize("preset", ["dr_grpo", "dapo"])
def test_other_settings_run(tmp_path, preset):
    overrides = ["algo.clip_ratio_c=3", "train.epochs_per_step=2", "sampling.top_p=0.9", "sampling.temperature=0.9"]
    summary = trainer_for(tmp_path / "run", f"preset={preset}", *overrides, steps=1).train()
    assert summary["metrics"]["actor/updates"] == 4


def test_a_trl_script_with_the_import_changed(tmp_path):
    """Functions in TRL's and in verl's signature, a data set in memory, settings as a mapping."""
    seen = tmp_path / "seen.jsonl"  # functions run in processes of their own: what they append to a list stays there

    def right_sum(prompts, completions, answer, **columns):
        with seen.open("a") as file:
            file.write(json.dumps([prompts[0], len(completions), answer[0], sorted(columns)]) + "\n")
        return [1.0 if c.rstrip().endswith(f"Answer: {a}") else 0.0 for c, a in zip(completions, answer, strict=True)]

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(ground_truth in solution_str), "acc": ground_truth in solution_str}

    rows = [{"prompt": f"{a}+{b}=?\n", "answer": str(a + b), "level": a} for a in range(1, 10) for b in range(1, 10)]
    settings = {
        "sampling.prompts_per_step": 4, "sampling.group_size": 4, "sampling.max_new_tokens": 48,
        "train.steps": 2, "train.lr": 1e-4, "train.warmup_steps": 0, "eval.every": 1, "log.report": False,
    }  # fmt: skip
    for i, reward in enumerate((right_sum, compute_score, [right_sum, compute_score])):
        trainer = DAPOTrainer("tiny", reward, None, rows, rows[:10], config=settings, run_dir=tmp_path / f"run{i}")
        summary = trainer.train()
        assert summary["steps"] == 2
        assert [e["step"] for e in summary["evaluations"]] == [0, 1, 2]
        recorded = Config.load(tmp_path / f"run{i}" / "config.yaml")
        assert recorded.data.train == recorded.data.eval == "in memory"
        names = [f.__name__ for f in (reward if isinstance(reward, list) else [reward])]
        assert all(name in str(recorded.reward.verifier) for name in names)
    calls = [json.loads(line) for line in seen.read_text().splitlines()]
    prompt, _, answer, columns = next(call for call in calls if call[1] == 4)  # a group; evaluation has one sample
    assert str(sum(map(int, prompt.removesuffix("=?\n").split("+")))) == answer
    assert {"level", "ground_truth", "completion_ids"} <= set(columns)


def test_graded_rewards_are_recognised_and_trained_on(tmp_path, capsys):
    """None of the scores is above the threshold, so every group is all wrong; the run in two parts is the whole run."""

    def brevity(completions, **columns):
        return [-len(text) / 100 for text in completions]

    def trainer(name, *overrides):
        words = ["eval.every=null", "data.eval=null", "checkpoint.every=1", *overrides]
        config = Config.load(DEFAULT_RECIPE, [*SMALL, "train.steps=2", *words])
        return DAPOTrainer(config=config, reward_funcs=brevity, run_dir=tmp_path / name)

    whole = trainer("whole")
    assert whole.train()["metrics"]["sampling/kept"] == 4
    assert capsys.readouterr().out.count("the scores are graded") == 1

    first = trainer("parts")
    first.stop_requested = lambda: first._run.progress.step == 1
    first.train()
    assert capsys.readouterr().out.count("the scores are graded") == 1
    second = trainer("parts")
    second.train(resume=True)
    assert "the scores are graded" not in capsys.readouterr().out, "it has been said"
    assert without_times(tmp_path / "parts") == without_times(tmp_path / "whole")

    by_score = trainer("score", "sampling.metric=score")
    by_score.train()
    for other in (second, by_score):
        for (name, a), (_, b) in zip(whole.model.named_parameters(), other.model.named_parameters(), strict=True):
            assert torch.equal(a, b), name

    with pytest.raises(UserError, match=r"4 all wrong\); sampling\.metric=score keeps \d of these"):
        trainer("correct", "sampling.metric=correct", "sampling.cap=4").train()
    # The advice can be followed without starting again.
    assert trainer("correct", "sampling.metric=score", "sampling.cap=40").train(resume=True)["steps"] == 2


def test_a_model_object_needs_its_tokenizer(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    config = Config.load(DEFAULT_RECIPE, [*SMALL, "train.steps=1"])
    with pytest.raises(UserError, match="processing_class"):
        DAPOTrainer(small_model(), config=config, run_dir=tmp_path / "none")
    # A model that was loaded from somewhere has its tokenizer there.
    with DAPOTrainer(model, config=config, run_dir=tmp_path / "a") as trainer:
        assert trainer.tokenizer.get_vocab() == AutoTokenizer.from_pretrained(TINY).get_vocab()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    trainer = DAPOTrainer(model, config=config, processing_class=tokenizer, run_dir=tmp_path / "b")
    assert trainer.train()["steps"] == 1


def test_a_model_in_training_mode_samples_without_dropout(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    settings = GPT2Config(vocab_size=len(tokenizer), n_positions=128, n_embd=32, n_layer=2, n_head=2, eos_token_id=2)
    model = GPT2LMHeadModel(settings).train()
    config = Config.load(DEFAULT_RECIPE, [*SMALL, "model.dtype=auto"])
    trainer = DAPOTrainer(model, config=config, processing_class=tokenizer, run_dir=tmp_path / "run")
    assert not model.training
    assert trainer.config.model.dtype in ("float32", "bfloat16"), "what auto means here is written down"


def test_a_bfloat16_model_is_trained_in_float32(tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    config = Config.load(DEFAULT_RECIPE, [*SMALL, "train.steps=1"])
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    trainer = DAPOTrainer(model, config=config, processing_class=tokenizer, run_dir=tmp_path / "run")
    assert trainer.train()["steps"] == 1
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert "bfloat16 weights are trained in float32" in capsys.readouterr().out
