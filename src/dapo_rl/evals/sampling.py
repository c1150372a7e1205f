"""Problems in, judged responses out: what an evaluation does, during training and apart from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dapo_rl.engines.protocol import Engine, Request, SamplingParams
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.rollout.flights import poll_engine
from dapo_rl.rollout.verdicts import check_nothing, submit
from dapo_rl.types import Pending, Prompt, Trajectory, Verifier


@dataclass(frozen=True, slots=True)
class Answered:
    """A problem with all of its samples, in the order of their indices."""

    index: int
    samples: tuple[Trajectory, ...]
    verdicts: Pending
    """They are computed while the engine goes on."""


def answer(
    engine: Engine,
    verifier: Verifier,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    samples: int,
    seed: int,
    indices: Sequence[int] | None = None,
    check: Callable[[], None] = check_nothing,
) -> Iterator[Answered]:
    """Samples every prompt `samples` times; problems come in the order in which they become whole.

    A sample's random numbers follow from the seed, the prompt's id and the sample's index: the same problems give the
    same responses, whichever of them (`indices`) are asked for and in whatever order. `check` is called every fraction
    of a second; it raises to end this.
    """
    wanted = range(len(prompts)) if indices is None else indices
    finished: dict[int, dict[int, Trajectory]] = {i: {} for i in wanted}
    for i in wanted:
        own_seed = derive_seed(seed, "eval", prompts[i].id)
        engine.submit(Request(f"eval-{i}", prompts[i].token_ids, samples, params, own_seed))
    try:
        while finished:
            completions = poll_engine(engine, check)
            if not completions:
                raise RuntimeError(f"the engine returned nothing with {len(finished)} unfinished problems")
            for completion in completions:
                i = int(completion.request_id.removeprefix("eval-"))
                finished[i][completion.index] = completion.sample
                if len(finished[i]) == samples:
                    by_index = finished.pop(i)
                    whole = tuple(by_index[n] for n in range(samples))
                    yield Answered(i, whole, submit(verifier, prompts[i], whole))
    finally:  # a caller that stops early leaves no work behind
        engine.cancel([f"eval-{i}" for i in finished])
