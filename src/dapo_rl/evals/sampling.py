"""Problems in, judged responses out: evaluation and `dapo verify`, by the same episodes as in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dapo_rl.engines.protocol import Engine, Request, SamplingParams
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.envs import OneTurn
from dapo_rl.rollout.episodes import Episodes, check_nothing
from dapo_rl.types import Group, Prompt, Verifier

LOOK_S = 0.05
"""Seconds between checks for verdicts."""


def answer(
    engine: Engine,
    verifier: Verifier,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    samples: int,
    seed: int,
    indices: Sequence[int] | None = None,
    check: Callable[[], None] = check_nothing,
) -> Iterator[Group]:
    """Samples every prompt `samples` times; yields problems in the order in which they are judged. The draw of a group
    is the index of its problem.

    A sample's random numbers follow from the seed, the prompt's id and the sample's index: the same problems give the
    same responses, whichever of them (`indices`) are asked for and in whatever order. `check` is called every fraction
    of a second; it raises to end this.
    """

    def request(index: int, prompt: Prompt) -> Request:
        return Request(f"eval-{index}", prompt.token_ids, samples, params, derive_seed(seed, "eval", prompt.id))

    episodes = Episodes(engine, OneTurn(verifier), request, waits=False)
    episodes.submitted = True
    try:
        for index in range(len(prompts)) if indices is None else indices:
            episodes.start(index, prompts[index])
        while len(episodes):
            if episodes.generating:
                episodes.poll(LOOK_S if episodes.stepping else None, check)
            yield from episodes.finish(everything=not episodes.generating, check=check)
    finally:  # a caller that stops early leaves no work behind
        engine.cancel([flight.request.id for flight in episodes.generating])
