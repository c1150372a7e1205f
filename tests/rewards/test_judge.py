"""A judge behind a real endpoint: good, slow, down, rate-limited, talking nonsense."""

import json
import threading
import time

import pytest
from judge_server import TOKENS, judge_server, write_judge
from support import make_prompt

from dapo_rl.config import RewardSettings
from dapo_rl.errors import StopRequested, UserError
from dapo_rl.rewards import build_verifier
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.types import Trajectory


def judging(path, verifier=None, **settings):
    given = RewardSettings(verifier=verifier or str(path), **({"workers": 0} | settings))
    return VerifierPool(build_verifier(given), given)


def responses(*texts):
    return [Trajectory.of_text(text) for text in texts]


def by_number(prompt):
    """The grade is the number in the response."""
    return f"Let me see. grade {prompt.split('Response: ')[1].split()[0]}"


def test_marks_become_verdicts(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with judge_server(by_number) as server:
        path = write_judge(tmp_path / "j.yaml", server.url, scale={"min": 0, "max": 10}, api_key_env="JUDGE_KEY")
        with judging(path) as pool:
            verdicts = pool(make_prompt("p", "1+1=?"), responses("2", "9", "2"))
            assert [v.score for v in verdicts] == pytest.approx([0.2, 0.9, 0.2])
            assert [v.correct for v in verdicts] == [False, True, False]
            assert {v.parts[0].name for v in verdicts} == {"j"}
            figures = pool.figures()
    assert sorted(server.asked) == [f"Question: 1+1=?\nResponse: {n}\nGrade:" for n in (2, 9)]  # equal ones once
    assert (figures["judge/calls"], figures["judge/cached"], figures["judge/errors"]) == (2, 1, 0)
    assert figures["judge/seconds"] > 0
    assert server.bodies[0][0] == "/v1/chat/completions"
    assert server.bodies[0][1]["model"] == "small"
    assert server.headers[0]["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize(("threshold", "correct"), [(None, [False, False, True]), (0, [False, True, True])])
def test_a_mark_above_the_threshold_is_correct(tmp_path, threshold, correct):
    with (
        judge_server(by_number) as server,
        judging(write_judge(tmp_path / "j.yaml", server.url), threshold=threshold) as pool,
    ):
        assert [v.correct for v in pool(make_prompt("p"), responses("0", "0.5", "0.6"))] == correct


def test_a_truth_that_is_missing_is_one_line(tmp_path):
    path = write_judge(tmp_path / "j.yaml", "http://127.0.0.1:1/v1", prompt="{response} {truth}")
    with judging(path) as pool:
        assert pool.needs_answer
        with pytest.raises(UserError, match=r"^prompt p: .*j\.yaml needs its ground truth; set data\.answer_key"):
            pool(make_prompt("p", answer=None), responses("2"))


def test_a_list_and_a_rule_to_agree_with(tmp_path):
    with judge_server(by_number) as server:
        path = write_judge(tmp_path / "j.yaml", server.url, agree_with="math", scale={"1": 1, "2": 1, "3": 0})
        entries = [{"verifier": "exact", "weight": 0.5}, {"verifier": str(path), "weight": 2}]
        for workers in (0, 1):
            with judging(path, entries, workers=workers) as pool:
                samples = responses("2", "1 \nAnswer: 2", "3 \nAnswer: 2", "3")
                verdicts = pool(make_prompt("p", answer="2"), samples)
                # exact gives ±1, of which half; the judge 1, 1, 0, 0, twice.
                assert [v.score for v in verdicts] == pytest.approx([2.5, 1.5, -0.5, -0.5])
                assert [part.name for part in verdicts[0].parts] == ["exact", "j"]
                # The rule finds an answer in the second and the third, and the judge likes the first two.
                figures = pool.figures()
                assert figures["judge/agreement"] == 0.5
                assert "judge/agreement" not in pool.figures()


def test_a_rule_alone_beside_a_judge_is_not_in_the_reward(tmp_path):
    with judge_server(by_number) as server:
        path = write_judge(tmp_path / "j.yaml", server.url, agree_with="math")
        with judging(path, workers=1) as pool:
            verdicts = pool(make_prompt("p", answer="2"), responses("1 \nAnswer: 2", "0", "0 \nAnswer: 2"))
            assert [v.score for v in verdicts] == [1, 0, 0]
            assert pool.figures()["judge/agreement"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("I cannot say", "nothing in its reply matches"),
        ((200, {}, b"<html>"), "its reply is not that of a chat completion: <html>"),
        ((200, {}, b'{"choices": []}'), "its reply is not that of a chat completion"),
        ((400, {}, b"no such model"), "the server answered 400 Bad Request: no such model"),
        ((401, {}, b""), "the server answered 401 Unauthorized"),
        ((500, {}, b"oops"), "the server answered 500 Internal Server Error: oops"),
        ((302, {"Location": "http://example.com/"}, b""), "the server answered 302 Found"),
        ("grade " + "9" * 400, "its mark"),
    ],
)
def test_what_is_no_mark_is_a_counted_error(tmp_path, said, line):
    with judge_server(lambda prompt: said) as server, judging(write_judge(tmp_path / "j.yaml", server.url)) as pool:
        verdicts = pool(make_prompt("p"), responses("a", "b"))
        assert pool.figures()["judge/errors"] == 2
    for verdict in verdicts:
        assert verdict.status == "error"
        assert line in verdict.detail
        assert "\n" not in verdict.detail


def test_a_server_that_is_down(tmp_path):
    with judge_server(by_number) as server:
        path = write_judge(tmp_path / "j.yaml", server.url)
    with judging(path) as pool:
        (verdict,) = pool(make_prompt("p"), responses("a"))
    assert verdict.status == "error"
    assert "cannot be reached: " in verdict.detail


def test_a_server_that_is_slow_is_a_timeout(tmp_path):
    done = threading.Event()
    with judge_server(lambda prompt: done.wait(10) and "grade 1") as server:
        started = time.monotonic()
        with judging(write_judge(tmp_path / "j.yaml", server.url, timeout_s=0.3)) as pool:
            (verdict,) = pool(make_prompt("p"), responses("a"))
        done.set()
    assert verdict.status == "timeout"
    assert "no reply within 0.3 s" in verdict.detail
    assert time.monotonic() - started < 5


def test_retries_wait_as_long_as_the_server_says(tmp_path):
    answers = iter([(429, {"Retry-After": "1"}), (503, {}), "grade 1"])
    with (
        judge_server(lambda prompt: next(answers)) as server,
        judging(write_judge(tmp_path / "j.yaml", server.url, retries=2)) as pool,
    ):
        started = time.monotonic()
        (verdict,) = pool(make_prompt("p"), responses("a"))
        assert time.monotonic() - started > 1.9  # 1 s, then 1 s: twice the first wait of 0.5 s
        assert pool.figures()["judge/calls"] == 3
    assert verdict.score == 1


def test_nonsense_is_asked_again_only_where_the_reply_may_differ(tmp_path):
    for temperature, calls in ((0, 1), (1, 2), ("none", 2)):
        answers = iter(["hm", "grade 1"])
        with judge_server(lambda prompt, answers=answers: next(answers)) as server:
            path = write_judge(tmp_path / "j.yaml", server.url, retries=3, temperature=temperature)
            with judging(path) as pool:
                (verdict,) = pool(make_prompt("p"), responses("a"))
        assert verdict.failed is (temperature == 0)
        assert len(server.asked) == calls


def test_no_more_calls_at_a_time_than_allowed(tmp_path):
    lock, now, most = threading.Lock(), [0], [0]

    def reply(prompt):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.1)
        with lock:
            now[0] -= 1
        return "grade 1"

    with judge_server(reply) as server, judging(write_judge(tmp_path / "j.yaml", server.url, concurrency=3)) as pool:
        pool(make_prompt("p"), responses(*"abcdefgh"))
    assert most[0] == 3


