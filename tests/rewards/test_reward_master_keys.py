"""No single response is paid for more than one of a thousand different truths.

The search mutates known keys and random expressions. `python tests/rewards/test_reward_master_keys.py SEED COUNT` runs
it for longer.
"""

import random
import re
import sys

import pytest
from truth_corpus import truths

from dapo_rl.rewards.answers import answers_equal, extract_answer

pytestmark = pytest.mark.slow

KEYS = [
    *("2^{10^9(z-9)}=x+y", "\\max(\\sqrt{y-10},0)+x=77", "0=0", "x=x", "1=1", "x-x", "0\\cdot x", "\\emptyset"),
    *("\\{\\}", "\\pm x", "\\pm 1 or 0", "\\mathbb{R}", "x or y", "any", "0.000000", "1", "0", "-1", "x", "n"),
    *(
        "(-1)^n",
        "\\infty",
        "-\\infty",
        "\\frac{0}{0}",
        "\\frac{1}{0}",
        "(x-10)^3",
        "\\sqrt{-1-x^2}",
        "\\lfloor x\\rfloor",
    ),
    *("0\\cdot\\ln(x-10^6)", "x^{10^9}", "\\min(\\ln x,\\ln(-x))", "((x!)!)!", "\\boxed{}", "{}", ".", ",", "()"),
    *("(-\\infty,\\infty)", "x\\in\\mathbb{R}", "\\ge=1", "\\not=1", "1,2,3,4,5", "A or B or C or D", "x\\ne y"),
    *("e^{-10^9x^2}", "10^{-99}x", "2^{-10^4x^2}=x+y", "\\tan\\frac{\\pi}{2}", "x<x+1", "xy=xy", "Answer:", "\\text{}"),
]
ATOMS = [*"xyzabcmnkpqstuvi", "0", "1", "2", "10", "20", "10^9", "10^{-99}", "\\pi", "e", "\\infty", "9999", "0.000001"]
SHAPES = [
    *("{0}+{1}", "{0}-{1}", "{0}\\cdot {1}", "0\\cdot({0})+{1}", "\\frac{{{0}}}{{{1}}}", "({0})^{{{1}}}", "({0})({1})"),
    *("\\sqrt{{{0}}}", "\\ln({0})", "\\max({0},{1})", "\\min({0},{1})", "\\lfloor {0}\\rfloor", "|{0}|", "({0})!"),
    *("\\arcsin({0})", "e^{{{0}}}", "2^{{10^9({0})}}", "\\sqrt{{{0}-10^6}}+{1}", "(-1)^{{{0}}}"),
    *("\\binom{{{0}}}{{{1}}}", "\\sin({0})", "\\sqrt[3]{{{0}}}", "-({0})", "\\log_{{{0}}}({1})"),
    "\\frac{{{0}}}{{{0}}}\\cdot {1}",
]
STATEMENTS = [
    *("{0}", "{0}", "{0}={1}", "{0}={1}", "{0}={0}", "{0}<{1}", "{0}\\ne {1}", "\\pm {0}", "{0} or {1}", "{0}, {1}"),
    *("\\{{{0},{1}\\}}", "({0},{1})", "[{0},{1}]", "x\\in({0},\\infty)", "{0}={1}={0}", "\\boxed{{{0}}} {1}"),
    *("{0}:{1}", "({0},{1})\\cup(-\\infty,{0})", "{0}\\text{{ or }}{1}", "{0} {1}s", "\\text{{{0}}}", "total={0}"),
    "{0}\\%",
]
PIECES = re.compile(r"\\[A-Za-z]+|\\.|[0-9.]+|.")


def expression(draw, depth):
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(ATOMS)
    return draw.choice(SHAPES).format(expression(draw, depth - 1), expression(draw, depth - 1))


def statement(draw):
    return draw.choice(STATEMENTS).format(expression(draw, draw.randint(0, 2)), expression(draw, draw.randint(0, 2)))


def mutated(text, draw):
    """The text with one of its parts replaced, left out, doubled or wrapped."""
    how = draw.random()
    if how < 0.3:
        return draw.choice([*STATEMENTS, *SHAPES]).format(text, expression(draw, 1))
    pieces = PIECES.findall(text)
    at = draw.randrange(len(pieces)) if pieces else 0
    if how < 0.8:
        pieces[at : at + 1] = [draw.choice([expression(draw, 1), draw.choice(ATOMS)])]
    elif how < 0.9:
        del pieces[at : at + 1]
    else:
        pieces.insert(at, draw.choice(["-", "+", "=", "\\pm ", ",", "(", ")", *ATOMS]))
    return "".join(pieces)[:200]


def paid(response, corpus):
    answer = extract_answer(f"Answer: {response}")
    return [truth for truth in corpus if answer is not None and answers_equal(answer, truth)]


def search(seed, count):
    """Mutates the responses that are paid most, and returns those paid more than once with their truths."""
    draw, corpus = random.Random(seed), truths(seed)
    pool = dict.fromkeys(KEYS, 0) | dict.fromkeys(draw.sample(corpus, 40), 1)
    found = {}
    for _ in range(count):
        parents = sorted(draw.sample(list(pool), 6), key=lambda text: pool[text])
        child = mutated(parents[-1], draw) if draw.random() < 0.7 else statement(draw)
        payers = paid(child, corpus)
        pool[child] = len(payers)
        if len(payers) > 1:
            found[child] = payers
    return found


@pytest.mark.parametrize("key", KEYS)
def test_known_keys(key):
    assert len(paid(key, truths())) <= 1


def test_no_response_is_paid_for_two_truths():
    assert search(seed=1, count=120) == {}


def test_the_truths_are_different():
    corpus = truths()
    assert len(set(corpus)) == 1000
    for truth in random.Random(2).sample(corpus, 25):
        assert paid(truth, corpus) == [truth]


if __name__ == "__main__":
    for response, payers in search(int(sys.argv[1]), int(sys.argv[2])).items():
        print(len(payers), response, payers[:5])
