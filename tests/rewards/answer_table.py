"""Answers that are right and answers that are wrong, by kind of truth and by the form of the response.

`python tests/rewards/answer_table.py` writes docs/answers.md: every row with the verdict of the verifier, and
math-verify's where that differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dapo_rl.rewards.answers import answers_equal

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "answers.md"
INDEPENDENT = Path(__file__).parent / "independent_answers.jsonl"


@dataclass(frozen=True)
class Kind:
    name: str
    truth: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]


KINDS = [
    Kind(
        "integer",
        "14",
        ("14", "14.", "14,", "+14", "14.0", "014", "x = 14", "14 apples", "3+8-4+7=14", "1.4e1"),
        (
            *(
                "3+8-4+7",
                "2\\cdot 7",
                "28/2",
                "\\frac{28}{2}",
                "\\sqrt{196}",
                "2^4-2",
                "|-14|",
                "\\lfloor 14.5\\rfloor",
            ),
            *("13", "-14", "14 or 15", "14, 15", "\\{13,14\\}", "14\\text{ minus two}", "14 million", "14x", "15-1=15"),
            *("14 elevenths", "14 millionths", "14 googols", "\\not=14", "~14", "\\approx 14", "-\\boxed{14}"),
            *("\\boxed{13} or \\boxed{14}", "15, not \\boxed{14}", "\\boxed{14}+1", "\\frac{\\boxed{14}}{2}"),
        ),
    ),
    Kind(
        "large integer",
        "83810205",
        ("83,810,205", "83 810 205", "83{,}810{,}205", "8.3810205\\times 10^7"),
        ("12345\\cdot 6789", "12345 \\times 6789", "83.810.205", "8.38\\times 10^7", "83,810,206"),
    ),
    Kind(
        "power that was asked for", "1023", ("1023", "1,023"), ("2^{10}-1", "2^{10} - 1 = 1024", "1024 - 1", "2^10-1")
    ),
    Kind("zero", "0", ("0", "-0", "0.0", "0/7"), ("1-1", "\\emptyset", "7/0", "\\{\\}", "x-x")),
    Kind("negative integer", "-7", ("-7", "−7", "–7", "(-7)", "y=-7"), ("7", "3-10", "- 8", "-7 or 7", "\\pm 7")),
    Kind(
        "decimal",
        "2.5",
        ("2.5", "2.50", "5/2", "\\frac{5}{2}", "\\frac{10}{4}", "2\\frac{1}{2}", "2 1/2", "2½", "250\\%"),
        ("2.05", "2,5", "1+1.5", "5\\div 2 + 0", "2.4999999", "2.5 or 2.6", "25%"),
    ),
    Kind(
        "fraction",
        "\\frac{3}{4}",
        ("3/4", "\\frac34", "\\dfrac{3}{4}", "0.75", "\\frac{6}{8}", "75%", "\\frac{-3}{-4}", "p = 3/4", "3:4"),
        (
            "4/3",
            "\\frac{1}{2}+\\frac{1}{4}",
            "1-\\frac{1}{4}",
            "0.7500001",
            "\\frac{3}{4",
            "3/4 or 1/4",
            "\\frac{3/2}{2}",
        ),
    ),
    Kind(
        "negative fraction",
        "-\\frac{1}{3}",
        ("-1/3", "\\frac{-1}{3}", "-\\frac{2}{6}"),
        ("1/3", "-0.333333", "-\\frac13, 2"),
    ),
    Kind("mixed number", "1 1/2", ("3/2", "1\\frac{1}{2}", "1.5"), ("11/2", "1, 1/2", "1+1/2")),
    Kind(
        "percentage",
        "45\\%",
        ("45%", "45", "0.45", "45 percent", "45\\text{ percent}"),
        ("4.5%", "45%%", "450", "0.45%"),
    ),
    Kind(
        "money",
        "\\$5",
        ("$5", "\\$5.00", "5", "5 dollars", "5 USD"),
        ("5 cents", "5¢", "€5", "\\$5 million", "\\$5 and \\$6", "\\$2+\\$3"),
    ),
    Kind(
        "length",
        "5\\text{ cm}",
        ("5", "5 cm", "5\\,\\text{cm}", "5 centimeters"),
        ("5 mm", "5\\text{ m}", "5 cm^2", "50 cm"),
    ),
    Kind(
        "area",
        "12\\text{ cm}^2",
        ("12", "12 square centimeters", "12 cm^2"),
        ("12 cm", "12 cubic centimeters", "12 square feet"),
    ),
    Kind("speed", "60\\text{ miles per hour}", ("60", "60 mph", "60 miles per hour"), ("60 km/h", "60 miles", "6 mph")),
    Kind(
        "count",
        "12",
        ("12 handshakes", "12\\text{ ways}", "12 red marbles", "12 people"),
        ("12 dozen", "12 thousand", "12 pairs"),
    ),
    Kind("angle", "90^\\circ", ("90", "90°", "90 degrees", "90^{\\circ}"), ("90 radians", "\\frac{\\pi}{2}", "9")),
    Kind(
        "root",
        "2\\sqrt{3}",
        ("2\\sqrt{3}", "\\sqrt{12}", "2√3", "2*sqrt(3)", "\\frac{6}{\\sqrt{3}}", "x=2\\sqrt3", "2\\cdot 3^{1/2}"),
        (
            "3\\sqrt{2}",
            "\\sqrt{3}+\\sqrt{3}",
            "3.46",
            "\\sqrt{48}-2\\sqrt{3}",
            "2\\sqrt{3}, -2\\sqrt{3}",
            "\\sqrt{13-1}",
            "2",
        ),
    ),
    Kind(
        "sum with a root",
        "3+2\\sqrt{2}",
        ("2\\sqrt{2}+3", "3+\\sqrt{8}", "\\frac{6+4\\sqrt{2}}{2}"),
        ("(1+\\sqrt{2})^2", "1+2+2\\sqrt{2}", "3-2\\sqrt{2}", "5\\sqrt{2}", "3\\pm 2\\sqrt{2}"),
    ),
    Kind(
        "multiple of pi",
        "6\\pi",
        ("6π", "6 pi", "6\\pi", "\\frac{12\\pi}{2}", "18.849556"),
        ("6", "18.85", "2\\cdot 3\\pi", "3\\pi+3\\pi", "\\pi^6"),
    ),
    Kind(
        "fraction of pi",
        "\\frac{3\\pi}{4}",
        ("0.75\\pi", "3π/4", "\\frac{3}{4}\\pi"),
        ("\\frac{\\pi}{2}+\\frac{\\pi}{4}", "\\frac{4\\pi}{3}", "135"),
    ),
    Kind(
        "rationalised",
        "\\frac{\\sqrt{2}}{2}",
        ("\\frac{1}{\\sqrt{2}}", "\\sqrt{2}/2", "0.70710678", "\\sqrt{\\frac{1}{2}}"),
        ("\\sin 45^\\circ", "0.7071", "\\sqrt{2}"),
    ),
    Kind("power as the truth", "2^{100}", ("2^{100}", "4^{50}", "2^100"), ("2^{101}", "2^{99}+2^{99}", "2^{50}")),
    Kind("factorial as the truth", "10!", ("10!", "3628800", "3,628,800"), ("10", "9!", "10!+1", "11!")),
    Kind(
        "binomial as the truth",
        "\\binom{10}{3}",
        ("120", "\\binom{10}{3}", "\\binom{10}{7}"),
        ("\\binom{10}{4}", "30", "\\frac{10!}{7!}"),
    ),
    Kind(
        "logarithm",
        "\\log_2 3",
        ("\\log_2 3", "\\log_{2}(3)", "\\frac{\\ln 3}{\\ln 2}"),
        ("\\log_3 2", "\\log 3", "1.58"),
    ),
    Kind("complex number", "3+4i", ("3+4i", "4i+3"), ("3-4i", "5", "3+4", "4+3i")),
    Kind(
        "complex fraction",
        "\\frac{1-i}{2}",
        ("\\frac{1}{2}-\\frac{i}{2}", "\\frac{1-i}{2}", "0.5-0.5i"),
        ("\\frac{1+i}{2}", "\\frac{1-2i}{2}"),
    ),
    Kind(
        "numeral in a base",
        "52_8",
        ("52_8", "52_{8}", "52_{\\text{eight}}", "(52)_8", "52"),
        ("52_9", "42", "42_{10}", "53_8", "52_{16}"),
    ),
    Kind("infinity", "\\infty", ("\\infty", "infinity", "∞"), ("-\\infty", "1/0", "0")),
    Kind(
        "monomial",
        "6x^2y",
        ("6x^2y", "6yx^2", "6 x^{2} y", "6*x^2*y", "2x\\cdot 3xy"),
        ("6xy^2", "6x^2", "6X^2y", "6x^2y+1"),
    ),
    Kind(
        "polynomial",
        "x^2+2x+1",
        ("x^2+2x+1", "1+2x+x^2", "(x+1)^2", "x^2 + 2x + 1 = (x+1)^2", "x**2+2*x+1"),
        ("x^2+2x-1", "x^2+1", "y^2+2y+1", "X^2+2X+1"),
    ),
    Kind(
        "letters in both cases",
        "R^2-r^2",
        ("R^2-r^2", "-r^2+R^2", "(R-r)(R+r)"),
        ("r^2-R^2", "R^2-R^2", "r^2-r^2", "0"),
    ),
    Kind("area of a circle", "\\pi r^2", ("πr²", "r^2\\pi", "A=\\pi r^2"), ("2\\pi r", "\\pi R^2", "\\pi r^3")),
    Kind(
        "rational function",
        "\\frac{x+1}{x-1}",
        ("\\frac{1+x}{x-1}", "(x+1)/(x-1)", "1+\\frac{2}{x-1}"),
        ("\\frac{x-1}{x+1}", "x+1/x-1", "-1"),
    ),
    Kind("subscripts", "a_1+a_2", ("a_1+a_2", "a_{2}+a_{1}"), ("a_1+a_3", "2a_1", "a1+a2")),
    Kind("exponential", "e^{2x}", ("e^{2x}", "(e^x)^2", "e^{x}e^{x}"), ("e^{x^2}", "2e^x", "e^2x")),
    Kind("trigonometric", "\\sin 2x", ("\\sin(2x)", "2\\sin x\\cos x"), ("\\sin x", "2\\sin x", "\\cos 2x")),
    Kind(
        "antiderivative",
        "\\frac{x^3}{3}+C",
        ("\\frac{1}{3}x^3+C", "C+\\frac{x^3}{3}"),
        ("\\frac{x^3}{3}", "x^3+C", "\\frac{x^3}{3}+c^2"),
    ),
    Kind(
        "absolute value", "|x-1|", ("|x-1|", "|1-x|", "\\lvert x-1\\rvert", "\\sqrt{(x-1)^2}"), ("x-1", "1-x", "|x|-1")
    ),
    Kind(
        "pair",
        "(2,4)",
        ("(2, 4)", "\\left(2,4\\right)", "( 2 ; 4 )", "x=2, y=4", "(2.0, 4)"),
        ("2,4", "\\{2,4\\}", "[2,4]", "(4,2)", "(2,4,4)", "(2,4", "2+4", "(1+1, 4)", "x=4, y=2", "(2,4) or (4,2)"),
    ),
    Kind(
        "triple",
        "(1,\\frac{1}{2},-3)",
        ("(1, 0.5, -3)", "(1,1/2,-3)"),
        ("(1,\\frac12,3)", "(1,-3,\\frac12)", "1,\\frac12,-3", "(1,0.5)"),
    ),
    Kind(
        "open interval",
        "(-\\infty,3)",
        ("(-∞, 3)", "x\\in(-\\infty,3)"),
        ("(-\\infty,3]", "(3,-\\infty)", "-\\infty,3", "(-\\infty,4)"),
    ),
    Kind(
        "half-open interval",
        "[0,1)",
        ("[0, 1)", "\\left[0,1\\right)", "[0,1.0)"),
        ("[0,1]", "(0,1)", "(0,1]", "[0,1", "0,1"),
    ),
    Kind(
        "union",
        "(-\\infty,0)\\cup(1,\\infty)",
        ("(1,\\infty)\\cup(-\\infty,0)", "(-∞,0) ∪ (1,∞)"),
        ("(-\\infty,0)\\cap(1,\\infty)", "(-\\infty,0)", "(-\\infty,0]\\cup(1,\\infty)"),
    ),
    Kind(
        "set",
        "\\{1,2,3\\}",
        ("\\{3,1,2\\}", "{1, 2, 3}", "1, 2, 3", "1, 2 and 3"),
        ("\\{1,2\\}", "\\{1,2,3,4\\}", "\\{1,2,2,3\\}", "(1,2,3)", "1+2+3", "3"),
    ),
    Kind("empty set", "\\emptyset", ("\\{\\}", "∅", "\\varnothing"), ("0", "\\{0\\}", "\\{\\emptyset\\}")),
    Kind(
        "all reals",
        "\\mathbb{R}",
        ("\\mathbb{R}", "(-\\infty,\\infty)", "x\\in\\mathbb{R}"),
        ("\\mathbb{Z}", "[0,\\infty)", "R"),
    ),
    Kind(
        "list of solutions",
        "2,3",
        ("3, 2", "2 and 3", "x=2 or x=3", "\\{2,3\\}", "2;3", "x=2,3"),
        ("2", "3", "2,3,4", "2,2,3", "2,3,3", "2 or 4", "23", "5", "x=2, x=2"),
    ),
    Kind(
        "large numbers in a list",
        "10000,20000",
        ("10,000 and 20,000", "20000, 10000"),
        ("10,000", "10000,2000", "30,000"),
    ),
    Kind("two signs", "\\pm 2", ("2, -2", "-2 and 2", "±2", "x=\\pm 2"), ("2", "-2", "2, 2", "\\pm 3")),
    Kind(
        "two signs in a sum",
        "3\\pm\\sqrt{2}",
        ("3+\\sqrt{2}, 3-\\sqrt{2}", "3±√2"),
        ("3+\\sqrt{2}", "\\pm 3+\\sqrt{2}", "3"),
    ),
    Kind(
        "assignments",
        "d=5,M=(1,\\frac{3}{2})",
        ("d=5, M=(1,1.5)", "M=(1,\\frac32), d=5"),
        ("d=7,M=(1,\\frac{3}{2})", "d=5", "(1,\\frac32)", "d=5,M=(1,2)", "5"),
    ),
    Kind(
        "two unknowns",
        "x=3,y=4",
        ("x = 3, y = 4", "y=4, x=3", "(3,4)"),
        ("x=4,y=3", "x=3", "4", "7", "y=3,x=4", "a=3,b=4"),
    ),
    Kind("one unknown", "x=5", ("5", "x=5", "x = 2+3 = 5"), ("y=5", "x=6", "x>5", "5, x", "x=2+3", "x\\ne 5")),
    Kind(
        "equation",
        "x+2y=4",
        ("2y+x=4", "4=x+2y", "2x+4y=8", "x + 2y - 4 = 0"),
        ("4", "x+2y", "x+2y=5", "x-2y=4", "0=0", "y=4"),
    ),
    Kind(
        "circle",
        "x^2+y^2=25",
        ("y^2+x^2=25", "y^2=25-x^2", "2x^2+2y^2=50"),
        ("\\max(\\sqrt{y-10},0)+x=77", "x^2+y^2=5", "x^2+y^2=x^2+y^2"),
    ),
    Kind("product", "abc=6", ("bca=6", "2abc=12"), ("6", "abc=5", "ab=6")),
    Kind(
        "line",
        "y=2x+3",
        ("y=3+2x", "2x+3", "y = 2x + 3", "3+2x=y"),
        ("y=2x-3", "y=3x+2", "3", "x=2y+3", "2x-y+3=0", "2x+3=x", "2y+3=x"),
    ),
    Kind("sum of letters", "a+b=c", ("c=a+b", "a=c-b", "c-b-a=0"), ("c=a-b", "a=b+c", "c", "a+b=c+d")),
    Kind("equation of numbers", "2+3=5", ("2+3=5", "3+2=5"), ("1=1", "5", "2+3", "5=5", "2+4=6")),
    Kind("inequality", "x>5", ("5<x", "x > 5", "(5,\\infty)"), ("x<5", "x\\ge 5", "[5,\\infty)", "5", "y>5", "x>6")),
    Kind(
        "chain of inequalities",
        "1<x\\le 4",
        ("1 < x ≤ 4", "4\\ge x>1", "(1,4]"),
        ("1\\le x\\le 4", "1<x", "x\\le 4", "1<x\\le 5"),
    ),
    Kind("ratio", "2:3", ("2:3", "2 : 3", "4:6", "2/3"), ("3:2", "2,3", "23", "2:4")),
    Kind("time", "3:30", ("3:30", "03:30"), ("1:10", "3.5", "330", "3:30\\text{ or }4:30", "3/30")),
    Kind(
        "time of day", "3:30\\text{ p.m.}", ("3:30 p.m.", "3:30\\text{ p.m.}"), ("3:30 a.m.", "3:30\\text{ a.m.}", "15")
    ),
    Kind(
        "date",
        "March 4, 2019",
        ("March 4, 2019", "4 March 2019", "march 4, 2019"),
        ("2019", "4", "March 5, 2019", "March 4", "March 4, 2018", "4, 2019"),
    ),
    Kind(
        "column vector",
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}"),
        ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{pmatrix}2\\\\1\\end{pmatrix}", "1,2"),
    ),
    Kind(
        "matrix",
        "\\begin{pmatrix}1&0\\\\0&\\frac{1}{2}\\end{pmatrix}",
        ("\\begin{bmatrix}1&0\\\\0&0.5\\end{bmatrix}",),
        ("\\begin{pmatrix}1&0\\\\0&2\\end{pmatrix}", "\\begin{pmatrix}1&0&0&\\frac12\\end{pmatrix}", "1,0,0,\\frac12"),
    ),
    Kind(
        "word",
        "\\text{Tuesday}",
        ("Tuesday", "tuesday", "\\textbf{Tuesday}"),
        ("Monday", "Tuesday or Monday", "Tues", "T"),
    ),
    Kind("yes or no", "Yes", ("yes", "\\text{Yes}", "YES"), ("No", "Yes or no", "y", "not yes")),
    Kind(
        "choice",
        "C",
        ("(C)", "C", "\\text{(C)}", "c", "\\textbf{C}", "Option C", "option (C)"),
        ("D", "C, D", "C) 42", "ABCDE", "A or C", "Option D"),
    ),
    Kind("order of letters", "BCA", ("BCA", "\\text{BCA}"), ("ABC", "bca", "BC", "CBA")),
    Kind("anagram", "cats", ("cats", "Cats"), ("cast", "acts", "c a t s t")),
    Kind(
        "value of a function",
        "5",
        ("f(2) = 5", "AB = 5", "|AB| = 5", "\\angle ABC = 5^\\circ", "P(1) = 5", "total = 5", "\\Pr = 5", "[ABC] = 5"),
        (
            "not = 5",
            "twice = 5",
            "\\text{square root} = 5",
            "x+1 = 5",
            "2x = 5",
            "|n| = 5",
            "f(5)",
            "5 = 6",
            "5!",
            "5'",
        ),
    ),
    Kind(
        "function",
        "f(x)=x^2",
        ("x^2", "f(x) = x^2", "f(x)=x\\cdot x"),
        ("g(x)=x^2", "f(y)=x^2", "x=x^2", "(x^2)'", "x^2!", "\\max x^2", "\\frac{d}{dx}x^3", "f(x)=x^2+1"),
    ),
    Kind("slope", "\\frac{y}{x}", ("y/x", "\\frac{y}{x}"), ("\\frac{dy}{dx}", "\\frac{\\Delta y}{\\Delta x}", "x/y")),
    Kind(
        "repeating decimal",
        "0.1\\overline{6}",
        ("1/6", "0.1\\overline{6}", "0.1\\bar{6}"),
        ("0.16", "0.166667", "0.\\overline{16}"),
    ),
    Kind(
        "volume",
        "36\\pi\\text{ cm}^3",
        ("36\\pi", "36π cm^3", "36\\pi\\text{ cubic centimeters}"),
        ("36", "36\\pi\\text{ cm}^2", "36\\pi\\text{ m}^3"),
    ),
    Kind(
        "named pair",
        "(x,y)=(2,4)",
        ("(2,4)", "(x,y)=(2,4)", "(x, y) = (2, 4)"),
        ("(y,x)=(2,4)", "(4,2)", "2,4", "(a,b)=(2,4)"),
    ),
    Kind(
        "temperature",
        "98.6^\\circ\\text{F}",
        ("98.6", "98.6°F", "98.6 degrees Fahrenheit", "98.6°"),
        ("98.6°C", "98.6\\text{ m}", "98"),
    ),
    Kind(
        "two angles",
        "60^\\circ, 120^\\circ",
        ("120^\\circ, 60^\\circ", "60° and 120°", "60, 120"),
        ("60", "60120", "60, 121"),
    ),
    Kind(
        "decimal for a root",
        "\\sqrt{2}",
        ("1.414213", "1.414214", "1.41421356"),
        ("1.414212", "1.414215", "1.414219", "1.41421"),
    ),
    Kind("small number", "e^{-20}", ("\\frac{1}{e^{20}}", "0.00000000206115362"), ("0", "0.000000", "0.000000002")),
    Kind("power", "x^4", ("x⁴", "x^{4}", "x^2\\cdot x^2"), ("x4", "4x", "x^3", "|x|^3")),
    Kind(
        "function with a domain",
        "\\sqrt{x-20}",
        ("\\sqrt{-20+x}", "(x-20)^{1/2}"),
        ("x-20", "(x-20)^3", "\\sqrt{20-x}", "\\sqrt{x-21}", "0"),
    ),
    Kind("sign", "(-1)^{m+n}", ("(-1)^m(-1)^n", "(-1)^{n-m}"), ("(-1)^n", "(-1)^{mn}", "1", "-1")),
]

FORM_ROWS = [
    ("5x", ("x\\cdot 5", "5\\times x"), ("2x+3x",)),
    ("x^2+2x+1", ("1+2x+x^2", "(x+1)^2=x^2+2x+1"), ("(x+1)^2", "x^2+x+x+1", "x(x+2)+1")),
    ("(x-1)(x+1)", ("(1+x)(x-1)",), ("x^2-1",)),
    ("\\frac{x}{2}", ("x/2", "\\frac12x"), ("\\frac{2x}{4}", "0.5x")),
    ("\\frac{1}{2}", ("1/2",), ("\\frac{2}{4}", "0.5", "50%")),
    ("2\\sqrt{3}", ("\\sqrt{3}\\cdot 2",), ("\\sqrt{12}", "\\frac{6}{\\sqrt{3}}")),
    ("x+2y=4", ("4=2y+x",), ("2x+4y=8",)),
    ("y=2x+3", ("3+2x", "2x+3=y"), ("y=2(x+1)+1",)),
    ("2,3", ("3 and 2", "\\{2,3\\}"), ()),
    ("x>5", ("5<x",), ("(5,\\infty)",)),
    ("14", ("14.0", "14 cm"), ()),
]
"""Truths, with answers of the same form and, where `reward.form` is `any`, right answers of another."""

FORMS = {
    "plain": "We work it out.\nAnswer: {}",
    "dollars": "Answer: ${}$",
    "dollars and a full stop": "Answer: ${}$.",
    "parentheses": "Answer: \\({}\\)",
    "brackets": "Answer: \\[ {} \\]",
    "double dollars": "Answer: $${}$$",
    "boxed": "Answer: \\boxed{{{}}}",
    "boxed in dollars": "Answer: $\\boxed{{{}}}$.",
    "bold word": "**Answer:** {}",
    "bold line": "**Answer: {}**",
    "bold answer": "Answer: **{}**",
    "code": "Answer: `{}`",
    "heading": "### Answer: {}",
    "final answer": "Final Answer: {}",
    "next line": "Answer:\n{}",
    "next line after a gap": "**Answer:**\n\n{}\n",
    "display on the next line": "**Answer:**\n\\[ {} \\]",
    "display over three lines": "**Answer:**\n\n\\[\n{}\n\\]\n",
    "display that opens at the end": "Answer: $$\n{}\n$$",
    "boxed on the next line": "Answer:\n$$\\boxed{{{}}}$$",
    "sentence": "Answer: The final answer is ${}$.",
    "short sentence": "Answer: the answer is {}",
    "said before": "Answer: 999\nNo, that is wrong.\nAnswer: {}",
    "words after it": "Answer: {}\nI hope that this helps!",
}
"""What stands around an answer; every answer is judged in each of them, in the tests."""


def rows() -> Iterator[tuple[Kind, str, bool]]:
    for kind in KINDS:
        yield from ((kind, answer, True) for answer in kind.right)
        yield from ((kind, answer, False) for answer in kind.wrong)


def suits(form: str, answer: str) -> bool:
    """Not every answer can stand in every form: a dollar sign ends a formula, a comma or a word is no formula's."""
    return not ("$" in answer and "{}" in FORMS[form] and ("$" in FORMS[form] or "boxed" in FORMS[form]))


