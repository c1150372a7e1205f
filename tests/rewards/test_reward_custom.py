"""Users' reward functions: loading them, both signatures, and everything that can go wrong in them."""

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards import CombinedVerifier, CustomVerifier, ExactVerifier, load_function
from dapo_rl.types import Prompt, Trajectory

SETTINGS = RewardSettings()
PLAIN = Prompt("p1", "2+3=", (1, 2), "5", "sums", None, {"level": 3, "extra_info": {"index": 8}})
CHAT = Prompt("p2", "<user>2+3=", (1, 2), "5", "", ({"role": "user", "content": "2+3="},), {"answer": "five"})
SAMPLES = [Trajectory((7, 8), (-0.1, -0.2), "5", "stop"), Trajectory((9,), (-0.3,), "six", "length")]


def verdicts(function, prompt=PLAIN, samples=SAMPLES, settings=SETTINGS):
    return CustomVerifier(function, settings)(prompt, samples)


def test_trl_on_a_plain_prompt():
    calls = []

    def reward(prompts, completions, **columns):
        calls.append((prompts, completions, columns))
        return [1, 0.25]

    first, second = verdicts(reward)
    given = {name: calls[0][2].pop(name) for name in ("trainer_state", "log_extra", "log_metric")}
    assert given["trainer_state"].global_step == 0
    assert calls == [
        (
            ["2+3=", "2+3="],
            ["5", "six"],
            {
                "level": [3, 3],
                "extra_info": [{"index": 8}, {"index": 8}],
                "answer": ["5", "5"],
                "ground_truth": ["5", "5"],
                "data_source": ["sums", "sums"],
                "completion_ids": [[7, 8], [9]],
            },
        )
    ]
    assert (first.score, first.correct, first.status) == (1.0, True, "correct")
    assert (second.score, second.correct, second.status) == (0.25, False, "wrong")


def test_trl_on_a_chat_gets_messages_and_the_data_s_own_columns():
    seen = {}

    def reward(prompts, completions, answer, ground_truth):
        seen.update(prompts=prompts, completions=completions, answer=answer, ground_truth=ground_truth)
        return [0.0, 1.0]

    assert [v.correct for v in verdicts(reward, CHAT)] == [False, True]
    assert seen["prompts"] == [[{"role": "user", "content": "2+3="}]] * 2
    assert seen["completions"] == [[{"role": "assistant", "content": "5"}], [{"role": "assistant", "content": "six"}]]
    assert seen["answer"] == ["five", "five"]
    assert seen["ground_truth"] == ["5", "5"]


def test_verl():
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        calls.append((data_source, solution_str, ground_truth, extra_info))
        return solution_str == ground_truth

    first, second = verdicts(compute_score)
    assert calls == [("sums", "5", "5", {"index": 8}), ("sums", "six", "5", {"index": 8})]
    assert (first.score, first.correct, second.score, second.correct) == (1.0, True, 0.0, False)


def test_verl_with_other_parameters():
    assert [v.score for v in verdicts(lambda solution_str: len(solution_str))] == [1.0, 3.0]
    assert [v.score for v in verdicts(lambda solution_str, **kw: len(kw))] == [3.0, 3.0]


def test_a_dict_says_correctness_apart_from_the_score():
    def compute_score(solution_str, ground_truth):
        return {"score": -0.5, "acc": solution_str == ground_truth, "pred": solution_str, "more": 1}

    first, second = verdicts(compute_score)
    assert (first.score, first.correct, first.answer) == (-0.5, True, "5")
    assert (second.score, second.correct, second.answer) == (-0.5, False, "six")


@pytest.mark.parametrize(
    ("value", "score", "correct"),
    [
        (True, 1.0, True),
        (False, 0.0, False),
        (0.5, 0.5, False),
        (0.51, 0.51, True),
        (2, 2.0, True),
        (-1, -1.0, False),
        (np.float32(1.0), 1.0, True),
        (np.bool_(False), 0.0, False),
        (np.array(3), 3.0, True),
        ({"score": 1.0}, 1.0, True),
        ({"score": np.float64(0.0), "acc": np.bool_(True)}, 0.0, True),
        ({"score": 1.0, "acc": 0.0}, 1.0, False),
    ],
)
def test_what_counts_as_a_score(value, score, correct):
    (by_verl,) = verdicts(lambda solution_str: value, samples=SAMPLES[:1])
    (by_trl,) = verdicts(lambda completions: [value], samples=SAMPLES[:1])
    for verdict in (by_verl, by_trl):
        assert (verdict.score, verdict.correct, verdict.failed) == (score, correct, False)
        assert type(verdict.score) is float
        assert type(verdict.correct) is bool


@pytest.mark.parametrize("threshold", [-0.5, 0])
def test_the_threshold_moves_the_line(threshold):
    settings = RewardSettings(threshold=threshold)
    scores = [threshold + 0.1, threshold]
    assert [v.correct for v in verdicts(lambda completions: scores, settings=settings)] == [True, False]


