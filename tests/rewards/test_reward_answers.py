"""Extraction, normalisation and equivalence of answers."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_rl.rewards.answers import MAX_ANSWER_CHARS, answers_equal, extract_answer, normalize_answer
from dapo_rl.rewards.answers.plain_numbers import plain_number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("We add them.\nAnswer: 42", "42"),
        ("answer : 42\n", "42"),
        ("ANSWER:42", "42"),
        ("**Answer:** 42", "42"),
        ("**Answer: 42**", "42"),
        ("**Answer**: `42`", "42"),
        ("Answer: $42$", "42"),
        ("Answer: $42$.", "42"),
        ("Answer: **$42$**", "42"),
        (r"Answer: \(x+1\)", "x+1"),
        (r"Answer: \boxed{42}", "42"),
        (r"Answer: $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"Answer: $$\frac{1}{2}$$", r"\frac{1}{2}"),
        ("Answer: $x$ and $y$", "$x$ and $y$"),
        ("Answer: 1\nNo, wait.\nAnswer: 2\nDone.", "2"),
        ("Answer: Answer: 5", "5"),
        ("Answer: 42\r\nBye", "42"),
        ("Final Answer: 7", "7"),
        ("Answer：7", "7"),
        ("Answer: $Answer", "$Answer"),
        ("Answer:   \n42", "42"),
        ("**Answer:**\n\n42\nThat is it.", "42"),
        ("**Answer:**\n\\[ 87 \\]", "87"),
        ("**Answer:** \\[\n87\n\\]", "87"),
        ("Answer: $$\n  x+1\n$$\nDone", "x+1"),
        ("Answer:\r\n$47$.\r\n", "47"),
        ("Answer: The final answer is $47$.", "47"),
        ("Answer: So the answer is: 47", "47"),
        ("Answer: The answer is not 47", "not 47"),
        ("Answer:\n5\n6", "5"),
        ("Answer: 5\n6", "5"),
        ("Answer:\n5 or 6", "5 or 6"),
    ],
)
def test_the_last_answer_line(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "The answer is 42",
        "answers: 42",
        "myanswer: 42",
        "Answer:",
        "Answer:   \n\n\n\n\n\n42",
        "Answer:\nFirst we need to find out how many there are.",
        "Answer: $$",
        "Answer: **",
    ],
)
def test_no_answer_line_is_no_answer(text):
    assert extract_answer(text) is None


def test_the_length_of_an_answer_line_is_bounded():
    assert extract_answer("Answer: " + "1" * (MAX_ANSWER_CHARS - 1)) is not None
    assert extract_answer("Answer: " + "1" * (MAX_ANSWER_CHARS + 1)) is None


@pytest.mark.parametrize(
    ("repeating", "fraction"),
    [(r"0.\overline{3}", "1/3"), (r"0.1\overline{6}", "1/6"), (r"2.05\overline{27}", "1129/550")],
)
def test_a_repeating_decimal_is_its_fraction(repeating, fraction):
    assert answers_equal(fraction, repeating)
    assert not answers_equal(fraction, repeating.replace("{", "{1"))


def test_a_line_below_of_more_than_three_words_is_a_sentence():
    assert extract_answer("Answer:\nthe red house") == "the red house"
    assert extract_answer("Answer:\nthe big red house") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"} \boxed{3} {", "3"),
        (r"\boxed{a \boxed{b}}", "b"),
        (r"\boxed{}", None),
        (r"\boxed 5", None),
    ],
)
def test_boxed_is_the_fallback_only_where_asked_for(text, answer):
    assert extract_answer(text, boxed=True) == answer
    assert extract_answer(text) is None


def test_an_answer_line_wins_over_a_later_box():
    assert extract_answer("Answer: 1\n\\boxed{2}", boxed=True) == "1"


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("$42$", "42"),
        ("\\$1,234,567.50", "1234567.50"),
        ("10,\\!000", "10000"),
        ("10{,}000", "10000"),
        ("12 345", "12345"),
        ("007", "7"),
        ("-.5", "-0.5"),
        ("42.", "42"),
        ("50\\%", "50"),
        ("90^{\\circ}", "90"),
        ("x = 5", "5"),
        ("f(x) = 2x + 1", "2x+1"),
        ("x = 2 + 3 = 5", "5"),
        ("x + y = 5", "x+y=5"),
        ("ab = 6", "ab=6"),
        ("total area = 6", "6"),
        ("x = 2, y = 3", "x=2,y=3"),
        ("\\frac12", "\\frac{1}{2}"),
        ("\\dfrac{1}2", "\\frac{1}{2}"),
        ("1/2", "\\frac{1}{2}"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("sqrt(3)", "\\sqrt{3}"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("\\pi r", "\\pi r"),
        ("3 4", "3 4"),
        ("5\\text{ cm}^2", "5"),
        ("5 square feet", "5"),
        ("5\\text{ million}", "5million"),
        ("5a", "5a"),
        ("\\text{Tuesday}", "Tuesday"),
        ("2 or 3", "2,3"),
        ("10²", "10^2"),
        ("\u200f42\u200b", "42"),
    ],
)
def test_normalize(written, normal):
    assert normalize_answer(written) == normal
    assert normalize_answer(normal) == normal


EQUAL = [
    ("1/2", "0.5"),
    ("\\frac{10}{4}", "2.5"),
    ("\\frac{-1}{2}", "-1/2"),
    ("1 1/2", "3/2"),
    ("-1\\frac{1}{2}", "-1.5"),
    ("1.2e5", "120000"),
    ("1.2 \\times 10^{-2}", "0.012"),
    ("+5", "5"),
    ("50%", "50"),
    ("50%", "0.5"),
    ("0.5", "50\\%"),
    ("5 percent", "5"),
    ("\\$5", "5 dollars"),
    ("42 cm", "42"),
    ("5 miles per hour", "5"),
    ("90°", "90"),
    ("Yes", "\\text{yes}"),
    ("(A)", "A"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
    ("\\frac{\\sqrt3}{3}", "\\frac{1}{\\sqrt{3}}"),
    ("2pi", "2\\pi"),
    ("\\frac{3\\pi}{4}", "0.75\\pi"),
    ("π r²", "\\pi r^2"),
    ("(x+1)^2", "x^2+2x+1"),
    ("y = 2x + 3", "y=3+2x"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\pi/2)"),
    ("\\{3,1,2\\}", "\\{1,2,3\\}"),
    ("x=2 or x=3", "3,2"),
    ("(-\\infty, 3]", "(-∞,3]"),
    ("x \\in [1,2]", "[1,2]"),
    ("x>5", "5<x"),
    ("10", "\\binom{5}{2}"),
    ("3628800", "10!"),
    ("1024", "2^{10}"),
    ("1+i", "i+1"),
    ("1+\\sqrt{2}+\\sqrt{3}+\\sqrt{6}", "(1+\\sqrt{2})(1+\\sqrt{3})"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
]

DIFFERENT = [
    ("43", "42"),
    ("-5", "5"),
    ("2", "1/2"),
    ("0.333333", "1/3"),
    ("1 1/2", "11/2"),
    ("3 4", "34"),
    ("10²", "102"),
    ("1,2", "12"),
    ("1,235", "1,234"),
    ("5%", "50"),
    ("0.5%", "50"),
    ("1/0", "0"),
    ("42 million", "42"),
    ("42\\text{ dozen}", "42"),
    ("42 or 43", "42"),
    ("2c", "2"),
    ("2", "2c"),
    ("5", "x+y=5"),
    ("4", "x=3,y=4"),
    ("6", "ab=6"),
    ("(2,1)", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("2,3", "2,3,4"),
    ("3.14", "\\pi"),
    ("\\sqrt{2}", "2"),
    ("x^2", "x^3"),
    ("Monday", "Tuesday"),
    ("B", "A"),
    ("٤٢", "42"),
    ("4\x002", "42"),
    ("°", "$"),
    ("3+8-4+7", "14"),
    ("12345\\cdot 6789", "83810205"),
    ("2^{10}-1", "1023"),
    ("(3+7)^{2}", "100"),
    ("10^{1+1}", "100"),
    ("3+\\sqrt{2}+\\sqrt{2}", "3+2\\sqrt{2}"),
    ("3+\\frac{3\\sqrt{2}}{2}+\\frac{\\sqrt{2}}{2}", "3+2\\sqrt{2}"),
    ("\\frac{(1+\\sqrt{2})(3+\\sqrt{5})}{3+\\sqrt{5}}", "1+\\sqrt{2}"),
    ("7", "\\sqrt{-1-x^2}"),
    ("(1+1):4", "1:2"),
    ("(1+1):4", "\\frac{1}{2}"),
    ("\\binom{5}{2}", "10"),
    ("10!", "3628800"),
    ("2^{10}", "1024"),
    ("r^2-R^2", "R^2-r^2"),
    ("1=1", "2+3=5"),
    ("d=7,M=(1,\\frac{3}{2})", "d=5,M=(1,\\frac{3}{2})"),
    ("5\\text{ minus two}", "5"),
    ("5 cents", "\\$5"),
    ("\\{2,4\\}", "(2,4)"),
    ("2019", "March 4, 2019"),
    ("2019", "2019-03-04"),
    ("52_9", "52_8"),
    ("2,4", "(2,4)"),
    ("2,3,3", "2,3"),
    ("2,3,3", "2,2,3"),
    ("\\{2,3\\}", "\\{2,2\\}"),
    ("x=1, x=2", "x=1, x=1"),
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_equal(answer, truth):
    assert answers_equal(answer, truth)


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different(answer, truth):
    assert not answers_equal(answer, truth)


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=1000), st.integers(-1000, 1000))
def test_plain_numbers_are_exact(value, other):
    assert plain_number(f"{value.numerator}/{value.denominator}") == value
    sign = "-" if value < 0 else ""
    assert plain_number(f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}") == value
    assert answers_equal(f"{value.numerator}/{value.denominator}", str(other)) == (value == other)


@given(st.integers(-(10**30), 10**30))
def test_an_integer_with_separators_or_zeros_is_itself(number):
    for written in (f"{number:,}", f"{number}.0", f"${number:,}$", f"{number}.00."):
        assert answers_equal(written, str(number))
    assert not answers_equal(f"{number:,}", str(number + 1))


@pytest.mark.parametrize(
    "text", ["1e101", "10^{999999999}", "1" * 101, "1e999999999", "1.5e-999", "", "-", "1/0", "٤٢", "1_000"]
)
def test_what_is_no_plain_number_is_not_computed(text):
    assert plain_number(text) is None


def test_scientific_notation():
    assert plain_number("2.5e-3") == Fraction(1, 400)
    assert plain_number("-3\\times10^{2}") == -300
    assert plain_number("-10^{3}") == -1000


@pytest.mark.parametrize("letter", ["m", "h", "g", "s"])
def test_a_letter_is_a_unit_after_a_space_and_a_variable_next_to_its_number(letter):
    assert answers_equal(f"5 {letter}", "5")
    assert answers_equal(f"5\\text{{ {letter}}}", "5")
    for joined, other in ((f"5{letter}", "5"), (f"5{letter}", f"5 {letter}"), (f"3x {letter}", "3x")):
        assert not answers_equal(joined, other)
        assert not answers_equal(other, joined)
