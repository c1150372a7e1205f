"""Functions and equations: equal at enough points of the truth's domain, which the answer cannot choose."""

import pytest

from dapo_rl.rewards.answers import answers_equal
from dapo_rl.rewards.answers.expressions import parse
from dapo_rl.rewards.answers.values import ENOUGH, equal, general_points, half_points, is_multiple, seeded, whole_points

EQUATIONS = [
    *("x^2+y^2=25", "a+b=c", "x+y=z", "x+y=1", "y=mx+c", "x+2y+3z=6", "z=xy", "x^2-y^2=z", "xyz=1", "x+y+z=0"),
    *("\\frac{x}{2}+\\frac{y}{3}=1", "(x-3)^2+(y+2)^2=16", "x^2+y^2+z^2=9", "y^2=4x", "e^x+y=2", "\\sqrt{x}+y=3"),
    *("\\ln x=y+1", "x-y=z^2", "\\frac{1}{x}+\\frac{1}{y}=z", "z^2=x+y"),
]
KEYS = [
    "2^{10^9(z-9)}=x+y",
    "2^{1000(z-9)}=x+y",
    "\\max(\\sqrt{y-10},0)+x=77",
    "\\max(\\sqrt{y-10},0)+x=y",
    "\\sqrt{-x^2-1}=y+z",
    "0=0",
    "x=x",
    "x+y+z=x+y+z",
    "0\\cdot x=0\\cdot y",
    "\\frac{x}{0}=y",
    "(x!)!=y+z",
    "\\ln(x-10^6)=y+z",
    "0\\cdot\\sqrt{x-999}=y",
    "x^{10^9}=y+z",
    "\\infty=x+y+z",
    "\\min(\\ln(-x),\\ln x)+y=z",
]


@pytest.mark.parametrize("key", KEYS)
def test_no_equation_is_paid_for_one_that_has_no_values(key):
    assert [truth for truth in EQUATIONS if answers_equal(key, truth)] == []


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("2x^2+2y^2=50", "x^2+y^2=25"),
        ("25-x^2=y^2", "x^2+y^2=25"),
        ("-a-b+c=0", "a+b=c"),
        ("3x+2y=6", "\\frac{x}{2}+\\frac{y}{3}=1"),
        ("\\sqrt{x-200}+y-3=0", "\\sqrt{x-200}+y=3"),
        ("2(-1)^nx=6", "(-1)^nx=3"),
    ],
)
def test_multiples_of_an_equation(answer, truth):
    assert answers_equal(answer, truth)


@pytest.mark.parametrize(
    ("truth", "solved", "wrong"),
    [
        ("a+b=c", ("c=a+b", "a=c-b", "b=c-a"), ("c=a-b", "a=c+b", "b=a-c", "c=2a+2b")),
        ("x+y=3", ("y=3-x", "x=3-y"), ("y=x-3", "y=3+x", "x=y+1", "y=-x")),
        ("y=2x+3", ("2x+3=y",), ("2x+4=y", "2x-3=y", "3+2y=x")),
    ],
)
def test_an_equation_that_is_solved_for_a_variable(truth, solved, wrong):
    assert [answer for answer in solved if not answers_equal(answer, truth)] == []
    assert [answer for answer in wrong if answers_equal(answer, truth)] == []


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("1", "(-1)^{mn}"),
        ("-1", "(-1)^{mn}"),
        ("(-1)^n", "(-1)^{m+n}"),
        ("(-1)^{m+n}", "(-1)^{mn}"),
        ("n!", "(-1)^{abc}n!"),
        ("x-10", "\\sqrt{x-10}"),
        ("(x-10)^3", "\\sqrt{x-10}"),
        ("0", "\\sqrt{x-1000}"),
        ("\\ln(20-x)", "\\ln(x-20)"),
        ("\\sqrt{x-21}", "\\sqrt{x-20}"),
        ("\\sqrt{x}", "|\\sqrt{x^2}|"),
        ("\\lfloor x\\rfloor+1", "\\lceil x\\rceil"),
        ("\\lfloor\\frac{n}{2}\\rfloor+1", "\\lceil\\frac{n}{2}\\rceil"),
        ("x+0\\cdot(-1)^x", "\\lfloor x\\rfloor"),
        ("x+2^{-10^9}", "x"),
        ("x+0y", "x"),
        ("x+y-y", "x"),
        ("\\max(x,\\sqrt{-x})", "x"),
        ("\\max(x,x+0\\cdot\\sqrt{x})", "x"),
        ("\\max(x,x+0\\cdot\\sqrt{x})+y=1", "x+y=1"),
        ("x+0\\cdot 2^{10^9x}", "x"),
        ("x+0\\cdot 2^{10^9x}+y=1", "x+y=1"),
        ("10^{-60}x", "10^{-61}x"),
    ],
)
def test_another_function(answer, truth):
    assert not answers_equal(answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("\\sqrt{-20+x}", "\\sqrt{x-20}"),
        ("\\ln(-20+x)", "\\ln(x-20)"),
        ("\\sqrt{x-100}+1", "1+\\sqrt{x-100}"),
        ("\\sqrt{-10^6+x}", "\\sqrt{x-10^6}"),
        ("\\arcsin(-50+x)", "\\arcsin(x-50)"),
        ("\\sqrt{7-x}+\\sqrt{-5+x}", "\\sqrt{x-5}+\\sqrt{7-x}"),
        ("-(-1)^n", "(-1)^{n+1}"),
        ("(-1)^n(-1)^m", "(-1)^{m+n}"),
        ("(-1)^{n-m}", "(-1)^{m+n}"),
        ("-(-1)^{n-\\frac{1}{2}}", "(-1)^{n+\\frac{1}{2}}"),
        ("n(n-1)", "\\frac{n!}{(n-2)!}"),
        ("\\frac{n!}{(n-2)!}", "n(n-1)"),
        ("\\frac{x^2-4}{x-2}", "x+2"),
        ("x^{1/3}", "\\sqrt[3]{x}"),
        ("-\\lceil -x\\rceil", "\\lfloor x\\rfloor"),
        ("\\frac{e^{x}+e^{-x}}{2}", "\\cosh x"),
        ("1", "\\cosh^2 x-\\sinh^2 x"),
        ("\\frac{y}{x}\\cdot x^2", "xy"),
    ],
)
def test_the_same_function(answer, truth):
    assert answers_equal(answer, truth)


