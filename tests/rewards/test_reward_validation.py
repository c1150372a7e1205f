"""What verifiers raise and return: one sound verdict for each sample, in a process and without."""

import asyncio

import numpy as np
import pytest
import torch

from dapo_rl.base.quote import LINE_LIMIT, TRACEBACK_LIMIT
from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards import CombinedVerifier, CustomVerifier, ExactVerifier, GymVerifier, VerifierPool, as_verifier
from dapo_rl.rewards import gym as gym_module
from dapo_rl.types import Prompt, Trajectory, Verdict

WORKERS = [0, pytest.param(1, marks=pytest.mark.slow)]
PROMPT = Prompt("p7", "2+3=", (1, 2), "5", "sums")
GROUP = [Trajectory((7, 8), (-0.1, -0.2), text, "stop") for text in ("Answer: 5", "Answer: 6")]
GOOD = Verdict(1.0, True, "correct")


def settings(**given):
    return RewardSettings(**{"timeout_s": 20, **given})


def verdicts_of(verifier, workers=0):
    ours = settings(workers=workers)
    with VerifierPool(as_verifier(verifier, ours), ours) as pool:
        return pool(PROMPT, GROUP)


def returning(value):
    def verifier(prompt, samples):
        return value

    return verifier


def raising(error):
    def verifier(prompt, samples):
        raise error

    return verifier


class Object:
    """The same as an object."""

    def __init__(self, verifier):
        self.verifier = verifier

    def __call__(self, prompt, samples):
        return self.verifier(prompt, samples)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("wrap", [Object, lambda verifier: verifier])
def test_what_a_verifier_raises_is_a_counted_error(wrap, workers):
    first, second = verdicts_of(wrap(raising(ZeroDivisionError("here"))), workers)
    assert [(v.status, v.score, v.correct) for v in (first, second)] == [("error", -1.0, False)] * 2
    line, _, traceback = first.detail.partition("\n")
    assert line == second.detail
    assert line.endswith("raised ZeroDivisionError: here")
    assert traceback.startswith("Traceback (most recent call last)")
    assert "raise error" in traceback


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, asyncio.CancelledError, RecursionError, BaseException])
def test_no_kind_of_exception_comes_out(error):
    assert [v.status for v in verdicts_of(raising(error("x")))] == ["error"] * 2


def test_a_group_of_exceptions_is_one_traceback_too():
    ours = settings(workers=0)
    with VerifierPool(raising(ExceptionGroup("two", [ValueError(1), KeyError(2)])), ours) as pool:
        details = [v.detail for _ in range(2) for v in pool(PROMPT, GROUP)]
    assert ["Traceback" in detail for detail in details] == [True, False, False, False]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_traceback_is_given_once(workers):
    ours = settings(workers=workers)
    with VerifierPool(raising(ValueError("x")), ours) as pool:
        details = [v.detail for _ in range(3) for v in pool(PROMPT, GROUP)]
    assert ["Traceback" in detail for detail in details] == [True, *[False] * 5]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_verifier_that_cannot_judge_at_all_says_so(workers):
    def function(completions):
        raise UserError("it needs a licence", more="below")

    for verifier in (raising(UserError("it needs a licence", more="below")), function, [function, "exact"]):
        with pytest.raises(UserError, match=r"^it needs a licence$") as caught:
            verdicts_of(verifier, workers)
        assert caught.value.more == "below"


@pytest.mark.slow
def test_ctrl_c_comes_out_where_there_are_no_processes():
    with pytest.raises(KeyboardInterrupt):
        verdicts_of(raising(KeyboardInterrupt()))
    assert [v.status for v in verdicts_of(raising(KeyboardInterrupt()), workers=1)] == ["error"] * 2


