"""Responses of any content: every verifier gives a verdict on each, and raises for none."""

import math

import pytest
from fuzzing import fuzz
from hypothesis import example, given
from hypothesis import strategies as st
from support import make_sample

from dapo_rl.config import RewardSettings, SourceSettings
from dapo_rl.data import load_rows
from dapo_rl.rewards import CustomVerifier, build_verifier, extract_answer, normalize_answer
from dapo_rl.types import Prompt

STATUSES = {"correct", "wrong", "unparseable", "timeout", "error"}

pieces = st.sampled_from(
    [
        *(r"\frac{", r"\sqrt{", r"\sqrt[", r"\boxed{", r"\text{", r"\left(", r"\right)", r"\begin{pmatrix}", r"\end{"),
        *("}", "{", "]", "[", "(", ")", "^", "_", "^{", "_{", "\\", r"\\", "&", "$", "$$", r"\(", r"\)", "%", "#", "~"),
        *(r"\pi", r"\infty", r"\cdot", r"\times", r"\pm", r"\in", r"\cup", r"\sum_{", r"\int_0^1", r"\lim", r"\log"),
        *("0", "1", "2", "-3", "4.5", "1/2", "1e9", "10^{9}", "1,000", "50%", "90^\\circ", "x", "y", "a", "i", "e"),
        *(
            "+",
            "-",
            "*",
            "/",
            "=",
            "<",
            r"\le",
            ",",
            ";",
            " ",
            "\n",
            "Answer:",
            "answer：",
            "**",
            "<answer>",
            "</answer>",
        ),
        *("²", "½", "−", "٣", "∞", "\x00", "\ud800", "é", "😀", "None", "nan", "inf", "__import__('os')", "9" * 30),
    ]
)
latex = st.lists(pieces, max_size=10).map("".join)
texts = latex | st.text(st.characters(codec=None), max_size=30) | latex.map("Answer: {}".format)
truths = (latex | st.text(max_size=12) | st.integers().map(str) | st.floats().map(str)).filter(str.strip)


def check(verdicts, count):
    assert len(verdicts) == count
    for verdict in verdicts:
        assert verdict.status in STATUSES
        assert math.isfinite(verdict.score)
        assert verdict.correct == (verdict.status == "correct")


def judge(verifier, truth, responses, **fields):
    prompt = Prompt(id="0", text="?", token_ids=(1,), answer=truth, **fields)
    verdicts = verifier(prompt, [make_sample(text=text) for text in responses])
    check(verdicts, len(responses))
    return verdicts


@fuzz(120)
@given(truths, st.lists(texts, min_size=1, max_size=2), st.booleans())
@example("10^{10^{10}}", ["Answer: 10^{10^{10}}+1", "Answer: 9**9**9**9"], False)
@example(r"\frac{1}{0}", [r"Answer: \frac{0}{0}"], False)
@example("1e400", ["Answer: 1e401", "Answer: " + "9" * 999], False)
@example("\ud800", ["Answer: \ud800\udc00"], True)
@example("²", ["Answer: ³"], False)
def test_math(truth, responses, boxed):
    judge(build_verifier(RewardSettings(boxed=boxed, timeout_s=2)), truth, responses)


@fuzz(150)
@given(truths, texts)
def test_exact(truth, response):
    verifier = build_verifier(RewardSettings(verifier="exact"))
    other, own = judge(verifier, truth, [response, f" {truth}\n"])
    assert own.correct
    assert other.correct == (response.strip() == truth.strip())


@fuzz(200)
@given(texts)
def test_answers_can_be_found_in_anything(text):
    answer = extract_answer(text, boxed=True)
    assert answer is None or answer in text
    assert isinstance(normalize_answer(text), str)


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "leg_counting", "simple_equations", "word_ladder"])
def test_gym(task):
    pytest.importorskip("reasoning_gym")
    rows = load_rows(SourceSettings(source=f"reasoning_gym:{task}", size=3)).good
    verifier = build_verifier(RewardSettings(verifier="gym", timeout_s=2))

    @fuzz(40)
    @given(st.sampled_from(rows), texts)
    def responses(row, text):
        columns = row.columns
        how = {"data_source": columns["data_source"], "columns": columns}
        judge(verifier, str(columns["answer"]), [text, f"Answer: {columns['answer']}"], **how)

    responses()


class Hostile:
    """An object whose every conversion raises."""

    def __float__(self):
        raise RuntimeError("no number")

    __bool__ = __str__ = __len__ = __iter__ = item = tolist = __float__


scores = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.complex_numbers()
    | st.builds(Hostile)
)
returned = st.recursive(
    scores,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["score", "acc", "pred", "x"]), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)
raised = st.sampled_from([ValueError("\ud800"), SystemExit(3), RecursionError(), StopIteration(), GeneratorExit()])


@fuzz(200)
@given(returned | raised, st.sampled_from(["trl", "verl"]), st.lists(texts, min_size=1, max_size=3))
@example(10**400, "verl", ["x"])
@example([10**400], "trl", ["x"])
@example({"score": 1, "acc": Hostile()}, "verl", ["x"])
@example(Hostile(), "verl", ["x"])
def test_user_functions_may_return_or_raise_anything(value, kind, responses):
    def give():
        if isinstance(value, BaseException):
            raise value
        return value

    def trl(prompts, completions, **columns):
        return give()

    def verl(data_source, solution_str, ground_truth, extra_info=None):
        return give()

    judge(CustomVerifier({"trl": trl, "verl": verl}[kind], RewardSettings()), "1", responses)