def test_without_points_the_structure_is_compared():
    nowhere = "\\sqrt{-1-x^2}"
    assert answers_equal(f"3+2\\cdot{nowhere}", f"{nowhere}\\cdot 2+3")
    assert not answers_equal(f"2{nowhere}+4", f"2{nowhere}+3")
    assert not answers_equal(f"{nowhere}+{nowhere}", f"2{nowhere}")
    assert not is_multiple(parse(nowhere), parse(f"2{nowhere}"))


def test_points_depend_on_both_sides_and_on_nothing_else():
    def points(truth, given):
        truth, given = parse(truth), parse(given)
        return [next(general_points(truth, ["x"], seeded(truth, given)))["x"] for _ in range(2)]

    assert len({*points("x+1", "x+2"), *points("x+1", "x+3"), *points("x+5", "x+2")}) == 3


def test_points_have_both_signs_and_parities_and_lie_near_and_far():
    truth = parse("\\sqrt{x-77}")
    general = [point["x"] for point in general_points(truth, ["x"], seeded(truth, truth))]
    assert {value > 0 for value in general[:ENOUGH]} == {True, False}
    assert sum(abs(value) > 30 for value in general[:ENOUGH]) >= 1
    assert max(general) > 10_000
    assert sum(76 < abs(value) < 81 for value in general) >= 5
    whole = [(point["m"], point["n"]) for point in whole_points(["m", "n"], seeded(truth, truth))]
    assert {(m % 2, n % 2) for m, n in whole} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {m > 0 for m, _ in whole} == {True, False}
    assert all(value.denominator == 1 for point in whole for value in point)
    assert all(point["m"].denominator == 2 for point in half_points(["m"], seeded(truth, truth)))


ROOT = ["1.414213", "1.414214", "1.4142135", "1.4142136", "1.41421356237"]
NOT_ROOT = ["1.414212", "1.414215", "1.414219", "1.414204", "1.4142134", "1.4142137", "1.41421356236", "1.41421356239"]


@pytest.mark.parametrize("sign", ["", "-"])
def test_a_decimal_for_an_irrational_number_is_off_by_less_than_its_last_digit(sign):
    truth = f"{sign}\\sqrt{{2}}"
    assert [answer for answer in ROOT if not answers_equal(sign + answer, truth)] == []
    assert [answer for answer in NOT_ROOT if answers_equal(sign + answer, truth)] == []
    assert not answers_equal(f"{sign}1.41421", truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("0.000000", "e^{-20}"),
        ("0.00000000", "e^{-20}"),
        ("0.000000", "\\frac{\\pi}{10^9}"),
        ("0.000003", "\\frac{\\pi}{10^6}"),
        ("0.00000314", "\\frac{\\pi}{10^6}"),
        ("-0.000000", "e^{-20}"),
        ("0", "e^{-200}"),
        ("0", "\\frac{\\pi}{10^{60}}"),
        ("0", "10^{-80}\\sqrt{2}"),
        ("\\frac{\\pi}{10^{61}}", "\\frac{\\pi}{10^{60}}"),
    ],
)
def test_a_small_number_is_not_zero(answer, truth):
    assert not answers_equal(answer, truth)


def test_significant_digits():
    assert answers_equal("0.00000314159", "\\frac{\\pi}{10^6}")
    assert answers_equal("0", "\\sin\\pi")
    assert equal(parse("\\cos\\frac{\\pi}{2}"), parse("0"))
    assert equal(parse("10^{-80}\\sqrt{8}"), parse("2\\cdot 10^{-80}\\sqrt{2}"))
