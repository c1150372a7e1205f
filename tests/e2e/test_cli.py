"""The command line, as a user meets it: exit codes, one line for a mistake, signals."""

import json
import os
import resource
import signal
import subprocess
import time
from functools import partial

import forked
import pytest
from support import DAPO, SMALL, dapo
from transformers import AutoTokenizer

from dapo_rl import cli
from dapo_rl.config import Config
from dapo_rl.recipes import packaged_recipe, recipe_names

pytestmark = pytest.mark.slow


def started(*words, cwd, until="step "):
    """A run in the background that has finished its first step, or printed another line."""
    process = forked.Popen(
        [DAPO, *words],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    for line in process.stdout:
        if line.startswith(until):
            break
    return process


def mistake(*words, cwd):
    result = dapo(*words, cwd=cwd)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("dapo: ")
    return lines[0]


def test_train_prints_a_line_a_step_and_the_outcome(tmp_path):
    result = dapo("train", *SMALL, "train.steps=2", "--run", "here", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 2
    assert any(line.startswith("held-out accuracy") for line in lines)
    assert json.loads((tmp_path / "here" / "summary.json").read_text())["steps"] == 2
    assert mistake("train", *SMALL, "--run", "here", cwd=tmp_path).endswith(
        "already contains a run; resume it with --resume (in Python: train(resume=True)), or name another with --run "
        "(run_dir)"
    )
    changed = mistake("train", "--run", "here", "--resume", "algo.clip_high=0.3", cwd=tmp_path)
    assert "algo.clip_high 0.28 → 0.3" in changed
    longer = dapo("train", "--run", "here", "--resume", "train.steps=3", cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert json.loads((tmp_path / "here" / "summary.json").read_text())["steps"] == 3
    assert "train.steps: 1 is below step 3" in mistake(
        "train", "--run", "here", "--resume", "train.steps=1", cwd=tmp_path
    )
    again = dapo("train", "--run", "here", "--resume", cwd=tmp_path)
    assert again.returncode == 0, "the longer run is the one that is finished"


def test_mistakes_are_one_line_and_exit_2(tmp_path):
    (tmp_path / "hostile.jsonl").write_text('{"\\u001b]0;title\\u0007": 1}\n')
    assert "did you mean algo.clip_high?" in mistake("train", "algo.clip_hihg=0.3", cwd=tmp_path)
    assert "no such recipe" in mistake("train", "nowhere.yaml", cwd=tmp_path)
    assert "two recipes" in mistake("train", "a.yaml", "b.yaml", cwd=tmp_path)
    assert "no directory ./nowhere" in mistake("train", "model.name=./nowhere", "data.train=arithmetic", cwd=tmp_path)
    assert "data.train" in mistake("train", "data.train=missing.jsonl", cwd=tmp_path)
    assert "there is no run in runs/" in mistake("train", "--resume", cwd=tmp_path)
    directory = tmp_path / "some"
    directory.mkdir()
    assert f"write --run {directory} --resume" in mistake("train", "--resume", str(directory), cwd=tmp_path)
    assert "no run here" in mistake("train", "--resume", "--run", "nothing", cwd=tmp_path)
    assert "did you mean tiny?" in mistake("model", "build", "huge", cwd=tmp_path)
    assert "there is nothing to evaluate on; set data.eval, give eval_dataset, or set eval.every=none" in mistake(
        "train", "data.eval=null", cwd=tmp_path
    )
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    words = ("train", "data.train=arithmetic", "model.name=./broken")
    assert "./broken" in mistake(*words, "eval.every=none", cwd=tmp_path)
    unread = mistake(*words, "eval.every=1", cwd=tmp_path)
    assert "there is nothing to evaluate on" in unread  # a model may take minutes to load
    long = mistake("train", "sampling.max_new_tokens=600", cwd=tmp_path)
    assert "sampling.max_new_tokens: " in long
    assert "context of 512" in long
    hostile = mistake("train", "data.train=hostile.jsonl", cwd=tmp_path)
    assert "\x1b" not in hostile
    (tmp_path / "empty.jsonl").write_text("")
    assert "no rows" in mistake("train", "data.train=empty.jsonl", cwd=tmp_path)
    assert not (tmp_path / "runs").exists()


def test_an_unknown_option_is_explained(tmp_path):
    result = dapo("train", "--rezume", cwd=tmp_path)
    assert result.returncode == 2
    assert "--rezume" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train", "--seed=3"], "seed=3"),
        (["train", "--train.lr", "1e-6"], "train.lr=1e-6"),
        (["train", "preset=grpo", "--learning-rate", "1e-6"], "train.lr=1e-6"),
        (["train", "--max_new_tokens", "--resume"], "sampling.max_new_tokens=VALUE"),
        (["check", "--group-size", "8"], "sampling.group_size=8"),
    ],
)
def test_an_option_that_is_a_setting_is_explained(words, hint, tmp_path):
    line = mistake(*words, cwd=tmp_path)
    assert line.endswith(f": settings are written key=value, without dashes: {hint}")


def test_divergence_exits_with_3(tmp_path):
    result = dapo(
        "train", *SMALL, "train.steps=3", "train.lr=1e30", "train.warmup_steps=0", "--run", "run", cwd=tmp_path
    )
    assert result.returncode == 3, result.stdout + result.stderr
    assert result.stderr.startswith("dapo: diverged at step 1: ")
    assert "no checkpoint had been written yet" in result.stderr


def test_help_is_worth_reading(tmp_path):
    text = dapo("train", "--help", cwd=tmp_path).stdout
    for words in ("dapo train recipe.yaml", "algo.clip_high = 0.28", "Clip-Higher", "--resume", "sampling.on_cap"):
        assert words in text
    installed = subprocess.run([DAPO, "--version"], capture_output=True, text=True, check=True)
    assert installed.stdout.startswith("dapo-rl ")


def test_help_fits_in_80_columns(tmp_path):
    def help_of(*words):
        return dapo(*words, "--help", cwd=tmp_path, env=os.environ | {"COLUMNS": "80"}).stdout

    def commands(text):
        return [line.split()[0] for line in text.partition("Commands:\n")[2].splitlines()]

    root = help_of()
    assert "train    Train a model.\n" in root
    texts = [root]
    for name in commands(root):
        texts.append(help_of(name))
        texts += [help_of(name, inner) for inner in commands(texts[-1])]
    assert len(texts) > 15
    for text in texts:
        assert max(map(len, text.splitlines())) <= 80
        assert "..." not in text.partition("Commands:\n")[2], "a summary is cut"


def test_one_thing_has_one_option():
    """`--prompts` is the number of prompts everywhere; other names of it are accepted."""
    commands = cli.root_command().commands
    options = {name: {option for p in command.params for option in p.opts} for name, command in commands.items()}
    for name in ("verify", "eval", "convert"):
        assert {"--prompts", "--rows"} <= options[name]
    for name in ("verify", "eval"):
        assert "--samples" in options[name]
    assert all("--prompts" in found for found in options.values() if "--rows" in found)


def test_a_plan_that_does_not_fit_is_an_error(tmp_path):
    result = dapo("plan", "dapo-math-qwen2.5-32b", "--gpus", "2", "--gpu", "h800", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, "dapo: plan: the run does not fit on 2 × h800\n")
    assert "does not fit, on the same GPUs: a GPU needs at least " in " ".join(result.stdout.split())


def test_check_reports_and_speaks_json(tmp_path):
    result = dapo("check", "dapo-math-qwen2.5-32b", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("dapo: check: the run does not fit on ")
    conformant, _, memory = result.stdout.partition("conformant: every row matches the paper\n")
    assert conformant
    assert memory.startswith("does not fit on ")
    report = json.loads(dapo("check", "preset=grpo", "--json", cwd=tmp_path).stdout)
    assert report["verdict"].startswith("not DAPO: ")
    assert report["arithmetic"]["samples_per_step"] == 128


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_by_its_name(name, tmp_path):
    """Those for GPUs do not fit on this machine, which is the only thing wrong with them."""
    result = dapo("check", name, cwd=tmp_path)
    fits = "does not fit on " not in result.stdout
    assert (result.returncode, bool(result.stderr)) == ((0, False) if fits else (2, True))
    assert fits or result.stderr.startswith("dapo: check: the run does not fit on ")


def test_recipes_are_listed_and_printed(tmp_path):
    listed = dapo("recipes", cwd=tmp_path, env=os.environ | {"COLUMNS": "80"}).stdout
    heads = [line.split(":")[0] for line in listed.splitlines()[:-1] if line[0] != " "]
    assert heads == recipe_names()
    assert max(map(len, listed.splitlines())) <= 80
    assert "\ndemo: tiny on arithmetic\n" in f"\n{listed}"
    assert "gsm8k-smollm2-135m: smollm2-135m on gsm8k-train.jsonl" in listed
    assert "Measured: one H200, ten of the 200 steps:" in " ".join(listed.split())
    text = dapo("recipes", "demo", cwd=tmp_path).stdout
    (tmp_path / "mine.yaml").write_text(text)
    assert text == packaged_recipe("demo").read_text()
    assert Config.load(tmp_path / "mine.yaml") == Config.load("demo")
    assert mistake("recipes", "demmo", cwd=tmp_path) == (
        "dapo: demmo: no such recipe; did you mean demo? `dapo recipes` lists them all"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_can_be_resumed(tmp_path, number, code):
    process = started("train", *SMALL, "train.steps=500", "checkpoint.every=400", "--run", "run", cwd=tmp_path)
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert "stopping: saving the run" in output
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["finished"]) == (step, False)
    resumed = dapo("train", "--run", "run", "--resume", f"train.steps={step + 1}", "eval.prompts=4", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(step + 2))


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    """The first one waits for verdicts."""
    (tmp_path / "judge.py").write_text(
        "import pathlib, time\n"
        "def judge(prompts, completions, **columns):\n"
        "    pathlib.Path('asked').touch()\n"
        "    time.sleep(30)\n"
        "    return [float(len(c) % 2) for c in completions]\n"
    )
    words = ["reward.verifier=judge.py:judge", "data.eval=null", "eval.every=null", "reward.timeout_s=60"]
    process = started("train", *SMALL[:5], *words, "--run", "run", cwd=tmp_path, until="dapo: ")
    while not (tmp_path / "asked").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    while "stopping: " not in process.stdout.readline():  # two signals that come at once are one
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "dapo: stopped; --resume starts again: there is no checkpoint yet\n"
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("kilobytes", [2000, 5000], ids=["weights", "optimizer"])
def test_a_disk_that_takes_no_checkpoint_is_an_error_at_the_end_and_the_last_one_stays(tmp_path, kilobytes):
    """A limit on file sizes fails in the middle of a write, as a full disk does."""
    assert dapo("train", *SMALL, "train.steps=1", "--run", "run", cwd=tmp_path).returncode == 0
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (kilobytes << 10, kilobytes << 10))
    result = dapo("train", "--run", "run", "--resume", "train.steps=2", cwd=tmp_path, preexec_fn=limit)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert "step-2: the checkpoint cannot be written: File too large; " in line
    assert line.endswith("--resume continues from run/checkpoints/step-1")
    assert ("the model is in run/model" in line) is (kilobytes == 5000)
    assert (tmp_path / "run" / "model").is_dir()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]
    again = dapo("train", "--run", "run", "--resume", "train.steps=2", cwd=tmp_path)
    assert again.returncode == 0, again.stderr


