"""Dry runs of the embedded model, and what they find in recipes with mistakes."""

import io
import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from forked import DAPO, Popen
from rich.console import Console
from support import dapo

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.evals.progress import EvalProgress
from dapo_rl.lab.verify import check_trainable, dry_run, dry_run_json
from dapo_rl.lab.verify_show import print_dry_run
from dapo_rl.models.load import TINY
from dapo_rl.trainer import DAPOTrainer

ROWS = [{"prompt": f"{a}+{b}-3=?\n", "answer": str(a + b - 3)} for a in range(2, 8) for b in range(2, 8)]
SETTINGS = {
    "model.dtype": "float32",
    "data.train": "rows.jsonl",
    "data.max_prompt_tokens": 32,
    "sampling.max_new_tokens": 56,
    "overlong.cache_length": 12,
    "reward.workers": 1,
}


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(ROWS)


def write_rows(rows):
    with open("rows.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def silent():
    return EvalProgress(Console(file=io.StringIO()))


def verify(rows=3, samples=3, **changes):
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    return dry_run(Config.build(settings), rows, samples, progress=silent())


def findings(result, level):
    return [f"{advice.what}; {advice.remedy}" for advice in result.findings if advice.level == level]


def printed(result, width=80, encoding="utf-8"):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    print_dry_run(result, Console(file=stream, width=width))
    stream.flush()
    return raw.getvalue().decode(encoding)


def reward_file(body, name="reward.py"):
    with open(name, "w") as file:
        file.write(f"def score(prompts, completions, **columns):\n    {body}\n")
    return f"{name}:score"


def test_rows_are_the_first_that_a_run_draws_and_rewards_are_those_of_its_batch():
    result = verify(rows=4, samples=4)
    with DAPOTrainer(config=Config.build(SETTINGS), run_dir="run") as trainer:
        stream = trainer._run.sampler._prompts
        drawn = [stream.draw() for _ in range(4)]
    assert [row.row for row in result.rows] == [prompt.id for prompt in drawn]
    assert [row.ground_truth for row in result.rows] == [prompt.answer for prompt in drawn]
    assert [row.prompt for row in result.rows] == [f"<bos>{prompt.text}" for prompt in drawn]
    for answer in result.answers:
        assert answer.score == (1 if answer.status == "correct" else -1)
        # Eq. 13 with L_max 56 and L_cache 12.
        assert answer.length_penalty == pytest.approx(min(0, (56 - 12 - answer.tokens) / 12))
        assert answer.reward == pytest.approx(answer.score + answer.length_penalty)
        assert (answer.finish_reason == "stop") == (not answer.text.endswith("\n") and answer.tokens < 56)
        if answer.status == "correct":
            assert answer.text.endswith(f"Answer: {answer.answer}")
    assert any(answer.length_penalty < 0 for answer in result.answers)
    assert result.stops_training is None
    assert verify(rows=4, samples=4).rows == result.rows


def test_more_rows_than_prompts():
    write_rows(ROWS[:2])
    assert len(verify(rows=50, samples=1).rows) == 2


def test_a_constant_reward():
    result = verify(reward__verifier=reward_file("return [0.25] * len(completions)"))
    (line,) = (line for line in findings(result, "warning") if "nothing to learn" in line)
    assert line.startswith("all 9 responses are wrong, with the score 0.25: there is nothing to learn; use easier")
    assert [row.outcome for row in result.rows] == ["all_wrong"] * 3
    check_trainable(result)


def test_a_reward_that_is_always_right():
    result = verify(reward__verifier=reward_file("return [1.0] * len(completions)"))
    (line,) = (line for line in findings(result, "warning") if "nothing to learn" in line)
    assert line.startswith("all 9 responses are right, with the score 1: there is nothing to learn; use harder")


def test_without_dynamic_sampling_the_length_penalty_is_still_a_signal():
    verifier = reward_file("return [1.0] * len(completions)")
    result = verify(rows=8, samples=4, reward__verifier=verifier, sampling__dynamic=False)
    (line,) = (line for line in findings(result, "warning") if "nothing to learn" in line)
    assert "there is nothing to learn but to avoid the length penalty" in line
    assert {row.outcome for row in result.rows} == {"kept"}


@pytest.mark.parametrize("metric", ["auto", "correct", "score"])
def test_graded_scores_of_wrong_answers(metric):
    verifier = reward_file("return [min(len(text), 40) / 100 for text in completions]")
    result = verify(rows=8, samples=4, reward__verifier=verifier, sampling__metric=metric)
    (note,) = (line for line in findings(result, "note") if line.startswith("all 32 responses are wrong, with diff"))
    no_signal = any(line.startswith("0 of 8 prompts are all right and 8 all") for line in findings(result, "warning"))
    if metric == "correct":
        assert "set sampling.metric=score to learn from the scores" in note
        assert no_signal
    else:
        assert "they are compared by their scores" in note
        assert not no_signal


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({}, True),
        ({"overlong__factor": 0.1}, False),
        ({"overlong__shape": "off"}, False),
        ({"overlong__shape": "linear", "overlong__max_length": 2}, True),
    ],
)
def test_a_length_penalty_that_outweighs_graded_scores(settings, warned):
    """Scores from 0 to 0.4 at most, and up to 1 for the length."""
    verifier = reward_file("return [min(len(text), 40) % 5 / 10 for text in completions]")
    lines = findings(verify(rows=8, samples=4, reward__verifier=verifier, **settings), "warning")
    found = [line for line in lines if line.startswith("the scores are graded, from 0 to 0.4, and the length penalty")]
    assert bool(found) is warned
    if warned and not settings:
        assert found[0].endswith(
            "takes up to 1 from them: a short response outweighs a good one; lower overlong.factor, for example to "
            "0.2, or set overlong.shape=off"
        )


