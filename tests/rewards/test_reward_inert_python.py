"""Text that was written to break the verifier, or looks like it."""

import threading
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dapo_rl.config import RewardSettings
from dapo_rl.rewards import ExactVerifier, MathVerifier, answers_equal, extract_answer
from dapo_rl.rewards.answers.expressions import parse
from dapo_rl.rewards.inert_python import is_inert_python
from dapo_rl.types import Prompt, Trajectory, Verdict

SETTINGS = RewardSettings(boxed=True, timeout_s=1.0)
PROMPT = Prompt("p", "?", (1,), answer=r"\frac{\sqrt{2}}{2}")


def judge(text, prompt=PROMPT, reward=SETTINGS):
    return MathVerifier(reward)(prompt, [Trajectory((), (), text, "stop")])[0]


def codes(marker):
    return [
        f"__import__('os').system('touch {marker}')",
        f"open('{marker}', 'w')",
        f"(1).__class__.__base__.__subclasses__()[0] or open('{marker}','w')",
        f"exec(\"open('{marker}','w')\")",
        f"\\text{{__import__('os').system('touch {marker}')}}",
        f"\\operatorname{{open}}('{marker}','w')",
        f"5 if open('{marker}','w') else 5",
        f"lambda: open('{marker}','w')",
    ]


def test_what_a_model_wrote_is_never_run(tmp_path):
    marker = tmp_path / "ran"
    for code in codes(marker):
        for form in ("Answer: {}", "Answer: ${}$", "Answer: 5 + {}", "\\boxed{{{}}}", "Answer: \\boxed{{{}}}", "{}"):
            verdict = judge(form.format(code))
            assert not verdict.correct
            assert not verdict.failed
    assert not marker.exists()
    # The texts do what they say where they are run: sympy's parser for plain expressions would.
    from sympy.parsing import parse_expr

    parse_expr(codes(marker)[0])
    assert marker.exists()


@pytest.mark.parametrize("truth", ["5", r"\frac{\sqrt{2}}{2}", "x+y", "(1,2)"])
@pytest.mark.parametrize(
    "bomb",
    [
        "9**9**9**9",
        "9^{9^{9}}",
        "9^9^9",
        "{9^{9}}^{9^{9}}",
        "((9^{999})^{999})^{999}",
        "2^{999999999}",
        "2^{1,000,000,000}",
        "2^{10^{10}}",
        "2^{99\\cdot 99\\cdot 99\\cdot 99}",
        "10^{-999999999}",
        "(x+y+z)^{9999}",
        "1e999999999",
        "99999999!",
        "((9!)!)!",
        "9!!!!",
        "2^{20!}",
        "2^9!",
        "(1000000000)_{5}",
        "\\binom{999999999}{499999999}",
        "\\Gamma(99999999)",
        "\\operatorname{zeros}(99999,99999)",
        "\\operatorname{eye}(99999)",
        "\\sum_{i=1}^{99999999} i",
        "\\prod_{i=1}^{9999999} i",
        "\\int_0^1 x^x dx",
        "\\begin{vmatrix}1\\end{vmatrix}",
        "(" * 500,
        "(" * 11 + "1" + ")" * 11,
        "\\frac{1}{2",
        "1}{",
        "9" * 200,
        "x" * 301,
        "(\\sqrt{2}+1)^{10000}",
        "(a+b+c+d+e+f+g)^{30}",
        "+".join(["\\sqrt[3]{1999!}"] * 18),
        "/".join(["(x^{9999})!"] * 20),
        ",".join(f"x+{n}!" for n in range(50)),
        "~ " * 450,
    ],
)
def test_a_bomb_is_wrong_at_once(bomb, truth):
    start = time.process_time()
    assert judge(f"Answer: ${bomb}$", Prompt("p", "?", (1,), answer=truth)).status == "wrong"
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("2^{2024}", "4^{1012}"),
        ("x^{2}(x+1)^{3}", "x^2(x+1)(x^2+2x+1)"),
        ("3^{n+1}", "3\\cdot 3^n"),
        ("(1/2)^{2024}", "2^{-2024}"),
        ("e^{-x}", "1/e^x"),
        ("\\sqrt[3]{5}", "5^{1/3}"),
        ("n!", "n\\cdot(n-1)!"),
    ],
)
def test_ordinary_powers_are_computed(text, same):
    assert parse(text) is not None
    assert answers_equal(same, text)
    assert not answers_equal(f"{same}+1", text)


