"""`dapo bench race`: contenders train from the same weights on the same prompts, and are compared by accuracy."""

import io
import json
import os
from dataclasses import asdict

import pytest
import torch
from rich.console import Console
from support import dapo

from dapo_rl.errors import UserError
from dapo_rl.lab.bench import race_report, race_trl
from dapo_rl.lab.bench.peer_variants import TRL_VARIANTS
from dapo_rl.lab.bench.race_report import RaceJob, _goal, _kept_run, print_race
from dapo_rl.lab.bench.race_trl import arguments
from dapo_rl.models.tokenizer import build_tokenizer

SMALL = ("sampling.prompts_per_step=4", "sampling.group_size=4", "eval.prompts=8", "model.device=cpu")


def run(contender, seed, *points):
    names = ("step", "seconds", "tokens", "accuracy")
    return {
        "contender": contender,
        "seed": seed,
        "start_seconds": 3.0,
        "points": [dict(zip(names, p, strict=True)) for p in points],
    }


RUNS = [
    run("dapo", 0, (0, 0.0, 0, 0.2), (5, 10.0, 1000, 0.5), (10, 20.0, 2000, 0.7)),
    run("trl", 0, (0, 0.0, 0, 0.2), (5, 30.0, 800, 0.4), (10, 60.0, 1600, 0.6)),
    run("dapo", 1, (0, 0.0, 0, 0.2), (5, 12.0, 1100, 0.6), (10, 24.0, 2200, 0.65)),
    run("trl", 1, (0, 0.0, 0, 0.2), (5, 36.0, 900, 0.55), (10, 72.0, 1700, 0.5)),
]


def test_a_goal_is_reached_at_the_first_evaluation():
    half = _goal(RUNS, ["dapo", "trl"], 0.5)
    assert half["dapo"] == {"seconds": [10.0, 12.0], "tokens": [1000, 1100], "step": [5, 5]}
    assert half["trl"] == {"seconds": [60.0, 36.0], "tokens": [1600, 900], "step": [10, 5]}
    assert half["ratio"] == 48 / 11
    most = _goal(RUNS, ["dapo", "trl"], 0.7)
    assert (most["dapo"]["seconds"], most["trl"]["seconds"], most["ratio"]) == ([20.0, None], [None, None], None)
    assert _goal(RUNS, ["dapo", "trl"], 0.1)["ratio"] is None  # all were there from the start


def test_the_ratio_is_of_the_seeds_that_both_have():
    half = _goal(RUNS[:3], ["dapo", "trl"], 0.5)
    assert half["dapo"]["seconds"] == [10.0, 12.0]
    assert half["ratio"] == 60 / 10


def test_every_seed_is_printed():
    out = io.StringIO()
    goals = [_goal(RUNS, ["dapo", "trl"], goal) for goal in (0.5, 0.7)]
    report = {"recipe": "demo", "model": "tiny", "steps": 10, "runs": RUNS, "goals": goals}
    print_race(report, Console(file=out, width=200))
    text = out.getvalue()
    assert "dapo-rl: 20.0% → 70.0%, 20.0% → 65.0% in 22 s, after 3 s of start-up" in text
    assert "10  12" in text
    assert "4.36×" in text
    assert "20  —" in text


def test_a_peer_gets_the_recipe_s_batch_and_updates():
    job = RaceJob(
        "trl", "demo", (*SMALL, "train.mini_batches=2", "train.epochs_per_step=3", "train.warmup_steps=5"), 0, 7, 2
    )
    config = job.config()
    given = arguments(job, config, TRL_VARIANTS["accumulate"], torch.device("cpu"), torch.float32)
    assert given["per_device_train_batch_size"] == 4
    assert given["gradient_accumulation_steps"] == 2  # 8 samples in each of 2 mini-batches
    assert given["steps_per_generation"] == 4
    assert given["per_device_train_batch_size"] * given["steps_per_generation"] == 16
    assert given["max_steps"] == 7 * 2 * 3
    assert given["warmup_steps"] == 5 * 2 * 3
    assert (given["learning_rate"], given["epsilon_high"]) == (config.train.lr, config.algo.clip_high)


def test_a_micro_batch_is_part_of_an_update():
    settings = ("sampling.prompts_per_step=16", "sampling.group_size=8", "train.mini_batches=2")
    job = RaceJob("trl", "demo", settings, 0, 7, 2)
    how = TRL_VARIANTS["vllm-liger-autocast"]
    given = arguments(job, job.config(), how, torch.device("cpu"), torch.float32)
    assert (given["per_device_train_batch_size"], given["gradient_accumulation_steps"]) == (32, 2)
    assert given["steps_per_generation"] == 4
    assert how.samples_at_once(16, 8) == 16
    assert [how.samples_at_once(samples, 8) for samples in (48, 40, 33)] == [24, 20, 11]