def test_right_and_wrong_are_no_graded_scores():
    assert not any("graded" in line for line in findings(verify(), "warning"))


def test_a_reward_that_crashes_would_stop_the_run():
    result = verify(reward__verifier=reward_file("return [1 / 0 for _ in completions]"))
    (line,) = findings(result, "error")
    assert line.startswith("the verifier failed on 9 of 9 responses; the first: score raised ZeroDivision")
    assert "3 of 3 groups, more than reward.max_error_share 0.5 allows" in line
    assert [row.outcome for row in result.rows] == ["verifier_error"] * 3
    with pytest.raises(UserError, match="dapo train would stop: the verifier failed on 9 of 9") as stopped:
        check_trainable(result)
    assert "line 2, in <listcomp>" in stopped.value.more or "line 2, in score" in stopped.value.more


def test_a_reward_that_sometimes_crashes_does_not():
    verifier = reward_file("return [1 / ('3' in prompts[0][:3]) for _ in completions]")
    result = verify(rows=12, samples=2, reward__verifier=verifier, reward__max_error_share=1.0)
    assert not findings(result, "error")
    assert any("the verifier failed on" in line for line in findings(result, "warning"))
    check_trainable(result)


def test_a_slow_verifier():
    verifier = reward_file("import time; time.sleep(60)")
    result = verify(rows=1, samples=2, reward__verifier=verifier, reward__timeout_s=0.2)
    (line,) = findings(result, "error")
    assert line.endswith("; raise reward.timeout_s, or make the verifier faster")


def test_responses_that_are_cut_off():
    result = verify(sampling__max_new_tokens=2, overlong__shape="off")
    lines = findings(result, "warning")
    assert any(line.startswith("9 of 9 responses (100%) were cut off at sampling.max_new_tokens 2") for line in lines)
    assert any(line.startswith("no response ended with an end-of-sequence token (<eos>)") for line in lines)
    assert any(line.startswith("all 9 responses have no answer that reward.verifier=math can parse") for line in lines)


def test_a_benchmark_setting():
    lines = findings(verify(sampling__ignore_eos=True), "warning")
    assert any(line.startswith("sampling.ignore_eos is on") for line in lines)
    assert not any("cut off" in line for line in lines)


