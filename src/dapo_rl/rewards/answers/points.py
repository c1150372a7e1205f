"""Points at which two functions are compared.

An answer must not be able to choose them, nor know them: they are drawn from a seed that depends on the truth and the
answer, and they count if the truth has a value there.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from fractions import Fraction

from dapo_rl.rewards.answers.expressions import Node

ENOUGH = 12
"""Points at which two functions must agree."""

Point = dict[str, Fraction]

_PRIME = 10_007
"""The denominator of general points: they are not roots or poles of what an answer contains."""
_NEAR = (2, 10, 2, 40, 10, 2, 300, 10, 2, 40, 10, 2)
"""Sizes of the first points; most functions have values at all of them."""
_FAR = (1, 3, 10, 30, 100, 1_000, 10_000, 1_000_000)
_FAR_TRIES = 240
HOPELESS = 100
"""General points after which a function without any value is taken to have none."""
_WHOLE = 64
_HALVES = 32


def seeded(truth: Node, given: Node) -> random.Random:
    """Random numbers that are the same in each run, and unknown to a policy that does not know the truth."""
    pair = repr((truth, given)).encode(errors="surrogatepass")
    return random.Random(hashlib.blake2b(pair, digest_size=16).digest())


def general_points(truth: Node, names: list[str], draw: random.Random) -> Iterator[Point]:
    """Points without special properties: first near 0, then anywhere and around the numbers in the truth."""
    for size in _NEAR * 2:
        yield {name: _general(size, draw) for name in names}
    centers = sorted(set(_numbers_in(truth))) or [Fraction()]
    for attempt in range(_FAR_TRIES):
        if attempt % 2:
            size = draw.choice(_FAR)
            yield {name: _general(size, draw) for name in names}
        else:
            yield {
                name: draw.choice((-1, 1)) * draw.choice(centers) + _general(draw.choice(_FAR[:3]), draw)
                for name in names
            }


def whole_points(names: list[str], draw: random.Random) -> Iterator[Point]:
    """Whole numbers of both signs, in each combination of even and odd."""
    for index in range(_WHOLE):
        sign, size = draw.choice((-1, 1, 1, 1)), draw.choice((3, 6, 6, 20, 60))
        yield {
            name: Fraction(sign * (2 * draw.randint(1, size) + (index >> bit) % 2)) for bit, name in enumerate(names)
        }


def half_points(names: list[str], draw: random.Random) -> Iterator[Point]:
    """Half of odd numbers."""
    for _ in range(_HALVES):
        yield {name: Fraction(2 * draw.randint(-20, 20) + 1, 2) for name in names}


def _general(size: int, draw: random.Random) -> Fraction:
    return Fraction(draw.choice((-1, 1)) * draw.randint(1, size * _PRIME), _PRIME)


def _numbers_in(node: Node) -> list[Fraction]:
    own = [node.value] if node.kind == "number" and isinstance(node.value, Fraction) else []
    return [*own, *(number for part in node.parts for number in _numbers_in(part))]
