"""`dapo ablate` as a user meets it: real runs, small enough for a test."""

import json
import os
import signal
import subprocess
import time

import forked
import pytest
from support import DAPO, dapo

pytestmark = pytest.mark.slow

SMALL = [
    "log.report=false",
    "sampling.prompts_per_step=2",
    "sampling.group_size=4",
    "sampling.max_new_tokens=24",
    "train.mini_batches=1",
    "eval.prompts=8",
    "data.train.size=64",
]
TWO = ["train.steps=2", *SMALL, "--vary", "algo.clip_high=0.2,0.28"]
ARMS = ["algo.clip_high-0.2", "algo.clip_high-0.28"]


def ablate(*words, cwd):
    return dapo("ablate", *words, cwd=cwd, timeout=600, env={"OMP_NUM_THREADS": "1", **os.environ})


def mistake(*words, cwd):
    result = ablate(*words, cwd=cwd)
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("dapo: ")
    assert result.stdout == ""
    return lines[0]


def read(path):
    return json.loads(path.read_text())


def test_finished_runs_are_not_run_again(tmp_path):
    first = ablate(*TWO, "--seeds", "1", "--out", "a", cwd=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "2 arms, 2 runs in a\n" in first.stdout
    assert "[2/2] algo.clip_high=0.28, seed 0: done at step 2, held-out accuracy " in first.stdout
    out = tmp_path / "a"
    runs = [out / arm / "seed-0" for arm in ARMS]
    assert [read(run / "summary.json")["finished"] for run in runs] == [True, True]
    for run in runs:  # what is compared stays, and the tokenizer for the board; no weights
        assert sorted(path.name for path in run.iterdir() if path.is_dir()) == ["model", "rollouts"]
        assert [path.name for path in (run / "model").iterdir()] == ["tokenizer.json"]
        assert "model" not in read(run / "summary.json")["paths"]
        assert "save_final: false" in (run / "config.yaml").read_text()  # it was not written and removed
    report = read(out / "ablation.json")
    ends = [read(run / "summary.json")["accuracy_after"] for run in runs]
    assert [arm["accuracy"]["mean"] for arm in report["arms"]] == ends
    assert report["arms"][1]["difference"]["mean"] == pytest.approx(ends[1] - ends[0])
    assert (out / "ablation.png").read_bytes()[:4] == b"\x89PNG"
    assert "| algo.clip_high=0.28 |" in (out / "ablation.md").read_text()

    before = [(run / "metrics.jsonl").stat().st_mtime_ns for run in runs]
    more = ablate("--out", "a", "--seeds", "2", "--keep-models", cwd=tmp_path)
    assert more.returncode == 0, more.stdout + more.stderr
    assert "2 arms, 4 runs in a; 2 already done\n" in more.stdout
    for arm in ARMS:
        assert (out / arm / "seed-1" / "model" / "model.safetensors").exists()
        assert (out / arm / "seed-1" / "checkpoints" / "step-2" / "optimizer.pt").exists()
    assert "seed 0: started" not in more.stdout
    assert more.stdout.count("seed 1: started") == 2
    assert [(run / "metrics.jsonl").stat().st_mtime_ns for run in runs] == before
    assert [arm["accuracy"]["n"] for arm in read(out / "ablation.json")["arms"]] == [2, 2]

    other = mistake(*TWO, "train.lr=1e-3", "--out", "a", cwd=tmp_path)
    assert "a: holds another ablation: algo.clip_high=0.2 with train.lr 0.0002 → 0.001; resume it by" in other
    longer = mistake("train.steps=3", *TWO[1:], "--out", "a", cwd=tmp_path)
    assert "train.steps 2 → 3" in longer
    same = ablate(*TWO, "--out", "a", cwd=tmp_path)
    assert same.returncode == 0, same.stderr
    assert ": started" not in same.stdout


def test_an_ablation_that_was_stopped_goes_on(tmp_path):
    words = ["train.steps=10", *SMALL, "checkpoint.every=10", "--vary", "algo.clip_high=0.2,0.28"]
    process = forked.Popen(
        [DAPO, "ablate", *words, "--seeds", "1", "--out", "a"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    log = tmp_path / "a" / ARMS[0] / "seed-0" / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "runs save and stop" in output
    assert "seed 0: stopped at step " in output
    assert output.rstrip().endswith("stopped; resume with dapo ablate --out a")
    assert "Traceback" not in errors
    summary = read(tmp_path / "a" / ARMS[0] / "seed-0" / "summary.json")
    assert summary["finished"] is False
    assert 2 <= summary["steps"] < 10
    assert not (tmp_path / "a" / ARMS[1]).exists()

    result = ablate("--out", "a", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (
        f"resumed from a/{ARMS[0]}/seed-0/checkpoints/step-{summary['steps']}"
        in (tmp_path / "a" / ARMS[0] / "seed-0.log").read_text()
    )
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == list(range(11))
    assert read(tmp_path / "a" / ARMS[1] / "seed-0" / "summary.json")["finished"] is True


def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path):
    """With processes that start from nothing, by which the threads of each are set."""
    (tmp_path / "judge.py").write_text(
        "import os, pathlib\n"
        "def judge(prompts, completions, **columns):\n"
        "    pathlib.Path('threads').write_text(os.environ['OMP_NUM_THREADS'])\n"
        "    return [float(len(c) % 2) for c in completions]\n"
    )
    words = ["train.steps=1", *SMALL, "reward.verifier=judge.py:judge", "reward.workers=0"]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    words += ["--vary", "sampling.max_new_tokens=600,56", "--seeds", "1", "--jobs", "2", "--out", "a"]
    result = subprocess.run(
        [DAPO, "ablate", *words], cwd=tmp_path, capture_output=True, text=True, timeout=600, env=environment
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    failed = next(line for line in result.stdout.splitlines() if "failed" in line)
    assert "sampling.max_new_tokens=600, seed 0: failed: sampling.max_new_tokens: " in failed
    assert "seed-0.log" in failed
    first, second = read(tmp_path / "a" / "ablation.json")["arms"]
    assert first["runs"][0]["state"] == "failed"
    assert "context of 512" in first["runs"][0]["message"]
    assert first["accuracy"] is None
    assert second["runs"][0]["state"] == "done"
    assert "- failed: sampling.max_new_tokens=600, seed 0: " in (tmp_path / "a" / "ablation.md").read_text()
    assert (tmp_path / "threads").read_text() == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_mistakes_are_one_line_before_anything_starts(tmp_path):
    assert "algo.clip_high: 1.5 is outside" in mistake("--vary", "algo.clip_high=0.2,1.5", cwd=tmp_path)
    assert "no such recipe" in mistake("nowhere.yaml", cwd=tmp_path)
    assert "--only: 'stairs'" in mistake("--only", "stairs", cwd=tmp_path)
    assert "replaces that table" in mistake("--only", "ladder", "--vary", "train.lr=1e-4", cwd=tmp_path)
    assert "turns Dynamic Sampling off" in mistake("sampling.dynamic=false", cwd=tmp_path)
    assert "contains =" in mistake("--out", "a=b", cwd=tmp_path)
    (tmp_path / "file").write_text("")
    assert "file: is not a directory" in mistake("--out", "file", cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