def test_answers_that_never_parse():
    """Every response ends at its first line break, before the line with the answer."""
    result = verify(sampling__stop=["="])
    parse = [line for line in findings(result, "warning") if "can parse" in line]
    assert len(parse) == 1
    assert "ask for a last line 'Answer: ...'" in parse[0]
    assert parse[0].endswith("or set reward.boxed=true")
    assert verify(sampling__stop=["="], reward__boxed=True).findings != result.findings


def test_prompts_that_are_too_long():
    long = [{"prompt": "1+" * 40 + "1=?\n", "answer": "41"}] * 12
    write_rows(ROWS + long)
    lines = findings(verify(), "warning")
    assert any(
        line.startswith("12 of 48 prompts are over data.max_prompt_tokens 32 and were dropped") for line in lines
    )
    write_rows(long)
    with pytest.raises(UserError, match="none of 12 rows gives a prompt: 12 prompts are over"):
        verify()


def test_rows_without_a_ground_truth_and_other_bad_rows():
    write_rows([*ROWS, {"prompt": "1+1=?\n"}, {"nothing": 1}])
    lines = findings(verify(), "warning")
    assert any(
        line.startswith("1 of 38 rows have no ground truth and were skipped; the first: rows.jsonl:37")
        for line in lines
    )
    assert any("1 of 38 rows cannot be used and were skipped; the first: rows.jsonl:38" in line for line in lines)
    write_rows([{"prompt": row["prompt"]} for row in ROWS])
    result = verify(reward__verifier=reward_file("return [float(len(text) % 2) for text in completions]"))
    assert any(line.startswith("36 of 36 prompts have no ground truth; ") for line in findings(result, "note"))
    assert {row.ground_truth for row in result.rows} == {None}


def test_prompts_that_ask_for_a_form():
    expand = [
        {"prompt": "Expand (x+1)^2.\n", "answer": "x^2+2x+1"},
        {"prompt": "Write 2/4 in lowest terms.\n", "answer": "\\frac{1}{2}"},
    ]
    plain = [
        {"prompt": "Simplify 2+3.\n", "answer": "5"},  # a number has one form
        {"prompt": "What is x?\n", "answer": "5x"},
    ]
    write_rows([*ROWS, *expand, *plain])
    (line,) = [line for line in findings(verify(), "warning") if "ask for a form" in line]
    assert line.startswith(
        "2 of 40 prompts ask for a form (the first, row 37: Expand), and reward.form=any accepts any"
    )
    assert line.endswith("set reward.form=same")
    own = reward_file("return [float(len(text) % 2) for text in completions]")
    for changes in ({"reward__form": "same"}, {"reward__verifier": own}):
        assert not any("ask for a form" in line for line in findings(verify(**changes), "warning"))
    write_rows([*ROWS, *plain])
    assert not any("ask for a form" in line for line in findings(verify(), "warning"))


def model_named(name, template=True):
    shutil.copytree(TINY, name)
    if not template:
        (Path(name) / "chat_template.jinja").unlink()
    return f"./{name}"


@pytest.mark.parametrize(
    ("name", "template", "settings", "words"),
    [
        ("Tiny-1M-Instruct", True, {}, "looks like a chat model, but 3 of 3 prompts are plain text; set data.chat_t"),
        ("Tiny-1M-Instruct", True, {"data__chat_template": "always"}, None),
        ("tiny-it", False, {}, "looks like a chat model, but its tokenizer has no chat template; save the tokenizer"),
        ("tiny-digit", False, {}, None),
        ("tiny-base", True, {}, None),
    ],
)
def test_chat_templates(name, template, settings, words):
    result = verify(model__name=model_named(name, template), **settings)
    found = [line for line in findings(result, "warning") if "chat" in line]
    assert len(found) == (words is not None)
    assert all(words in line for line in found)