def test_the_cache_outlives_a_run_and_a_line_that_was_cut_off(tmp_path):
    with judge_server(by_number) as server:
        path = write_judge(tmp_path / "j.yaml", server.url)
        for run in range(3):
            with judging(path) as pool:
                pool.begin(tmp_path / "run")
                asked = ["1", "2"] if run == 0 else ["1", "2", "3"]  # the first reply after a line that was cut off
                assert [v.score for v in pool(make_prompt("p"), responses(*asked))] == list(map(int, asked))
            with (tmp_path / "run" / "judge" / "j.jsonl").open("a") as file:
                file.write('{"key": "cut o')
        assert not server.twice
        # Another model or temperature is another question, another way to read the reply is not.
        for changes, calls in (({"parse": r"(\d)"}, 3), ({"model": "large"}, 4), ({"temperature": 0.5}, 5)):
            with judging(write_judge(tmp_path / "j.yaml", server.url, **changes)) as pool:
                pool.begin(tmp_path / "run")
                pool(make_prompt("p"), responses("1"))
            assert len(server.asked) == calls


def test_a_directory_for_the_cache_serves_several_runs(tmp_path):
    with judge_server(by_number) as server:
        path = write_judge(tmp_path / "j.yaml", server.url, cache=str(tmp_path / "shared"))
        for run in "ab":
            with judging(path) as pool:
                pool.begin(tmp_path / run)
                pool(make_prompt("p"), responses("1"))
        assert len(server.asked) == 1
        path = write_judge(tmp_path / "j.yaml", server.url, cache=False)
        for _ in range(2):
            with judging(path) as pool:
                pool.begin(tmp_path / "a")
                pool(make_prompt("p"), responses("1"))
        assert len(server.asked) == 3


