"""A teacher behind a real HTTP server: its log-probabilities are those of the model, and mistakes are one line."""

import json
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest
import torch
from support import small_model
from teacher_server import CONTEXT, teacher_server

from dapo_rl.config import ModelSettings, TeacherSettings
from dapo_rl.errors import TeacherStopError, UserError
from dapo_rl.models.load import load_model
from dapo_rl.models.response_logps import response_logps
from dapo_rl.models.tokenizer import build_tokenizer
from dapo_rl.train import served_teacher
from dapo_rl.train.served_teacher import ServedTeacher
from dapo_rl.types import Trajectory

LONGEST = 40


@pytest.fixture(scope="module")
def tiny():
    return load_model(ModelSettings(device="cpu"))


def teacher(url, tokenizer=None, **settings):
    settings = {"retries": 0, "timeout_s": 5, **settings}
    made = ServedTeacher(TeacherSettings(name=url, **settings))
    if tokenizer is not None:
        made.check(tokenizer, LONGEST)
    return made


def samples(count=5):
    rng = np.random.default_rng(0)
    return [
        Trajectory(rng.integers(3, 30, 2 + i), prompt_ids=rng.integers(3, 30, 3 + i % 2).tolist()) for i in range(count)
    ]


def only(path, answer):
    return lambda asked, body: answer() if asked == path else None


def test_its_scores_are_those_of_the_model_whatever_the_batches(tiny, monkeypatch):
    given = samples()  # of 5, 7, 7, 9 and 9 tokens
    with torch.no_grad():
        expected = response_logps(tiny[0], given, 1.0, 0).logps.numpy()
    with teacher_server(*tiny) as server:
        for most, requests in ((16384, 1), (20, 2), (12, 4), (1, 5)):
            monkeypatch.setattr(served_teacher, "BATCH_TOKENS", most)
            server.asked.clear()
            found = teacher(server.url, tiny[1]).score(given)
            assert len(server.completions) == requests
            assert all(body["model"] == "teacher" for body in server.completions)
            for sample, row, own in zip(given, found, expected, strict=True):
                assert len(row) == len(sample.token_ids)
                np.testing.assert_allclose(row, own[: len(row)], atol=1e-4)


def test_the_key_and_the_name_of_the_model_are_sent(tiny, monkeypatch):
    monkeypatch.setenv("SECRET", "abc")
    with teacher_server(*tiny) as server:
        teacher(server.url + "/", tiny[1], model="lora", api_key_env="SECRET").score(samples(1))
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer abc"}
    assert server.completions[0]["model"] == "lora"


def test_a_request_that_fails_is_made_again(tiny):
    failures = iter([(503, b"busy"), (200, b"{}")])
    with teacher_server(
        *tiny, lambda path, body: next(failures, None) if path == "/v1/completions" else None
    ) as server:
        found = teacher(server.url, tiny[1], retries=2)
        assert len(found.score(samples(2))) == 2
    assert len(server.completions) == 3
    assert not found.stopped


def spoilt(change):
    """An answer in which one position of the first completion is changed."""

    def before(path, body):
        if path != "/v1/completions":
            return None
        rows = [{"index": i, "prompt_logprobs": [{str(t): {"logprob": -1.0}} for t in r]}
                for i, r in enumerate(body["prompt"])]  # fmt: skip
        change(rows)
        return 200, json.dumps({"choices": rows}).encode()

    return before


def last(rows):
    return next(iter(rows[0]["prompt_logprobs"][-1].values()))


NONSENSE = "its reply has no log-probabilities of these tokens, as vLLM's has: "


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (lambda path, body: (500, b"no\nmemory"), "the server answered 500 Internal Server Error: no"),
        (lambda path, body: (400, b"too long"), "the server answered 400 Bad Request: too long"),
        (lambda path, body: (401, b""), "the server answered 401 Unauthorized; set teacher.api_key_env"),
        (lambda path, body: (200, b"<html>"), NONSENSE + "<html>"),
        (lambda path, body: (200, b'{"choices": 3}'), NONSENSE),
        (lambda path, body: (200, b'{"choices": []}'), NONSENSE),
        (spoilt(lambda rows: rows[0].update(prompt_logprobs=None)), NONSENSE),
        (spoilt(lambda rows: rows[0]["prompt_logprobs"].pop()), NONSENSE),
        (spoilt(lambda rows: rows[0]["prompt_logprobs"].__setitem__(-1, {"999": {"logprob": -1.0}})), NONSENSE),
        (spoilt(lambda rows: rows[0]["prompt_logprobs"].__setitem__(-1, None)), NONSENSE),
        (spoilt(lambda rows: last(rows).update(logprob=0.5)), NONSENSE),
        (spoilt(lambda rows: last(rows).update(logprob=float("nan"))), NONSENSE),
        (spoilt(lambda rows: last(rows).update(logprob=-(10**400))), NONSENSE),
        (spoilt(lambda rows: rows[0].update(index=float("inf"))), NONSENSE),
        (spoilt(lambda rows: rows.pop()), NONSENSE),
        (spoilt(lambda rows: rows[0].pop("index")), NONSENSE),
    ],
)  # fmt: skip
def test_a_server_that_fails_stops_the_run_with_one_line(tiny, before, said):
    with teacher_server(*tiny) as server:
        found = teacher(server.url, tiny[1])
        server.before = before
        with pytest.raises(TeacherStopError) as stop:
            found.score(samples(3))
    line = str(stop.value)
    assert line == found.stopped
    assert line.startswith(f"teacher.name: {server.url}: {said}")
    assert line.endswith("; resume when it answers")
    assert "\n" not in line