def test_arrays_of_scores():
    assert [v.score for v in verdicts(lambda completions: np.array([1.0, 0.0]))] == [1.0, 0.0]
    assert [v.score for v in verdicts(lambda completions: (1, 0))] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ("1", "str"),
        ([1], "list"),
        (None, "None"),
        ({"acc": True}, "score"),
        ({"score": None}, "NoneType"),
        (10**400, "OverflowError"),
        (np.array([1.0, 2.0]), "ValueError"),
        (1j, "complex"),
    ],
)
def test_a_bad_score_is_a_failure_of_its_sample_alone(value, what):
    by_trl = verdicts(lambda completions: [value, 1.0])
    by_verl = verdicts(lambda solution_str: value if solution_str == "5" else 1.0)
    for bad, good in (by_trl, by_verl):
        assert (bad.status, bad.failed, bad.correct) == ("error", True, False)
        assert what in bad.detail
        assert (good.status, good.score) == ("correct", 1.0)


@pytest.mark.parametrize(
    ("value", "what"),
    [([1.0], "1 score for 2"), ([1.0] * 3, "3 scores for 2"), (1.0, "returned a float"), (None, "returned None")],
)
def test_a_bad_list_is_a_failure_of_the_group(value, what):
    for verdict in verdicts(lambda completions: value):
        assert (verdict.status, verdict.failed) == ("error", True)
        assert what in verdict.detail


def test_a_crash_is_not_a_wrong_answer_and_tells_where_it_was():
    def crashing_reward(completions):
        return [1 / 0 for _ in completions]

    verifier = CustomVerifier(crashing_reward, SETTINGS)
    first, second = verifier(PLAIN, SAMPLES)
    assert [(v.status, v.failed, v.correct) for v in (first, second)] == [("error", True, False)] * 2
    assert "crashing_reward raised ZeroDivisionError: division by zero" in first.detail
    assert "1 / 0 for _ in completions" in first.detail
    assert "Traceback" not in second.detail
    assert "ZeroDivisionError" in second.detail
    assert "Traceback" not in verifier(PLAIN, SAMPLES)[0].detail


def test_verl_s_crash_fails_its_sample_alone():
    def compute_score(solution_str):
        return float(solution_str)

    assert [v.status for v in verdicts(compute_score)] == ["correct", "error"]


@pytest.mark.parametrize("error", [RecursionError, MemoryError, asyncio.CancelledError, GeneratorExit, SystemExit])
def test_no_crash_comes_out(error):
    def reward(completions):
        raise error("x")

    assert [v.status for v in verdicts(reward)] == ["error", "error"]