def test_what_cannot_be_read_is_not_kept(tmp_path):
    with judge_server(lambda prompt: "hm") as server:
        for _ in range(2):
            with judging(write_judge(tmp_path / "j.yaml", server.url)) as pool:
                pool.begin(tmp_path / "run")
                pool(make_prompt("p"), responses("1"))
        assert len(server.asked) == 2


@pytest.mark.parametrize(("budget", "calls"), [({"calls": 3}, 3), ({"tokens": 2 * TOKENS + 1}, 3)])
def test_a_budget_counts_over_stops(tmp_path, budget, calls):
    (key,) = budget
    with judge_server(by_number) as server:
        path = write_judge(tmp_path / "j.yaml", server.url, budget=budget, concurrency=1)
        for number in range(1, 6):
            with judging(path) as pool:
                pool.begin(tmp_path / "run")
                if number <= calls:
                    pool(make_prompt("p"), responses(str(number)))
                    assert not pool.stopped
                    with (tmp_path / "run" / "judge" / "j.calls.jsonl").open("a") as file:
                        file.write('{"cal')  # cut off by a kill
                    continue
                with pytest.raises(StopRequested):
                    pool(make_prompt("p"), responses(str(number)))
                assert f"j.yaml: budget.{key}: " in pool.stopped
                assert "\n" not in pool.stopped
                pool(make_prompt("p"), responses("1"))  # from the cache
        assert len(server.asked) == calls


@pytest.mark.parametrize(("budget", "calls"), [({"calls": 5}, 5), ({"tokens": 4 * TOKENS + 1}, 5)])
def test_a_budget_counts_once_in_a_process_that_resumes(tmp_path, budget, calls):
    """Calls before the run begins count too, and so do those that the run directory has."""
    with judge_server(by_number) as server:
        path = write_judge(tmp_path / "j.yaml", server.url, budget=budget, concurrency=1)
        with judging(path) as pool:
            pool.begin(tmp_path / "run")
            pool(make_prompt("p"), responses("1"))
        with judging(path) as pool:
            pool(make_prompt("p"), responses("2"))
            for number in range(3, 3 + calls - 2):
                pool.begin(tmp_path / "run")
                pool(make_prompt("p"), responses(str(number)))
                assert not pool.stopped
            with pytest.raises(StopRequested):
                pool(make_prompt("p"), responses("9"))
            assert pool.stopped
            pool.begin(tmp_path / "run")
            assert not pool.stopped, "it may go on as far as it is known"
        assert len(server.asked) == calls


def test_a_cache_that_cannot_be_written_stops_with_a_line(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    path = write_judge(tmp_path / "j.yaml", "http://127.0.0.1:1/v1", cache=str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"j\.yaml: .*cannot be used: "):
        judging(path)


def test_the_key_is_in_no_file_and_no_message(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with (
        judge_server(lambda prompt: (401, {}, b"bad key s3cret")) as server,
        judging(write_judge(tmp_path / "j.yaml", server.url, api_key_env="JUDGE_KEY")) as pool,
    ):
        pool.begin(tmp_path / "run")
        (verdict,) = pool(make_prompt("p"), responses("1"))
    assert "s3cret" not in verdict.detail
    assert all("s3cret" not in path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file())
    json.loads((tmp_path / "run" / "judge" / "j.calls.jsonl").read_text())