UNSOUND = {
    "nan": (Verdict(float("nan"), True, "correct"), "nan is not finite"),
    "infinity": (Verdict(float("-inf"), True, "correct"), "-inf is not finite"),
    "too large": (Verdict(1.1e6, True, "correct"), "1.1e+06 is beyond ±1000000"),
    "a huge integer": (Verdict(10**5000, True, "correct"), "OverflowError"),
    "a boolean score": (Verdict(True, True, "correct"), "score is a bool, not a float"),
    "a string": (Verdict("1", True, "correct"), "score is a str, not a float"),
    "a NumPy score": (Verdict(np.float64(1), True, "correct"), "score is a numpy.float64, not a float"),
    "a torch score": (Verdict(torch.tensor(1.0), True, "correct"), "score is a torch.Tensor, not a float"),
    "no score": (Verdict(None, True, "correct"), "score is None, not a float"),
    "correct": (Verdict(1.0, np.bool_(True), "correct"), "correct is a numpy.bool, not a bool"),
    "correct as a number": (Verdict(1.0, 1, "correct"), "correct is a int, not a bool"),
    "status": (Verdict(1.0, True, "right"), "status is not one of correct, wrong"),
    "no status": (Verdict(1.0, True, ["correct"]), "status is not one of correct, wrong"),
    "answer": (Verdict(1.0, True, "correct", 5), "answer is a int, not a string or None"),
    "detail": (Verdict(1.0, True, "correct", None, b"x"), "detail is a bytes, not a string"),
    "a number": (1.0, "returned a float instead of a Verdict"),
    "none": (None, "returned None instead of a Verdict"),
}


@pytest.mark.parametrize("workers", WORKERS)
def test_an_unsound_verdict_is_the_verifiers_error(workers):
    ours = settings(workers=workers)

    def verifier(prompt, samples):
        return [UNSOUND[prompt.id][0], GOOD]

    with VerifierPool(verifier, ours) as pool:
        for name, (_, what) in UNSOUND.items():
            bad, good = pool(Prompt(name, "?", (1,)), GROUP)
            assert (bad.status, bad.correct, bad.score, type(bad.score)) == ("error", False, -1.0, float), name
            assert what in bad.detail, name
            assert bad.detail.startswith("test_an_unsound"), name
            assert good == GOOD


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ([GOOD], "returned 1 verdict for 2 samples"),
        ([GOOD] * 3, "returned 3 verdicts for 2 samples"),
        (None, "returned None, not a list of 2 verdicts"),
        ("ab", "returned a str, not a list of 2 verdicts"),
        ({1: GOOD, 2: GOOD}, "returned a dict, not a list of 2 verdicts"),
    ],
)
def test_a_bad_list_of_verdicts_is_named(returned, what, workers):
    for verdict in verdicts_of(returning(returned), workers):
        assert verdict.status == "error"
        assert what in verdict.detail
        assert "Traceback" not in verdict.detail


@pytest.mark.slow
def test_what_is_sound_passes_as_it_is():
    verdicts = [Verdict(1e6, True, "correct", "5", "why"), Verdict(-1, False, "unparseable")]
    for workers in (0, 1):
        assert verdicts_of(returning(tuple(verdicts)), workers) == verdicts


@pytest.mark.parametrize("workers", WORKERS)
def test_a_functions_score_has_the_same_limits(workers):
    verdicts = verdicts_of(lambda completions: [1e7, -1e6], workers)
    assert [v.status for v in verdicts] == ["error", "wrong"]
    assert "1e+07 is beyond ±1000000" in verdicts[0].detail


@pytest.mark.parametrize("workers", WORKERS)
def test_a_weighted_sum_is_checked_after_weighting(workers):
    ours = settings(workers=workers)
    big = CustomVerifier(lambda completions: [1e6, 1.0], ours)
    with VerifierPool(CombinedVerifier([big, ExactVerifier(ours)], [2.0, 1.0]), ours) as pool:
        bad, good = pool(PROMPT, GROUP)
    assert (bad.status, "beyond ±1000000" in bad.detail) == ("error", True)
    assert (good.status, good.score) == ("correct", 1.0)


def test_of_several_verifiers_the_one_that_fails_is_named():
    ours = settings(workers=0)
    for broken, what in (
        (raising(KeyError("gone")), "raised KeyError: 'gone'"),
        (returning([GOOD]), "returned 1 verdict for 2 samples"),
        (returning([GOOD, Verdict(float("nan"), True, "correct")]), "nan is not finite"),
    ):
        with VerifierPool(CombinedVerifier([ExactVerifier(ours), Object(broken)]), ours) as pool:
            last = pool(PROMPT, GROUP)[-1]
        assert last.status == "error"
        assert last.detail.startswith("Object ")
        assert what in last.detail