def render() -> str:
    """docs/answers.md."""
    judged = [(kind, answer, right, *_verdicts(kind.truth, answer)) for kind, answer, right in rows()]
    ours = sum(right == verdict for _, _, right, verdict, _ in judged)
    theirs = sum(right == verdict for _, _, right, _, verdict in judged)
    cases = independent()
    known = [answers_equal(answer, truth) == right for truth, answer, right in cases]
    accepted = sum(judged for judged, (_, _, right) in zip(known, cases, strict=True) if right)
    rights = sum(right for _, _, right in cases)
    lines = [
        "# Answers",
        "",
        "This page specifies the verdicts of `reward.verifier: math`, by kind of ground truth:",
        "",
        "- If the truth is a number, an unevaluated expression is wrong.",
        "- Two alternatives for a single value (`14 or 15`) are wrong.",
        "- An answer that cannot be parsed completely is never judged by a part of it.",
        "- Functions and equations are compared at 12 or more points that depend on the truth and the answer, in the "
        "domain of the truth. An answer without a value at one of them is wrong.",
        "- A decimal for an irrational number needs six decimals and six significant digits.",
        "- A line with `\\boxed{…}` is read as a whole, with the box as a bracket.",
        "",
        "## Accuracy",
        "",
        f"Of {len(cases):,} answers to {len({truth for truth, _, _ in cases})} truths that were written without "
        f"knowledge of the verifier (`tests/rewards/independent_answers.jsonl`), it judges "
        f"{_share(sum(known), len(cases), 2)} correctly: it accepts {accepted:,} of {rights:,} right ones, and rejects "
        f"{sum(known) - accepted:,} of {len(cases) - rights:,} wrong ones.",
        "",
        f"The {len(judged)} answers of the table below were written together with the verifier, so it judges all of "
        f"them correctly ({_share(ours, len(judged))}): they specify it, and do not measure it. math-verify 0.9, which "
        f"follows other rules, agrees on {_share(theirs, len(judged))}; the last column has its verdict where it "
        "differs. `python tests/rewards/answer_table.py` regenerates this page.",
        "",
        "## Require the same form",
        "",
        "`reward.form: any` accepts every notation that equals the truth. If the task is to expand, factor or "
        "simplify, a copy of the question then counts as right. `reward.form: same` accepts only the form of the "
        "truth, with its parts in any order. `dapo verify` warns about prompts that ask for a form.",
        "",
        "| truth | right in both | wrong with `reward.form: same` |",
        "|---|---|---|",
        *(
            f"| {_code(truth)} | {', '.join(map(_code, same))} | {', '.join(map(_code, other))} |"
            for truth, same, other in FORM_ROWS
        ),
        "",
        "## Response formats",
        "",
        "The tests judge each answer in all of these formats:",
        "",
        *(f"- {name}: {_code(form.format('…').replace(chr(10), '⏎'))}" for name, form in FORMS.items()),
        "",
        "## Table of answers",
        "",
        "| kind of truth | truth | answer | verdict | math-verify |",
        "|---|---|---|---|---|",
    ]
    for kind, answer, _, verdict, peer in judged:
        differs = "" if verdict == peer else _word(peer)
        lines.append(f"| {kind.name} | {_code(kind.truth)} | {_code(answer)} | {_word(verdict)} | {differs} |")
    return "\n".join(lines) + "\n"


def independent() -> list[tuple[str, str, bool]]:
    """Truths, answers and whether they are right, written without a look at the verifier."""
    lines = INDEPENDENT.read_text(encoding="utf-8").splitlines()
    return [
        (case["truth"], answer, right)
        for case in map(json.loads, lines)
        for right in (True, False)
        for answer in case["right" if right else "wrong"]
    ]


def _verdicts(truth: str, answer: str) -> tuple[bool, bool]:
    import math_verify

    gold = math_verify.parse(f"${truth}$", parsing_timeout=None)
    target = math_verify.parse(f"${answer}$", parsing_timeout=None)
    return answers_equal(answer, truth), bool(math_verify.verify(gold, target, timeout_seconds=None))


def _share(count: int, total: int, digits: int = 1) -> str:
    return f"{100 * count / total:.{digits}f} %"


def _word(right: bool) -> str:
    return "right" if right else "wrong"


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    padding = " " if "`" in text else ""
    return f"{fence}{padding}{text}{padding}{fence}".replace("|", "\\|")


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