MEGABYTE = [
    "(" * 10**6,
    "Answer: " + "(" * 10**6,
    "Answer:" * 150_000,
    "answer " * 150_000,
    "answer" + " " * 10**6,
    "answer" + "*" * 10**6 + ":",
    "\\boxed{" * 150_000,
    "\\boxed{1}" * 100_000,
    "{" * 10**6,
    "\\" * 10**6,
    "\n" * 10**6,
    "<answer>" * 120_000,
]


@pytest.mark.parametrize("text", MEGABYTE, ids=lambda text: repr(text[:12]))
def test_a_megabyte_of_anything_is_searched_in_linear_time(text):
    start = time.process_time()
    assert not judge(text).correct
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Answer: \x00", "wrong"),
        ("Answer: 4\x002", "wrong"),
        ("Answer: ４２", "wrong"),
        ("Answer: ٤٢", "wrong"),
        ("Answer: \\frac{1}{", "wrong"),
        ("Answer: }}}}{{{{", "wrong"),
        ("Answer: $$$$$", "unparseable"),
        ("Answer: \u202e24", "wrong"),
        ("Answer: \u200f42", "correct"),
        ("Answer:\u00a042\u200b", "correct"),
        ("\u202eAnswer: 42\u202c", "correct"),
    ],
)
def test_odd_characters(text, status):
    assert judge(text, Prompt("p", "?", (1,), answer="42")).status == status


def test_a_crash_of_the_comparison_is_a_failure_and_not_a_wrong_answer(monkeypatch):
    def crash(*_):
        raise MemoryError("too much")

    monkeypatch.setattr("dapo_rl.rewards.math.answers_equal", crash)
    verdict = judge("Answer: 5")
    assert (verdict.status, verdict.failed, verdict.correct) == ("error", True, False)
    assert verdict.detail == "MemoryError: too much"


def test_equivalence_works_outside_the_main_thread():
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(answers_equal(r"\sqrt{8}", r"2\sqrt{2}"))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True, True]


TEXTS = st.one_of(
    st.text(max_size=200),
    st.text(alphabet="0123456789+-*/^_=<>()[]{}|,.;:!&\\ $%xyn", max_size=40),
    st.lists(
        st.sampled_from(
            ["\\frac", "{1}", "{2}", "\\sqrt", "{", "}", "(", ")", "x", "2", "^", "_", "\\pi", ",", "\\text{", "="]
        ),
        max_size=12,
    ).map("".join),
)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.sampled_from(["", "Answer: ", "\\boxed{"]), st.sampled_from(["5", r"\frac{1}{2}", "(1,2)", "x=2"]))
@example("x", "Answer: ", "5")
def test_any_text_gives_a_verdict(text, before, truth):
    prompt = Prompt("p", "?", (1,), answer=truth)
    samples = [Trajectory((), (), before + text, "length"), Trajectory((), (), f"Answer: {truth}", "stop")]
    verdicts = MathVerifier(SETTINGS)(prompt, samples)
    assert [type(verdict) for verdict in verdicts] == [Verdict, Verdict]
    assert verdicts[1].correct
    assert verdicts[0].status != "error"
    assert (verdicts[0].answer is None) == (verdicts[0].status == "unparseable")
    assert ExactVerifier(SETTINGS)(prompt, samples)[0].correct == ((before + text).strip() == truth)


@given(st.text(max_size=300))
def test_extraction_takes_any_text(text):
    answer = extract_answer(text + "\nAnswer: 42\n")
    assert answer == "42"


@pytest.mark.parametrize(
    "text",
    [
        "(3 + 4) * 5 - 6/2",
        "[[0, 1], [1, 0]]",
        "['A', 'B']",
        "0 1\n1 0",
        "_ Q _ _\n_ _ _ Q",
        "x**3/3 + 2*sin(x)*exp(2*x) + C",
        "ABCDE",
    ],
)
def test_arithmetic_and_lists_are_inert(text):
    assert is_inert_python(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "open ('f')",
        "open\n('f')",
        "open\\\n('f')",
        "(open)('f')",
        "[open][0]('f')",
        "(1).real",
        "''.join",
        "x .y",
        "ｅｖａｌ(1)",
        "eval('1')",
        "S('1')",
        "Symbol(x)",
        "[0]*999999999",
        "'a'*999999999",
        "'%99999999d' % 1",
        "1<<99999999",
        "9**9**9",
        "9**1_000_000_000",
        "9**0xFFFFFFFF",
        "9 * * 9 ** 99999999",
        "(9**999)**999",
        "99999!",
        "exp(exp(exp(99)))",
        "[i for i in x]",
        "lambda: 1",
        "1 # x",
        "1; 2",
    ],
)
def test_all_else_is_not_inert(text):
    assert not is_inert_python(text)
