"""The file of a judge: its mistakes, its template, and how marks are read."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_server import write_judge
from support import REPOSITORY

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.rewards import build_verifier
from dapo_rl.rewards.judge.judge_file import JudgeSettings, read_judge, rendered
from dapo_rl.rewards.judge.reading import NoMarkError, score_of

URL = "http://localhost:1/v1"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"endpoint": None}, r"judge\.yaml: no endpoint; give the base URL"),
        ({"model": None}, r"judge\.yaml: no model; give the name"),
        ({"prompt": None}, r"judge\.yaml: no prompt; give what the judge is asked"),
        ({"parse": None}, r"judge\.yaml: no parse; give a regular expression"),
        ({"temprature": 0}, r"judge\.yaml: no key 'temprature'; did you mean temperature\?"),
        ({"budget": {"call": 3}}, r"judge\.yaml: budget\.call: 3: "),
        ({"endpoint": "localhost:8000"}, r"endpoint: 'localhost:8000' is not a base URL such as http"),
        ({"endpoint": "file:///etc/passwd"}, r"endpoint: 'file:///etc/passwd' is not a base URL"),
        (
            {"endpoint": "http://me:s3cret@host/v1"},
            r"judge\.yaml: endpoint: a user name or password in a URL ",
        ),
        ({"prompt": "Good?"}, r"prompt: it has no \{response\}: the judge would not see what it judges"),
        ({"prompt": "{response} {promt}"}, r"prompt: \{promt\} is not replaced; did you mean \{prompt\}\?"),
        ({"parse": "(a"}, r"parse: '\(a' is not a regular expression"),
        ({"parse": "a"}, r"parse: 'a' has 0 groups; it needs one, the mark"),
        ({"parse": "(a)(b)"}, r"parse: '\(a\)\(b\)' has 2 groups"),
        ({"parse": {"jsn": "a"}}, r"parse: give a regular expression, or \{json: KEY\}"),
        ({"scale": {"min": 5, "max": 1}}, r"scale: min 5 is not below max 1"),
        ({"timeout_s": 0}, r"judge\.yaml: timeout_s: 0: "),
        ({"temperature": 1e-39}, r"judge\.yaml: temperature: .*1e-39.*: expected 1e-30 or more"),
        ({"retries": "many"}, r"judge\.yaml: retries: 'many': "),
        ({"agree_with": "maths"}, r"agree_with: 'maths' is not one of math, exact, gym; did you mean math\?"),
        ({"api_key_env": "NO_SUCH_KEY"}, r"api_key_env: the environment variable NO_SUCH_KEY is not set"),
    ],
)
def test_mistakes_are_one_line(tmp_path, changes, line):
    path = write_judge(tmp_path / "judge.yaml", URL, **changes)
    with pytest.raises(UserError, match=line) as error:
        read_judge(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "has"),
    [
        ("model", "small", "the model of the run"),
        ("api_key_env", "KEY", "no key"),
        ("timeout_s", 5, "no time limit"),
        ("concurrency", 2, "the whole engine"),
        ("cache", True, "no file of replies, as they hold for one version of the weights"),
    ],
)
def test_what_only_a_server_needs_is_refused_with_the_policy(tmp_path, key, value, has):
    none = {"model": None, "timeout_s": None}
    judge = read_judge(write_judge(tmp_path / "judge.yaml", "policy", **none))
    assert (judge.is_policy, judge.cache) == (True, False)
    path = write_judge(tmp_path / "judge.yaml", "policy", **none | {key: value})
    with pytest.raises(UserError, match=rf"judge\.yaml: {key}: endpoint: policy has {has}; leave it out$"):
        read_judge(path)


def test_files_that_are_no_judges(tmp_path):
    for name, content, line in (
        ("list.yaml", "- a", r"list\.yaml: a judge is a mapping of keys"),
        ("bad.yaml", "a: [", r"bad\.yaml: not valid YAML"),
        ("binary.yaml", "\x00", r"binary\.yaml: "),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=line):
            read_judge(tmp_path / name)
    with pytest.raises(UserError, match=r"^reward\.verifier: no judge .*lists\.yaml; did you mean .*list\.yaml\?"):
        build_verifier(Config.load("demo", [f"reward.verifier={tmp_path / 'lists.yaml'}"]).reward)


def test_a_template_is_text():
    assert rendered("{prompt}|{response}|{truth}", "a", "b", "c") == "a|b|c"
    assert (
        rendered('{"score": 1} {score} {response.__class__}', "", "", "") == '{"score": 1} {score} {response.__class__}'
    )
    # What a response says is not replaced again.
    assert rendered("{response}/{truth}", "", "{truth} {0} {prompt} %s", "42") == "{truth} {0} {prompt} %s/42"


@given(st.text(), st.text(), st.text())
def test_texts_arrive_as_they_are(prompt, response, truth):
    assert rendered("[{prompt}][{response}][{truth}]", prompt, response, truth) == f"[{prompt}][{response}][{truth}]"


@pytest.mark.parametrize(
    ("reply", "parse", "scale", "score"),
    [
        ("I would say 3. Grade: 7", r"(\d+)", None, 7.0),
        ("Grade: 7", r"Grade: (\d+)", {"min": 1, "max": 10}, 2 / 3),
        ("It is **Good**.", r"is (\S+)\.", {"good": 1, "bad": -1}, 1.0),
        ('Well {"a": {"score": 1}} ```json\n{"score": 0.25}\n```', {"json": "score"}, None, 0.25),
        ('{"score": "8"}', "json: score", {"min": 0, "max": 10}, 0.8),
        ('{"ok": true}', {"json": "ok"}, {"true": 1, "false": 0}, 1.0),
    ],
)
def test_marks(reply, parse, scale, score):
    assert score_of(reply, parse, scale) == pytest.approx(score)


@pytest.mark.parametrize(
    ("reply", "parse", "scale", "line"),
    [
        ("nothing", r"(\d+)", None, "nothing in its reply matches"),
        ("Grade: 11", r"(\d+)", {"min": 1, "max": 10}, "its mark 11 is not between 1 and 10"),
        ("so so", r"(so)", {"good": 1}, "its mark 'so' is not one of good"),
        ("{score: 1}", {"json": "score"}, None, "its reply has no JSON object with 'score'"),
        ('{"score": [1]}', {"json": "score"}, None, "is not a number"),
        ("1e999", r"(\S+)", None, "is not finite"),
        ("{" * 5000, {"json": "score"}, None, "no JSON object"),
    ],
)
def test_replies_without_a_mark(reply, parse, scale, line):
    with pytest.raises(NoMarkError, match=line):
        score_of(reply, parse, scale)


@given(st.text())
def test_any_reply_gives_a_mark_or_a_reason(reply):
    for parse in (r"(\S+)", {"json": "a"}):
        with suppress(NoMarkError):
            assert abs(score_of(reply, parse, None)) >= 0


@pytest.mark.parametrize(
    ("scale", "scores"),
    [("{yes: 1, no: 0}", {"Yes": 1, "no": 0}), ("{0: 0, 1: 0.5, 2: 1}", {"0": 0, "1": 0.5, "2": 1})],
)
def test_words_that_yaml_reads_as_switches_and_numbers_that_python_takes_for_them(tmp_path, scale, scores):
    path = tmp_path / "judge.yaml"
    path.write_text(
        f"endpoint: {URL}\nmodel: m\nprompt: '{{response}}'\nparse: '(\\w+)'\nscale: {scale}\n", encoding="utf-8"
    )
    judge = read_judge(path)
    assert {mark: score_of(mark, judge.parse, judge.scale) for mark in scores} == scores


def test_the_example_and_the_table_of_the_docs():
    page = (REPOSITORY / "docs" / "verifiers.md").read_text(encoding="utf-8")
    example = (REPOSITORY / "examples" / "judge.yaml").read_text(encoding="utf-8")
    assert example.partition("\n")[2] in page
    judge = read_judge(REPOSITORY / "examples" / "judge.yaml")
    assert score_of("It is. Verdict: right", judge.parse, judge.scale) == 1
    table = page.partition("## Judges")[2].partition("## ")[0]
    for key in JudgeSettings.model_fields:
        assert f"`{key}`" in table