def test_ctrl_c_comes_out():
    def reward(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verdicts(reward)


def test_a_missing_column_is_named():
    def reward(completions, solution, **columns):
        return [1.0] * len(completions)

    assert "needs 'solution', but the data has only answer, completion_ids" in verdicts(reward)[0].detail


def test_async_functions():
    async def reward(completions, **columns):
        await asyncio.sleep(0)
        return [1.0, 0.0]

    async def compute_score(solution_str):
        return float(solution_str)

    assert [v.score for v in verdicts(reward)] == [1.0, 0.0]
    assert [v.status for v in verdicts(compute_score)] == ["correct", "error"]

    async def in_a_running_loop():
        return verdicts(reward)

    assert [v.score for v in asyncio.run(in_a_running_loop())] == [1.0, 0.0]


def test_an_async_function_runs_in_the_thread_that_asks_unless_its_event_loop_is_taken():
    """So that what belongs to a thread, such as a session or a handler of signals, can be used."""
    threads = []

    async def reward(completions, **columns):
        threads.append(threading.get_ident())
        return [1.0, 0.0]

    async def in_a_running_loop():
        return verdicts(reward)

    verdicts(reward)
    asyncio.run(in_a_running_loop())
    here, elsewhere = threads
    assert here == threading.get_ident() != elsewhere


def test_callable_objects():
    class Reward:
        def __call__(self, completions, **columns):
            return [1.0, 0.0]

    assert [v.correct for v in verdicts(Reward())] == [True, False]


@pytest.mark.parametrize("function", [lambda x: 1, lambda prompt, response: 1, lambda **kw: 1, dict])
def test_an_unknown_signature_shows_both(function):
    with pytest.raises(UserError, match=r"prompts, completions.*TRL.*solution_str.*verl"):
        CustomVerifier(function, SETTINGS)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_whatever_a_function_returns_there_is_a_verdict_for_each_sample(value):
    for function in (lambda completions: value, lambda solution_str: value):
        for verdict in verdicts(function):
            assert verdict.failed or np.isfinite(verdict.score)


class TestCombined:
    def combined(self, *functions, weights=None):
        return CombinedVerifier([CustomVerifier(f, SETTINGS) for f in functions], weights)(PLAIN, SAMPLES)

    def test_scores_add_up_and_the_first_decides(self):
        first, second = self.combined(
            lambda completions: [1.0, 0.0], lambda completions: [-3.0, 4.0], weights=[1.0, 0.5]
        )
        assert (first.score, first.correct, first.status) == (-0.5, True, "correct")
        assert (second.score, second.correct, second.status) == (2.0, False, "wrong")

    def test_none_does_not_apply(self):
        first, second = self.combined(lambda completions: [None, 1.0], lambda completions: [0.75, None])
        assert (first.score, first.correct, first.failed) == (0.75, True, False)
        assert (second.score, second.correct, second.failed) == (1.0, True, False)

    def test_none_from_all_is_a_failure(self):
        first, second = self.combined(lambda completions: [None, 1.0], lambda completions: [None, 1.0])
        assert (first.status, second.status) == ("error", "correct")

    def test_one_failure_fails_the_sample(self):
        first, second = self.combined(lambda completions: [1.0, 1.0], lambda completions: [float("nan"), 1.0])
        assert (first.status, first.failed, second.score) == ("error", True, 2.0)

    def test_built_in_verifiers_take_part(self):
        length = CustomVerifier(lambda completions: [len(c) / 10 for c in completions], SETTINGS)
        first, second = CombinedVerifier([ExactVerifier(SETTINGS), length])(PLAIN, SAMPLES)
        assert (first.score, first.correct) == (1.1, True)
        assert (second.score, second.correct) == (-0.7, False)

    def test_weights_and_functions_match(self):
        with pytest.raises(UserError, match="1 for 2"):
            CombinedVerifier([ExactVerifier(SETTINGS)] * 2, [1.0])
        with pytest.raises(UserError, match="empty"):
            CombinedVerifier([])


class TestLoad:
    @pytest.fixture(autouse=True)
    def in_a_directory(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.path", list(__import__("sys").path))
        self.directory = tmp_path

    def write(self, name, text):
        (self.directory / name).write_text(text, encoding="utf-8")

    def test_a_file(self):
        self.write("my_rewards_a.py", "import my_helper_a\ndef score(completions):\n    return my_helper_a.ONE\n")
        self.write("my_helper_a.py", "ONE = [1.0]")
        assert load_function("my_rewards_a.py:score")(["x"]) == [1.0]
        assert load_function(f"{self.directory}/my_rewards_a.py:score")(["x"]) == [1.0]

    def test_a_file_in_the_home_directory(self, monkeypatch):
        monkeypatch.setenv("HOME", str(self.directory))
        self.write("at_home.py", "def score(completions): return [2.0]")
        assert load_function("~/at_home.py:score")([]) == [2.0]

    def test_functions_of_one_file_share_its_state(self):
        self.write("my_state.py", "calls = []\ndef a(): calls.append(1)\ndef b(): return len(calls)\n")
        load_function("my_state.py:a")()
        assert load_function("my_state.py:b")() == 1

    def test_a_module(self):
        self.write("my_module_b.py", "def score(completions): return [3.0]")
        assert load_function("my_module_b:score")([]) == [3.0]
        assert load_function("math:sqrt")(4) == 2.0

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("score", "module:name or file.py:name"),
            (":score", "module:name or file.py:name"),
            ("rewards.py:", "module:name or file.py:name"),
            ("broken.py:no_such", "importing it failed: ValueError: at the top"),
            ("syntax.py:f", "importing it failed: SyntaxError"),
            ("exits.py:f", "importing it failed: SystemExit: 3"),
            ("needs.py:f", "importing it failed: ModuleNotFoundError: No module named 'not_there_either'"),
            ("brokne.py:f", r"no such file: brokne.py .*did you mean broken.py\?"),
            ("good.py:scor", r"good.py has no 'scor'; did you mean good.py:score\?"),
            ("good.py:zzz", "good.py has no 'zzz'$"),
            ("good.py:NUMBER", "expected a function, got int"),
            ("not_there_at_all:f", "no module 'not_there_at_all'"),
            ("not_there.at_all:f", "no module 'not_there'"),
            ("needs_too:f", "importing it failed: ModuleNotFoundError: No module named 'not_there_either'"),
        ],
    )
    def test_mistakes_are_one_line(self, spec, message):
        self.write("broken.py", "raise ValueError('at the top\\nof it')")
        self.write("syntax.py", "def f(:")
        self.write("exits.py", "import sys; sys.exit(3)")
        self.write("needs.py", "import not_there_either")
        self.write("needs_too.py", "import not_there_either")
        self.write("good.py", "NUMBER = 1\ndef score(completions): return [1.0]")
        with pytest.raises(UserError, match=message) as caught:
            load_function(spec)
        assert "\n" not in str(caught.value)