def test_the_embedded_model_can_be_rebuilt(tmp_path):
    result = dapo("model", "build", "tiny", "--out", "built", "--steps", "2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "built" / "model.safetensors").stat().st_size < 4_000_000
    text = "12+3=?\nWait\nAnswer: -5 é😀\x00"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "built")
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    words = [*SMALL[:5], "train.steps=1", "sampling.cap=4", "sampling.max_new_tokens=56"]
    train = dapo("train", "model.name=built", *words, cwd=tmp_path)
    assert train.returncode == 2, "an untrained model is never right, and the cap says so"
    assert "sampling.cap: 4 groups drawn, 0 of 4 kept (4 all wrong)" in train.stderr


def test_a_run_of_ones_own_data_says_with_which_settings(tmp_path):
    rows = [{"prompt": f"{a}+{b}-3=?\n", "answer": str(a + b - 3)} for a in range(1, 10) for b in range(1, 10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = ["sampling.prompts_per_step=2", "sampling.group_size=4", "train.steps=1"]
    result = dapo("train", "data.train=rows.jsonl", *small, "--run", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    first, *others = result.stdout.splitlines()
    assert first.startswith("tiny on rows.jsonl with the defaults of preset=dapo, not the demo's: data.eval=none ")
    assert "sampling.max_new_tokens=256 train.lr=1e-06 train.steps=1; change any with key=value" in first
    assert not any("eval " in line for line in others)
    longer = dapo("train", "--resume", "--run", "run", "train.steps=2", cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert "not the demo's" not in longer.stdout
    checked = dapo("check", "data.train=rows.jsonl", "--json", cwd=tmp_path)
    assert json.loads(checked.stdout)["arithmetic"]["samples_per_step"] == 256
    demo = dapo("train", *SMALL, "train.steps=1", cwd=tmp_path)
    assert "not the demo's" not in demo.stdout
    assert demo.stdout.startswith("dapo: tiny ")
