"""The embedded task: chains of additions and subtractions of single digits, `3+8-4+7=?`.

Whether a problem is held out depends only on its text, so no seed can leak one into training. Random numbers come from
`Random(text).random()`, which is the same across Python versions and machines.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dapo_rl.data.rows import BadRow, Row, make_row
from dapo_rl.data.source_parameters import check_names, whole
from dapo_rl.errors import UserError

NAME = "arithmetic"
Split = Literal["train", "heldout"]
SPLITS = ("train", "heldout")
MOST_TERMS = 12
"""A random float has too few bits to choose among all problems of 13 terms."""


@dataclass(frozen=True, slots=True)
class Problem:
    terms: tuple[int, ...]
    ops: tuple[str, ...]
    """`+` or `-` before each term except the first."""

    @property
    def text(self) -> str:
        chain = "".join(f"{op}{term}" for op, term in zip(("", *self.ops), self.terms, strict=True))
        return f"{chain}=?\n"

    @property
    def answer(self) -> str:
        return str(sum(-term if op == "-" else term for op, term in zip(("", *self.ops), self.terms, strict=True)))

    @property
    def heldout(self) -> bool:
        """True for about one problem in eight."""
        return hashlib.sha256(self.text.encode()).digest()[0] < 32


def draw_problems(
    size: int, seed: int = 0, split: Split = "train", min_terms: int = 2, max_terms: int = 5
) -> list[Problem]:
    """Distinct problems of one split. The number of terms is uniform until one of the numbers runs out of problems.

    With the same seed, a longer list begins with the shorter one.
    """
    if not 2 <= min_terms <= max_terms <= MOST_TERMS:
        raise UserError(f"{NAME}: min_terms {min_terms}, max_terms {max_terms}: expected 2 to {MOST_TERMS}, in order")
    if split not in SPLITS:
        raise UserError(f"{NAME}: split {split!r} is not one of {', '.join(SPLITS)}")
    choose = random.Random(f"{NAME}:{seed}")
    left = {n: _shuffled_problems(n, seed, split) for n in range(min_terms, max_terms + 1)}
    problems: list[Problem] = []
    while len(problems) < size and left:
        terms = list(left)[int(choose.random() * len(left))]
        problem = next(left[terms], None)
        if problem is None:
            del left[terms]
        else:
            problems.append(problem)
    if len(problems) < size:
        raise UserError(
            f"{NAME}: there are {len(problems)} {split} problems of {min_terms} to {max_terms} terms, "
            f"not {size}; lower size or raise max_terms"
        )
    return problems


def problems(
    size: int, seed: int = 0, split: Split = "train", min_terms: int = 2, max_terms: int = 5
) -> list[dict[str, str]]:
    """The same problems as rows of a data set."""
    drawn = draw_problems(size, seed, split, min_terms, max_terms)
    return [{"prompt": p.text, "answer": p.answer, "data_source": NAME} for p in drawn]


def read_arithmetic(parameters: Mapping[str, Any], key: str) -> Iterator[Row | BadRow]:
    check_names(parameters, ["size", "seed", "split", "min_terms", "max_terms"], key, NAME)
    size = whole(parameters, "size", 4096, key, least=1)
    seed = whole(parameters, "seed", 0, key)
    split = parameters.get("split", "train")
    min_terms = whole(parameters, "min_terms", 2, key)
    max_terms = whole(parameters, "max_terms", max(5, min_terms), key)
    try:
        rows = problems(size, seed, split, min_terms, max_terms)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    for number, row in enumerate(rows):
        yield make_row(number, f"{NAME}:row {number}", row)


def _shuffled_problems(terms: int, seed: int, split: Split) -> Iterator[Problem]:
    """Every problem of a length and split once, in random order."""
    rng = random.Random(f"{NAME}:{seed}:{terms}")
    for code in _shuffled(9**terms * 2 ** (terms - 1), rng):
        problem = _decode(code, terms)
        if problem.heldout == (split == "heldout"):
            yield problem


def _shuffled(count: int, rng: random.Random) -> Iterator[int]:
    """A random permutation of range(count) by Fisher–Yates that stores only the moved entries."""
    moved: dict[int, int] = {}
    for last in range(count - 1, -1, -1):
        at = int(rng.random() * (last + 1))
        yield moved.get(at, at)
        moved[at] = moved.pop(last, last)


def _decode(code: int, terms: int) -> Problem:
    code, first = divmod(code, 9)
    digits, ops = [first + 1], []
    for _ in range(terms - 1):
        code, digit = divmod(code, 9)
        code, minus = divmod(code, 2)
        digits.append(digit + 1)
        ops.append("-" if minus else "+")
    return Problem(tuple(digits), tuple(ops))