def test_messages_for_a_base_model():
    write_rows([{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS])
    base = model_named("tiny-base", template=False)
    with pytest.raises(UserError, match="the prompts are chat messages, but the tokenizer has no chat template"):
        verify(model__name=base)
    result = verify(model__name=base, data__chat_template="never")
    assert any(
        line.startswith("the prompts are chat messages, joined as plain text") for line in findings(result, "note")
    )


def test_the_text_of_models_and_data_is_shown_as_it_is():
    write_rows([{"prompt": "[bold]\x1b[31m1+1=?[/nope]\u4e2d\n", "answer": "[red]2\x07"}])
    result = verify(rows=1, samples=2, data__max_prompt_tokens=64)
    for width, encoding in ((80, "utf-8"), (120, "utf-8"), (80, "ascii")):
        text = printed(result, width, encoding)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert r"<bos>[bold]\x1b[31m1+1=?[/nope]" in text
        assert r"ground truth [red]2\x07" in text
        assert ("\u4e2d" if encoding == "utf-8" else r"\u4e2d") in text
        assert max(map(len, text.splitlines())) <= width


def test_json_has_everything():
    result = verify(rows=2, samples=2)
    document = json.loads(dry_run_json(result))
    assert document["rows"][0]["prompt"].startswith("<bos>")
    assert [len(row["answers"]) for row in document["rows"]] == [2, 2]
    assert set(document["rows"][0]["answers"][0]) == {
        *("text", "status", "answer", "score", "length_penalty", "reward", "finish_reason", "tokens", "detail"),
        *("parts", "extra", "turns", "messages"),
    }
    assert [finding["level"] for finding in document["findings"]] == [finding.level for finding in result.findings]


@pytest.mark.slow
def test_the_command(tmp_path):
    done = dapo("verify", "--prompts", "2", "--samples", "2", "reward.workers=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loading tiny" in done.stderr
    assert "2 of 2 problems" in done.stderr
    assert "on arithmetic, 4,096 prompts: 4 responses" in " ".join(done.stdout.split())
    assert not list(tmp_path.glob("runs"))
    as_json = dapo("verify", "--rows", "2", "--samples", "2", "--json", "reward.workers=1", cwd=tmp_path)
    assert len(json.loads(as_json.stdout)["rows"]) == 2


def test_the_command_fails_where_a_run_would(tmp_path):
    verifier = reward_file("raise KeyError('gone')")
    done = dapo("verify", "--rows", "2", "--samples", "2", f"reward.verifier={verifier}", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: the verifier failed on 4 of 4 responses" in " ".join(done.stdout.split())
    assert "\ndapo: verify: dapo train would stop: the verifier failed on 4 of 4" in done.stderr
    assert done.stderr.rstrip().endswith("KeyError: 'gone'")
    missing = dapo("verify", "data.train=none.jsonl", cwd=tmp_path)
    assert missing.returncode == 2
    assert missing.stderr.splitlines()[-1].startswith("dapo: data.train: ")


def test_ctrl_c_stops_while_sampling(tmp_path):
    words = ["verify", "sampling.max_new_tokens=400", "sampling.ignore_eos=true", "--rows", "100", "--samples", "16"]
    process = Popen([DAPO, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("sampling"):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "dapo: stopped"


def test_several_rewards_are_shown_by_name(tmp_path):
    (tmp_path / "more.py").write_text(
        "def size(completions, log_extra):\n"
        "    log_extra('characters', [len(text) for text in completions])\n"
        "    return [len(text) / 100 for text in completions]\n"
    )
    verifier = "reward.verifier=[math, {verifier: more.py:size, weight: 0.5}]"
    words = ["verify", "--rows", "2", "--samples", "2", "reward.workers=1", verifier]
    document = json.loads(dapo(*words, "--json", cwd=tmp_path).stdout)
    answers = [answer for row in document["rows"] for answer in row["answers"]]
    for answer in answers:
        first, second = answer["parts"]
        assert first == {"name": "math", "score": 1.0 if answer["status"] == "correct" else -1.0, "weight": 1.0}
        assert second == {"name": "size", "score": len(answer["text"]) / 100, "weight": 0.5}
        assert answer["score"] == pytest.approx(first["score"] + 0.5 * second["score"])
        assert answer["extra"] == {"characters": len(answer["text"])}
    shown = dapo(*words, cwd=tmp_path).stdout
    one, two = (f"{answer['parts'][1]['score']:.4g}" for answer in answers[:2])
    assert f"\nsize ×0.5: {one}, {two}\n" in "\n".join(line.rstrip() for line in shown.splitlines())