def test_a_peer_samples_as_the_recipe_does():
    sampling = ("sampling.temperature=0.9", "sampling.top_p=0.8", "sampling.top_k=20", "sampling.min_p=0.1")
    for settings, expected in ((sampling, (0.9, 0.8, 20, 0.1)), ((), (1.0, 1.0, 0, None))):
        job = RaceJob("trl", "demo", (*SMALL, *settings), 0, 2, 1)
        given = arguments(job, job.config(), TRL_VARIANTS["whole"], torch.device("cpu"), torch.float32)
        assert tuple(given[name] for name in ("temperature", "top_p", "top_k", "min_p")) == expected


def test_samples_of_a_race_end_in_every_variant():
    job = RaceJob("trl", "demo", SMALL, 0, 2, 1)
    for name, how in TRL_VARIANTS.items():
        given = arguments(job, job.config(), how, torch.device("cpu"), torch.float32)
        assert given["generation_kwargs"] == {}, name


@pytest.mark.slow
def test_a_peer_without_vllm_ends_at_stop_strings(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    sampled = []
    plain = race_trl.Rewards.__call__

    def recorded(rewards, completions, **columns):
        sampled.extend(zip(completions, columns["completion_ids"], strict=True))
        return plain(rewards, completions, **columns)

    monkeypatch.setattr(race_trl.Rewards, "__call__", recorded)
    settings = (*SMALL, 'sampling.stop=["=", "\\n"]', "sampling.prompts_per_step=8")
    race_trl.race_trl(RaceJob("trl", "demo", settings, 0, 1, 1, "whole", str(tmp_path)))
    assert len(sampled) == 32
    ended = [text for text, _ in sampled if text.endswith(("=", "\n"))]
    assert len(ended) > 16
    assert all(text.count("=") + text.count("\n") <= 1 for text, _ in sampled)
    eos = build_tokenizer().eos_token_id
    assert all(ids[-1] == eos for text, ids in sampled if text in ended)
    with pytest.raises(UserError, match="--peer-variant: continuous has no stop strings"):
        race_trl.race_trl(RaceJob("trl", "demo", settings, 0, 1, 1, "continuous", str(tmp_path)))


def test_kept_results_are_not_run_again(tmp_path):
    job = RaceJob("dapo", "demo", SMALL, 0, 2, 1)
    kept = {"points": [{"step": 0, "seconds": 0.0, "tokens": 0, "accuracy": 0.5}], "start_seconds": 1.0}
    path = tmp_path / "dapo-0.json"
    what = asdict(job) | {"config": job.config().resolved()}
    path.write_text(json.dumps({"job": what, "run": kept}))
    assert _kept_run(job, 1.0, tmp_path) == kept
    with pytest.raises(UserError, match=r"dapo-0\.json is the result of another race; give each race its own"):
        _kept_run(RaceJob("dapo", "demo", SMALL, 0, 3, 1), 1.0, tmp_path)


def test_results_of_a_recipe_that_has_changed_are_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(race_report, "_run", lambda job, timeout: {"points": [job.config().train.lr]})
    (recipe := tmp_path / "r.yaml").write_text("preset: dapo\ntrain: {lr: 1.0e-5}\n")
    job = RaceJob("dapo", str(recipe), SMALL, 0, 2, 1)
    assert [_kept_run(job, 1.0, tmp_path / "kept")["points"] for _ in range(2)] == [[1e-5], [1e-5]]
    recipe.write_text("preset: dapo\ntrain: {lr: 2.0e-5}\n")
    with pytest.raises(UserError, match=r"dapo-0\.json is the result of another race"):
        _kept_run(job, 1.0, tmp_path / "kept")


def test_mistakes_are_one_line(tmp_path):
    for words, line in (
        (("--accuracy", "x"), "--accuracy: 'x' is not a list of percentages, as in 50,60,70"),
        (("--against", "verl"), "--against: 'verl' is not a peer of `bench race`; peers are: trl"),
        (("data.eval=null",), "data.eval: the race needs held-out prompts to measure accuracy on"),
    ):
        result = dapo("bench", "race", *words, cwd=tmp_path)
        assert result.returncode == 2
        assert line in " ".join(result.stderr.split())


@pytest.mark.slow
def test_both_contenders_run(tmp_path):
    result = dapo(
        *("bench", "race", "demo", *SMALL, "--against", "trl", "--seeds", "1", "--steps", "3", "--every", "2"),
        *("--accuracy", "99", "--json", "--out", tmp_path / "race.png"),
        *("--results", tmp_path / "runs"),
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    ours, theirs = (run["points"] for run in report["runs"])
    assert [point["step"] for point in ours] == [point["step"] for point in theirs] == [0, 2, 3]
    assert ours[0]["accuracy"] == theirs[0]["accuracy"]  # the same weights and evaluation
    assert all(run["start_seconds"] > 0 for run in report["runs"])
    for points in (ours, theirs):
        assert 0 < points[1]["seconds"] < points[2]["seconds"]
        assert 0 < points[1]["tokens"] < points[2]["tokens"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["dapo-0.json", "trl-0.json"]
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