def test_a_check_of_the_users_own_is_one_line():
    class Checking(Object):
        def check(self, prompts):
            raise SystemExit(0)

    for verifier in (Checking(returning([])), CombinedVerifier([Checking(returning([])), ExactVerifier(settings())])):
        with (
            VerifierPool(verifier, settings(workers=0)) as pool,
            pytest.raises(UserError, match=r"check raised SystemExit: 0$"),
        ):
            pool.check([PROMPT])


@pytest.mark.slow
def test_a_warm_up_that_ends_its_process_is_left_to_the_call():
    class Exits(Object):
        def warm_up(self):
            raise SystemExit(0)

    with VerifierPool(Exits(returning([GOOD] * 2)), settings(workers=1)) as pool:
        assert pool(PROMPT, GROUP) == [GOOD] * 2


HUGE = "a\x1b]0;title\x07b\n" * 100_000


class UntellableError(Exception):
    def __str__(self):
        raise ValueError("no")


@pytest.mark.parametrize("workers", WORKERS)
def test_a_megabyte_of_message_is_shortened(workers):
    def trl(completions):
        raise ValueError(HUGE)

    def verl(solution_str):
        raise ValueError(HUGE)

    own = Verdict(0.0, False, "error", detail=HUGE)
    for verifier in (raising(ValueError(HUGE)), trl, verl, returning([own, own])):
        for verdict in verdicts_of(verifier, workers):
            line, _, rest = verdict.detail.partition("\n")
            assert verdict.status == "error"
            assert len(line) < 2 * LINE_LIMIT
            assert len(rest) < 2 * (LINE_LIMIT + TRACEBACK_LIMIT)
            assert "characters cut" in verdict.detail
            assert "\x1b" not in verdict.detail


def test_an_exception_that_cannot_be_shown():
    for verifier in (raising(UntellableError()), lambda solution_str: (_ for _ in ()).throw(UntellableError())):
        assert "raised UntellableError: (its message cannot be shown)" in verdicts_of(verifier)[0].detail


@pytest.mark.parametrize("name", ["needs_answer", "per_sample", "text_only"])
def test_an_attribute_that_cannot_be_read_is_one_line(name):
    kind = type("Odd", (Object,), {name: property(lambda self: 1 / 0)})
    ours = settings(workers=1)
    for among in (lambda odd: odd, lambda odd: CombinedVerifier([odd, ExactVerifier(ours)])):
        with pytest.raises(UserError, match=rf"^reward\.verifier: Odd\.{name} raised ZeroDivisionError"):
            VerifierPool(among(kind(returning([]))), ours)


def test_a_module_whose_attributes_exit_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "computed.py").write_text("import sys\ndef __getattr__(name):\n    sys.exit(0)\n", encoding="utf-8")
    (tmp_path / "cancelled.py").write_text("import asyncio\nraise asyncio.CancelledError\n", encoding="utf-8")
    (tmp_path / "loud.py").write_text("raise ValueError('x' * 10**6)\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"computed\.py:score: importing it failed: SystemExit: 0"):
        as_verifier("computed.py:score", settings())
    with pytest.raises(UserError, match=r"cancelled\.py:score: importing it failed: CancelledError"):
        as_verifier("cancelled.py:score", settings())
    with pytest.raises(UserError, match="characters cut") as caught:
        as_verifier("loud.py:score", settings())
    assert len(str(caught.value)) < 2 * LINE_LIMIT


def test_a_gym_scorer_that_returns_nan_has_failed(monkeypatch):
    class Scorer:
        def score_answer(self, answer, entry):
            return float("nan")

    monkeypatch.setattr(gym_module, "_scorer", lambda name, parameters: (Scorer(), False))
    prompt = Prompt("p", "?", (1,), "5", "reasoning_gym:sums")
    with VerifierPool(GymVerifier(settings()), settings(workers=0)) as pool:
        assert [(v.status, v.detail) for v in pool(prompt, GROUP)] == [("error", "Scorer returned the score nan")] * 2