def test_a_correct_answer_passes_the_same_checks(tiny):
    with teacher_server(*tiny, spoilt(lambda rows: None)) as server:
        (row, *_) = teacher(server.url, tiny[1]).score(samples(3))
    assert row.tolist() == [-1.0, -1.0]


def test_a_server_that_is_down_or_slow_is_one_line(tiny):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(UserError, match=rf"^teacher\.name: {url}: no reply within 0\.1 s$"):
            teacher(url, tiny[1], timeout_s=0.1)
    with pytest.raises(UserError, match=rf"^teacher\.name: {url}/models cannot be reached: .*refused"):
        teacher(url, tiny[1])


def test_a_server_with_another_vocabulary_is_refused(tiny):
    words = build_tokenizer()
    words.add_tokens(["<new>", "12"])
    other = small_model(vocab_size=len(words)), words
    for served, before, said in (
        (other, lambda path, body: None, "teacher at http.* has another vocabulary than the policy"),
        (tiny, only("/tokenize", lambda: (404, b"")), ".* has no /tokenize to compare vocabularies by; serve"),
        (tiny, only("/tokenize", lambda: (200, b'{"tokens": []}')), ".*/tokenize gave no tokens"),
    ):
        with teacher_server(*served, before) as server, pytest.raises(UserError, match=rf"^teacher\.name: {said}"):
            teacher(server.url, tiny[1])


def test_a_server_without_the_model_or_with_a_short_context_is_refused(tiny, monkeypatch):
    with teacher_server(*tiny) as server:
        with pytest.raises(UserError, match=r"it has no model other \(teacher\.model\), but teacher, lora$"):
            teacher(server.url, tiny[1], model="other")
        with pytest.raises(UserError, match=rf"reads {CONTEXT} tokens, and a sample may have {CONTEXT}; start it with"):
            ServedTeacher(TeacherSettings(name=server.url)).check(tiny[1], CONTEXT)
        server.before = lambda path, body: (200, b'{"data": [{}]}')
        with pytest.raises(UserError, match=r"it lists no model: "):
            teacher(server.url, tiny[1])
    monkeypatch.delenv("SECRET", raising=False)
    with pytest.raises(UserError, match=r"^teacher\.api_key_env: the environment variable SECRET is not set"):
        teacher(server.url, api_key_env="SECRET")
    with pytest.raises(UserError, match=r"^teacher\.name: 'http://:80' is not a base URL"):
        teacher("http://:80")


def test_nothing_is_asked_without_samples(tiny):
    with teacher_server(*tiny) as server:
        assert teacher(server.url, tiny[1]).score([]) == []
    assert not server.completions


def test_a_run_that_goes_on_in_this_process_retries_again(tiny):
    """`trainer.train(resume=True)` after a stop asks the same teacher."""
    failures = []
    with teacher_server(
        *tiny, lambda path, body: failures.pop() if path == "/v1/completions" and failures else None
    ) as server:
        found = teacher(server.url, tiny[1], retries=1)
        failures += [(503, b"busy")] * 2
        with pytest.raises(TeacherStopError):
            found.score(samples(2))
        assert found.stopped
        failures += [(503, b"busy")]
        assert len(found.score(samples(2))) == 2
        assert not found.stopped


def test_an_interrupt_waits_for_no_reply(tiny, monkeypatch):
    """As the second Ctrl-C of a run, while 8 requests are made and others wait."""
    monkeypatch.setattr(served_teacher, "BATCH_TOKENS", 1)
    begun, go_on = threading.Event(), threading.Event()

    def answer(path, body):
        if path == "/v1/completions":
            begun.set()
            go_on.wait(10)

    def interrupt():
        begun.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    with teacher_server(*tiny, answer) as server:
        found = teacher(server.url, tiny[1])
        threading.Thread(target=interrupt, daemon=True).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            found.score(samples(20))
        waited = time.monotonic() - started
        go_on.set()
    assert waited < 3
    assert len(server.completions) <= served_teacher.CONCURRENCY
